"""Nodes made of files, for the tests of the audit: a folder in the shape that scripts/collect.sh writes."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30
PAGE = 4096
BLOCK = 512 * PAGE

VERSION_OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder)\n"
)
VERSION_CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Mon Jan  1 00:00:00 UTC 2024\n"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         {soft}            {hard}            bytes
"""


def zone(node: int, name: str, managed: int, free: int, *, cma: int = 0, free_cma: int = 0) -> str:
    """Return one zone of /proc/zoneinfo, numbers in pages."""
    return f"""Node {node}, zone {name:>8}
  per-node stats
      nr_inactive_anon 17
  pages free     {free}
        boost    0
        min      11
        low      13
        high     16
        spanned  {managed + 100}
        present  {managed + 50}
        managed  {managed}
        cma      {cma}
        protection: (0, 0, 0, 0, 0)
      nr_free_pages {free}
      nr_free_cma  {free_cma}
  pagesets
    cpu: 0
              count:    118
              high:     4096
  node_unreclaimable:  0
  start_pfn:           1048576
"""


def pagetypeinfo(*rows: tuple[int, str, int, int]) -> str:
    """Return /proc/pagetypeinfo of rows (node, zone, movable blocks, CMA blocks)."""
    text = "Page block order: 9\nPages per block:  512\n\n"
    text += "Free pages count per migrate type at order       0      1      2\n"
    for node, name, _, _ in rows:
        text += f"Node {node:4}, zone {name:>8}, type      Movable      1      2      3\n"
    text += (
        "\nNumber of blocks type     Unmovable      Movable  Reclaimable   HighAtomic          CMA      "
        "Isolate\n"
    )
    for node, name, movable, cma in rows:
        text += f"Node {node}, zone {name:>8} {20:12} {movable:12} {2:12} {0:12} {cma:12} {0:12}\n"
    return text


# `uname -r` of kernels that are neither kernel.org's nor Debian's, as vendors ship them.
VENDOR_RELEASES = (
    "5.10.0-136.12.0.86.oe2203sp1.x86_64",  # openEuler 22.03 SP1
    "4.19.90-2112.8.0.0131.oe1.x86_64",  # openEuler 20.03
    "6.6.0-28.0.0.34.oe2403.aarch64",  # openEuler 24.03
    "5.10.134-16.2.an8.x86_64",  # Anolis OS 8
    "4.19.91-26.an8.x86_64",
    "5.10.134-13.al8.x86_64",  # Alibaba Cloud Linux 3
    "4.19.91-27.al7.x86_64",
    "4.19.90-25.10.v2101.ky10.x86_64",  # Kylin V10
    "4.19.90-52.22.v2207.ky10.aarch64",
    "5.4.18-85-generic",  # Kylin desktop
    "5.4.119-19.0009.28",  # TencentOS Server 3
    "5.4.119-1-tlinux4-0010",
    "6.6.30-5.tl4.x86_64",  # TencentOS Server 4
    "3.10.0-1160.119.1.el7.x86_64",  # CentOS 7
    "4.18.0-553.el8_10.x86_64",  # RHEL 8
    "4.18.0-305.25.1.el8_4.x86_64",
    "4.18.0-2.4.3.kwai.x86_64",  # a company's own build of CentOS
    "5.14.0-427.13.1.el9_4.x86_64",  # RHEL 9
    "5.14.0-503.11.1.el9_5.aarch64+64k",
    "6.12.0-55.9.1.el10_0.x86_64",  # RHEL 10
    "5.3.18-150300.59.164-default",  # SLES 15 SP3
    "5.14.21-150500.55.73-default",  # SLES 15 SP5
    "6.4.0-150600.23.25-default",  # SLES 15 SP6
    "4.12.14-122.222-default",  # SLES 12
    "5.4.0-190-generic",  # Ubuntu 20.04
    "5.15.0-122-generic",  # Ubuntu 22.04
    "5.15.0-1062-nvidia",
    "6.2.0-1010-nvidia-64k",
    "6.5.0-45-generic",
    "6.8.0-45-generic",  # Ubuntu 24.04
    "6.8.0-1015-azure",
    "7.0.0-1019-nvidia",
    "4.14.355-275.570.amzn2.x86_64",  # Amazon Linux 2
    "5.10.226-214.880.amzn2.x86_64",
    "6.1.112-124.190.amzn2023.aarch64",
    "5.4.17-2136.335.4.el8uek.x86_64",  # Oracle UEK 6
    "5.15.0-301.163.5.2.el9uek.x86_64",  # Oracle UEK 7
    "5.15.133+",  # Container-Optimized OS
    "5.10.152-6.ph4",  # Photon OS
    "6.1.90-flatcar",
    "6.2.16-20-pve",  # Proxmox
    "5.10.0-amd64-desktop",  # Deepin, UOS
    "6.6.9-amd64",  # Kali
    "6.6.20+rpt-rpi-v8",  # Raspberry Pi OS
    "4.19.0-amd64-server",
    "5.15.90.1-microsoft-standard-WSL2",
)


class Node:
    """A captured node, changed step by step; `write` puts it into a folder."""

    def __init__(self) -> None:
        total = 62 * GIB // PAGE
        self.files: dict[str, str] = {
            "collect.txt": "regrepro-collect 1\nuid 0\n",
            "links.txt": "",
            "denied.txt": "",
            "commands/getconf.txt": "4096\n",
            "commands/dmesg.txt": "[    0.000000] Linux version 6.8.0-45-generic (build)\n",
            "commands/sys-module.txt": "ib_core\nib_uverbs\nmlx5_core\nmlx5_ib\n",
            "commands/kallsyms.txt": "0000000000000000 t migrate_longterm_unpinnable_pages\n"
            "0000000000000000 T pin_user_pages_fast\n"
            "0000000000000000 t mlx5_ib_reg_user_mr_dmabuf\t[mlx5_ib]\n",
            "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro\n",
            "proc/meminfo": f"MemTotal: {total * 4} kB\nMemFree: {total * 3} kB\nMemAvailable: "
            f"{total * 3} kB\n"
            "CmaTotal: 0 kB\nCmaFree: 0 kB\n",
            "proc/zoneinfo": zone(0, "Normal", total // 2, total // 3)
            + zone(0, "Movable", 0, 0)
            + zone(1, "Normal", total - total // 2, total // 3)
            + zone(1, "Movable", 0, 0),
            "proc/pagetypeinfo": pagetypeinfo((0, "Normal", 15000, 0), (1, "Normal", 15000, 0)),
            "proc/modules": "mlx5_ib 458752 0 - Live 0x0\nib_uverbs 200704 2 mlx5_ib - Live 0x0\n"
            "ib_core 512000 2 mlx5_ib,ib_uverbs - Live 0x0\nmlx5_core 2000000 1 mlx5_ib - Live 0x0\n",
            "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
            "proc/sys/kernel/version": "#45 SMP\n",
            "proc/sys/kernel/hostname": "gpu-a17\n",
            "proc/sys/kernel/arch": "x86_64\n",
            "proc/self/limits": LIMITS.format(soft="unlimited", hard="unlimited"),
            "proc/self/status": "Name:\tsh\nCapEff:\t000001ffffffffff\nSeccomp:\t0\n",
            "proc/1/limits": LIMITS.format(soft="unlimited", hard="unlimited"),
            "proc/1/cgroup": "0::/init.scope\n",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
            "sys/kernel/security/lockdown": "[none] integrity confidentiality\n",
            "sys/class/infiniband/mlx5_0/fw_ver": "28.39.3560\n",
            "sys/class/infiniband/mlx5_0/hca_type": "MT4129\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/module/mlx5_core/taint": "\n",
        }
        self.link("sys/class/infiniband/mlx5_0/device/driver", "../../../../bus/pci/drivers/mlx5_core")

    def link(self, path: str, target: str) -> Node:
        """Add a symbolic link as collect.sh writes it down."""
        self.files["links.txt"] += f"/{path}\t{target}\n"
        return self

    def set(self, path: str, text: str) -> Node:
        """Set a file."""
        self.files[path] = text
        return self

    def without(self, *paths: str) -> Node:
        """Take files away; a path that ends in / takes a folder."""
        for path in paths:
            for name in list(self.files):
                if name == path or (path.endswith("/") and name.startswith(path)):
                    del self.files[name]
        return self

    def driver(self, version: str, *, open_module: bool = True, peermem: bool = False) -> Node:
        """Load an NVIDIA driver."""
        text = VERSION_OPEN if open_module else VERSION_CLOSED
        self.files["proc/driver/nvidia/version"] = text.format(version=version)
        self.files["proc/modules"] += "nvidia 50000000 10 - Live 0x0 (OE)\n"
        self.files["commands/sys-module.txt"] += "nvidia\n"
        if peermem:
            self.files["proc/modules"] += "nvidia_peermem 16384 0 - Live 0x0 (OE)\n"
            self.files["commands/sys-module.txt"] += "nvidia_peermem\n"
        return self

    def hugetlb_cma(
        self, per_node: int, argument: str = "hugetlb_cma=6G", *, free_share: float = 0.05
    ) -> Node:
        """Reserve CMA on both nodes, `per_node` bytes each, all of it free; `free_share` of free pages
        is CMA.
        """
        pages = per_node // PAGE
        total = 62 * GIB // PAGE
        free = int(pages / free_share)
        self.files["proc/cmdline"] = f"BOOT_IMAGE=/vmlinuz ro {argument}\n"
        self.files["proc/meminfo"] = (
            f"MemTotal: {total * 4} kB\nMemFree: {free * 8} kB\nMemAvailable: {free * 8} kB\n"
            f"CmaTotal: {pages * 8} kB\nCmaFree: {pages * 8} kB\n"
        )
        self.files["proc/zoneinfo"] = "".join(
            zone(node, "Normal", total // 2, free, cma=pages, free_cma=pages) + zone(node, "Movable", 0, 0)
            for node in (0, 1)
        )
        blocks = per_node // BLOCK
        self.files["proc/pagetypeinfo"] = pagetypeinfo(
            (0, "Normal", 14000, blocks), (1, "Normal", 14000, blocks)
        )
        for node in (0, 1):
            base = f"sys/kernel/mm/cma/hugetlb{node}"
            self.files[f"{base}/total_pages"] = f"{pages}\n"
            self.files[f"{base}/available_pages"] = f"{pages}\n"
            self.files[f"{base}/alloc_pages_success"] = "0\n"
            self.files[f"{base}/release_pages_success"] = "0\n"
        self.files["commands/dmesg.txt"] += (
            "[    0.000000] hugetlb_cma: reserve 6144 MiB, up to 3072 MiB per node\n"
            "[    0.000000] cma: Reserved 3072 MiB in 1 range\n"
            "[    0.000000] hugetlb_cma: reserved 3072 MiB on node 0\n"
            "[    0.000000] cma: Reserved 3072 MiB in 1 range\n"
            "[    0.000000] hugetlb_cma: reserved 3072 MiB on node 1\n"
        )
        return self

    def write(self, folder: Path) -> Path:
        """Write the node below `folder`; return it."""
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return folder

"""How to repeat the run of a bundle: with regrepro in a virtual machine, and by the C program alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

# Boot arguments that make unpinnable memory, or move it; the others of a node's are no part of a repetition.
_RESERVES = re.compile(
    r"(?:cma|numa_cma|cma_pernuma|hugetlb_cma|movablecore|kernelcore|movable_node|kho|kho_scratch|nokaslr)(?:=.*)?"
)
_OPTIONS = (
    ("cuda", "--cuda", "auto"),
    ("place", "--place", "gather"),
    ("rdma_device", "--rdma-device", "auto"),
)

_WITHOUT_PYTHON = """\
The same steps in a guest without Python, to bisect a kernel: the kernel under test (CONFIG_CMA, USERFAULTFD,
CROSS_MEMORY_ATTACH, IO_URING, INFINIBAND_USER_ACCESS, RDMA_RXE, DUMMY built in, or their modules, unpacked,
in the order of `modprobe --show-depends`, as root/modules/1.ko, 2.ko, …; where a kernel has CRYPTO_CRC32,
crc32_generic before all, which older rdma_rxe asks for by name, so that no dependency tells of it), the boot
line, and one program of c/. Needs busybox-static, iproute2, libibverbs-dev with libnl's static libraries,
qemu-system.

    mkdir -p root/bin root/proc root/sys root/dev root/modules
    cc -static -O2 -DRDMA_STATIC_PROVIDERS=rxe -o root/bin/program c/@@NAME@@.c \\
        $(pkg-config --static --libs libibverbs) -lpthread
    cp "$(command -v busybox)" "$(command -v rdma)" root/bin/
    cp -L --parents $(ldd "$(command -v rdma)" | grep -o '/[^ ]*') root/
    cat >root/init <<'END'
    #!/bin/busybox sh
    export PATH=/bin
    /bin/busybox --install -s /bin
    mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
    for n in $(seq 1 99); do [ -e /modules/$n.ko ] && insmod /modules/$n.ko; done
    ip link add soft0 type dummy; ip addr add 10.99.0.1/24 dev soft0; ip link set soft0 up
    rdma link add rxe0 type rxe netdev soft0; sleep 1
    program; echo "exit status $?"
    poweroff -f
    END
    chmod +x root/init; (cd root && find . | busybox cpio -o -H newc | gzip) >initramfs.gz
    qemu-system-x86_64 -m @@MEMORY@@M -nographic -no-reboot -kernel KERNEL -initrd initramfs.gz \\
        -append "console=ttyS0 panic=-1 @@BOOT@@"

It ends with "exit status 1" where the registration fails under the pin ("not ok"), 0 where all register, 4
where there was nothing to try, or a registration failed with no pin held: for `git bisect run` 1 is bad, 0
good, and 4, as all else (no such line: the boot did not come so far), is 125.
"""


def boot_of(header: Mapping[str, Any]) -> list[str]:
    """Return the boot arguments that the run rests on: the lab's own, or the node's that reserve memory."""
    lab, node = header.get("lab"), header.get("node")
    if isinstance(lab, Mapping) and isinstance(lab.get("boot"), list):
        return [str(argument) for argument in lab["boot"]]
    words = str(node.get("cmdline") or "").split() if isinstance(node, Mapping) else []
    return [word for word in words if _RESERVES.fullmatch(word)]


def lab_command(header: Mapping[str, Any]) -> str:
    """Return the `regrepro lab run` that repeats a run, on Debian's kernel of the same series."""
    run = header.get("run") if isinstance(header.get("run"), Mapping) else {}
    node = header.get("node") if isinstance(header.get("node"), Mapping) else {}
    lab = header.get("lab") if isinstance(header.get("lab"), Mapping) else {}
    assert isinstance(run, Mapping) and isinstance(node, Mapping) and isinstance(lab, Mapping)
    series = re.match(r"\d+\.\d+", str(node.get("kernel") or ""))
    names = run["names"] if isinstance(run.get("names"), list) else []
    words = ["regrepro", "lab", "run", *(str(name).rpartition("/")[2] for name in names)]
    if not names and run.get("profile") not in (None, "default", "watch"):
        words += ["--profile", str(run["profile"])]
    words += ["--kernel", series[0] if series else "latest"]
    boot = boot_of(header)
    if boot:
        words += ["--boot", " ".join(boot)]
    if type(lab.get("memory")) is int:
        words += ["--memory", f"{lab['memory'] >> 20}M"]
    if type(lab.get("numa")) is int and lab["numa"] > 1:
        words += ["--numa", str(lab["numa"])]
    for key, option, usual in _OPTIONS:
        value = run.get(key)
        if isinstance(value, str) and value != usual and (lab or key == "place"):
            words += [option, value]
    return shlex.join(words)


def how_to_repeat(header: Mapping[str, Any], programs: list[str]) -> Iterator[str]:
    """Yield the lines of the bundle's README about repeating the run; `programs`: names below c/."""
    node = header.get("node")
    facts: Mapping[str, Any] = node if isinstance(node, Mapping) else {}
    boot = " ".join(boot_of(header)) or "(no argument that reserves memory)"
    yield f"Recorded on Linux {facts.get('kernel')} ({facts.get('arch')}), {facts.get('kernel_version')}"
    yield f"Boot line: {boot}"
    yield ""
    yield "Repeat it in a virtual machine, on Debian's kernel of this series, with no GPU and no RDMA card:"
    yield ""
    yield f"    {lab_command(header)}"
    yield ""
    if programs:
        lab = header.get("lab")
        memory = lab.get("memory") if isinstance(lab, Mapping) else None
        text = _WITHOUT_PYTHON.replace("@@NAME@@", programs[0])
        text = text.replace("@@MEMORY@@", str(memory >> 20) if type(memory) is int else "4096")
        yield text.replace("@@BOOT@@", " ".join(boot_of(header)))

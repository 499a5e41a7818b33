"""The audit's findings on nodes made of files, one condition changed at a time."""

from __future__ import annotations

import json
import struct
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from audit_nodes import GIB, LIMITS, PAGE, VENDOR_RELEASES, Node, pagetypeinfo, zone
from click.testing import CliRunner

from regrepro.audit.audit import audit, exit_code
from regrepro.audit.commands import audit as command
from regrepro.audit.places import open_place
from regrepro.audit.reader import LiveReader
from regrepro.audit.report import plain


def run(node: Node, folder: Path, **options: Any) -> dict[str, Any]:
    """Write a node, audit it, hold the result to its schema."""
    place = node.write(folder / "node")
    with open_place(place) as reader:
        result = audit(reader, **options)
    check(result)
    return result


def check(result: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(
        resources.files("regrepro").joinpath("schema", "audit-1.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(result)), schema)
    assert plain(result)


def finding(result: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((one for one in result["findings"] if one["id"] == name), None)


def severity(result: dict[str, Any], name: str) -> str | None:
    found = finding(result, name)
    return None if found is None else str(found["severity"])


def state(result: dict[str, Any], name: str = "B") -> str:
    return next(str(one["state"]) for one in result["exposure"] if one["class"] == name)


def reason(result: dict[str, Any], name: str = "B") -> str:
    return next(str(one["reason"]) for one in result["exposure"] if one["class"] == name)


def fact(result: dict[str, Any], group: str, name: str) -> Any:
    return next(one["value"] for one in result["facts"] if (one["group"], one["name"]) == (group, name))


def exposed_node() -> Node:
    """The incident's node: hugetlb_cma=6G on two nodes, a driver without FOLL_LONGTERM, ConnectX-7."""
    return Node().hugetlb_cma(3 * GIB).driver("535.104.05")


def test_the_incidents_node_is_exposed(tmp_path: Path) -> None:
    result = run(exposed_node(), tmp_path)
    assert state(result) == "exposed"
    assert exit_code(result) == 10
    found = finding(result, "class-b")
    assert found is not None
    assert "hugetlb_cma=0" in found["fix"]
    assert "FOLL_LONGTERM" in found["fix"]
    assert result["driver"]["contract"]["contract"] == "pin"
    assert [(node["node"], node["cma"]) for node in result["nodes"]] == [(0, 3 * GIB), (1, 3 * GIB)]
    assert severity(result, "cma-unused") == "warning"
    assert severity(result, "reservation-failed") is None
    assert severity(result, "cma-beyond-total") is None
    unpinnable = finding(result, "unpinnable-memory")
    assert unpinnable is not None
    assert "hugetlb_cma=6G" in unpinnable["explanation"]


def test_each_missing_condition_makes_it_not_exposed(tmp_path: Path) -> None:
    cases = {
        "no unpinnable memory": (Node().driver("535.104.05"), "ZONE_MOVABLE is empty"),
        "a pin with FOLL_LONGTERM": (Node().hugetlb_cma(3 * GIB).driver("550.67"), "asks for FOLL_LONGTERM"),
        "no RDMA device": (
            exposed_node().without("sys/class/infiniband/").set("links.txt", ""),
            "no RDMA device",
        ),
        "no driver": (Node().hugetlb_cma(3 * GIB), "no NVIDIA driver"),
        "an old kernel": (
            exposed_node()
            .set("proc/sys/kernel/osrelease", "5.10.0-46-amd64\n")
            .set("commands/kallsyms.txt", "0000000000000000 t check_and_migrate_cma_pages\n"),
            "pins in place",
        ),
    }
    for name, (node, why) in cases.items():
        result = run(node, tmp_path / name.replace(" ", "-"))
        assert state(result) == "not-exposed", name
        assert exit_code(result) == 0, name
        assert why in reason(result), name
        assert severity(result, "class-b") == "ok", name


def test_each_unknown_condition_makes_it_undecided(tmp_path: Path) -> None:
    cases = {
        "memory": exposed_node().without(
            "proc/meminfo", "proc/zoneinfo", "proc/pagetypeinfo", "sys/kernel/mm/cma/"
        ),
        "driver": exposed_node().without("proc/driver/nvidia/version", "proc/modules"),
        "kernel": exposed_node().without("proc/sys/kernel/osrelease", "commands/kallsyms.txt"),
        "arch": exposed_node().without("proc/sys/kernel/arch").driver("550.67"),
    }
    cases["arch"].set("proc/driver/nvidia/version", "NVRM version: 550.67\n")
    for name, node in cases.items():
        result = run(node, tmp_path / name)
        assert state(result) == "unknown", (name, reason(result))
        assert exit_code(result) == 125, name
        assert severity(result, "class-b") == "unknown", name


def kernel_condition(node: Node, folder: Path) -> dict[str, Any]:
    exposure = next(one for one in run(node, folder)["exposure"] if one["class"] == "B")
    return next(one for one in exposure["conditions"] if "kernel refuses" in one["what"])


@pytest.mark.parametrize("release", VENDOR_RELEASES)
def test_a_number_decides_for_no_vendors_kernel(release: str, tmp_path: Path) -> None:
    """The rule of 5.13, kexec handover and DMA-BUF: a vendor ports newer code back."""
    banner = f"Linux version {release} (builder@host) (gcc (GCC) 12.3.1) #1 SMP"
    node = exposed_node().set("proc/sys/kernel/osrelease", f"{release}\n").set("proc/version", banner)
    node.set("proc/sys/kernel/version", "#1 SMP PREEMPT_DYNAMIC Mon Mar 4 10:11:12 UTC 2024\n")
    node.without("commands/kallsyms.txt")
    told = kernel_condition(node, tmp_path / "hidden")
    assert told["holds"] is None, told
    # A symbol decides, either way.
    line = "0000000000000000 t {}\n"
    new = node.set("commands/kallsyms.txt", line.format("check_and_migrate_movable_pages"))
    assert kernel_condition(new, tmp_path / "new")["holds"] is True
    old = node.set("commands/kallsyms.txt", line.format("check_and_migrate_cma_pages.constprop.0"))
    assert kernel_condition(old, tmp_path / "old")["holds"] is False
    # Without root nothing excludes kexec handover, and nothing says that there is no DMA-BUF.
    doubt = Node().driver("535.104.05").without("proc/pagetypeinfo", "commands/kallsyms.txt")
    doubt.set("proc/sys/kernel/osrelease", release).set("proc/version", banner)
    result = run(doubt, tmp_path / "kho")
    assert state(result) == "unknown"
    assert "kexec handover" in reason(result)
    assert severity(result, "dmabuf") == "unknown"


def test_the_kernels_own_btf_decides_where_symbols_are_hidden(tmp_path: Path) -> None:
    node = exposed_node().without("commands/kallsyms.txt")
    node.set("proc/sys/kernel/osrelease", "4.18.0-553.el8_10.x86_64\n")
    place = node.write(tmp_path / "node")
    btf = place / "sys/kernel/btf/vmlinux"
    btf.parent.mkdir(parents=True)
    head = struct.pack("=HBBI", 0xEB9F, 1, 0, 24) + bytes(16)
    for names, holds in ((b"\0MR_CONTIG_RANGE\0", None), (b"\0MR_CONTIG_RANGE\0MR_LONGTERM_PIN\0", True)):
        btf.write_bytes(head + names)
        with open_place(place) as reader:
            result = audit(reader)
        exposure = next(one for one in result["exposure"] if one["class"] == "B")
        assert exposure["conditions"][-1]["holds"] is holds


def test_the_drivers_build_time_test_is_not_answered_by_a_vendors_number(tmp_path: Path) -> None:
    """4.18 of Enterprise Linux 8 has FOLL_LONGTERM, which came to kernel.org with 5.2."""
    node = Node().hugetlb_cma(3 * GIB).driver("550.67")
    node.set("proc/sys/kernel/osrelease", "4.18.0-553.el8_10.x86_64\n")
    assert state(run(node, tmp_path / "vendor")) == "unknown"
    node.set("proc/sys/kernel/osrelease", "4.19.0-27-amd64\n")
    node.set("proc/sys/kernel/version", "#1 SMP Debian 4.19.316-1 (2024-06-25)\n")
    result = run(node, tmp_path / "debian")
    assert "needs a kernel that has it" in json.dumps(result["exposure"])


def test_arm64_is_exposed_with_every_release(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("580.82.07").set("proc/sys/kernel/arch", "aarch64\n")
    result = run(node, tmp_path)
    assert state(result) == "exposed"
    assert "FOLL_LONGTERM on x86 only" in result["driver"]["contract"]["why"]
    found = finding(result, "class-b")
    assert found is not None
    assert "move to a driver" not in found["fix"]


def test_zone_movable_counts_as_unpinnable(tmp_path: Path) -> None:
    pages = 8 * GIB // PAGE
    node = Node().driver("535.104.05").set("proc/cmdline", "ro movablecore=8G\n")
    node.set(
        "proc/zoneinfo", zone(0, "Normal", 9 * pages // 2, pages) + zone(0, "Movable", pages, pages - 1000)
    )
    node.set("proc/pagetypeinfo", pagetypeinfo((0, "Normal", 14000, 0), (0, "Movable", 4096, 0)))
    result = run(node, tmp_path)
    assert state(result) == "exposed"
    entry = next(one for one in result["likelihood"] if one["kind"] == "ZONE_MOVABLE")
    assert entry["now"] is True
    found = finding(result, "class-b")
    assert found is not None
    assert "movablecore" in found["fix"]


@pytest.mark.parametrize(("share", "now"), [(0.05, False), (0.45, False), (0.55, True), (0.99, True)])
def test_the_half_of_free_rule(tmp_path: Path, share: float, now: bool) -> None:
    result = run(Node().hugetlb_cma(GIB, free_share=share).driver("535.104.05"), tmp_path)
    entries = [one for one in result["likelihood"] if one["kind"] == "CMA"]
    assert [one["node"] for one in entries] == [0, 1]
    pages = GIB // PAGE
    free = int(pages / share)
    for entry in entries:
        assert entry["now"] is now
        assert entry["free_bytes"] == GIB
        assert entry["to_go_bytes"] == max(free - 2 * pages, 0) * PAGE
    found = finding(result, "class-b")
    assert found is not None
    assert ("any time" in found["explanation"]) is now


def test_kexec_handover_leaves_cma_that_nobody_counts(tmp_path: Path) -> None:
    """Two DGX Spark: 4,761 CMA blocks with CmaTotal 0 and CmaFree about 9.7 GiB (facts, section 6)."""
    node = Node().driver("595.45.04").set("proc/sys/kernel/arch", "aarch64\n")
    node.set("proc/sys/kernel/osrelease", "7.0.0-1019-nvidia\n")
    node.set("proc/pagetypeinfo", pagetypeinfo((0, "Normal", 50000, 4761)))
    node.files["proc/meminfo"] = node.files["proc/meminfo"].replace("CmaFree: 0 kB", "CmaFree: 9750000 kB")
    result = run(node, tmp_path)
    assert state(result) == "exposed"
    beyond = finding(result, "cma-beyond-total")
    assert beyond is not None
    assert "kho=off" in beyond["fix"]
    assert "crash kernel" in beyond["fix"]
    found = finding(result, "class-b")
    assert found is not None
    assert "kho=off" in found["fix"]


def test_without_root_handover_leaves_a_doubt_that_kho_off_takes_away(tmp_path: Path) -> None:
    node = Node().driver("535.104.05").without("proc/pagetypeinfo")
    node.set("proc/sys/kernel/osrelease", "7.0.0-1019-nvidia\n")
    result = run(node, tmp_path / "on")
    assert state(result) == "unknown"
    assert "kexec handover" in reason(result)
    result = run(node.set("proc/cmdline", "ro kho=off\n"), tmp_path / "off")
    assert state(result) == "not-exposed"


def test_a_failed_reservation_is_told_with_the_kernels_lines(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("535.104.05")
    node.files["commands/dmesg.txt"] += "[    0.000000] hugetlb_cma: reservation failed: err -12, node 0\n"
    result = run(node, tmp_path)
    found = finding(result, "reservation-failed")
    assert found is not None
    assert any("err -12, node 0" in str(item["value"]) for item in found["evidence"])


def test_a_shortfall_is_told_without_a_log(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(1 * GIB).without("commands/dmesg.txt")
    result = run(node, tmp_path)
    found = finding(result, "reservation-failed")
    assert found is not None
    assert "6 GiB asked for, CmaTotal is 2 GiB" in str(found["evidence"])


def test_an_argument_that_the_kernel_cannot_serve_is_told(tmp_path: Path) -> None:
    node = Node().set("proc/cmdline", "ro cma=512M\n")
    node.files["proc/meminfo"] = node.files["proc/meminfo"].split("CmaTotal")[0]
    result = run(node, tmp_path)
    found = finding(result, "reservation-failed")
    assert found is not None
    assert "without CONFIG_CMA" in str(found["evidence"])
    assert severity(result, "unpinnable-memory") == "ok"


def test_a_log_that_was_overwritten_proves_nothing(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).set("commands/dmesg.txt", "[ 9000.1] something late\n")
    result = run(node, tmp_path)
    assert severity(result, "boot-log-cut") == "unknown"
    assert severity(result, "reservation-failed") is None


@pytest.mark.parametrize(
    ("version", "peermem", "counters", "expected"),
    [
        ("525.60.13", True, None, "exposed"),
        ("525.60.13", False, None, "not-exposed"),
        ("535.183.01", True, None, "unknown"),
        ("535.183.01", True, {"nv_mem": 17, "nv_mem_nc": 0}, "exposed"),
        ("535.183.01", True, {"nv_mem": 0, "nv_mem_nc": 17}, "not-exposed"),
        ("580.82.07", True, None, "not-exposed"),
    ],
)
def test_class_a(
    tmp_path: Path, version: str, peermem: bool, counters: dict[str, int] | None, expected: str
) -> None:
    node = Node().driver(version, peermem=peermem)
    for client, count in (counters or {}).items():
        node.set(f"sys/kernel/mm/memory_peers/{client}/num_alloc_mrs", f"{count}\n")
    result = run(node, tmp_path)
    assert state(result, "A") == expected
    code = {"exposed": 10, "unknown": 125, "not-exposed": 0}[expected]
    assert exit_code(result, ("A",)) == code
    assert exit_code(result, ("B",)) == 0


def test_legacy_forced_by_the_module_parameter_is_exposed(tmp_path: Path) -> None:
    node = Node().driver("580.82.07", peermem=True)
    node.set("sys/module/nvidia_peermem/parameters/persistent_api_support", "0\n")
    assert state(run(node, tmp_path), "A") == "exposed"


@pytest.mark.parametrize(("soft", "told"), [("8388608", True), ("unlimited", False), ("4294967296", False)])
def test_memlock(tmp_path: Path, soft: str, told: bool) -> None:
    node = Node().set("proc/self/limits", LIMITS.format(soft=soft, hard="unlimited"))
    assert (severity(run(node, tmp_path), "memlock-too-small") == "warning") is told


def test_memlock_of_a_running_rank(tmp_path: Path) -> None:
    node = Node().set("proc/4113/limits", LIMITS.format(soft="65536", hard="65536"))
    node.set("proc/4113/status", "Name:\tpython3\nCapEff:\t0000000000000000\n")
    node.link("proc/4113/fd/17", "/dev/infiniband/uverbs0")
    result = run(node, tmp_path / "limited")
    found = finding(result, "memlock-too-small")
    assert found is not None
    assert "python3 (pid 4113) 64 KiB" in found["title"]
    node.set("proc/4113/status", "Name:\tpython3\nCapEff:\t0000000000004000\n")  # CAP_IPC_LOCK
    assert finding(run(node, tmp_path / "capable"), "memlock-too-small") is None


def test_memory_regions_near_the_limit(tmp_path: Path) -> None:
    node = Node().set(
        "commands/rdma-resource.txt", "0: mlx5_0: pd 4 cq 4 qp 1 cm_id 1 mr 15900000 ctx 1 srq 2\n"
    )
    node.set("commands/ibv_devinfo.txt", "hca_id:\tmlx5_0\n\tmax_mr:\t\t\t\t16777216\n")
    assert severity(run(node, tmp_path / "near"), "mr-limit") == "warning"
    node.set("commands/rdma-resource.txt", "0: mlx5_0: pd 4 cq 4 qp 1 cm_id 1 mr 12 ctx 1 srq 2\n")
    assert severity(run(node, tmp_path / "far"), "mr-limit") is None


SMI = """==============NVSMI LOG==============
Driver Version                            : 535.104.05
CUDA Version                              : 12.2
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    FB Memory Usage
        Total                             : 81559 MiB
    BAR1 Memory Usage
        Total                             : {total} MiB
        Used                              : {used} MiB
"""


@pytest.mark.parametrize(
    ("total", "used", "expected"),
    [(256, 3, "bar1-small"), (131072, 130000, "bar1-used"), (131072, 3, None)],
)
def test_bar1(tmp_path: Path, total: int, used: int, expected: str | None) -> None:
    node = Node().driver("535.104.05").set("commands/nvidia-smi.txt", SMI.format(total=total, used=used))
    result = run(node, tmp_path)
    told = [one["id"] for one in result["findings"] if one["id"].startswith("bar1")]
    assert told == ([expected] if expected else [])


def test_dmabuf_conditions(tmp_path: Path) -> None:
    assert severity(run(Node().driver("535.104.05"), tmp_path / "met"), "dmabuf") == "ok"
    closed = run(Node().driver("535.104.05", open_module=False), tmp_path / "closed")
    assert severity(closed, "dmabuf") == "warning"
    old = Node().driver("535.104.05").without("commands/kallsyms.txt")
    old.set("proc/sys/kernel/osrelease", "5.10.0-46-amd64\n")
    assert severity(run(old, tmp_path / "vendor"), "dmabuf") == "unknown"
    old.set("proc/sys/kernel/version", "#1 SMP Debian 5.10.257-1 (2026-08-02)\n")
    assert severity(run(old, tmp_path / "old"), "dmabuf") == "warning"
    provider = Node().driver("535.104.05").set("commands/kallsyms.txt", "0 T pin_user_pages_fast\n")
    assert severity(run(provider, tmp_path / "provider"), "dmabuf") == "warning"
    unknown = Node().driver("535.104.05").without("commands/kallsyms.txt")
    assert severity(run(unknown, tmp_path / "unknown"), "dmabuf") == "unknown"


def test_another_driver_can_be_asked_about(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB)
    assert state(run(node, tmp_path / "a", driver="535.104.05")) == "exposed"
    assert state(run(node, tmp_path / "b", driver="550.67")) == "not-exposed"
    assert state(run(node, tmp_path / "c", driver="550.67", arch="aarch64")) == "exposed"


def test_the_installed_drivers_own_source_comes_before_the_catalogue(tmp_path: Path) -> None:
    source = (
        "NV_STATUS os_lock_user_pages(void *address)\n{\n    unsigned int gup_flags = 0;\n"
        "    gup_flags |= FOLL_LONGTERM;\n    ret = NV_PIN_USER_PAGES(address, n, gup_flags, pages);\n}\n"
    )
    node = exposed_node().set("usr/src/nvidia-535.104.05/nvidia/os-mlock.c", source)
    node.set("commands/driver-folders.txt", "/usr/src/nvidia-535.104.05\n")
    result = run(node, tmp_path)
    assert [one["how"] for one in result["driver"]["contracts"]] == ["observed", "observed"]
    assert result["driver"]["contract"]["contract"] == "longterm"
    assert state(result) == "not-exposed"


def test_a_measured_contract_comes_before_all(tmp_path: Path) -> None:
    node = exposed_node().write(tmp_path / "node")
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    header = {
        "schema": "regrepro.record/2",
        "node": {"hostname": "gpu-a17", "kernel": "6.8.0-45-generic", "nvidia_driver": "535.104.05"},
    }
    (run_dir / "record.jsonl").write_text(json.dumps(header) + "\n", encoding="utf-8")
    verdict = {
        "pin_owner": "cuda",
        "evidence": {
            "pin_contract": {"value": {"1": {"contract": "longterm", "why": ""}}, "how": "inferred"}
        },
    }
    (run_dir / "verdicts.json").write_text(json.dumps({"verdicts": [verdict]}), encoding="utf-8")
    with open_place(node) as reader:
        result = audit(reader, runs=[run_dir])
    assert result["driver"]["contract"]["how"] == "measured"
    assert state(result) == "not-exposed"
    header["node"]["hostname"] = "another"  # type: ignore[index]
    (run_dir / "record.jsonl").write_text(json.dumps(header) + "\n", encoding="utf-8")
    with open_place(node) as reader:
        assert audit(reader, runs=[run_dir])["driver"]["contract"]["how"] == "observed"


def test_this_machine_gives_an_answer_without_a_traceback() -> None:
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code in (0, 10, 125), result.output
    value = json.loads(result.output)
    check(value)
    assert value["live"] is True
    assert fact(value, "system", "kernel")


def test_the_command_line(tmp_path: Path) -> None:
    place = exposed_node().write(tmp_path / "node")
    shown = CliRunner().invoke(command, ["--from", str(place)])
    assert shown.exit_code == 10
    assert "EXPOSED" in shown.output
    assert "Facts of" in shown.output
    brief = CliRunner().invoke(command, ["--from", str(place), "--no-facts", "--class", "A"])
    assert brief.exit_code == 0
    assert "Facts of" not in brief.output
    for wrong in (
        ["--driver", "latest"],
        ["--driver-source", str(tmp_path / "none")],
        ["--from", "/nonexistent"],
    ):
        failed = CliRunner().invoke(
            command, ["--from", str(place), *wrong] if "--from" not in wrong else wrong
        )
        assert failed.exit_code == 2, failed.output
        assert failed.output.count("\n") == 1
        assert failed.output.startswith("regrepro audit: ")


def test_every_fact_says_where_it_was_read_or_why_not(tmp_path: Path) -> None:
    for name, node in {
        "full": exposed_node(),
        "bare": Node().without("sys/", "commands/", "proc/modules"),
    }.items():
        for one in run(node, tmp_path / name)["facts"]:
            assert one["source"], one
            assert one["value"] is not None or one["why"], one


def test_foreign_text_reaches_the_terminal_without_control_characters(tmp_path: Path) -> None:
    node = exposed_node().set("proc/sys/kernel/hostname", "evil\x1b]0;owned\x07\x1b[2Jnode\n")
    text = plain(run(node, tmp_path))
    assert "\x1b" not in text
    assert "\x07" not in text


def test_live_reader_runs_nothing_that_is_not_listed() -> None:
    assert LiveReader().command("rm").text is None

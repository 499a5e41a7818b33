"""What an audit of the node says of the causes that the judge leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_nodes import GIB, LIMITS, Node

from unit.explain.explaining import LOG, audit_of, run, status


def test_an_audit_without_unpinnable_memory_excludes_the_bug(tmp_path: Path) -> None:
    before = run(LOG)
    assert status(before, "page-migration") == "possible"
    after = run(LOG, audit=audit_of(Node().driver("535.104.05"), tmp_path / "node"))
    assert status(after, "page-migration") == "impossible"
    assert status(after, "migration-target") == "impossible"
    assert status(after, "peer-memory") == "impossible"
    assert status(after, "memlock-accounting") == "possible"
    assert after["audited"] is True


def test_an_audit_of_an_exposed_node_speaks_for_it(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("535.104.05")
    node.set("proc/self/limits", LIMITS.format(soft="65536", hard="65536"))
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") == "supported"
    assert status(after, "memlock-accounting") == "supported"
    assert not [one for one in after["groups"][0]["causes"] if one["status"] == "decided"]


def test_ranks_without_a_limit_exclude_it(tmp_path: Path) -> None:
    node = Node().set("proc/77/limits", LIMITS.format(soft="unlimited", hard="unlimited"))
    node.set("proc/77/status", "Name:\tpython3\nCapEff:\t0\n").link("proc/77/fd/9", "/dev/infiniband/uverbs0")
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "memlock-accounting") == "impossible"


def test_a_longterm_driver_is_not_the_holder_but_another_can_be(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("550.67")
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") == "possible"
    why = next(one["why"] for one in after["groups"][0]["causes"] if one["cause"] == "page-migration")
    assert "not the NVIDIA driver's pin" in why


def test_without_peermem_a_gpu_address_gives_efault(tmp_path: Path) -> None:
    log = LOG.replace("Cannot allocate memory", "Bad address")
    after = run(log, audit=audit_of(Node().driver("535.104.05"), tmp_path / "node"))
    assert status(after, "peer-memory") == "supported"


@pytest.mark.parametrize(
    ("release", "enomem", "efault"),
    [
        ("5.10.0-46-amd64", "impossible", "impossible"),
        ("6.1.0-57-amd64", "possible", "impossible"),
        ("6.5.0", "possible", "possible"),
        ("6.12.0", "impossible", "possible"),
        ("5.14.0-427.el9.x86_64", "possible", "possible"),
    ],
)
def test_the_kernel_says_what_it_refuses(release: str, enomem: str, efault: str, tmp_path: Path) -> None:
    """A file that is written through its mapping since 6.5, a huge page in unpinnable memory until 6.5."""
    node = Node().hugetlb_cma(3 * GIB).without("commands/kallsyms.txt")
    node.set("proc/sys/kernel/osrelease", release)
    audit = audit_of(node, tmp_path / "node")
    assert status(run(LOG, audit=audit), "longterm-refused") == enomem
    log = LOG.replace("Cannot allocate memory", "Bad address")
    assert status(run(log, audit=audit), "longterm-refused") == efault


def test_an_old_kernel_excludes_the_bug(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("535.104.05").without("commands/kallsyms.txt")
    node.set("proc/sys/kernel/osrelease", "5.10.0-46-amd64\n")
    node.set("proc/sys/kernel/version", "#1 SMP Debian 5.10.257-1 (2026-08-02)\n")
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") == "impossible"


@pytest.mark.parametrize(
    "release", ["5.10.0-136.12.0.86.oe2203sp1.x86_64", "4.19.90-25.10.v2101.ky10.x86_64"]
)
def test_an_old_kernel_of_a_vendor_excludes_nothing(release: str, tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("535.104.05").without("commands/kallsyms.txt")
    node.set("proc/sys/kernel/osrelease", release)
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") != "impossible"

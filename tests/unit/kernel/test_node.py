"""Node facts."""

from __future__ import annotations

import json
import os

import pytest

from regrepro.kernel import node


def test_the_header_has_every_fact_of_the_record() -> None:
    facts = node.node_facts()
    wanted = (
        "hostname kernel kernel_version arch page_size cmdline cpus memory_total euid capabilities lockdown "
        "vm nvidia_driver limits"
    )
    assert set(wanted.split()) <= set(facts)
    assert facts["kernel"] == os.uname().release and facts["page_size"] == os.sysconf("SC_PAGE_SIZE")
    assert set(facts["limits"]) == {"memlock_soft", "memlock_hard"}
    json.dumps(facts)


def test_capabilities_by_name() -> None:
    assert node.decode_capabilities(0) == []
    assert node.decode_capabilities(1 << 21 | 1 << 14) == ["CAP_IPC_LOCK", "CAP_SYS_ADMIN"]
    assert node.decode_capabilities(1 << 40 | 1 << 60) == ["CAP_CHECKPOINT_RESTORE", "CAP_60"]


@pytest.mark.parametrize(
    ("sysfs", "proc", "version"),
    [
        ("550.67", None, "550.67"),
        (
            None,
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.171.04  Tue Mar 19 20:30:00 UTC 2024",
            "535.171.04",
        ),
        (
            None,
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.84  Release Build  (dvs-builder)",
            "595.84",
        ),
        (None, None, None),
    ],
)
def test_nvidia_driver(
    monkeypatch: pytest.MonkeyPatch, sysfs: str | None, proc: str | None, version: str | None
) -> None:
    texts = {"/sys/module/nvidia/version": sysfs, "/proc/driver/nvidia/version": proc}
    monkeypatch.setattr(node, "_text", texts.get)
    assert node.nvidia_driver() == version

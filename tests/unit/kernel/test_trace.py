"""The tracer where it cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regrepro.kernel import procfs, trace, trace_fs, trace_tree


class NoJournal:
    def add(self, kind: str, **_data: Any) -> None:
        raise AssertionError(f"{kind}: nothing may be changed here")


@pytest.mark.parametrize(
    ("lockdown", "euid", "word"),
    [("confidentiality", 0, "locked down"), ("none", 1000, "root"), ("integrity", 1000, "root")],
)
def test_without_rights_it_says_so_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, lockdown: str, euid: int, word: str
) -> None:
    monkeypatch.setattr(procfs, "lockdown", lambda: lockdown)
    monkeypatch.setattr("os.geteuid", lambda: euid)
    tracer = trace.Tracer(NoJournal())  # type: ignore[arg-type]
    assert tracer.status()[0] is False
    assert tracer.arm() is False
    available, why = tracer.status()
    assert not available
    assert word in why
    token = tracer.begin()
    assert token is None
    result = tracer.end(token)
    assert (result["status"], result["why"], result["events"], result["tree"]) == ("unavailable", why, [], [])
    tracer.disarm()
    assert trace_tree.render(result) == [f"trace unavailable: {why}"]


def test_without_kprobes_or_write_access_it_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "lockdown", lambda: None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(trace_fs, "PLACES", (tmp_path,))
    (tmp_path / "trace_clock").touch()
    assert "CONFIG_KPROBE_EVENTS" in trace.Tracer(NoJournal()).status()[1]  # type: ignore[arg-type]
    (tmp_path / "kprobe_events").touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "read-only" in trace.Tracer(NoJournal()).status()[1]  # type: ignore[arg-type]


def test_a_kernel_without_tracefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "lockdown", lambda: None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(trace_fs, "PLACES", (tmp_path / "none",))
    monkeypatch.setattr(trace_fs, "kernel_has_tracefs", lambda: False)
    assert "no tracefs" in trace.Tracer(NoJournal()).status()[1]  # type: ignore[arg-type]

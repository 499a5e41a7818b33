"""A control group of its own for the memory that pressure holds."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from regrepro.kernel import procfs
from regrepro.kernel.busy import when_free
from regrepro.kernel.journal import Entry, Journal

CGROUP_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


class Cgroup:
    """A control group (version 2) with `memory.max`, removed when it ends. `path` is None where there is
    none to be had, and `why` says so.
    """

    def __init__(self, journal: Journal, limit: int) -> None:
        self.path: Path | None = None
        self.why = ""
        self._journal = journal
        self._entry: Entry | None = None
        self._enabled: Path | None = None
        root = next((root for root in CGROUP_ROOTS if (root / "cgroup.controllers").exists()), None)
        if root is None:
            self.why = "no control groups of version 2 are mounted"
            return
        try:
            self._make(root, limit)
        except OSError as error:
            self.why = f"no control group of our own: {error.strerror or error}"
            self.remove()

    def _make(self, root: Path, limit: int) -> None:
        if "memory" not in (root / "cgroup.controllers").read_text().split():
            self.why = "control groups of version 2 do not control memory here"
            return
        path = root / f"regrepro-pressure-{os.getpid()}"
        switch = root / "cgroup.subtree_control"
        off = "memory" not in switch.read_text().split()
        self._entry = self._journal.add("cgroup", path=str(path), enabled=str(switch) if off else None)
        if off:
            switch.write_text("+memory")
            self._enabled = switch
        path.mkdir(exist_ok=True)
        self.path = path
        (path / "memory.max").write_text(str(limit))
        # What is held must not be swapped out: that would undo the pressure.
        with suppress(OSError):
            (path / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        """Move this process in."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def events(self) -> dict[str, int]:
        """Return memory.events: `{"oom_kill": 0, …}`."""
        if self.path is None:
            return {}
        return procfs.counts(procfs.text(self.path / "memory.events") or "")

    def remove(self) -> None:
        """Remove it; its processes must be gone. What cannot be removed stays in the journal."""
        if self.path is not None:
            try:
                when_free(self.path.rmdir, 5)
            except FileNotFoundError:
                pass
            except OSError:
                return
        self.path = None
        if self._enabled is not None:
            with suppress(OSError):
                self._enabled.write_text("-memory")
            self._enabled = None
        if self._entry is not None:
            self._journal.remove(self._entry)
            self._entry = None

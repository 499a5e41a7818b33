"""A machine made of numbers for the runner, and scenario files that are run on it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from stage_fakes import FakeBackend

from regrepro import runner
from regrepro.errors import Unmet
from regrepro.options import RunOptions
from regrepro.record import Record, read_record

HEAD = "import os, signal, sys, time\nfrom regrepro import Stage, change, instead, scenario\n"
SCENARIO = '''
@scenario(
    shows="a test",
    needs={needs},
    expects={{"pin": "reproduced"}},
    controls={controls},
    timeout={timeout},
)
def {name}(stage: Stage) -> None:
    """A test."""
{body}
'''


def scenario(
    body: str,
    *,
    name: str = "mine",
    needs: str = "()",
    controls: str = '{"no-pin": change(pin="none")}',
    timeout: float = 20,
) -> str:
    return SCENARIO.format(
        body=textwrap.indent(textwrap.dedent(body).strip(), "    "),
        name=name,
        needs=needs,
        controls=controls,
        timeout=timeout,
    )


class FakeEnvironment(runner.Environment):
    """A machine of numbers; journals what it is asked for."""

    def __init__(self) -> None:
        self.in_lab = False
        self.made_backend = FakeBackend()
        self.order: list[str] = []
        self.block: Any = None

    def node_facts(self) -> dict[str, Any]:
        return {"hostname": "fake"}

    def reclaim(self) -> list[str]:
        return ["a memory block"]

    def journal(self) -> Any:
        class Journal:
            def add(self, kind: str, **data: Any) -> Any:
                return (kind, data)

            def remove(self, entry: Any) -> None: ...

        return Journal()

    def memory_map(self) -> Any:
        return self.made_backend.memory_map

    def block_events(self) -> Any:
        class NoEvents:
            def count(self) -> int:
                return 0

            def close(self) -> None: ...

        return NoEvents()

    def online_movable(self, journal: Any, memory_map: Any, report: Any) -> Any:
        step = {"block": 7, "range": [1000, 2000], "errno": None}
        if self.block is None:
            report({**step, "step": "failed", "errno": "EBUSY"})
            raise Unmet("online-movable", "no block can be offlined", "free memory")
        self.block.report = lambda: report({**step, "step": "given-back"})
        report({**step, "step": "online_movable"})
        return self.block

    def tracer(self, journal: Any) -> Any:
        raise OSError("no tracefs here")

    def reservations(self, given: Any) -> list[dict[str, Any]]:
        """As of a kernel that knows none of what `--boot` gave."""
        keys = {"wanted": None, "got": None, "ok": False, "why": "not known", "kernel_lines": []}
        return [{"argument": argument, **keys} for argument in given]

    def stand_ins(self, options: RunOptions) -> list[dict[str, str]]:
        return []

    def backend(self, options: RunOptions, memory_map: Any) -> Any:
        return self.made_backend


def run(tmp_path: Path, text: str, **keys: Any) -> Record:
    file = tmp_path / "file.py"
    file.write_text(HEAD + text)
    options = keys.pop("options", RunOptions())
    keys.setdefault("environment", FakeEnvironment())
    runner.run([str(file)], options, tmp_path / "out", **keys)
    return read_record(tmp_path / "out")


def ends(record: Record) -> dict[str | None, dict[str, Any]]:
    return {event["control"]: event for event in record.of("scenario-end")}

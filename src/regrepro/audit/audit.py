"""The audit as a whole: facts, what the driver asks for, findings, and the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regrepro import __version__
from regrepro.audit import subjects
from regrepro.audit.driver import resolve
from regrepro.audit.finding import EXPOSED, NOT_EXPOSED, UNKNOWN
from regrepro.audit.reader import Reader
from regrepro.audit.subjects.memory import likelihood, per_node
from regrepro.errors import EXIT_DECIDED, EXIT_REPRODUCED, EXIT_UNDECIDED

SCHEMA = "regrepro.audit/1"


def audit(
    reader: Reader,
    *,
    driver: str | None = None,
    driver_source: Path | None = None,
    headers: Path | None = None,
    arch: str | None = None,
    runs: list[Path] | None = None,
) -> dict[str, Any]:
    """Audit what `reader` reads. Returns plain JSON values in the shape of schema/audit-1.json.

    Raises UsageError where --driver or --driver-source cannot be read; nothing else is an error.
    """
    sheet = subjects.collect(reader)
    answer = resolve(
        reader, sheet, version=driver, source=driver_source, headers=headers, arch=arch, runs=runs
    )
    found, exposures = subjects.find(sheet, answer.contract, answer.peermem, driver=answer.version)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "where": reader.where,
        "live": reader.live,
        "facts": [fact.as_dict() for fact in sheet.facts],
        "driver": answer.as_dict(),
        "likelihood": likelihood(sheet),
        "nodes": per_node(sheet),
        "findings": [finding.as_dict() for finding in found],
        "exposure": [exposure.as_dict() for exposure in exposures],
        "state": overall([exposure.state for exposure in exposures]),
    }


def overall(states: list[str]) -> str:
    """Exposed to any, else unknown where one is unknown, else not exposed."""
    for state in (EXPOSED, UNKNOWN):
        if state in states:
            return state
    return NOT_EXPOSED


def exit_code(result: dict[str, Any], classes: tuple[str, ...] = ("A", "B")) -> int:
    """0 not exposed, 10 exposed, 125 cannot tell, of the classes that are asked about."""
    state = overall([one["state"] for one in result["exposure"] if one["class"] in classes])
    return {
        EXPOSED: EXIT_REPRODUCED,
        UNKNOWN: EXIT_UNDECIDED,
        NOT_EXPOSED: EXIT_DECIDED,
    }[state]

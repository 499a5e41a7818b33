"""What the audit makes of facts: conditions, exposure to a class of failure, findings.

Two classes are judged, after the incident that this project follows:
A, the peer-memory path of GPU buffers (the teardown race of the API without persistent pages), and
B, host pages in unpinnable memory that a driver pins without FOLL_LONGTERM before RDMA registers them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

EXPOSED = "exposed"
NOT_EXPOSED = "not-exposed"
UNKNOWN = "unknown"

SEVERITIES = ("exposed", "warning", "unknown", "note", "ok")


@dataclass
class Finding:
    """One finding. `evidence` items are {what, value, source}; `fix` is "" where nothing is to be done."""

    id: str
    severity: str
    title: str
    explanation: str
    fix: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the finding in the shape of the schema audit-1."""
        return asdict(self)


@dataclass(frozen=True)
class Condition:
    """One of the conditions that must all hold: `holds` is None where it is not known."""

    what: str
    holds: bool | None
    reason: str


def evidence_of(conditions: Iterable[Condition]) -> list[dict[str, Any]]:
    """Return conditions as evidence of a finding."""
    return [{"what": one.what, "value": one.holds, "source": one.reason} for one in conditions]


@dataclass
class Exposure:
    """Whether the node is exposed to one class, by the conditions that must all hold."""

    name: str
    conditions: list[Condition]

    @property
    def state(self) -> str:
        """Exposed where all hold, not exposed where one does not, else unknown."""
        values = [condition.holds for condition in self.conditions]
        if False in values:
            return NOT_EXPOSED
        return UNKNOWN if None in values else EXPOSED

    @property
    def reason(self) -> str:
        """What decides: the condition that fails, those that are not known, or all."""
        wanted = {NOT_EXPOSED: False, UNKNOWN: None, EXPOSED: True}[self.state]
        return "; ".join(condition.reason for condition in self.conditions if condition.holds is wanted)

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of the schema audit-1."""
        return {
            "class": self.name,
            "state": self.state,
            "reason": self.reason,
            "conditions": [asdict(condition) for condition in self.conditions],
        }

    def finding(self, not_exposed: str, unknown: tuple[str, str], exposed: tuple[str, str, str]) -> Finding:
        """Return the finding: its title where the node is not exposed; title and fix where it is not known;
        title, explanation and fix where it is.
        """
        severity, fix = self.state, ""
        if self.state == NOT_EXPOSED:
            severity, title = "ok", not_exposed
            why = (
                f"One condition of the failure does not hold here: {self.reason}. "
                "It needs all of them at once."
            )
        elif self.state == UNKNOWN:
            title, fix = unknown
            why = (
                f"No condition is excluded, but not all are known: {self.reason}. "
                "Until they are, the node counts as undecided."
            )
        else:
            title, why, fix = exposed
        return Finding(f"class-{self.name.lower()}", severity, title, why, fix, evidence_of(self.conditions))


def size(count: int | None) -> str:
    """Write bytes for people: 6 GiB, 9.3 GiB, 512 MiB, 64 KiB."""
    if count is None:
        return "an unknown amount"
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{f'{count / unit:.1f}'.removesuffix('.0')} {name}"
    return f"{count} bytes"

"""Metrics for Prometheus' textfile collector: one file, replaced whole.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Metrics:
    """What watch counts. Counters start at 0 with each start of watch."""

    watching: int = 0
    failures: dict[tuple[str, str], int] = field(default_factory=dict)  # (layer, class) → count
    proven: int = 0  # failures of this bug, by later looks; they are in `failures` as what they were at first
    not_looked_at: int = 0  # failures of this bug for which there were no later looks
    suppressed: int = 0  # failures that were counted and not recorded in full
    lost: int = 0
    missed: int = 0  # hits of probes
    engine_restarts: int = 0
    attach_failures: int = 0
    copies: int = 0
    copies_not_followed: int = 0
    record_problems: int = 0
    started: float = 0.0
    last_failure: float = 0.0
    registrations: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def failed(self, layer: str, bug_class: str = "", number: int = 1) -> None:
        """Count failures."""
        key = layer, bug_class
        self.failures[key] = self.failures.get(key, 0) + number

    @property
    def total(self) -> int:
        """All failures."""
        return sum(self.failures.values())

    def text(self) -> str:
        """Return the file's content."""
        lines: list[str] = []

        def metric(name: str, kind: str, what: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
            lines.append(f"# HELP regrepro_watch_{name} {what}")
            lines.append(f"# TYPE regrepro_watch_{name} {kind}")
            for labels, value in samples:
                inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                shown = repr(float(value)) if isinstance(value, float) else str(value)
                lines.append(f"regrepro_watch_{name}{'{' + inside + '}' if inside else ''} {shown}")

        metric("up", "gauge", "Whether every probe is attached.", [({}, self.watching)])
        metric(
            "failures_total",
            "counter",
            "Registrations that failed, by the layer that failed and the class of bug.",
            [
                ({"layer": layer, "class": kind}, count)
                for (layer, kind), count in sorted(self.failures.items())
            ]
            or [({"layer": "page-migration", "class": "B likely"}, 0)],
        )
        for name, what, value in (
            ("proven_total", "Failures of this bug that later looks have proven.", self.proven),
            (
                "not_looked_at_again_total",
                "Failures of this bug whose pages were not looked at again: there were too many.",
                self.not_looked_at,
            ),
            ("suppressed_total", "Failures that were counted and not recorded in full.", self.suppressed),
            ("lost_events_total", "Events that did not reach watch.", self.lost),
            ("missed_hits_total", "Hits of probes that the kernel says it missed.", self.missed),
            ("engine_restarts_total", "Times that bpftrace was started anew.", self.engine_restarts),
            (
                "attach_failures_total",
                "Probes or copies that could not be attached to.",
                self.attach_failures,
            ),
            ("record_problems_total", "Failures that could not be written.", self.record_problems),
        ):
            metric(name, "counter", what, [({}, value)])
        metric("libibverbs_copies", "gauge", "Copies of libibverbs that are followed.", [({}, self.copies)])
        metric(
            "libibverbs_copies_not_followed",
            "gauge",
            "Copies of libibverbs that were seen and are not followed.",
            [({}, self.copies_not_followed)],
        )
        metric("start_time_seconds", "gauge", "When watch started.", [({}, self.started)])
        if self.last_failure:
            metric(
                "last_failure_time_seconds", "gauge", "When the last failure was.", [({}, self.last_failure)]
            )
        if self.registrations:
            given = sorted(self.registrations.items())
            labels = [({"path": path, "driver": driver}, value) for (path, driver), value in given]
            metric(
                "registrations_total",
                "counter",
                "Registrations that succeeded, by the path that they took.",
                [(label, value[0]) for label, value in labels],
            )
            metric(
                "registered_bytes_total",
                "counter",
                "Bytes registered, by the path that they took.",
                [(label, value[1]) for label, value in labels],
            )
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Replace the file. Raises OSError."""
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            scratch.write_text(self.text(), encoding="utf-8")
            scratch.chmod(0o644)
            scratch.replace(path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

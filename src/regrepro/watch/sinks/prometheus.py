"""Metrics for Prometheus' textfile collector: one file, replaced whole.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from regrepro.watch.counts import WatchCounts
from regrepro.watch.happenings import Counted, Happening, Surroundings


class PrometheusSink:
    """Keeps a file of the counts. A problem is said once, until the file can be written again."""

    def __init__(self, path: Path, counts: WatchCounts, say: Callable[[str], None]) -> None:
        self._path, self._counts, self._say = path, counts, say
        self._problem = ""

    def take(self, happening: Happening) -> None:
        """Write the file when the counts are up to date."""
        if not isinstance(happening, Counted):
            return
        try:
            write(self._path, text_of(self._counts))
            problem = ""
        except OSError as error:
            problem = f"cannot write {self._path}: {error.strerror}"
        if problem and problem != self._problem:  # and not every fifteen seconds
            self._say(problem)
        self._problem = problem


def make(surroundings: Surroundings) -> PrometheusSink | None:
    """Return the sink where --metrics names a file."""
    path = surroundings.settings.metrics
    return PrometheusSink(path, surroundings.counts, surroundings.say) if path is not None else None


def text_of(counts: WatchCounts) -> str:
    """Return the file's content."""
    lines: list[str] = []

    def metric(name: str, kind: str, what: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        lines.append(f"# HELP regrepro_watch_{name} {what}")
        lines.append(f"# TYPE regrepro_watch_{name} {kind}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            shown = repr(float(value)) if isinstance(value, float) else str(value)
            lines.append(f"regrepro_watch_{name}{'{' + inside + '}' if inside else ''} {shown}")

    metric("up", "gauge", "Whether every probe is attached.", [({}, counts.watching)])
    metric(
        "failures_total",
        "counter",
        "Registrations that failed, by the layer that failed and the class of bug.",
        [({"layer": layer, "class": kind}, count) for (layer, kind), count in sorted(counts.failures.items())]
        or [({"layer": "page-migration", "class": "B likely"}, 0)],
    )
    for name, what, value in (
        ("proven_total", "Failures of this bug that later looks have proven.", counts.proven),
        (
            "not_looked_at_again_total",
            "Failures of this bug whose pages were not looked at again: there were too many.",
            counts.not_looked_at,
        ),
        ("suppressed_total", "Failures that were counted and not recorded in full.", counts.suppressed),
        ("lost_events_total", "Events that did not reach watch.", counts.lost),
        ("missed_hits_total", "Hits of probes that the kernel says it missed.", counts.missed),
        (
            "engine_restarts_total",
            "Times that what follows the kernel was started anew.",
            counts.engine_restarts,
        ),
        (
            "attach_failures_total",
            "Probes or copies that could not be attached to.",
            counts.attach_failures,
        ),
        ("record_problems_total", "Failures that could not be written.", counts.record_problems),
    ):
        metric(name, "counter", what, [({}, value)])
    metric("libibverbs_copies", "gauge", "Copies of libibverbs that are followed.", [({}, counts.copies)])
    metric(
        "libibverbs_copies_not_followed",
        "gauge",
        "Copies of libibverbs that were seen and are not followed.",
        [({}, counts.copies_not_followed)],
    )
    metric("start_time_seconds", "gauge", "When watch started.", [({}, counts.started)])
    if counts.last_failure:
        metric(
            "last_failure_time_seconds", "gauge", "When the last failure was.", [({}, counts.last_failure)]
        )
    if counts.registrations:
        given = sorted(counts.registrations.items())
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


def write(path: Path, text: str) -> None:
    """Replace the file, which everybody may read. Raises OSError.

    The directory may be another user's, who must not choose what is written: the name of the new file cannot
    be known before, no link is followed, and nothing is done by a path twice.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    scratch = f".{path.name}.{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(scratch, flags, 0o600, dir_fd=directory), "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(scratch, path.name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):
            os.unlink(scratch, dir_fd=directory)
        raise
    finally:
        os.close(directory)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

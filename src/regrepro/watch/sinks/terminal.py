"""The terminal: a line on stdout for each failure, and on stderr what goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from regrepro.foreign import visible
from regrepro.watch.happenings import Caught, Happening, Notice, Proven, Surroundings
from regrepro.watch.later_looks import CaughtFailure


class TerminalSink:
    """Tells people of failures in words, or as lines of JSON where that was asked for."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._settings = surroundings.settings
        self._directories = surroundings.directories

    def take(self, happening: Happening) -> None:
        """Print failures, those that are proven once more, and sentences."""
        if isinstance(happening, Notice) and happening.sentence:
            say_on_stderr(happening.sentence)
        elif isinstance(happening, Caught | Proven):
            if self._settings.as_json:
                print(json.dumps(self._as_json(happening.item, happening.verdict)), flush=True)
            elif not self._settings.quiet:
                print(visible(self._in_words(happening.item, happening.verdict)), flush=True)

    def _as_json(self, item: CaughtFailure, verdict: Mapping[str, Any]) -> dict[str, Any]:
        failure, seen = item.failure, item.evidence
        return {
            "record": str(self._directories.path),
            "failure": item.name,
            "pid": failure.pid,
            "comm": failure.comm,
            "rank": seen.process.facts.get("rank"),
            "container": seen.process.facts.get("container"),
            "verb": failure.shown_verb,
            "errno": failure.errno,
            "address": failure.address,
            "length": failure.length,
            "layer": verdict.get("layer"),
            "class": verdict.get("class"),
            "looked_for_seconds": item.looks[-1]["after_seconds"] if item.looks else seen.again_after,
            "reason": verdict.get("reason"),
        }

    def _in_words(self, item: CaughtFailure, verdict: Mapping[str, Any]) -> str:
        failure, rank = item.failure, item.evidence.process.facts.get("rank") or {}
        number = rank.get("RANK") or rank.get("OMPI_COMM_WORLD_RANK") or rank.get("SLURM_PROCID")
        who = f"{failure.comm} ({failure.pid}{f', rank {number}' if number else ''})"
        place = f"{self._directories.path.name}/{item.name}"
        return f"{time.strftime('%H:%M:%S')} {who}: {verdict.get('reason')} [{place}]"


def say_on_stderr(text: str) -> None:
    """Tell a person, and the journal of systemd, what goes on."""
    with suppress(OSError):
        print(f"regrepro watch: {visible(text)}", file=sys.stderr, flush=True)

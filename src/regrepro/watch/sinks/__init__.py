"""Where what `watch` sees is written. A sink is one file here, and one line in `SINKS`.

An entry makes a sink from the surroundings of a watch, or gives None where nobody asked for it. The record
comes first, so that the others can name the place of a failure in it.
"""

from __future__ import annotations

from collections.abc import Callable

from regrepro.watch.happenings import Sink, Surroundings
from regrepro.watch.sinks import prometheus, record, terminal

SINKS: list[Callable[[Surroundings], Sink | None]] = [
    record.RecordSink,
    prometheus.make,
    terminal.TerminalSink,
]

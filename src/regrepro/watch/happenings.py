"""What happens while a node is watched, and the one interface of the sinks that write it down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from regrepro.watch.counts import WatchCounts
from regrepro.watch.later_looks import CaughtFailure
from regrepro.watch.run_directories import RunDirectories
from regrepro.watch.watch_settings import WatchSettings


@dataclass(frozen=True)
class Notice:
    """Something about the watch itself: a sentence for people, "" for none, and what of it a record keeps
    (event `watch` of docs/record.md), "" for nothing.
    """

    sentence: str
    what: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Caught:
    """A failure was caught and judged. `waits`: its frames will be looked at again."""

    item: CaughtFailure
    verdict: Mapping[str, Any]
    waits: bool


@dataclass(frozen=True)
class Looked:
    """Frames that a failure left behind were looked at again; the look is the last of `item.looks`."""

    item: CaughtFailure
    last: bool


@dataclass(frozen=True)
class Proven:
    """The later looks at a failure have proven what it was."""

    item: CaughtFailure
    verdict: Mapping[str, Any]


@dataclass(frozen=True)
class Counted:
    """The counts were brought up to date, as they are every fifteen seconds and at the end."""


@dataclass(frozen=True)
class RotationAsked:
    """A person asked for new files (SIGHUP)."""


@dataclass(frozen=True)
class Stopped:
    """Nothing comes any more. `outcome`: of the run, "finished" or "interrupted"."""

    outcome: str


Happening = Notice | Caught | Looked | Proven | Counted | RotationAsked | Stopped


class Sink(Protocol):
    """Writes down what happens. A sink passes over what it has no use for, and says problems of its own by
    `Surroundings.say`.
    """

    def take(self, happening: Happening) -> None:
        """Take one thing that happened."""


@dataclass
class Surroundings:
    """What sinks may use. `beginning`: the events (type, keys) that each record begins with."""

    settings: WatchSettings
    counts: WatchCounts
    directories: RunDirectories
    beginning: Callable[[], Iterable[tuple[str, Mapping[str, Any]]]]
    say: Callable[[str], None]


class Sinks:
    """All sinks of a watch as one; each is given everything that happens, in the order of `makers`."""

    def __init__(
        self, makers: Iterable[Callable[[Surroundings], Sink | None]], surroundings: Surroundings
    ) -> None:
        made = (make(surroundings) for make in makers)
        self._sinks = [sink for sink in made if sink is not None]

    def take(self, happening: Happening) -> None:
        """Give it to every sink."""
        for sink in self._sinks:
            sink.take(happening)

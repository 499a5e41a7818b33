"""The states of a pass' pages: read, or inferred where no page can have moved, and each written once.

A state that is long and the same as before is not written again: the event refers to the one that has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regrepro.record import Encoded, encoded
from regrepro.stage.ports import Backend, PageState, join, readable

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer

# A page state whose text is longer is written once; events that find it unchanged refer to it.
_REFER_ABOVE = 2000

# Arrays of a page state; two states that agree in all of them are the same.
_STATE_ARRAYS = (
    "pfn",
    "place",
    "state",
    "node",
    "refcount",
    "mapcount",
    "pincount",
    "baseline",
    "large",
    "file",
    "exclusive",
)


class PageStates:
    """The page states of one pass."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._written: dict[int, _Written] = {}  # by buffer
        # What the event that is being made holds in full, each under its key.
        self._unplaced: list[tuple[_Written, str]] = []
        self._known: dict[int, tuple[PageState, tuple[bytes, ...]]] = {}

    def recorded(self, seq: int) -> None:
        """Note that the event with the keys made last has this number."""
        for written, key in self._unplaced:
            written.seq, written.key = seq, key
        self._unplaced.clear()

    def moved(self, buffer: Buffer) -> None:
        """Infer nothing of a buffer's pages any more: it has others."""
        self._known.pop(buffer.id, None)

    def freed(self, buffer: Buffer) -> None:
        """Forget a buffer."""
        self._written.pop(buffer.id, None)
        self._known.pop(buffer.id, None)

    def look(self, buffer: Buffer, *, counts: bool = True) -> Look:
        """Read the state of a buffer's pages now. `counts`: with their reference counts."""
        if buffer.no_pages:
            return Look(None)
        return Look(self._backend.snapshot(buffer.address, buffer.length, counts=counts))

    def look_again(self, buffer: Buffer) -> Look:
        """Read a state, unless the kernel's own counters prove that no page has moved since it was read.

        A page of anonymous memory that this process does not share changes its frame by migration, by being
        swapped out, by the collapse of a huge page, or by a fault of this process. The kernel counts each of
        them (`System.movements`); where none was counted, the pages have the frames that they had. What
        their pageblocks are is read again.
        """
        counted = self._backend.movements()
        known = self._known.get(buffer.id)
        if (
            known is not None
            and counted is not None
            and known[1] == counted
            and self._backend.same_places(known[0])
        ):
            return Look(known[0], inferred=True)
        look = self.look(buffer, counts=False)
        if look.state is not None and counted is not None:
            self._known[buffer.id] = (look.state, counted)
        return look

    def around(self, buffer: Buffer, before: Look, after: Look) -> dict[str, Any]:
        """Return the states before and after a call as keys of its event."""
        return self.keys("before", buffer, before) | self.keys("after", buffer, after)

    def keys(self, key: str, buffer: Buffer, look: Look) -> dict[str, Any]:
        """Return a state as keys of an event; `pages_unknown` says why there is none."""
        state, inferred = look.state, look.inferred
        last = self._written.get(buffer.id)
        if state is None:
            return {key: None, "pages_unknown": buffer.no_pages or _NO_MAP}
        known = last is not None and state is last.state
        if not known and not readable(state):
            return {key: None, "pages_unknown": join(state.problems) or "the pages could not be read"}
        # Before and after are the same more often than not: encode equal states once.
        if last is None or not (known or _same(last.state, state)):
            last = _Written(state, encoded(state.as_record()))
            self._written[buffer.id] = last
            self._unplaced.append((last, key))
            return {key: last.text}
        if len(last.text.text) <= _REFER_ABOVE:
            return {key: state.as_record() | _INFERRED if inferred else last.text}
        place: dict[str, Any] = {"seq": last.seq, "key": last.key}
        if last.seq is None:  # in this very event
            place = {"key": next(its for written, its in self._unplaced if written is last)}
        return {key: {"same_as": place} | (_INFERRED if inferred else {})}


@dataclass
class _Written:
    """A page state as the record holds it in full: in which event, under which key."""

    state: PageState
    text: Encoded
    seq: int | None = None
    key: str = ""


@dataclass(frozen=True)
class Look:
    """A page state, read now or inferred to be what was read before."""

    state: PageState | None
    inferred: bool = False


_NO_MAP = "no map of this node's memory could be read"

_INFERRED = {
    "how": "inferred",
    "source": "frames as read before: since then /proc/vmstat counted no migration, swap or collapse, and "
    "getrusage no fault; their places were read again",
}


def _same(one: Any, other: Any) -> bool:
    """Return whether two page states hold the same, array by array."""
    for name in _STATE_ARRAYS:
        a, b = getattr(one, name, None), getattr(other, name, None)
        if a is None or b is None:
            if a is not b:
                return False
        elif a is not b and (len(a) != len(b) or not (a == b).all()):
            return False
    return list(one.problems) == list(other.problems)

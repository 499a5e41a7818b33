"""All states that a function can be in, and which can follow which.

Wherever the code leaves a choice, more paths are followed than there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from regrepro.watch.flow.aarch64 import Aarch64
from regrepro.watch.flow.machine import End, Machine, Undecided
from regrepro.watch.flow.state import State
from regrepro.watch.flow.x86_64 import X86

_STATES = 3000  # far more than a function needs that makes a call and looks at its result
_SLOTS = 200  # so that a loop which pushes ends soon


class Graph:
    """All states that the function can be in: an over-approximation."""

    def __init__(self, machine: Machine, parameters: Mapping[str, int]) -> None:
        self.machine = machine
        self.addresses: list[int] = []
        self.states: list[State] = []
        self.edges: list[list[int]] = []
        self.ends: dict[int, End] = {}
        self._known: dict[tuple[object, ...], int] = {}
        self._add(machine.span.start, machine.begin(parameters))
        at = 0
        while at < len(self.addresses):
            self._expand(at)
            at += 1

    def _add(self, address: int, state: State) -> int:
        key = (address, *state.key())
        if key not in self._known:
            if len(self.addresses) >= _STATES:
                raise Undecided(f"more than {_STATES} states: too many paths")
            if max(len(state.slots), len(state.written)) > _SLOTS:
                raise Undecided(f"{address:#x}: too large a frame")
            self._known[key] = len(self.addresses)
            self.addresses.append(address)
            self.states.append(state)
            self.edges.append([])
        return self._known[key]

    def _expand(self, at: int) -> None:
        machine = self.machine
        address = self.addresses[at]
        code = machine.decode(address)
        if code is None:
            raise Undecided(f"{address:#x}: the text ends here")
        try:
            step = machine.step(self.states[at].copy(), code)
        except (IndexError, ValueError):  # capstone's versions differ in how they list operands
            raise machine.refuse(code, "its operands are not those that are known") from None
        if isinstance(step, End):
            self.ends[at] = step
            return
        following = address + code.size
        for address_next, state, after_call in step:
            leaves = address in machine.span and address_next == following and following not in machine.span
            if after_call and (leaves or machine.has_ended(following)):
                continue  # nothing of the function is left to return to: the call never returns
            if leaves and not machine.is_control(code):
                raise Undecided(f"{address:#x}: runs on past the end of the function")
            self.edges[at].append(self._add(address_next, state))
        if not self.edges[at]:
            self.ends[at] = End.NEVER

    def before(self) -> list[list[int]]:
        """Return the edges the other way round."""
        before: list[list[int]] = [[] for _ in self.addresses]
        for at, following in enumerate(self.edges):
            for item in following:
                before[item].append(at)
        return before


def reachable(edges: list[list[int]], starts: Iterable[int], without: Iterable[int] = ()) -> set[int]:
    """Return what can be reached from `starts`, themselves included, without passing `without`."""
    closed = set(without)
    found = {at for at in starts if at not in closed}
    queue = deque(found)
    while queue:
        for item in edges[queue.popleft()]:
            if item not in found and item not in closed:
                found.add(item)
                queue.append(item)
    return found


def distances(edges: list[list[int]]) -> dict[int, int]:
    """Return how many steps each state is from the first."""
    found = {0: 0}
    queue = deque([0])
    while queue:
        at = queue.popleft()
        for item in edges[at]:
            if item not in found:
                found[item] = found[at] + 1
                queue.append(item)
    return found


def _machine(name: str, read: Callable[[int, int], bytes], span: range) -> Machine:
    try:
        import capstone
    except ImportError:
        raise Undecided("Python has no disassembler: install the package capstone") from None
    try:
        if name == "x86_64":
            return X86(capstone, capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64), read, span)
        if name == "aarch64":
            decoder = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN)
            return Aarch64(capstone, decoder, read, span)
    except (AttributeError, capstone.CsError) as error:
        raise Undecided(f"this version of capstone is not known: {error}") from None
    raise Undecided(f"the instructions of {name} are not modelled")


def follow(
    read: Callable[[int, int], bytes], span: range, parameters: Mapping[str, int], machine: str
) -> Graph:
    """Follow a function. For the arguments see `branches.failing_branches`; raises Undecided."""
    follower = _machine(machine, read, span)
    # Twice: the first time finds what the function reads of its frame after calls, which was thus not theirs.
    Graph(follower, parameters)
    follower.own = follower.evidence
    return Graph(follower, parameters)

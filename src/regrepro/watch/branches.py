"""Where a C function has failed: addresses of which it passes one exactly when it is going to return NULL.

Probes there cost nothing while registrations succeed. Where a failure has no address of its own, as when it
goes straight to the end that success takes, too, it is told by what a register holds there: that costs a trap
each time. The answer is proved by following every path through the machine code, or refused: a wrong one
would be a lost failure, or a false report. Wherever the code leaves a choice, more paths are followed than
there are, and less is known than there is: both can only turn an answer into a refusal.

What is taken for granted is the platform's calling convention (callees restore the stack pointer and the
callee-saved registers, and touch the caller's frame only where they were given its address or an argument on
the stack; the caller does not read that argument after the call), that calls return where they were made from
(or not at all), and that no other code jumps into the middle of the function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from regrepro.watch.flow.graph import Graph, distances, follow, reachable
from regrepro.watch.flow.machine import End, Undecided
from regrepro.watch.flow.state import Place

__all__ = ["Branch", "Place", "Undecided", "failing_branches"]

_BRANCHES = 4  # each is a probe of its own
_STEPS = 2000  # of the search for them


@dataclass(frozen=True)
class Branch:
    """The address (as in the ELF file), and where the parameters lie before its instruction runs.

    Parameters that are no longer known there are left out. `zero`: the function has only failed if what lies
    here is 0.
    """

    address: int
    where: dict[str, Place]
    zero: Place | None = None


class _Candidate(NamedTuple):
    """A branch that no path to a value hits, and no path hits twice."""

    branch: Branch
    rank: tuple[int, ...]
    hits: Set[int]  # states: it is hit there, and NULL can follow
    missed: Set[int]  # states on paths to NULL that do not hit it
    after: Set[int]  # states that can follow a hit


def _exclude(one: _Candidate, other: _Candidate) -> bool:
    """Whether a path to NULL hits both, or they are two conditions at one address."""
    return one.branch.address == other.branch.address or bool(
        one.hits & other.hits or one.after & other.hits or other.after & one.hits
    )


def _differing(kept: list[_Candidate], more: Iterable[_Candidate]) -> list[_Candidate]:
    """Return `kept` and more, but of those that the same paths hit only the best one."""
    kept = list(kept)
    for candidate in sorted(more, key=lambda item: item.rank):
        if not any(
            item.hits.isdisjoint(candidate.missed) and candidate.hits.isdisjoint(item.missed) for item in kept
        ):
            kept.append(candidate)
    return kept


def _rank(candidates: tuple[_Candidate, ...]) -> list[int]:
    return [sum(each) for each in zip(*(item.rank for item in candidates), strict=True)]


class _Choice:
    """Which branches are the answer: every path that returns NULL hits exactly one of them, no other any.

    Paths that never return count as neither.
    """

    def __init__(self, graph: Graph, parameters: Mapping[str, int]) -> None:
        self._graph = graph
        self._parameters = parameters
        self._before = graph.before()
        self._null = {at for at, end in graph.ends.items() if end is End.NULL}
        if not self._null:
            raise Undecided("no path returns NULL")
        self._to_null = reachable(self._before, self._null)
        value = (at for at, end in graph.ends.items() if end is End.VALUE)
        self._to_value = reachable(self._before, value)
        self._distances = distances(graph.edges)
        self._steps = 0

    def best(self) -> tuple[Branch, ...]:
        """Return the answer: as few conditions as can be, since they cost something where nothing fails."""
        usable = list(self._usable())
        candidates = _differing([], self._without_condition(usable))
        for conditions in range(_BRANCHES + 1):
            if conditions == 1:
                candidates = _differing(candidates, self._with_condition(usable))
            for count in range(max(conditions, 1), _BRANCHES + 1):
                found = list(self._sets(candidates, (), conditions, count))
                if found:
                    chosen = min(found, key=_rank)
                    return tuple(sorted((item.branch for item in chosen), key=lambda branch: branch.address))
        raise Undecided("no addresses tell the paths that return NULL from the others")

    def _sets(
        self, candidates: list[_Candidate], chosen: tuple[_Candidate, ...], conditions: int, count: int
    ) -> Iterator[tuple[_Candidate, ...]]:
        """Yield the sets of `count` branches more, `conditions` of them with a condition, that make `chosen`
        complete.
        """
        self._steps += 1
        if self._steps > _STEPS:
            raise Undecided("too many ways to tell the paths that return NULL from the others")
        missed = self._missed({at for item in chosen for at in item.hits})
        if not missed:
            if not count:
                yield chosen
            return
        if not count:
            return
        path = self._path(missed)
        for candidate in candidates:
            with_condition = candidate.branch.zero is not None
            if (
                path.isdisjoint(candidate.hits)
                or with_condition > conditions
                or (not with_condition and conditions == count)
                or any(_exclude(candidate, item) for item in chosen)
            ):
                continue
            yield from self._sets(candidates, (*chosen, candidate), conditions - with_condition, count - 1)

    def _missed(self, hits: Set[int]) -> set[int]:
        """Return the states on those paths to NULL that avoid `hits`."""
        found = reachable(self._graph.edges, [0], hits)
        return found & reachable(self._before, self._null & found, hits)

    def _path(self, missed: set[int]) -> set[int]:
        """Return the states of one path from the start to NULL, all of them in `missed`."""
        came_from = {0: 0}
        queue = deque([0])
        while (at := queue.popleft()) not in self._null:
            for item in self._graph.edges[at]:
                if item in missed and item not in came_from:
                    came_from[item] = at
                    queue.append(item)
        path = {at}
        while at:
            at = came_from[at]
            path.add(at)
        return path

    def _usable(self) -> Iterator[tuple[int, list[int]]]:
        """Yield addresses that a probe may be set on, each with its states: failing paths pass it, no path
        that returns does so twice.
        """
        machine = self._graph.machine
        by_address: dict[int, list[int]] = {}
        for at, address in enumerate(self._graph.addresses):
            by_address.setdefault(address, []).append(at)
        # A breakpoint changes bytes: no path may run them as part of another instruction.
        owners: dict[int, set[int]] = {}
        for address in by_address:
            for byte in range(address, address + machine.decode(address).size):
                owners.setdefault(byte, set()).add(address)
        returning = self._to_null | self._to_value
        for address, here in by_address.items():
            size = machine.decode(address).size
            # What lies outside, as seldom used parts of a function do, could be other functions', too.
            if not (address in machine.span and address + size - 1 in machine.span):
                continue
            if any(len(owners[byte]) > 1 for byte in range(address, address + size)):
                continue
            if self._to_null.isdisjoint(here):
                continue
            if self._after(here).isdisjoint(returning.intersection(here)):
                yield address, here

    def _after(self, states: Iterable[int]) -> set[int]:
        """Return the states that can follow."""
        return reachable(self._graph.edges, [item for at in states for item in self._graph.edges[at]])

    def _without_condition(self, usable: list[tuple[int, list[int]]]) -> Iterator[_Candidate]:
        for address, here in usable:
            if self._to_value.isdisjoint(here):
                yield self._candidate(address, here, None, self._to_null.intersection(here))

    def _with_condition(self, usable: list[tuple[int, list[int]]]) -> Iterator[_Candidate]:
        for address, here in usable:
            returning = [at for at in here if at in self._to_null or at in self._to_value]
            if self._to_value.isdisjoint(returning):
                continue  # none is needed
            # That what lies in a place is returned later need not be known: where it is zero nothing but NULL
            # can follow, and what can end in NULL though it is not, is left for other branches.
            decided = [self._graph.states[at].decided() for at in returning]
            seen = set()
            for place in sorted(set.intersection(*map(set, decided)), key=_preference):
                hits = frozenset(at for at, known in zip(returning, decided, strict=True) if known[place])
                if hits and hits not in seen and hits.isdisjoint(self._to_value):
                    seen.add(hits)
                    yield self._candidate(address, here, place, hits)

    def _candidate(self, address: int, here: list[int], zero: Place | None, hits: Set[int]) -> _Candidate:
        machine = self._graph.machine
        places = [self._graph.states[at].places(self._parameters) for at in here]
        where = {}
        for name in self._parameters:
            common = set.intersection(*(each[name] for each in places))
            if common:
                where[name] = min(common, key=_preference)
        code = machine.decode(address)
        rank = (
            int(machine.is_relative(code)),  # the kernel has to run these elsewhere with care
            -len(where),
            int(machine.is_control(code)),
            min(self._distances[at] for at in here),
            address,
        )
        return _Candidate(Branch(address, where, zero), rank, hits, self._missed(hits), self._after(hits))


def _preference(place: Place) -> tuple[bool, str, int]:
    return not place.register, place.register, place.offset


def failing_branches(
    read: Callable[[int, int], bytes], start: int, size: int, parameters: Mapping[str, int], machine: str
) -> tuple[Branch, ...]:
    """Return addresses of which a function passes exactly one, once, whenever it returns NULL, and none
    otherwise. Where there is a condition, to pass it with that condition unmet does not count.

    `read(address, n)`: bytes of the text, fewer at its end; `start`, `size`: of the function; `parameters`:
    names and sizes in bytes (4 or 8), in order; `machine`: "x86_64" or "aarch64", as `uname -m` says.
    There are as few conditions as can be, then as few addresses; of equally many those where most parameters
    are known. Raises Undecided.
    """
    if size <= 0:
        raise Undecided("it is not known where the function ends")
    if not set(parameters.values()) <= {4, 8}:
        raise Undecided("a parameter is neither 4 nor 8 bytes long")
    return _Choice(follow(read, range(start, start + size), parameters, machine), parameters).best()

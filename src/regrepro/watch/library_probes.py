"""Probes on what libibverbs runs when a registration fails; one that succeeds does not meet most of them.

Where such instructions lie, and where the call's parameters lie in that moment, is found in the copy's own
code (`branches`). A verb of which that cannot be said is followed at its entry and return, by the engine.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from regrepro.core.uprobes import Hit, UserProbes, Zero
from regrepro.watch.branches import Branch, Place, Undecided, failing_branches
from regrepro.watch.copies import Copy
from regrepro.watch.elf import NotElf, file_offset, machine_of, text_reader
from regrepro.watch.events import LibraryWord
from regrepro.watch.program import verb_number

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")
_STACK_BYTES = 64  # parameters that compilers keep there lie near its pointer
# Of all CPUs' rings together, and of one at least and at most (bytes); a hit takes some 300.
_RINGS_BYTES, _RING_LEAST, _RING_MOST = 16 << 20, 32 << 10, 1 << 20
# Parameters in order (include/infiniband/verbs.h of rdma-core) → their sizes in bytes. The names are those of
# `Failure`; of ibv_reg_dmabuf_mr `address` is the offset in the dma-buf.
PARAMETERS: dict[str, dict[str, int]] = {
    "ibv_reg_mr": {"pd": 8, "address": 8, "length": 8, "access": 4},
    "ibv_reg_mr_iova2": {"pd": 8, "address": 8, "length": 8, "iova": 8, "access": 4},
    "ibv_reg_dmabuf_mr": {"pd": 8, "address": 8, "length": 8, "iova": 8, "fd": 4, "access": 4},
}


@dataclass(frozen=True)
class _Followed:
    copy: tuple[int, int]
    verb: str
    branch: Branch


def ring_pages(cpus: int, page_size: int = PAGE_SIZE) -> int:
    """Return the pages of each CPU's ring, a power of two; the kernel allocates all of them at once."""
    size = max(_RING_LEAST, min(_RING_MOST, _RINGS_BYTES // cpus))
    return 1 << max(size // page_size, 1).bit_length() - 1


class LibraryProbes:
    """Follows copies of libibverbs where they fail. `why`: "" or why this kernel does not let it."""

    def __init__(self) -> None:
        self.why = UserProbes.supported()
        self._probes: UserProbes | None = None
        self._followed: dict[int, _Followed] = {}
        self._why_not: dict[tuple[tuple[int, int], str], str] = {}  # copy, verb → why it is not followed so

    def follow(self, copy: Copy, blob: bytes) -> None:
        """Follow what can be of a copy whose file is `blob`; `copy.at_failure` then names these verbs."""
        for verb in copy.verbs() if not self.why else ():
            try:
                machine, read = machine_of(blob), text_reader(blob)
                branches = failing_branches(
                    read, copy.functions[verb], copy.functions[f"{verb}:size"], PARAMETERS[verb], machine
                )
                self._add(copy, verb, [(branch, file_offset(blob, branch.address)) for branch in branches])
            except (Undecided, OSError, NotElf) as error:
                self._why_not[copy.key, verb] = str(error)
                with suppress(NotElf):
                    copy.offsets[verb] = file_offset(blob, copy.functions[verb])
            else:
                copy.at_failure.add(verb)

    def _add(self, copy: Copy, verb: str, branches: Sequence[tuple[Branch, int]]) -> None:
        """Probe all that a verb needs, or none of it. Raises OSError."""
        if self._probes is None:
            self._probes = UserProbes(stack_bytes=_STACK_BYTES, ring_pages=ring_pages(os.cpu_count() or 1))
        added = []
        try:
            for branch, offset in branches:
                place = branch.zero
                zero = Zero(place.register, place.offset, place.size) if place is not None else None
                probe = self._probes.add(copy.library.path, offset, zero=zero)
                added.append(probe)
                self._followed[probe] = _Followed(copy.key, verb, branch)
        except OSError:
            for probe in added:
                del self._followed[probe]
                self._probes.remove(probe)
            raise

    def how(self, copy: Copy, *, at_return: bool = True) -> Iterator[dict[str, str]]:
        """Yield how each verb of a copy is followed, as the record has it (docs/record.md). `at_return`:
        whether the engine follows those that are not followed where they fail.
        """
        for verb in copy.verbs():
            row = {"copy": copy.shown, "verb": verb}
            if verb in copy.at_failure:
                yield row | {"at": "failure"}
            else:
                at = "return" if at_return else "nowhere"
                yield row | {"at": at, "why": self.why or self._why_not.get((copy.key, verb), "")}

    def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """Take the probes away of copies that are gone."""
        gone = set(keys)
        self._why_not = {key: why for key, why in self._why_not.items() if key[0] not in gone}
        for probe in [probe for probe, known in self._followed.items() if known.copy in gone]:
            del self._followed[probe]
            if self._probes is not None:
                self._probes.remove(probe)

    @property
    def some(self) -> bool:
        """Whether any copy is followed this way."""
        return bool(self._followed)

    @property
    def lost(self) -> int:
        """Hits that the kernel counted as lost."""
        return self._probes.lost if self._probes is not None else 0

    def fds(self) -> list[int]:
        """File descriptors to poll."""
        return self._probes.fds() if self._probes is not None else []

    def take(self, word: Callable[[LibraryWord], None]) -> int:
        """Hand out what there is, a thread's in time order; return how many hits that were."""
        hits = self._probes.read() if self._probes is not None else []
        for hit in hits:
            known = self._followed.get(hit.probe)
            if known is not None:
                word(_word(hit, known))
        return len(hits)

    def follow_cpus(self) -> None:
        """Follow CPUs, too, that came online since."""
        if self._probes is not None:
            self._probes.follow_cpus()

    def close(self) -> None:
        """Take all probes away."""
        if self._probes is not None:
            self._probes.close()
            self._probes = None
        self._followed.clear()


def _word(hit: Hit, known: _Followed) -> LibraryWord:
    given = {}
    for name, place in known.branch.where.items():
        value = _value(hit, place)
        if value is not None and name != "pd":
            given[name] = value
    if known.verb == "ibv_reg_mr" and "address" in given:
        given["iova"] = given["address"]
    return LibraryWord(hit.tid, hit.pid, hit.ns, verb_number(known.verb), given)


def _value(hit: Hit, place: Place) -> int | None:
    """Return a parameter's value, None where the kernel did not give it."""
    if place.register:
        value = hit.registers.get(place.register)
    else:
        end = place.offset + place.size
        if place.offset < 0 or end > len(hit.stack):
            return None
        (value,) = struct.unpack("=Q" if place.size == 8 else "=I", hit.stack[place.offset : end])
    return None if value is None else value & (1 << 8 * place.size) - 1

"""The recorded steps of a scenario as one C file that needs neither regrepro nor Python.

What the scenario did stands in the record, so the program is made of events, not of the scenario file. The
parts that it shares with all others are the template `data/reproducer.c.in`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import islice
from typing import Any

from regrepro.errors import UsageError
from regrepro.judge.names import name_of, names_of
from regrepro.record import Record
from regrepro.report.steps import Pass, passes
from regrepro.views import words

MAX_LINES = 450
_PINS = ("pin", "get", "longterm")
_VERBS = ("ibv_reg_mr_iova2", "ibv_reg_mr", "io_uring_register_buffers", "pyverbs.MR")
# With 4 KiB pages; PVM_MAX_KMALLOC_PAGES, mm/process_vm_access.c
_PAGES_PER_CALL = 1024
_MOST_CALLS = 16
_MOST_RANGES = 16
_SILENT = (
    "scenario-begin",
    "scenario-end",
    "note",
    "memory-map",
    "memory-map-check",
    "reservation",
    "free",
    "transfer",
)


class NotExportable(UsageError):
    """The steps cannot be a C program of this kind; says which step, and why."""


def exportable(record: Record) -> list[str]:
    """Return the scenarios of a record that can be exported: those that hold a pin, in order."""
    names = []
    for one in passes(record.events):
        if one.control is not None:
            continue
        try:
            _Program(one, record).text()
        except NotExportable:
            continue
        names.append(name_of(one.events[0]))
    return names


def render(record: Record, scenario: str | None = None) -> str:
    """Return the C program of a scenario's recorded steps. Raises `UsageError`.

    `scenario` may be left out where the record holds just one that can be exported.
    """
    own = {name_of(one.events[0]): one for one in passes(record.events) if one.control is None}
    if scenario is None:
        if len(own) == 1:
            scenario = next(iter(own))
        else:
            names = exportable(record)
            if len(names) != 1:
                raise UsageError(
                    f"{len(names)} scenarios of this run can be a C program",
                    hint=f"name one: --scenario {' or '.join(names)}" if names else "run pin_then_register",
                )
            scenario = names[0]
    chosen = [one for one in own.values() if scenario in names_of(one.events[0])]
    if len(chosen) != 1:
        raise UsageError(
            f"the run holds no scenario {scenario!r}", hint=f"it holds {', '.join(own) or 'none'}"
        )
    return _Program(chosen[0], record).text()


class _Program:
    def __init__(self, one: Pass, record: Record) -> None:
        self._pass = one
        self._header = record.header
        maps = [event for event in record.events if event.get("event") == "memory-map"]
        self._map: Mapping[str, Any] = maps[-1] if maps else {}
        self._parts: set[str] = set()
        self._tests = 0
        self._page: dict[int, int] = {}
        self._address: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        self._held: dict[int, str] = {}
        self._mrs: dict[int, str] = {}
        self._calls: dict[int, int] = {}
        self._steps = [line for event in one.events for line in self._lines(event)]
        if not any(event.get("event") == "pin" and event.get("kind") in _PINS for event in one.events):
            raise self._cannot("it holds no pin, so that there is nothing to show with it")
        if not self._tests:
            raise self._cannot("it registers nothing")

    def text(self) -> str:
        source = resources.files("regrepro.data").joinpath("reproducer.c.in").read_text(encoding="utf-8")
        source = _choose(source, self._parts)
        name = re.sub(r"[^A-Za-z0-9_-]", "_", self._pass.scenario)
        steps = "\n".join(f"\t{line}" if line else "" for line in self._steps).rstrip()
        for key, value in (
            ("HEAD", "\n".join(self._head())),
            ("NAME", name),
            ("TESTS", str(self._tests)),
            ("RANGES", self._recorded_ranges()),
            ("STEPS", steps),
        ):
            source = source.replace(f"@@{key}@@", value)
        lines = source.count("\n")
        if lines >= MAX_LINES:
            raise self._cannot(f"the program would have {lines} lines, more than a person reads")
        return source

    def _recorded_ranges(self) -> str:
        """Where the run had unpinnable memory, which is where the same boot of the same machine has it."""
        ranges = [
            (item[0], item[1])
            for item in words.list_of(self._map.get("unpinnable_ranges"))
            if isinstance(item, list) and len(item) == 3 and type(item[0]) is type(item[1]) is int
        ]
        texts = [f"{{ {low:#x}, {high:#x} }}, " for low, high in ranges if 0 <= low < high < 1 << 52]
        return "".join(texts[:_MOST_RANGES])

    def _cannot(self, why: str) -> NotExportable:
        return NotExportable(
            f"{self._pass.scenario} cannot be a C program", why=why, hint="the other formats show it"
        )

    def _head(self) -> Iterator[str]:
        declared = words.mapping_of(self._pass.begin.get("declared"))
        node = words.mapping_of(self._header.get("node"))
        title = f"{self._pass.scenario}: {declared.get('shows') or 'steps of a recorded run'}."
        yield from _comment(title)
        yield " *"
        yield from _comment(
            f"The steps that regrepro {self._header.get('version')} recorded on Linux {node.get('kernel')} "
            f"({node.get('arch')}), without regrepro. A page that is pinned without FOLL_LONGTERM in "
            "unpinnable memory cannot be moved out of it, so that a long-term pin of the same page, as an "
            "RDMA registration takes one, fails with ENOMEM. Released, the same registration succeeds."
        )

    def _lines(self, event: Mapping[str, Any]) -> Iterator[str]:
        kind = str(event.get("event"))
        if kind in _SILENT:
            return
        made = _STEPS.get(kind)
        if made is None:
            raise self._cannot(f"it has a step {event.get('name') or kind!r}, which no C program knows")
        yield from made(self, event)

    def _buffer(self, event: Mapping[str, Any]) -> Iterator[str]:
        number, page = self._id(event, "buffer"), words.number_of(event.get("page_size"))
        length = words.number_of(event.get("length"))
        if event.get("backing") != "anonymous":
            raise self._cannot(
                f"buffer {number} is backed by {event.get('backing')}, not by anonymous memory"
            )
        if page <= 0 or length <= 0 or length % page:
            raise self._cannot(f"buffer {number} is not a whole number of pages")
        self._page[number], self._address[number] = page, words.number_of(event.get("address"))
        self._pages[number] = pages = length // page
        pieces = list(_pieces(event.get("place"), pages))
        if len(pieces) > 32:
            raise self._cannot(f"buffer {number} has {len(pieces)} pieces")
        table = [f"{{ {first}, {count}, {place} }}," for first, count, place in pieces]
        if len(table) <= 3:
            yield f"static const struct piece pieces{number}[] = {{ {' '.join(table).rstrip(',')} }};"
        else:
            yield f"static const struct piece pieces{number}[] = {{"
            yield from (f"\t{line}" for line in table)
            yield "};"
        yield f"struct buffer b{number} = make_buffer({pages}, pieces{number}, {len(pieces)});"

    def _pin(self, event: Mapping[str, Any]) -> Iterator[str]:
        kind = event.get("kind")
        if kind not in _PINS:
            return
        number, buffer = self._id(event, "pin"), self._id(event, "buffer")
        make = {"pin": "pin_pages", "get": "get_pages", "longterm": "longterm_pin"}[str(kind)]
        self._parts.add({"pin": "pin", "get": "get", "longterm": "uring"}[str(kind)])
        pieces = (piece for given in self._ranges(event) for piece in _split(*given, kind == "pin"))
        calls = list(islice(pieces, _MOST_CALLS + 1))
        if len(calls) > _MOST_CALLS:
            raise self._cannot(f"pin {number} takes more than {_MOST_CALLS} calls")
        for n, (first, count) in enumerate(calls):
            name = f"p{number}" + (f"_{n}" if len(calls) > 1 else "")
            call = f"{make}(&b{buffer}, {first}, {count})"
            if kind == "longterm":
                yield f"int {name} = no_pin ? -1 : {call};"
                yield f"held += {name} >= 0;"
                yield f"if (!no_pin && {name} < 0)"
                yield f'\tprintf("# pin {number} failed: %s\\n", strerror(errno));'
            else:
                yield f"struct {'pin' if kind == 'pin' else 'reference'} *{name} = no_pin ? NULL : {call};"
        self._held[number] = str(kind)
        self._calls[number] = len(calls)

    def _ranges(self, event: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        page = self._page.get(self._id(event, "buffer"), 0)
        ranges = event.get("ranges") or [[event.get("offset"), event.get("length")]]
        for item in ranges if isinstance(ranges, list) else []:
            good = isinstance(item, list) and len(item) == 2 and all(type(part) is int for part in item)
            if not good or not page or item[1] <= 0:
                raise self._cannot(f"pin {event.get('pin')} does not say what it pinned")
            first, end = item[0] // page, -(-(item[0] + item[1]) // page)
            yield first, end - first

    def _release(self, event: Mapping[str, Any]) -> Iterator[str]:
        number = self._id(event, "pin")
        kind = self._held.pop(number, None)
        if kind is None:
            return
        count = self._calls[number]
        for n in range(count):
            name = f"p{number}" + (f"_{n}" if count > 1 else "")
            if kind == "longterm":
                yield f"if ({name} >= 0)"
                yield f"\theld--, close({name});"
            else:
                yield f"release_pin({name});" if kind == "pin" else f"put_pages({name});"

    def _register(self, event: Mapping[str, Any]) -> Iterator[str]:
        number, buffer = self._id(event, "registration"), self._id(event, "buffer")
        verb, page = str(event.get("verb")), self._page.get(buffer, 0)
        if verb not in _VERBS or not page:
            raise self._cannot(f"registration {number} is by {verb}")
        offset = words.number_of(event.get("address")) - self._address[buffer]
        length = words.number_of(event.get("length"))
        whole = not offset % page and not length % page
        if offset < 0 or length <= 0 or not whole or offset + length > self._pages[buffer] * page:
            raise self._cannot(f"registration {number} is not of whole pages of its buffer")
        first, count = offset // page, length // page
        call = "ibv_reg_mr" if verb == "pyverbs.MR" else verb
        if verb.startswith("io_"):
            self._parts.add("uring")
            yield f"int mr{number} = longterm_pin(&b{buffer}, {first}, {count});"
            failed = f"mr{number} < 0 ? errno : 0"
        else:
            self._parts.add("verbs")
            at = f"b{buffer}.address" + (f" + {first} * page" if first else "")
            flags = [f"IBV_ACCESS_{flag}" for flag in words.list_of(event.get("access"))]
            if not all(re.fullmatch(r"[A-Z_0-9]+", flag) for flag in flags):
                raise self._cannot(f"registration {number} has access flags that are no names")
            iova = ""
            if verb == "ibv_reg_mr_iova2":
                same = event.get("iova") == event.get("address")
                iova = f" (uintptr_t)({at})," if same else f" {words.number_of(event.get('iova')):#x},"
            yield f"struct ibv_mr *mr{number} = {call}(pd, {at}, {count} * page,{iova}"
            yield f"\t{' | '.join(flags) or '0'});"
            failed = f"mr{number} ? 0 : errno ? errno : EIO"
        self._mrs[number] = verb
        self._tests += 1
        errno = event.get("errno")
        recorded = "OK" if not errno else errno if re.fullmatch(r"[A-Z0-9]+", str(errno)) else "failed"
        # Both are taken right after the call: errno, and how many pins outlived it.
        yield f'report(&b{buffer}, {failed}, held, "{call} of {words.pages(count)}", "{recorded}");'
        yield ""

    def _deregister(self, event: Mapping[str, Any]) -> Iterator[str]:
        number = self._id(event, "registration")
        verb, name = self._mrs.pop(number, None), f"mr{number}"
        if verb is not None:
            yield f"if ({name} >= 0)" if verb.startswith("io_") else f"if ({name})"
            yield f"\tclose({name});" if verb.startswith("io_") else f"\tibv_dereg_mr({name});"

    def _id(self, event: Mapping[str, Any], key: str) -> int:
        """Return a number that becomes part of a name in C."""
        value = event.get(key)
        if type(value) is not int or value < 0:
            raise self._cannot(f"a {event.get('event') or key} has no number")
        return value


# What a C program can do of a run's events.
_STEPS: dict[str, Callable[[_Program, Mapping[str, Any]], Iterator[str]]] = {
    "buffer": _Program._buffer,
    "pin": _Program._pin,
    "release": _Program._release,
    "register": _Program._register,
    "deregister": _Program._deregister,
}
_UNPINNABLE = ("unpinnable", "cma", "movable-zone")


def _pieces(place: object, pages: int) -> Iterator[tuple[int, int, str]]:
    """What was asked of a buffer's place, as runs; a lone mapping names the unpinnable pages."""
    if isinstance(place, Mapping):
        which = next((place[kind] for kind in _UNPINNABLE if kind in place), None)
        marked = {page for page in words.list_of(which) if isinstance(page, int) and 0 <= page < pages}
        first = 0
        for page in sorted({*marked, *(page + 1 for page in marked), pages}):
            if page > first and (page == pages or (page in marked) != (first in marked)):
                yield first, page - first, "UNPINNABLE" if first in marked else "ORDINARY"
                first = page
        return
    whole = "UNPINNABLE" if place in _UNPINNABLE else "ORDINARY" if place == "ordinary" else "ANY"
    yield 0, pages, whole


def _split(first: int, count: int, limited: bool) -> Iterator[tuple[int, int]]:
    step = _PAGES_PER_CALL if limited else count
    for at in range(first, first + count, step):
        yield at, min(step, first + count - at)


def _choose(source: str, parts: set[str]) -> str:
    """Keep the used parts of the template: `//@if PART` to `//@end`, with `//@else` in between."""
    kept, keep = [], True
    for line in source.split("\n"):
        if line.startswith("//@if "):
            keep = line[6:] in parts
        elif line == "//@else":
            keep = not keep
        elif line == "//@end":
            keep = True
        elif keep:
            kept.append(line)
    return "\n".join(kept)


def _comment(text: str) -> Sequence[str]:
    import textwrap

    plain = " ".join(text.split()).replace("*/", "* /").replace("@@", "@ @")
    return textwrap.wrap(plain, 112, initial_indent=" * ", subsequent_indent=" * ", break_on_hyphens=False)

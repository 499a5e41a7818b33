"""The content of a report before it is laid out: answer, addressees, causal chain, pictures, log, gaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regrepro.judge.layer_table import BY_NAME
from regrepro.judge.names import name_of
from regrepro.options import format_size
from regrepro.record import key_of
from regrepro.report.load import Run
from regrepro.report.steps import Moment, Pass, Reader, Step, counted, passes
from regrepro.views import words
from regrepro.views.picture import Picture, pictures
from regrepro.views.policy import Point, points
from regrepro.views.rates import Rate, rates

TITLES = {
    "reproduced": "the bug was reproduced",
    "caught": "a failure of this bug was caught",
    "not-reproduced": "the bug was not reproduced",
    "other-failure": "another failure, not this bug",
    "unmet": "undecided: something was not met",
    "error": "undecided: the scenario or regrepro failed",
}
LOG_LIMIT = 300

_PLACE_NAMES = {"cma": "CMA", "movable-zone": "ZONE_MOVABLE", "isolate": "isolated pageblocks"}


@dataclass(frozen=True)
class Link:
    """One link of the causal chain: what must be so, what was seen, how that is known, from where."""

    claim: str
    seen: str
    how: str
    source: str = ""
    state: str = ""


@dataclass(frozen=True)
class PathLine:
    """One line of the kernel's own path."""

    depth: int
    text: str
    failing: bool
    deepest: bool


@dataclass(frozen=True)
class Trial:
    """The scenario itself or one control, side by side: what was changed, and what came of it."""

    name: str
    changed: str
    placed: str
    pin: str
    result: str
    moved: str
    held: bool | None
    ok: bool | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of its row in a table."""
        return (self.name, self.changed, self.placed, self.pin, self.result, self.moved)


@dataclass
class Finding:
    """One verdict with everything that it rests on."""

    item: Mapping[str, Any]
    title: str
    chain: list[Link] = field(default_factory=list)
    path: list[PathLine] = field(default_factory=list)
    no_path: str = ""
    moments: list[Moment] = field(default_factory=list)
    picture: Picture | None = None
    policy: list[Point] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    evidence: list[tuple[str, str, str, str]] = field(default_factory=list)
    checks: list[tuple[str, str, str]] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What a person reads: the scenario, with its variant or the failure that `watch` caught."""
        return name_of(self.item)

    @property
    def verdict(self) -> str:
        """The verdict's name."""
        return str(self.item.get("verdict"))

    @property
    def reason(self) -> str:
        """The judge's one sentence."""
        return str(self.item.get("reason") or "")


@dataclass
class Report:
    """A whole report. `banner` is the first line: whether a vendor's driver took part at all."""

    banner: str
    answer: str
    verdict: str
    concerns: list[tuple[str, str]]
    asks: list[tuple[str, str]]
    findings: list[Finding]
    log: list[tuple[str, Step]]
    log_left_out: int
    facts: list[tuple[str, str]]
    stand_ins: list[str]
    gaps: list[str]
    problems: list[str]
    started: str
    version: str


def build(run: Run) -> Report:
    """Make the content of a report. Never raises for what a record holds: what is missing is said."""
    header = words.mapping_of(run.record.header)
    items = words.mappings_of(run.verdicts.get("verdicts"))
    found = passes(run.record.events)
    reader = Reader()
    findings = [_finding(item, found, reader) for item in items]
    drawn = {(one.scenario, one.part): one for one in pictures(run.record.events)}
    measured, counted = points(run.record.events), rates(run.record.events)
    for finding in findings:
        key = key_of(finding.item)
        finding.picture = drawn.get(key)
        finding.policy = measured.get(key, [])
        finding.rates = counted.get(key, [])
    main = headline(items)
    steps = [(_pass_name(one), step) for one in found for step in reader.steps(one)]
    problems = [str(text) for text in words.list_of(run.verdicts.get("problems"))] + run.problems
    return Report(
        banner=_banner(header, items),
        answer=_answer(main, items, header, complete=run.verdicts.get("complete") is not False),
        verdict=str(main.get("verdict")) if main else "error",
        concerns=list(_concerns(main, header, run.record.events)),
        asks=list(_asks(main, header, items)),
        findings=findings,
        log=steps[:LOG_LIMIT],
        log_left_out=max(0, len(steps) - LOG_LIMIT),
        facts=list(_facts(header, run.record.events)),
        stand_ins=words.stand_ins(header, items),
        gaps=_gaps(findings, header, items),
        problems=list(dict.fromkeys(problems)),
        started=str(header.get("started") or "at an unknown time"),
        version=str(header.get("version") or "of unknown version"),
    )


def headline(items: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the verdict that the report opens with: the worst; of these a driver's, then a plain pin's."""
    order = ("reproduced", "caught", "other-failure", "error", "unmet", "not-reproduced")

    def rank(item: Mapping[str, Any]) -> tuple[int, int]:
        name = str(item.get("verdict"))
        owner = str(item.get("pin_owner"))
        near = ("cuda", "standin:pin", "process-vm")
        return (order.index(name) if name in order else 2, near.index(owner) if owner in near else len(near))

    return min(items, key=rank, default=None)


def by_driver(item: Mapping[str, Any] | None) -> bool:
    """Tell whether CUDA's own driver held the pin of a verdict."""
    return item is not None and item.get("pin_owner") == "cuda"


def driver_of(item: Mapping[str, Any] | None, header: Mapping[str, Any]) -> str:
    """Return the driver as words."""
    version = (item or {}).get("driver") or words.mapping_of(header.get("node")).get("nvidia_driver")
    return f"NVIDIA driver {version}" if version else "the NVIDIA driver (version not recorded)"


def kernel_of(header: Mapping[str, Any]) -> str:
    """Return the kernel as words."""
    return f"Linux {words.mapping_of(header.get('node')).get('kernel') or 'of unknown version'}"


def _pass_name(one: Pass) -> str:
    return one.scenario if one.control is None else f"{one.scenario}, control {one.control}"


# The answer


def _banner(header: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> str:
    driver = any(by_driver(item) for item in items)
    if header.get("lab"):
        return (
            "Lab run, in a virtual machine: no vendor driver and no vendor hardware took part. It shows "
            "what this kernel does, and nothing about any driver."
        )
    if any(item.get("verdict") == "caught" for item in items):
        return (
            "Failures of programs on a node, as `regrepro watch` caught them: nothing was tried again, so "
            "each is proven as far as what was seen goes."
        )
    if not driver:
        return (
            "No vendor driver held a pin in this run: it shows what this kernel does, and nothing about "
            "any driver."
        )
    return "Measured on a node, with the vendor's own driver holding the pin."


def _answer(
    main: Mapping[str, Any] | None,
    items: Sequence[Mapping[str, Any]],
    header: Mapping[str, Any],
    *,
    complete: bool,
) -> str:
    if main is None:
        return "There is no answer: the record holds no scenario."
    verdict, evidence = main.get("verdict"), words.mapping_of(main.get("evidence"))
    kernel = kernel_of(header)
    if verdict == "reproduced":
        count = sum(1 for item in items if item.get("verdict") == "reproduced")
        return _reproduced(
            main, evidence, header, f" ({count} of {len(items)} scenarios)" if len(items) > 1 else ""
        )
    if verdict == "caught":
        return f"A program's own registration failed, and it was caught: {main.get('reason')}."
    if verdict == "other-failure":
        return f"It is not this bug: something else failed, {main.get('reason')}."
    if verdict in ("unmet", "error"):
        count = sum(1 for item in items if item.get("verdict") in ("unmet", "error"))
        many = f"{count} of {len(items)} scenarios" if len(items) > 1 else str(main.get("scenario"))
        return f"There is no answer yet: {many} could not be decided; {main.get('reason')}."
    if verdict != "not-reproduced":
        return f"The verdict {verdict!r} of {main.get('scenario')} is not known to this version of regrepro."
    if not complete:
        return "There is no answer yet: what ran did not show the bug, but the run did not reach its end."
    bases = {str(item.get("basis")) for item in items}
    if bases == {"placement"}:
        return (
            f"The bug cannot occur here as this node is configured: {kernel} has no unpinnable memory at "
            "all; this says nothing of a driver."
        )
    if by_driver(main) and main.get("basis") == "pin":
        return (
            f"The bug is not there: {driver_of(main, header)} moves pages out of unpinnable memory before "
            f"it pins them, and every registration succeeded on {kernel}."
        )
    return f"The bug was not reproduced on {kernel}: {main.get('reason')}."


def _reproduced(
    main: Mapping[str, Any], evidence: Mapping[str, Any], header: Mapping[str, Any], of: str
) -> str:
    places = words.value_of(evidence, "placement")
    names = [str(name) for name in places] if isinstance(places, Mapping) else []
    where = " and ".join(_PLACE_NAMES[name] for name in names if name in _PLACE_NAMES) or "unpinnable memory"
    count = words.value_of(evidence, "pages_pinned")
    pinned = words.pages(count) if isinstance(count, int) else "the pages"
    verb = words.mapping_of(words.value_of(evidence, "registrar")).get("verb") or "the registration"
    failed = f"{verb} failed with {main.get('errno')}"
    after = f"with the pin released the same call succeeded{of}"
    if by_driver(main):
        return (
            f"Yes, it is this bug: a pin held by {driver_of(main, header)} kept {pinned} in {where} from "
            f"moving, so {failed} on {kernel_of(header)}; {after}."
        )
    return (
        f"{kernel_of(header)}, configured as here, is susceptible to this bug: while {owner_of(main)} pinned "
        f"{pinned} in {where}, {failed}; {after}."
    )


def owner_of(item: Mapping[str, Any] | None) -> str:
    """Return who held the pin, in words."""
    owner = str((item or {}).get("pin_owner") or "none")
    if owner == "cuda":
        return "the NVIDIA driver"
    return {
        "none": "nobody",
        "unknown": "somebody who was not seen (a count of references names no holder)",
        "process-vm": "a process itself (process_vm_writev, in the place of a driver)",
        "vmsplice": "a process itself (a vmsplice reference, in the place of a driver)",
        "io-uring": "io_uring (in the place of a driver)",
    }.get(owner, f"{owner} (software in the place of a driver)")


def _concerns(
    main: Mapping[str, Any] | None, header: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    node = words.mapping_of(header.get("node"))
    if by_driver(main):
        yield "driver", driver_of(main, header)
    else:
        loaded = (
            f" ({driver_of(None, header)} is loaded, but held no pin here)"
            if node.get("nvidia_driver")
            else ""
        )
        yield "driver", f"none took part{loaded}; the pin was held by {owner_of(main)}"
    yield (
        "kernel",
        f"{kernel_of(header)}, {node.get('arch') or 'unknown architecture'}, "
        f"{node.get('kernel_version') or ''}",
    )
    boot = words.boot_of(header)
    yield (
        "configuration",
        f"booted with {' '.join(boot)}" if boot else "no boot argument that makes unpinnable memory",
    )
    memory = next((event for event in events if event.get("event") == "memory-map"), None)
    if memory is not None:
        yield "unpinnable memory", unpinnable_memory(memory)
    registrar = words.registrar(words.mapping_of((main or {}).get("evidence")))
    if registrar:
        yield "registration", registrar


def unpinnable_memory(memory: Mapping[str, Any]) -> str:
    """Return how much unpinnable memory of which kind a `memory-map` event shows."""
    page = words.number_of(memory.get("page_size"))
    sizes: dict[str, int] = {}
    for item in words.list_of(memory.get("unpinnable_ranges")):
        if isinstance(item, list) and len(item) == 3 and type(item[0]) is int and type(item[1]) is int:
            sizes[str(item[2])] = sizes.get(str(item[2]), 0) + (item[1] - item[0]) * page
    parts = [f"{format_size(size)} in {_PLACE_NAMES.get(name, name)}" for name, size in sizes.items()]
    if parts:
        return ", ".join(parts) + (
            "" if memory.get("complete") else " (the map is not complete: there may be more)"
        )
    if memory.get("complete") and memory.get("has_unpinnable") is False:
        return "none, and the map of this memory is complete"
    return "not known: " + "; ".join(str(text) for text in words.list_of(memory.get("problems"))[:2])


def _asks(
    main: Mapping[str, Any] | None, header: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    verdict = (main or {}).get("verdict")
    if verdict == "reproduced" and by_driver(main):
        yield (
            "driver vendor",
            "pin user pages that stay pinned with FOLL_LONGTERM, so that the kernel moves them out of "
            "unpinnable memory first; the recorded steps below, and the C program in this bundle or from "
            "`regrepro report --format c`, show the failure",
        )
        yield (
            "operator of the node",
            "until then, run without the unpinnable memory named above (drop the boot argument), or use a "
            "driver whose pin asks for FOLL_LONGTERM on this architecture; `regrepro compare` shows what a "
            "change did",
        )
    elif verdict == "reproduced":
        yield (
            "operator of the node",
            "run `regrepro run --cuda real` on a GPU node with this kernel and configuration: only the "
            "driver's own pin tells whether the driver is concerned; `regrepro audit` says what is exposed",
        )
        yield (
            "kernel engineers",
            "nothing is asked: the kernel keeps its promise that such memory stays movable. The C program "
            "(`regrepro report --format c`) shows the steps without regrepro",
        )
    elif verdict == "other-failure":
        layer = BY_NAME.get((main or {}).get("layer") or "", BY_NAME["unknown"])
        yield (
            "whoever sees this failure",
            f"look at the layer that failed, {layer.name}: {layer.title}; this report's evidence says why",
        )
    elif verdict in ("unmet", "error"):
        hows = [
            entry.get("how")
            for item in items
            for entry in words.mappings_of(item.get("unmet"))
            if entry.get("how")
        ]
        for how in list(dict.fromkeys(map(str, hows)))[:4]:
            yield "operator of the node", how
        if not hows:
            yield "operator of the node", "run it again; the record says where it stopped"
    elif verdict == "not-reproduced":
        yield (
            "nobody",
            "nothing is asked: keep this run, so that `regrepro compare` can hold the next one against it",
        )


# A verdict


def _finding(item: Mapping[str, Any], found: Sequence[Pass], reader: Reader) -> Finding:
    own = [one for one in found if (one.scenario, one.part) == key_of(item)]
    finding = Finding(item, TITLES.get(str(item.get("verdict")), "a verdict that this version does not know"))
    evidence = words.mapping_of(item.get("evidence"))
    main = next((one for one in own if one.control is None), None)
    if main is not None:
        under_test = main.under_test(item.get("registration"))
        if under_test is not None:
            finding.moments = reader.moments(main, under_test.get("buffer"))
        finding.chain = list(_chain(item, evidence, under_test))
    trace = words.mapping_of(words.value_of(evidence, "trace"))
    nodes = words.mappings_of(trace.get("tree"))
    deepest = words.deepest(nodes)
    finding.path = [
        PathLine(
            max(0, min(words.number_of(node.get("depth")), 30)),
            words.path_item(node),
            bool(node.get("failing")),
            n == deepest,
        )
        for n, node in enumerate(nodes)
    ]
    if not finding.path:
        finding.no_path = words.trace(evidence)
    finding.trials = [_trial(one, item, reader) for one in own]
    for key, value in evidence.items():
        entry = words.mapping_of(value)
        shown = entry.get("value")
        if key == "trace" and isinstance(shown, Mapping):
            shown = {part: inner for part, inner in shown.items() if part != "tree"}
        finding.evidence.append(
            (str(key), words.plain(shown), str(entry.get("how")), str(entry.get("source") or ""))
        )
    finding.checks = [
        (str(check.get("name")), str(check.get("state")), str(check.get("text")))
        for check in words.mappings_of(item.get("checks"))
    ]
    finding.gaps = _own_gaps(item, evidence)
    return finding


def _chain(
    item: Mapping[str, Any], evidence: Mapping[str, Any], under_test: Mapping[str, Any] | None
) -> Iterator[Link]:
    states = {
        str(check.get("name")): str(check.get("state")) for check in words.mappings_of(item.get("checks"))
    }

    def link(claim: str, seen: str, name: str, check: str = "") -> Iterator[Link]:
        if seen:
            source = str(words.mapping_of(evidence.get(name)).get("source") or "")
            yield Link(claim, seen, words.how_known(evidence, name), source, states.get(check, ""))

    verdict = item.get("verdict")
    held = bool(words.value_of(evidence, "pins"))
    yield from link("Where the pages lay", words.placement(evidence), "placement", "placement")
    yield from link("Who held a pin on them", words.pin(evidence), "pins", "pin")
    yield from link("What the pin asked the kernel for", words.flags(evidence), "pin_flags")
    if under_test is not None:
        yield from _request(under_test)
    yield from link("What became of the pages", words.movement(evidence), "pages_moved", "movement")
    if held:
        yield from link(
            "What the reference counts say", words.references(evidence), "references", "references"
        )
    if verdict != "not-reproduced":
        yield from link("Which layer failed", words.layer(evidence), "layer", "trace")
    if under_test is not None:
        errno = under_test.get("errno")
        seen = (
            f"{under_test.get('verb')} failed with {errno}"
            if errno
            else f"{under_test.get('verb')} succeeded"
        )
        yield Link("What the caller saw", seen, "observed", "return of the call", states.get("errno", ""))
    yield from link("Without the pin", words.release(evidence), "release", "release")


def _request(under_test: Mapping[str, Any]) -> Iterator[Link]:
    """What the registration asked for: seen in the trace, or known from the kernel's source."""
    for event in words.mappings_of(words.mapping_of(under_test.get("trace")).get("events")):
        flags = words.list_of(words.mapping_of(event.get("args")).get("flags"))
        if "FOLL_LONGTERM" in flags:
            caller = event.get("caller") or "an unknown caller"
            text = f"{event.get('fn')}({'|'.join(map(str, flags))}) from {caller}"
            yield Link(
                "What the registration asked for", text, "observed", "the kernel's own trace of the call"
            )
            return
    yield Link(
        "What the registration asked for",
        "a pin with FOLL_LONGTERM, as every registration of user memory does",
        "inferred",
        "ib_umem_get, drivers/infiniband/core/umem.c; io_pin_pages, io_uring",
    )


def _trial(one: Pass, item: Mapping[str, Any], reader: Reader) -> Trial:
    under_test = one.under_test(item.get("registration") if one.control is None else None)
    held = None
    for control in words.mappings_of(item.get("controls")):
        if one.control is not None and control.get("name") == one.control:
            held = bool(control.get("held"))
    name = "the scenario itself" if one.control is None else one.control
    if under_test is None:
        return Trial(name, one.changed, "-", "-", f"no registration; it {one.outcome}", "-", held, None)
    pins = words.mappings_of(under_test.get("pins"))
    before, after = reader.state(under_test.get("before")), reader.state(under_test.get("after"))
    placed = "not known"
    if before is not None:
        placed = ", ".join(words.places(counted(before)))
    moved = "not known"
    if before is not None and after is not None:
        moved = f"{before.moved(after).total} moved, {before.unmoved(after).total} stayed"
    errno = under_test.get("errno")
    return Trial(
        name, one.changed, placed, "held" if pins else "none", str(errno or "OK"), moved, held, not errno
    )


# Facts and gaps


def _gpu(events: Sequence[Mapping[str, Any]]) -> str:
    """What CUDA told of the GPU and itself, and who told it; empty where only a stand-in was asked."""
    for event in events:
        gpu, versions = words.mapping_of(event.get("gpu")), words.mapping_of(event.get("cuda_versions"))
        if event.get("name") != "cuda-memory" or event.get("stand_in") or not gpu:
            continue
        told = [str(gpu.get("name"))]
        if isinstance(gpu.get("memory"), int):
            told.append(format_size(gpu["memory"]))
        capability = [gpu.get(f"compute_capability_{part}") for part in ("major", "minor")]
        if all(isinstance(part, int) for part in capability):
            told.append("compute capability " + ".".join(map(str, capability)))
        place = [gpu.get(f"pci_{part}_id") for part in ("domain", "bus", "device")]
        if all(isinstance(part, int) for part in place):
            told.append("PCI " + ":".join(f"{part:0{n}x}" for part, n in zip(place, (4, 2, 2), strict=True)))
        told += [f"CUDA {key} {versions.get(key) or 'of unknown version'}" for key in ("runtime", "driver")]
        sources = ", and ".join(str(source) for source in words.mapping_of(event.get("gpu_sources")))
        return ", ".join(told) + (f" (told by {sources})" if sources else "")
    return ""


def _facts(header: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    node, lab = words.mapping_of(header.get("node")), words.mapping_of(header.get("lab"))
    run, limits = words.mapping_of(header.get("run")), words.mapping_of(node.get("limits"))
    yield "recorded", f"{header.get('started') or 'at an unknown time'} by regrepro {header.get('version')}"
    yield "host", str(node.get("hostname") or "unnamed")
    if lab:
        known = {
            "tcg": "CPU emulated (TCG)",
            "kvm": "KVM",
            "icount": "CPU emulated (TCG), its clock counting instructions",
        }
        accel = known.get(str(lab.get("accel")), str(lab.get("accel")))
        yield (
            "lab",
            f"virtual machine, {accel}, kernel of {lab.get('kernel_origin') or 'unknown origin'}, boot "
            f"arguments {' '.join(map(str, words.list_of(lab.get('boot')))) or 'none'}, "
            f"{lab.get('numa') or 1} NUMA node(s)",
        )
    yield "kernel", f"{node.get('kernel')} {node.get('kernel_version') or ''}".strip()
    yield (
        "architecture",
        f"{node.get('arch')}, pages of {node.get('page_size')} bytes, {node.get('cpus')} CPUs",
    )
    if isinstance(node.get("memory_total"), int):
        yield "memory", format_size(node["memory_total"])
    yield "NVIDIA driver", str(node.get("nvidia_driver") or "none")
    gpu = _gpu(events)
    if gpu:
        yield "GPU", gpu
    for key, value in words.mapping_of(node.get("rdma")).items():
        yield f"RDMA, {key}", words.plain(value)
    yield "boot arguments of interest", " ".join(words.boot_of(header)) or "none"
    yield "rights", f"euid {node.get('euid')}, lockdown {node.get('lockdown')}"
    if limits:
        yield (
            "RLIMIT_MEMLOCK",
            f"soft {_limit(limits.get('memlock_soft'))}, hard {_limit(limits.get('memlock_hard'))}",
        )
    for key, value in words.mapping_of(node.get("vm")).items():
        yield str(key) if "." in str(key) else f"vm.{key}", str(value)
    for event in events:
        if event.get("event") == "memory-map":
            yield "unpinnable memory", unpinnable_memory(event)
            yield "memory map from", ", ".join(str(text) for text in words.list_of(event.get("sources")))
        elif event.get("event") == "reservation":
            size = event.get("got")
            got = format_size(size) if isinstance(size, int) and size else "nothing" if size == 0 else "it"
            what = f"the kernel gave {got}" if event.get("ok") is not None else "nobody tells what it gave"
            yield f"boot argument {event.get('argument')}", str(event.get("why") or what)
    shown = ("cuda", "rdma_device", "trace", "place", "profile", "expect")
    yield (
        "options",
        ", ".join(f"{key}={run[key]}" for key in shown if run.get(key) is not None) or "not recorded",
    )


def _limit(value: object) -> str:
    return format_size(value) if isinstance(value, int) else "unlimited"


def _own_gaps(item: Mapping[str, Any], evidence: Mapping[str, Any]) -> list[str]:
    gaps = []
    for name, value in evidence.items():
        entry = words.mapping_of(value)
        if entry.get("how") == "missing":
            gaps.append(f"{name}: {entry.get('source') or 'not recorded'}")
    trace = words.mapping_of(words.value_of(evidence, "trace"))
    for missing in words.mappings_of(trace.get("missing")):
        gaps.append(f"{missing.get('fn')} was not in sight: {missing.get('why')}")
    for check in words.mappings_of(item.get("checks")):
        if check.get("state") != "ok":
            gaps.append(f"rule {check.get('name')} is {check.get('state')}: {check.get('text')}")
    for entry in words.mappings_of(item.get("unmet")):
        how = f" ({entry['how']})" if entry.get("how") else ""
        gaps.append(f"{entry.get('need')} is not met: {entry.get('why')}{how}")
    for control in words.mappings_of(item.get("controls")):
        if not control.get("held"):
            gaps.append(f"control {control.get('name')} did not hold: {control.get('reason')}")
    return gaps


def _gaps(
    findings: Sequence[Finding], header: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
) -> list[str]:
    gaps: dict[str, None] = {}
    if not any(by_driver(item) for item in items):
        gaps["No vendor driver held a pin: whether a driver pins this way is not shown here."] = None
    for name in sorted({str(stand.get("name")) for stand in words.mappings_of(header.get("stand_ins"))}):
        gaps[f"{name} stood in the place of hardware: what a real device's driver adds is not shown."] = None
    for finding in findings:
        for gap in finding.gaps:
            gaps[f"{finding.name}: {gap}"] = None
    return list(gaps)

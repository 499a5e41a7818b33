"""A report as plain text, inline, at most 76 columns where a word allows: for a kernel mailing list."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from regrepro.report.model import Finding, Report
from regrepro.report.steps import LETTERS, Moment
from regrepro.views import policy, rates
from regrepro.views.picture import as_text, legend

WIDTH = 76
_SHOWN_PAGES = 64


def render(report: Report) -> str:
    """Return the report as text."""
    return "\n".join(line.rstrip() for line in _lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield from _wrap(report.banner)
    yield ""
    yield from _wrap(report.answer)
    if report.problems:
        yield from _title("What is wrong with the files of this run")
        for text in report.problems:
            yield from _wrap(text, "- ")
    yield from _title("Whom it concerns")
    for name, value in report.concerns:
        yield from _wrap(value, f"{name}: ")
    yield from _title("What is asked")
    for who, what in report.asks:
        yield from _wrap(what, f"{who}: ")
    for finding in report.findings:
        yield from _finding(finding)
    yield from _title("Log of pins and registrations (seconds since the start)")
    last = None
    for name, step in report.log:
        if name != last:
            yield f"{name}:"
            last = name
        yield from _wrap(
            f"{step.what}: {step.result}" if step.result else step.what, f"{step.seconds:9.3f}  "
        )
    if report.log_left_out:
        yield f"({report.log_left_out} more steps are in record.jsonl)"
    yield from _title("Facts")
    for name, value in report.facts:
        yield from _wrap(value, f"{name}: ")
    yield from _title("Stand-ins")
    for text in report.stand_ins or ["none: everything was real"]:
        yield from _wrap(text, "- ")
    yield from _title("What this does not show")
    for text in report.gaps or ["nothing is missing that the rules of proof ask for"]:
        yield from _wrap(text, "- ")
    yield ""
    yield f"-- regrepro {report.version}, recorded {report.started}"


def _finding(finding: Finding) -> Iterator[str]:
    yield from _title(f"{finding.name}: {finding.title}")
    yield from _wrap(finding.reason)
    if finding.chain:
        yield ""
    for link in finding.chain:
        yield from _wrap(f"{link.seen} [{link.how}]", f"{link.claim}: ", hang="    ")
    if finding.path:
        yield ""
        yield "The kernel's own path (> where it failed deepest):"
        for line in finding.path:
            yield f"{'>' if line.deepest else ' '} {'  ' * line.depth}{line.text}"
    elif finding.no_path:
        yield from _wrap(finding.no_path, "The kernel's own path: ")
    if finding.moments:
        yield ""
        yield from picture(finding.moments)
    if finding.picture is not None:
        yield ""
        yield f"Buffer {finding.picture.buffer} over physical memory:"
        yield from (f"  {line}" for line in as_text(finding.picture, WIDTH - 2))
        yield from _wrap(legend(finding.picture), "  ")
    if finding.policy:
        yield ""
        yield from policy.as_text(finding.policy, WIDTH)
    if finding.rates:
        yield ""
        yield "Registrations that failed, by setting (95 % interval):"
        yield from rates.as_text(finding.rates, WIDTH)
    if len(finding.trials) > 1:
        yield ""
        yield "The same steps, one thing changed:"
        size = max(len(trial.name) for trial in finding.trials)
        for trial in finding.trials:
            mark = "" if trial.held is None else ", as it must be" if trial.held else ", NOT as it must be"
            what = f"{trial.changed}; pages {trial.placed}; pin {trial.pin}; {trial.moved}"
            yield from _wrap(
                f"{trial.result}{mark} ({what})",
                f"  {trial.name:<{size}}  ",
            )
    if finding.checks:
        yield ""
        yield "Rules of proof:"
        for name, state, text in finding.checks:
            yield from _wrap(text, f"  {state:<12}  {name}: ", hang=" " * 18)


def picture(moments: list[Moment]) -> Iterator[str]:
    """Yield the pages at each moment, one letter for a page; a pinned page stands in capitals or brackets."""
    yield "The pages (C CMA, M ZONE_MOVABLE, I isolated, o ordinary; * under a pinned page):"
    size = max(len(moment.label) for moment in moments)
    for moment in moments:
        total = max((end for _, end, _, _ in moment.cells), default=0)
        letters = (
            "".join(LETTERS.get(place, "?") * (end - first) for first, end, place, _ in moment.cells)
            if total <= _SHOWN_PAGES
            else None
        )
        note = f"  {moment.note}" if moment.note else ""
        if letters is None:
            parts = [
                f"{end - first} x {LETTERS.get(place, '?')}{'*' if held else ''}"
                for first, end, place, held in moment.cells[:12]
            ]
            more = ", …" if len(moment.cells) > 12 else ""
            yield f"  {moment.label:<{size}}  {', '.join(parts)}{more}{note}"
            continue
        yield f"  {moment.label:<{size}}  {letters}{note}  {moment.pfns}"
        marks = "".join(("*" if held else " ") * (end - first) for first, end, _, held in moment.cells)
        if marks.strip():
            yield f"  {'':<{size}}  {marks}"


def _title(text: str) -> Iterator[str]:
    yield ""
    yield text
    yield "-" * min(len(text), WIDTH)


def _wrap(text: str, first: str = "", hang: str | None = None) -> list[str]:
    indent = hang if hang is not None else " " * min(len(first), 20)
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]

"""A report as Markdown, for an issue tracker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from regrepro.report.model import Finding, Report
from regrepro.report.text import picture
from regrepro.views.markup import md, md_table
from regrepro.views.rates import HEAD


def render(report: Report) -> str:
    """Return the report as Markdown (CommonMark and tables)."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"> {md(report.banner)}"
    yield ""
    yield f"**{md(report.answer)}**"
    yield ""
    if report.problems:
        yield "### What is wrong with the files of this run"
        yield ""
        yield from (f"- {md(text)}" for text in report.problems)
        yield ""
    yield from _table(("concerns", ""), report.concerns)
    yield "### What is asked"
    yield ""
    yield from (f"- **{md(who)}**: {md(what, code=True)}" for who, what in report.asks)
    yield ""
    for finding in report.findings:
        yield from _finding(finding)
    yield "<details><summary>Log of pins and registrations</summary>"
    yield ""
    rows = [(f"{step.seconds:.3f}", name, step.what, step.result) for name, step in report.log]
    yield from _table(("s", "pass", "step", "result"), rows)
    if report.log_left_out:
        yield f"{report.log_left_out} more steps are in `record.jsonl`."
        yield ""
    yield "</details>"
    yield ""
    yield "<details><summary>Facts of the node and the run</summary>"
    yield ""
    yield from _table(("fact", ""), report.facts)
    yield "</details>"
    yield ""
    yield "### Stand-ins"
    yield ""
    yield from (f"- {md(text)}" for text in report.stand_ins or ["none: everything was real"])
    yield ""
    yield "### What this does not show"
    yield ""
    none = ["nothing is missing that the rules of proof ask for"]
    yield from (f"- {md(text)}" for text in report.gaps or none)
    yield ""
    yield f"regrepro {md(report.version)}, recorded {md(report.started)}"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"### {md(finding.name)}: {md(finding.title)}"
    yield ""
    yield md(finding.reason)
    yield ""
    rows = [(link.claim, link.seen, link.how, link.state or "-") for link in finding.chain]
    if rows:
        yield from _table(("link", "what was seen", "how it is known", "rule"), rows)
    if finding.path:
        yield "The kernel's own path:"
        yield ""
        yield from _fenced(
            f"{'>' if line.deepest else ' '} {'  ' * line.depth}{line.text}" for line in finding.path
        )
    elif finding.no_path:
        yield f"The kernel's own path: {md(finding.no_path)}"
        yield ""
    if finding.moments:
        yield from _fenced(picture(finding.moments))
    if finding.rates:
        yield "Registrations that failed, by setting:"
        yield ""
        yield from _table(HEAD, [rate.cells for rate in finding.rates])
    if len(finding.trials) > 1:
        head = ("pass", "changed", "pages", "pin", "result", "moved", "as it must be")
        held = {None: "", True: "yes", False: "**no**"}
        yield from md_table(head, ([*map(md, trial.cells), held[trial.held]] for trial in finding.trials))
    if finding.checks:
        yield "<details><summary>Rules of proof</summary>"
        yield ""
        yield from _table(("rule", "state", ""), finding.checks)
        yield "</details>"
        yield ""


def _fenced(lines: Iterable[str]) -> Iterator[str]:
    text = [line.rstrip() for line in lines]
    longest = max((len(run) for line in text for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (f"{fence}text", *text, fence, "")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    return md_table(head, ([md(cell) for cell in row] for row in rows))

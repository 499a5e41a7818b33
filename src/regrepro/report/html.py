"""A report as one HTML file: no network, no script, readable on paper and without colour."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import resources

from regrepro.report import picture, policy
from regrepro.report.model import Finding, Report
from regrepro.report.steps import LETTERS, Moment
from regrepro.views.markup import html as esc
from regrepro.views.markup import html_table
from regrepro.views.rates import HEAD

_STYLE = {
    "reproduced": "bad",
    "caught": "bad",
    "other-failure": "warn",
    "not-reproduced": "good",
}
# Nothing is fetched and nothing runs, whatever a record may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CELL = 22
_SQUARES = 128
_STRIP = 960
_MOST_RUNS = 1500


def render(report: Report) -> str:
    """Return the report as a whole HTML document."""
    style = resources.files("regrepro.data").joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(_body(report))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{esc(report.answer[:90])}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _body(report: Report) -> Iterator[str]:
    kind = _STYLE.get(report.verdict, "open")
    yield f'<header class="{kind}">'
    yield f'<p class="banner">{esc(report.banner)}</p>'
    yield f"<h1>{esc(report.answer)}</h1>"
    yield "</header>\n<main>"
    if report.problems:
        yield '<section class="problems"><h2>What is wrong with the files of this run</h2>'
        yield _list(report.problems)
        yield "</section>"
    yield '<section class="two"><div><h2>Whom it concerns</h2>'
    yield _pairs(report.concerns)
    yield "</div><div><h2>What is asked</h2>"
    yield _pairs(report.asks)
    yield "</div></section>"
    if len(report.findings) > 1:
        yield "<section><h2>Verdicts</h2>"
        yield html_table(
            ("scenario", "verdict", "pin by", "basis", "errno", "layer", "reason"),
            [
                (
                    f'<a href="#f{n}">{esc(finding.name)}</a>',
                    f'<b class="{_STYLE.get(finding.verdict, "open")}">{esc(finding.verdict)}</b>',
                    *(esc(finding.item.get(key) or "-") for key in ("pin_owner", "basis", "errno", "layer")),
                    esc(finding.reason),
                )
                for n, finding in enumerate(report.findings)
            ],
            kind="verdicts",
        )
        yield "</section>"
    for n, finding in enumerate(report.findings):
        yield from _finding(n, finding)
    yield "<section><h2>Log of pins and registrations</h2>"
    yield _log(report)
    yield "</section>"
    yield "<section><h2>Facts of the node and the run</h2>"
    yield html_table(("fact", ""), [(esc(name), esc(value)) for name, value in report.facts], kind="facts")
    yield "</section>"
    yield '<section class="two"><div><h2>Stand-ins</h2>'
    yield _list(report.stand_ins or ["None: everything was real."])
    yield "</div><div><h2>What this does not show</h2>"
    yield _list(report.gaps or ["Nothing is missing that the rules of proof ask for."])
    yield "</div></section>\n</main>"
    yield f"<footer>regrepro {esc(report.version)}, recorded {esc(report.started)}</footer>"


def _finding(n: int, finding: Finding) -> Iterator[str]:
    kind = _STYLE.get(finding.verdict, "open")
    tag = f'<span class="tag {kind}">{esc(finding.verdict)}</span>'
    yield f'<section id="f{n}"><h2>{tag} {esc(finding.name)}</h2>'
    yield f"<p>{esc(finding.reason)}.</p>"
    if finding.chain:
        yield (
            "<h3>From cause to failure</h3>"
            if finding.verdict != "not-reproduced"
            else "<h3>What was seen</h3>"
        )
        yield '<ol class="chain">'
        for link in finding.chain:
            state = f' <span class="state">rule: {esc(link.state)}</span>' if link.state else ""
            source = f'<span class="source">{esc(link.source)}</span>' if link.source else ""
            yield (
                f'<li><b>{esc(link.claim)}</b> <span class="how {esc(link.how)}">{esc(link.how)}</span>'
                f"{state}<br>{esc(link.seen)}{source}</li>"
            )
        yield "</ol>"
    if finding.path:
        yield (
            "<h3>The kernel’s own path of the failing call</h3>"
            if finding.verdict != "not-reproduced"
            else ("<h3>The kernel’s own path</h3>")
        )
        yield '<pre class="path">'
        for line in finding.path:
            css = "deepest" if line.deepest else "failing" if line.failing else "through"
            mark = "✗" if line.deepest else " "
            yield f'<span class="{css}">{mark} {"  " * line.depth}{esc(line.text)}</span>'
        yield "</pre>"
    elif finding.no_path:
        yield f"<p>The kernel’s own path is not known: {esc(finding.no_path)}</p>"
    if finding.moments:
        yield "<h3>Where the pages lay</h3>"
        yield _legend()
        yield '<div class="moments">'
        for moment in finding.moments:
            yield _moment(moment)
        yield "</div>"
    if finding.picture is not None:
        yield "<h3>Where that is in physical memory</h3>"
        yield from picture.render(finding.picture)
    if finding.policy:
        yield "<h3>What the page allocator handed out</h3>"
        yield from policy.render(finding.policy)
    if finding.rates:
        yield "<h3>Registrations that failed, by setting</h3>"
        yield html_table(HEAD, [tuple(map(esc, rate.cells)) for rate in finding.rates])
    if len(finding.trials) > 1:
        yield "<h3>The same steps, one thing changed</h3>"
        held = {None: "", True: "yes", False: "<b>NO</b>"}
        outcome = {None: "open", True: "good", False: "bad"}
        yield html_table(
            ("pass", "changed", "pages", "pin", "registration", "movement", "as it must be"),
            [
                (
                    *map(esc, trial.cells[:4]),
                    f'<b class="{outcome[trial.ok]}">{esc(trial.result)}</b>',
                    esc(trial.moved),
                    held[trial.held],
                )
                for trial in finding.trials
            ],
        )
    if finding.checks:
        yield "<h3>Rules of proof</h3>"
        rows = [
            (esc(name), f'<span class="{esc(state)}">{esc(state)}</span>', esc(text))
            for name, state, text in finding.checks
        ]
        yield html_table(("rule", "state", ""), rows)
    if finding.evidence:
        yield "<details><summary>Every piece of evidence, how it is known, and its source</summary>"
        yield html_table(
            ("evidence", "value", "how", "source"), [tuple(map(esc, row)) for row in finding.evidence]
        )
        yield "</details>"
    yield "</section>"


def _log(report: Report) -> str:
    rows = []
    for name, step in report.log:
        css = "good" if step.ok else "bad" if step.ok is False else ""
        result = f'<span class="{css}">{esc(step.result)}</span>' if css else esc(step.result)
        rows.append((f"{step.seconds:.3f}", esc(name), esc(step.what), result))
    more = f"<p>{report.log_left_out} more steps are in record.jsonl.</p>" if report.log_left_out else ""
    return html_table(("s", "pass", "step", "result"), rows, kind="log") + more


def _legend() -> str:
    names = {
        "cma": "CMA",
        "movable-zone": "ZONE_MOVABLE",
        "isolate": "isolated",
        "ordinary": "ordinary memory",
    }
    head = f'<svg width="{_CELL}" height="{_CELL}" aria-hidden="true">'
    parts = [f"{head}{_square(0, place, False)}</svg> {text}" for place, text in names.items()]
    pinned = f"{head}{_square(0, 'cma', True)}</svg> thick frame: pinned"
    return f'<p class="legend">One square is one page: {", ".join(parts)}; {pinned}.</p>'


def _moment(moment: Moment) -> str:
    note = f" <em>{esc(moment.note)}</em>" if moment.note else ""
    total = max((end for _, end, _, _ in moment.cells), default=0)
    return (
        f"<figure>{_picture(moment, total)}<figcaption><b>{esc(moment.label)}</b>{note}<br>"
        f'<span class="source">{esc(moment.pfns)}</span></figcaption></figure>'
    )


def _picture(moment: Moment, total: int) -> str:
    label = esc(
        f"{moment.label}: "
        + ", ".join(f"{b - a} {place}{' pinned' if h else ''}" for a, b, place, h in moment.cells[:20])
    )
    if total <= _SQUARES:
        columns = 32
        rows = -(-max(total, 1) // columns)
        squares = [
            _square(page % columns * _CELL, place, held, page // columns * _CELL)
            for first, end, place, held in moment.cells
            for page in range(first, end)
        ]
        width = min(max(total, 1), columns) * _CELL
        head = f'<svg width="{width}" height="{rows * _CELL}" role="img" aria-label="{label}">'
        return f"{head}{''.join(squares)}</svg>"
    if len(moment.cells) > _MOST_RUNS:
        return f"<p>{len(moment.cells)} runs of pages: too many to draw; they are in record.jsonl.</p>"
    scale = _STRIP / total
    bars = []
    for first, end, place, held in moment.cells:
        x, wide = first * scale, max((end - first) * scale, 1.0)
        frame = ' stroke="#000" stroke-width="3"' if held else ""
        bars.append(f'<rect class="{esc(place)}" x="{x:.1f}" y="2" width="{wide:.1f}" height="20"{frame}/>')
    return (
        f'<svg viewBox="0 0 {_STRIP} 24" class="strip" role="img" aria-label="{label}">{"".join(bars)}</svg>'
    )


def _square(x: int, place: str, held: bool, y: int = 0) -> str:
    inner = 2 if held else 1
    frame = ' stroke="#000" stroke-width="3"' if held else ' stroke="#888" stroke-width="1"'
    size = _CELL - 2 * inner
    return (
        f'<rect class="{esc(place)}" x="{x + inner}" y="{y + inner}" width="{size}" height="{size}"{frame}/>'
        f'<text x="{x + _CELL // 2}" y="{y + _CELL - 6}">{esc(LETTERS.get(place, "?"))}</text>'
    )


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    parts = [f"<dt>{esc(name)}</dt><dd>{_code(value)}</dd>" for name, value in pairs]
    return f"<dl>{''.join(parts)}</dl>"


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{esc(text)}</li>" for text in texts) + "</ul>"


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", esc(text))

"""Verdicts on a terminal or in a log: a table, the proof behind each verdict, and where everything lies.

The text is laid out once, in plain words that fit the width. With rich and a terminal it gets colour; without
either it is the same text, so that a log reads like the screen.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from regrepro.judge.names import name_of
from regrepro.record import key_of
from regrepro.views import picture, policy, rates, words
from regrepro.views.lines import Line, columns, emit, width_of

WIDEST, PLAIN_WIDTH = 118, 100

_VERDICT_STYLE = {
    "reproduced": "bold red",
    "caught": "bold red",
    "not-reproduced": "bold green",
    "other-failure": "bold yellow",
    "unmet": "bold magenta",
    "error": "bold magenta",
}
_HEADLINE = {
    "reproduced": "This bug was reproduced",
    "caught": "Failures of this bug (class B) were caught",
    "other-failure": "A registration or a pin failed, but not by this bug",
    "undecided": "Undecided: something could not be met, proven or run",
    "not-reproduced": "This bug was not reproduced",
}


class RecordLike(Protocol):
    """What this view needs of a record."""

    @property
    def header(self) -> Mapping[str, Any]: ...


def show(
    verdicts: Mapping[str, Any],
    record: RecordLike | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    file: TextIO | None = None,
    *,
    width: int | None = None,
) -> None:
    """Print verdicts for a person: table, proofs, stand-ins, flaws of the record, run directory.

    `verdicts` is the object of verdicts.json, `record` gives the node's name and kernel. `width` in columns
    is the terminal's by default, 100 where there is none.
    """
    out = file if file is not None else sys.stdout
    size = _width(out, width)
    header = record.header if record is not None else {}
    emit(_whole(verdicts, header, run_dir, size, _drawn(getattr(record, "events", ()), size)), out)


def show_evidence(
    verdict: Mapping[str, Any], file: TextIO | None = None, *, width: int | None = None
) -> None:
    """Print one verdict (an item of `verdicts`) with every piece of its evidence, how each is known, and its
    source.
    """
    out = file if file is not None else sys.stdout
    size = _width(out, width)
    lines = [_title(verdict), *_indented(str(verdict.get("reason", "")), size, "  ")]
    evidence = words.mapping_of(verdict.get("evidence"))
    names = max((len(name) for name in evidence), default=0)
    for name, item in evidence.items():
        value, how, source = (words.mapping_of(item).get(key) for key in ("value", "how", "source"))
        if name == "trace" and isinstance(value, Mapping):
            value = {key: part for key, part in value.items() if key != "tree"}
        text = f"{words.plain(value)}  ({how}: {source})" if source else f"{words.plain(value)}  ({how})"
        lines += _labelled(name, text, size, names, style="dim" if how == "missing" else "")
    tree = _tree(evidence, size)
    if tree:
        lines += [[], [("  the kernel's own path:", "bold")], *tree]
    lines += _checks(verdict, size)
    for control in words.controls(verdict):
        lines += _labelled("control", control, size, names)
    emit(lines, out)


# Layout


def _whole(
    verdicts: Mapping[str, Any],
    header: Mapping[str, Any],
    run_dir: object,
    width: int,
    drawn: Mapping[tuple[str, str], list[Line]],
) -> list[Line]:
    items = words.mappings_of(verdicts.get("verdicts"))
    lines: list[Line] = [[], *_head(header, width)]
    if not items:
        lines += [[("There is no verdict: the record holds no scenario.", "bold magenta")]]
    else:
        lines += [[], *_table(items, width)]
        for item in items:
            proof = _proof(item, width)
            if proof:
                lines += [[], *proof, *drawn.get(key_of(item), [])]
    stand_ins = words.stand_ins(header, items)
    if stand_ins:
        lines += [[], [("Stand-ins in this run", "bold")]]
        for text in stand_ins:
            lines += _indented(text, width, "  ")
    problems = [str(text) for text in words.list_of(verdicts.get("problems"))]
    if problems:
        lines += [[], [("What is wrong with the record", "bold magenta")]]
        for text in problems:
            lines += _indented(text, width, "  ")
    lines += [[], _headline(items, verdicts)]
    if run_dir is not None:
        lines += [
            [
                ("The run lies in ", ""),
                (str(Path(str(run_dir))), "bold"),
                (" (record.jsonl, verdicts.json)", ""),
            ]
        ]
    return lines


def _head(header: Mapping[str, Any], width: int) -> list[Line]:
    node = words.mapping_of(header.get("node"))
    if not node:
        return [[("regrepro", "bold")]]
    where = f"{node.get('hostname') or 'unnamed node'}, Linux {node.get('kernel') or 'of unknown version'}"
    lab = words.mapping_of(header.get("lab"))
    if lab:
        where += f", in the lab ({lab.get('accel') or 'virtual machine'})"
    if node.get("nvidia_driver"):
        where += f", NVIDIA driver {node['nvidia_driver']}"
    boot = words.boot_of(header)
    lines: list[Line] = [[("regrepro on ", ""), (where, "bold")]]
    if boot:
        lines += _indented(f"booted with {' '.join(boot)}", width, "", style="dim")
    return lines


_COLUMNS = ("scenario", "verdict", "pin by", "basis", "errno", "layer")


def _row(item: Mapping[str, Any]) -> list[str]:
    owner = str(item.get("pin_owner") or "none")
    if owner == "cuda" and item.get("driver"):
        owner += f" {item['driver']}"
    cells = [name_of(item), str(item.get("verdict")), owner]
    return [*cells, *(str(item.get(key) or "-") for key in ("basis", "errno", "layer"))]


def _table(items: Sequence[Mapping[str, Any]], width: int) -> list[Line]:
    cells = [_row(item) for item in items]
    rows = [
        [
            (cell, "bold" if n == 0 else _VERDICT_STYLE.get(cell, "") if n == 1 else "")
            for n, cell in enumerate(row)
        ]
        for row in cells
    ]
    table = columns([name.upper() for name in _COLUMNS], rows)
    size = max(len("".join(text for text, _ in line)) for line in table)
    fits = size <= width
    lines: list[Line] = [table[0], [("─" * size, "dim")]] if fits else []
    for item, row, line in zip(items, rows, table[1:], strict=True):
        if fits:
            lines.append(line)
        else:
            rest = [
                f"{name} {cell}" for name, (cell, _) in zip(_COLUMNS[2:], row[2:], strict=True) if cell != "-"
            ]
            lines += [[row[0]], [("  ", ""), row[1]], *_indented(", ".join(rest), width, "  ")]
        lines += _indented(str(item.get("reason") or ""), width, "  ", style="" if fits else "dim")
        if item.get("as_declared") is False:
            lines += _indented(
                f"not as declared: {words.plain(item.get('declared'))}", width, "  ", style="bold yellow"
            )
    return lines


def _title(item: Mapping[str, Any]) -> Line:
    verdict = str(item.get("verdict"))
    return [(name_of(item), "bold"), (": ", ""), (verdict, _VERDICT_STYLE.get(verdict, ""))]


def _proof(item: Mapping[str, Any], width: int) -> list[Line]:
    """What a decided scenario rests on; what an undecided one lacks. Nothing where the reason says it all."""
    verdict = item.get("verdict")
    evidence = words.mapping_of(item.get("evidence"))
    if verdict == "unmet":
        return _lacks(item, width)
    if verdict not in ("reproduced", "not-reproduced", "other-failure", "caught"):
        return []
    lines: list[Line] = []
    size = 10
    for label, text in (
        ("placement", words.placement(evidence)),
        ("pin", words.pin(evidence)),
        ("flags", words.flags(evidence)),
        ("contract", words.contract(evidence)),
        ("references", words.references(evidence)),
        ("movement", words.movement(evidence)),
        ("registrar", words.registrar(evidence)),
    ):
        if text:
            lines += _labelled(label, text, width, size)
    tree = _tree(evidence, width)
    if tree:
        lines += [[*_label("kernel", size), ("its own trace of the call:", "")], *tree]
    elif words.trace(evidence):
        lines += _labelled("kernel", words.trace(evidence), width, size)
    if words.release(evidence):
        lines += _labelled("release", words.release(evidence), width, size)
    if verdict == "other-failure":
        lines += _labelled("layer", words.layer(evidence), width, size)
    for n, control in enumerate(words.controls(item)):
        lines += _labelled("" if n else "controls", control, width, size)
    what = "the proof" if verdict == "reproduced" else "what was seen"
    title: Line = [(f"{name_of(item)}: {what}", "bold")]
    return [title, *lines] if lines else []


def _drawn(events: Iterable[Mapping[str, Any]], width: int) -> dict[tuple[str, str], list[Line]]:
    """What can be drawn of each scenario: its buffer, what the page allocator did, rates that it counted."""
    found = {(item.scenario, item.part): _picture(item, width) for item in picture.pictures(events)}
    for key, its in policy.points(events).items():
        rows: list[Line] = [[*_label("policy", 10), ("what the page allocator handed out", "")]]
        rows += [[("    ", ""), (row, "")] for row in policy.as_text(its, width - 4)]
        found[key] = rows + found.get(key, [])
    for key, counted in rates.rates(events).items():
        rows = [[*_label("rates", 10), ("registrations that failed, by setting (95 % interval)", "")]]
        rows += [[("    ", ""), (row, "")] for row in rates.as_text(counted, width - 4)]
        found[key] = rows + found.get(key, [])
    return found


def _picture(drawn: picture.Picture, width: int) -> list[Line]:
    """The buffer over the node's physical memory."""
    lines: list[Line] = [[*_label("picture", 10), (f"buffer {drawn.buffer} over physical memory", "")]]
    for row in picture.as_text(drawn, width - 4):
        lines.append([("    ", ""), (row, "")])
    return [*lines, *_indented(picture.legend(drawn), width, "    ", style="dim")]


def _lacks(item: Mapping[str, Any], width: int) -> list[Line]:
    """All that was not met, where the reason names only the first."""
    entries = [words.mapping_of(entry) for entry in words.list_of(item.get("unmet"))]
    measured = words.contract(words.mapping_of(item.get("evidence")))
    if len(entries) < 2 and not measured:
        return []
    lines: list[Line] = [[(f"{name_of(item)}: what is missing", "bold")]]
    for entry in entries:
        how = f" ({entry['how']})" if entry.get("how") else ""
        lines += _labelled(str(entry.get("need")), f"{entry.get('why')}{how}", width, 10)
    # What needs no more than the pages themselves.
    return lines + (_labelled("contract", measured, width, 10) if measured else [])


def _checks(verdict: Mapping[str, Any], width: int) -> list[Line]:
    lines: list[Line] = []
    marks = {
        "ok": ("ok", "green"),
        "missing": ("missing", "magenta"),
        "contradicted": ("contradicted", "red"),
    }
    for check in words.mappings_of(verdict.get("checks")):
        mark, style = marks.get(str(check.get("state")), ("?", ""))
        text = _indented(f"{check.get('name')}: {check.get('text')}", max(20, width - 16), "")
        lines.append([(f"  {mark.ljust(12)}  ", style), *text[0]])
        lines += [[(" " * 16, ""), *line] for line in text[1:]]
    return [[], [("  the rules of proof:", "bold")], *lines] if lines else []


def _tree(evidence: Mapping[str, Any], width: int) -> list[Line]:
    """The kernel's path, indented, with return values and errno names; the deepest failure is marked."""
    nodes = words.mappings_of(words.mapping_of(words.value_of(evidence, "trace")).get("tree"))
    deepest = words.deepest(nodes)
    lines: list[Line] = []
    for n, node in enumerate(nodes):
        indent = 2 * max(0, min(words.number_of(node.get("depth")), 20))
        style = "bold red" if n == deepest else "" if node.get("failing") else "dim"
        mark = "  ✗ " if n == deepest else "    "
        wrapped = textwrap.wrap(
            words.path_item(node), max(24, width - indent - 6), break_on_hyphens=False
        ) or [""]
        lines.append([(mark, "bold red"), (" " * (indent + 2) + wrapped[0], style)])
        lines += [[(" " * (indent + 10) + more, style)] for more in wrapped[1:]]
    return lines


def _headline(items: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Any]) -> Line:
    names = [item.get("verdict") for item in items]
    undecided = (
        not items or verdicts.get("complete") is False or any(name in ("unmet", "error") for name in names)
    )
    which = (
        "reproduced"
        if "reproduced" in names
        else "caught"
        if "caught" in names
        else "other-failure"
        if "other-failure" in names
        else "undecided"
        if undecided
        else "not-reproduced"
    )
    count = sum(1 for name in names if name == which)
    style = _VERDICT_STYLE.get(which, "bold magenta")
    of = f" ({count} of {len(items)} scenarios)" if count and len(items) > 1 else ""
    return [(f"{_HEADLINE[which]}{of}.", style)]


# Text


def _indented(text: str, width: int, indent: str, style: str = "") -> list[Line]:
    wrapped = textwrap.wrap(
        " ".join(text.split()),
        max(24, width),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return [[(line, style)] for line in wrapped]


def _label(label: str, size: int) -> Line:
    return [(f"  {label.ljust(size)}  ", "cyan")]


def _labelled(label: str, text: str, width: int, size: int, style: str = "") -> list[Line]:
    """`  label  text`, wrapped beside the label."""
    wrapped = textwrap.wrap(" ".join(text.split()), max(24, width - size - 4), break_on_hyphens=False) or [""]
    first: Line = [*_label(label, size), (wrapped[0], style)]
    return [first, *([(" " * (max(size, len(label)) + 4), ""), (line, style)] for line in wrapped[1:])]


def _width(out: TextIO, width: int | None) -> int:
    return max(40, min(width, WIDEST)) if width is not None else width_of(out, PLAIN_WIDTH, WIDEST)

"""The closing table of scripts/quickstart: two runs side by side, with and without unpinnable memory.

Reads the run directories alone, so that it can be shown again at any time:
`.venv/bin/python scripts/quickstart_table.py DIR-WITH DIR-WITHOUT`.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

SUBJECT = "pin_then_register"
WIDTH = 100


class Unreadable(Exception):
    """A run directory without verdicts that can be read."""


def verdicts(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the verdicts of a run directory by scenario; raises `Unreadable`."""
    path = run_dir / "verdicts.json"
    try:
        items = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
        return {item["scenario"]: item for item in items}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{path} holds no verdicts ({error})") from None


def boot_of(run_dir: Path) -> str:
    """Return the boot arguments of a run's guest, or the directory's name where the record does not tell."""
    try:
        with (run_dir / "record.jsonl").open(encoding="utf-8") as record:
            boot = json.loads(record.readline())["lab"]["boot"]
    except (OSError, ValueError, KeyError, TypeError):
        return run_dir.name
    return " ".join(boot) or "no boot argument"


def in_short(item: dict[str, Any] | None) -> str:
    """Return a verdict as a cell of the table."""
    if item is None:
        return "did not run"
    beside = item.get("errno") if item["verdict"] == "reproduced" else item.get("basis") or item.get("layer")
    return f"{item['verdict']} ({beside})" if beside else str(item["verdict"])


def control_in_short(item: dict[str, Any] | None, name: str) -> str:
    """Return how a control of a verdict went, as a cell of the table."""
    for control in (item or {}).get("controls") or []:
        if control.get("name") == name:
            got = str(control.get("got") or "no answer")
            if control.get("held"):
                return got
            # Where no memory is unpinnable there is nothing that a control could show.
            return (
                f"{got}, {'proves nothing' if (item or {}).get('basis') == 'placement' else 'did not hold'}"
            )
    return "-"


def table(rows: list[tuple[str, str, str]]) -> str:
    """Return rows as a plain table; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def fill(text: str, indent: str = "") -> str:
    """Return text in lines, `indent` before the first and more before the others; process-vm stays whole."""
    return textwrap.fill(
        text, WIDTH, break_on_hyphens=False, initial_indent=indent, subsequent_indent=f"{indent}  "
    )


def value_of(item: dict[str, Any], name: str) -> Any:
    """Return the value of an evidence, or None where it is missing."""
    return ((item.get("evidence") or {}).get(name) or {}).get("value")


def proof(item: dict[str, Any]) -> list[str]:
    """Return the evidence of a reproduced verdict as sentences. Says only what the evidence holds."""
    sentences = []
    pages, unpinnable = value_of(item, "pages"), value_of(item, "pages_unpinnable")
    pinned, unmoved = value_of(item, "pages_pinned"), value_of(item, "pages_unmoved")
    if None not in (pages, unpinnable, pinned, unmoved):
        places = value_of(item, "placement") or {}
        where = ", ".join(f"{count} {place}" for place, count in places.items()) or "no place known"
        sentences.append(
            f"{unpinnable} of the buffer's {pages} pages lay in unpinnable memory ({where}), "
            f"{pinned} were pinned without FOLL_LONGTERM, and {unmoved} did not move."
        )
    references = ((value_of(item, "references") or {}).get("before") or {}).get("refcount")
    if references is not None:
        sentences.append(f"References of each pinned page: {references} (one FOLL_PIN adds 1024).")
    left = (value_of(item, "trace") or {}).get("migrate_pages")
    if left is not None:
        sentences.append(f"The kernel's own trace of the call: migrate_pages() left {left} where they were.")
    release = value_of(item, "release") or {}
    if release.get("again_errno", "not tried") is None:
        count = release.get("again_moved")
        moved = f", and {count} pages moved" if count is not None else ""
        sentences.append(f"Released, the same registration of the same buffer succeeded{moved}.")
    return sentences


def main(arguments: list[str]) -> int:
    """Print the table; return 0 when both runs gave what the incident's one-variable experiment gives."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with_dir, without_dir = map(Path, arguments)
    try:
        first, second = verdicts(with_dir), verdicts(without_dir)
    except Unreadable as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    with_boot, without_boot = boot_of(with_dir), boot_of(without_dir)
    rows = [("", with_boot, without_boot)]
    for name in dict.fromkeys([*first, *second]):
        one, two = first.get(name), second.get(name)
        rows.append((name, in_short(one), in_short(two)))
        controls = [c.get("name") for item in (one, two) for c in (item or {}).get("controls") or []]
        for control in dict.fromkeys(controls):
            rows.append(
                (f"  control {control}", control_in_short(one, control), control_in_short(two, control))
            )
    print(table(rows))
    print()

    one, two = first.get(SUBJECT), second.get(SUBJECT)
    if one is not None:
        print(fill(f"{SUBJECT}, {with_boot}: {one['reason']}"))
        for sentence in proof(one):
            print(fill(f"- {sentence}", "  "))
    if two is not None:
        print(fill(f"{SUBJECT}, {without_boot}: {two['reason']}"))
    print("\nThe proofs in full, from the run directories:")
    print(f"  .venv/bin/regrepro judge {with_dir}\n  .venv/bin/regrepro judge {without_dir}")

    as_it_should = (
        one is not None
        and two is not None
        and one["verdict"] == "reproduced"
        and (two["verdict"], two.get("basis")) == ("not-reproduced", "placement")
    )
    if one is not None and as_it_should:
        print()
        print(
            fill(
                f"Reproduced. The two runs differ in nothing but the size of hugetlb_cma. The pin was held "
                f"by {one['pin_owner']}: this kernel, with this placement, is susceptible. That says nothing "
                f"of any driver."
            )
        )
        return 0
    print(
        f"\nquickstart: expected {SUBJECT} to be reproduced in the first run and not-reproduced (placement) "
        f"in the second, and saw {in_short(one)} and {in_short(two)}.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

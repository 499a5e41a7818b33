"""Writes the list of layers wherever it stands outside of the code, from judge/layer_table.py.

    python -m regrepro.explain.layer_lists DIRECTORY

writes it into two schemas of `src/regrepro/schema`, and into the first two columns of the table in
docs/verdicts.md, in a checkout. What a rule asks for, and the kernel's source, stay as the table has them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from regrepro.judge.layer_table import LAYERS, ROWS

FILES = ("src/regrepro/schema/verdicts-1.json", "src/regrepro/schema/explain-1.json", "docs/verdicts.md")


def with_layers(text: str) -> str:
    """Return the text of a schema, or of docs/verdicts.md, with the layers as they are to be."""

    def enum(found: re.Match[str]) -> str:
        return f'"enum": {json.dumps([*LAYERS, *([None] if "null" in found[0] else [])])}'

    def table(found: re.Match[str]) -> str:
        told = dict(re.findall(r"^\| `([a-z-]+)` \|[^|]*(\|.*)$", found[2], re.M))
        rows = [f"| `{row.name}` | {row.title} {told.get(row.name, '| | |')}\n" for row in ROWS]
        return f"{found[1]}{''.join(rows)}{found[3]}"

    text = re.sub(rf'"enum": \[(?=[^\]]*"{LAYERS[0]}")[^\]]*\]', enum, text)
    return re.sub(r"(<!-- generated: layers -->\n(?:\|.*\n){2})((?:\|.*\n)*)(<!-- end -->)", table, text)


if __name__ == "__main__":
    for path in (Path(sys.argv[1], name) for name in FILES):
        path.write_text(with_layers(path.read_text(encoding="utf-8")), encoding="utf-8")

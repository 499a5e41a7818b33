"""What README.md has a newcomer do, done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

README = Path(__file__).parents[2] / "README.md"


def test_the_example_scenario_gives_what_the_readme_says(lab: Lab, tmp_path: Path) -> None:
    """Save it, run it with the command shown: `reproduced`, exit 10."""
    text = README.read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    [command] = re.findall(r"^    regrepro (lab run last_page_pinned\.py .*)$", text, re.M)
    (tmp_path / "last_page_pinned.py").write_text(example, encoding="utf-8")
    lab.require("latest")
    done = subprocess.run(
        [sys.executable, "-m", "regrepro", *command.split(), "--out", "run"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 10, done.stderr + done.stdout
    [item] = json.loads((tmp_path / "run/verdicts.json").read_text())["verdicts"]
    assert item["verdict"] == "reproduced"
    assert item["as_declared"] is True
    assert item["evidence"]["pages_unmoved"]["value"] == 1
    assert item["evidence"]["pages_moved"]["value"] == 3
    # The words that the README quotes are those of the verdict's reason.
    [quoted] = re.findall(r'It ends in `reproduced`, "([^"]*)", exit 10', " ".join(text.split()))
    assert quoted in item["reason"]

"""README.md holds what it says: its example loads, its commands and exit codes are the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from regrepro import cli, errors
from regrepro.scenario import load_file

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example() -> str:
    """Return the scenario file that README.md has a newcomer write."""
    [code] = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    return str(code)


def test_the_example_loads_without_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "last_page_pinned.py"
    file.write_text(example(), encoding="utf-8")
    [scenario] = load_file(file)
    assert scenario.name == "last_page_pinned"
    assert "last_page_pinned.py" in README


@pytest.mark.parametrize("line", re.findall(r"^    (?:sudo \$\(which )?regrepro\)? (.*)$", README, re.M))
def test_commands_exist(line: str) -> None:
    """Each command of README.md is known, with the options that it is shown with."""
    words = line.split("#", maxsplit=1)[0].split()
    command = words[: 2 if words[0] == "lab" else 1]
    help_text = CliRunner().invoke(cli.group, [*command, "--help"])
    assert help_text.exit_code == 0, help_text.output
    for option in (word for word in words if word.startswith("--")):
        assert option in help_text.output, f"{' '.join(command)} has no {option}"


def test_exit_codes_are_those_of_the_code() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.M)}
    assert table == {
        errors.EXIT_DECIDED,
        errors.EXIT_USAGE,
        errors.EXIT_REPRODUCED,
        errors.EXIT_OTHER_FAILURE,
        errors.EXIT_UNDECIDED,
    }


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_output_shown_is_one_that_was_seen() -> None:
    """A real run ends in these words; no placeholder is left."""
    assert "QUICKSTART-OUTPUT" not in README
    [shown] = re.findall(r"^```\n(.*?)^```", README, re.S | re.M)
    assert re.search(r"^pin_then_register +reproduced \(ENOMEM\) +not-reproduced \(placement\)$", shown, re.M)

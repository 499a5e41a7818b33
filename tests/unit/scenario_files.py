"""Scenario files for tests: a good one, and how a mistake in one is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrepro.scenario import Scenario, ScenarioFileError, load_file

GOOD = '''from regrepro import Stage, change, scenario


@scenario(
    shows="section 13",
    needs=("root", "kernel>=5.13"),
    expects={"pin": "reproduced", "longterm": "not-reproduced"},
    controls={"no-pin": change(pin="none")},
    profiles=("default", "node"),
    timeout=30,
)
def mine(stage: Stage) -> None:
    """Do as the README says."""
    stage.note("hello")
'''


def load(tmp_path: Path, text: str) -> list[Scenario]:
    file = tmp_path / "file.py"
    file.write_text(text)
    return load_file(file)


def mistake(tmp_path: Path, text: str) -> ScenarioFileError:
    """Load a file that has a mistake; return what is said of it."""
    with pytest.raises(ScenarioFileError) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "file.py"))
    assert caught.value.exit_code == 2
    return caught.value

"""Options of the scenarios themselves: declared with a default, set by `--option`, recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrepro.errors import UsageError
from regrepro.options import RunOptions
from regrepro.scenario import Scenario, ScenarioFileError, check_options, load_file

TEXT = '''from regrepro import Size, Stage, change, scenario


@scenario(
    shows="section 8",
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    options={"length": Size(4096), "rounds": 10, "gdr": True, "name": "x", "process": ("same", "multi")},
)
def mine(stage: Stage) -> None:
    """Have options."""
'''


@pytest.fixture
def mine(tmp_path: Path) -> Scenario:
    file = tmp_path / "mine.py"
    file.write_text(TEXT)
    return load_file(file)[0]


def test_defaults_are_declared(mine: Scenario) -> None:
    assert mine.option_values(()) == {
        "length": 4096,
        "rounds": 10,
        "gdr": True,
        "name": "x",
        "process": "same",
    }
    assert mine.declared()["options"]["process"] == "same"


def test_values_take_the_kind_of_their_default(mine: Scenario) -> None:
    given = ["length=2M", "rounds=3", "gdr=no", "mine.process=multi", "other.name=y"]
    assert mine.option_values(given) == {
        "length": 2 << 20,
        "rounds": 3,
        "gdr": False,
        "name": "x",
        "process": "multi",
    }
    assert mine.option_values(["length=0", "rounds=0"])["length"] == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lenght=1", "did you mean 'length'"),
        ("other.length=1", "no option of the scenarios"),
        ("length", "sets nothing"),
        (
            "length=many",
            r"length=many is no size \(write a number with K, M, G or T, such as --option length=4M",
        ),
        ("rounds=many", r"rounds=many is no whole number \(write digits, such as --option rounds=10"),
        ("rounds=2M", "is no whole number"),
        ("rounds=-1", "is no whole number"),
        (f"rounds={'9' * 5000}", "is no whole number"),
        ("gdr=maybe", "neither true nor false"),
        ("process=both", "is not known"),
    ],
)
def test_what_does_not_fit_is_a_usage_error(mine: Scenario, given: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_options([mine], [given])


@pytest.mark.parametrize("options", ["4", '{"a b": 1}', '{"a": None}', '{"a": ()}', '{"a": 1.5}'])
def test_a_wrong_declaration_is_told_with_its_line(tmp_path: Path, options: str) -> None:
    file = tmp_path / "wrong.py"
    text = TEXT.splitlines()
    text[7] = f"    options={options},"
    file.write_text("\n".join(text) + "\n")
    with pytest.raises(ScenarioFileError) as caught:
        load_file(file)
    assert caught.value.line == 8


def test_options_travel_to_a_lab_guest() -> None:
    options = RunOptions(option=("length=2M",))
    assert RunOptions.from_json(options.as_json()) == options

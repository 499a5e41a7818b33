"""Scenario files: what a declaration holds, and one line with file, line and remedy for every mistake."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from regrepro.errors import UsageError
from regrepro.scenario import (
    CONTRACTS,
    Library,
    ScenarioFileError,
    in_words,
    load_file,
    shipped_files,
)

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


def load(tmp_path: Path, text: str) -> object:
    file = tmp_path / "file.py"
    file.write_text(text)
    return load_file(file)


def mistake(tmp_path: Path, text: str) -> ScenarioFileError:
    with pytest.raises(ScenarioFileError) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "file.py"))
    assert caught.value.exit_code == 2
    return caught.value


def test_a_good_file(tmp_path: Path) -> None:
    [one] = load(tmp_path, GOOD)  # type: ignore[misc]
    assert one.name == "mine"
    assert one.summary == "Do as the README says."
    assert one.needs == ("root", "kernel>=5.13")
    assert one.declared()["controls"] == {"no-pin": "pin=none"}
    assert one.timeout == 30
    assert one.contract("pin") == "pin"
    assert one.contract("longterm") == "longterm"


def test_the_contract_of_a_scenario_with_its_own_kind(tmp_path: Path) -> None:
    text = GOOD.replace('{"pin": "reproduced", "longterm": "not-reproduced"}', '{"get": "reproduced"}')
    [one] = load(tmp_path, text)  # type: ignore[misc]
    assert one.contract("pin") == "get"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('"root", "kernel>=5.13"', '"rot",', 6, "unknown need 'rot'; did you mean 'root'?"),
        ('"root", "kernel>=5.13"', '"kernel>5",', 6, "did you mean 'kernel>=5.13'?"),
        ('("root", "kernel>=5.13")', '"root"', 6, "needs is no list of words"),
        ('"pin": "reproduced"', '"pin": "reproducd"', 7, "did you mean 'reproduced'?"),
        ('"pin": "reproduced"', '"pni": "reproduced"', 7, "did you mean 'pin'?"),
        ('{"pin": "reproduced", "longterm": "not-reproduced"}', "{}", 7, "expects is missing"),
        ('{"no-pin": change(pin="none")}', "{}", 8, "no control"),
        ('{"no-pin": change(pin="none")}', "None", 8, "no control"),
        ('"no-pin"', '"No Pin"', 8, "no name for a control"),
        ('change(pin="none")', '"none"', 8, "is no control"),
        ('change(pin="none")', 'change(pin="nne")', 8, "did you mean 'none'?"),
        ('change(pin="none")', 'change(pn="none")', 8, "did you mean 'pin'?"),
        ('change(pin="none")', "change()", 8, "a control changes exactly one"),
        ('change(pin="none")', 'change(pin="none", place="ordinary")', 8, "a control changes exactly one"),
        ('"default", "node"', '"defualt",', 9, "did you mean 'default'?"),
        ("timeout=30", "timeout=0", 10, "timeout=0 is no time"),
        ("timeout=30", 'timeout="30"', 10, "is no time"),
        ("timeout=30", "timeot=30", 10, "did you mean 'timeout'?"),
        ('shows="section 13"', 'shows=""', 5, "shows is missing"),
        ("(stage: Stage)", "()", 12, "must take one argument"),
        ("(stage: Stage)", "(stage, more)", 12, "must take one argument"),
        ("(stage: Stage)", "(*stages)", 12, "must take one argument"),
        ("def mine", "async def mine", 4, "async"),
        ('    """Do as the README says."""\n', "", 12, "no docstring"),
        ('stage.note("hello")', "yield", 12, "generator"),
        ("import Stage, change, scenario", "import Stage, chnage, scenario", 1, "did you mean 'change'?"),
        (
            "from regrepro import",
            "import nothing_of_that_name\nfrom regrepro import",
            1,
            "nothing_of_that_name",
        ),
        ("def mine(stage: Stage) -> None:", "def mine(stage: Stage) -> None", 12, "expected ':'"),
        ("@scenario(", "1 / 0\n@scenario(", 4, "ZeroDivisionError"),
        ("@scenario(", "raise SystemExit(3)\n@scenario(", 4, "SystemExit: 3"),
        ("timeout=30", "timeout=unknown_name", 10, "NameError"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    error = mistake(tmp_path, GOOD.replace(old, new))
    assert says in str(error)
    assert error.line == line


def test_missing_controls_at_all(tmp_path: Path) -> None:
    error = mistake(tmp_path, re.sub(r"    controls=.*\n", "", GOOD))
    assert "no control" in str(error)
    assert 'change(pin="none")' in str(error)


def test_the_decorator_without_its_declaration(tmp_path: Path) -> None:
    text = "from regrepro import scenario\n\n@scenario\ndef mine(stage):\n    pass\n"
    error = mistake(tmp_path, text)
    assert "write @scenario(" in str(error)
    assert error.line == 3


def test_the_same_name_twice(tmp_path: Path) -> None:
    error = mistake(tmp_path, GOOD + GOOD.split("\n\n\n")[1])
    assert "second time (first in line 4)" in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("x = 1\n", "holds no scenario"),
        ("from regrepro import scenario\n", "holds no scenario"),
        ("x = 1\0\n", "null bytes"),
    ],
)
def test_files_without_a_scenario(tmp_path: Path, text: str, says: str) -> None:
    assert says in str(mistake(tmp_path, text))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_bytes(b"\x80\x81\xff = 1\n")
    with pytest.raises(ScenarioFileError):
        load_file(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScenarioFileError, match="No such file"):
        load_file(tmp_path / "missing.py")
    with pytest.raises(ScenarioFileError, match="Is a directory"):
        load_file(tmp_path)
    secret = tmp_path / "secret.py"
    secret.write_text(GOOD)
    secret.chmod(0)
    if os.geteuid() != 0:
        with pytest.raises(ScenarioFileError, match="Permission denied"):
            load_file(secret)


def test_a_mistake_leaves_nothing_for_the_next_file(tmp_path: Path) -> None:
    mistake(tmp_path, GOOD + "\n1 / 0\n")
    [one] = load(tmp_path, GOOD)  # type: ignore[misc]
    assert one.name == "mine"


def test_imported_scenarios_are_not_the_files_own(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(GOOD)
    text = (
        GOOD.replace("mine", "ours")
        + f"\nfrom regrepro.scenario import load_file\nload_file({str(other)!r})\n"
    )
    [one] = load(tmp_path, text)  # type: ignore[misc]
    assert one.name == "ours"


# The library


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"unknown scenario 'pin_then_registr'.*did you mean 'pin_then_register'"
    ):
        Library().select(["pin_then_registr"], "default")
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    with pytest.raises(UsageError, match=r"holds no scenario 'mien'.*did you mean 'mine'"):
        Library().select([f"{file}:mien"], "default")
    with pytest.raises(UsageError, match="is a directory"):
        Library().select([f"{tmp_path}/"], "default")
    with pytest.raises(ScenarioFileError, match="No such file"):
        Library().select(["missing.py"], "default")


def test_files_and_names_together(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    chosen = Library().select([str(file), "no_pin", f"{file}:mine", f"{file}::mine"], "default")
    assert [item.name for item in chosen] == ["mine", "no_pin"]


def test_two_of_one_name_cannot_share_a_record(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD.replace("mine", "no_pin"))
    with pytest.raises(UsageError, match="two scenarios have the name no_pin"):
        Library().select([str(file), "no_pin"], "default")


def test_a_control_that_names_no_scenario(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = GOOD.replace("change, scenario", "instead, scenario")
    file.write_text(text.replace('change(pin="none")', 'instead("no_pni")'))
    with pytest.raises(ScenarioFileError, match=r"mine\.py:4: .*did you mean 'no_pin'"):
        Library().select([str(file)], "default")
    file.write_text(text.replace('change(pin="none")', 'instead("mine")'))
    with pytest.raises(ScenarioFileError, match="is the scenario itself"):
        Library().select([str(file)], "default")


# What is expected


def test_what_is_expected_may_depend_on_the_kernel(tmp_path: Path) -> None:
    expects = """{
        "pin": {"kernel>=6.5": {"verdict": "other-failure", "layer": ["mkey", "device"]},
                "kernel<6.5": "not-reproduced"},
        "longterm": {"verdict": "other-failure", "layer": "unknown", "errno": "ENOMEM"},
    }"""
    text = GOOD.replace('{"pin": "reproduced", "longterm": "not-reproduced"}', expects)
    [item] = load(tmp_path, text)  # type: ignore[misc]
    assert item.declared()["expects"]["pin"]["kernel<6.5"] == "not-reproduced"
    assert in_words(item.expects["pin"]) == (
        "other-failure (mkey/device) (kernel>=6.5) or not-reproduced (kernel<6.5)"
    )
    assert in_words(item.expects["longterm"]) == "other-failure (unknown, ENOMEM)"


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        ('{"kernel>=6.5": "reproduced", "verdict": "unmet"}', "mixes ranges of kernels with other keys"),
        ('{"kernel>=6.5": {"kernel<7.0": "unmet"}}', "it cannot expect 'kernel<7.0'"),
        ('{"kernel>=6.5": "broken"}', "unknown verdict 'broken'"),
        ('{"layer": "mkey"}', "it expects no verdict"),
        ('{"verdict": "unmet", "layr": "mkey"}', "did you mean 'layer'?"),
        ('{"verdict": "unmet", "layer": 7}', "layer=7 is no word"),
        ('{"verdict": ["unmet", "bad"]}', "unknown verdict 'bad'"),
        ("7", "unknown verdict 7"),
        ('["unmet", "reproduced"]', 'write {"verdict": […]}'),
    ],
)
def test_what_cannot_be_expected_is_said(tmp_path: Path, expected: str, says: str) -> None:
    text = GOOD.replace('{"pin": "reproduced", "longterm": "not-reproduced"}', f'{{"pin": {expected}}}')
    assert says in str(mistake(tmp_path, text))


# The shipped ones


def test_the_shipped_scenarios_load() -> None:
    library = Library()
    names = {item.name for item in library.shipped()}
    assert {
        "pin_then_register",
        "register_then_pin",
        "no_pin",
        "longterm_pin_then_register",
        "get_reference_then_register",
        "one_page_of_many",
        "release_and_retry",
    } <= names
    for item in library.shipped():
        assert set(item.expects) <= set(CONTRACTS)
        assert library.select([item.name], "default") == [item]


def test_each_shipped_file_bears_the_name_of_a_scenario_in_it() -> None:
    for file in shipped_files():
        assert file.stem in {item.name for item in load_file(file)}

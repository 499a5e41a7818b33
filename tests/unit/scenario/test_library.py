"""Scenario files: how they are found, loaded and chosen from, and what is said where that cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scenario_files import GOOD, load, mistake

from regrepro.errors import UsageError
from regrepro.scenario import CONTRACTS, Library, ScenarioFileError, load_file, shipped_files

VARIANTS = GOOD.replace("timeout=30", 'variants={"one": {}, "two": {}}')


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
    [one] = load(tmp_path, GOOD)
    assert one.name == "mine"


def test_imported_scenarios_are_not_the_files_own(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(GOOD)
    text = (
        GOOD.replace("mine", "ours")
        + f"\nfrom regrepro.scenario import load_file\nload_file({str(other)!r})\n"
    )
    [one] = load(tmp_path, text)
    assert one.name == "ours"


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


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mine", ["mine[one]", "mine[two]"]),
        ("mine[two]", ["mine[two]"]),
        ("mine_two", ["mine[two]"]),
        ("", ["mine[one]", "mine[two]"]),
    ],
)
def test_variants_are_chosen_by_name(tmp_path: Path, name: str, found: list[str]) -> None:
    file = tmp_path / "file.py"
    file.write_text(VARIANTS)
    chosen = Library().select([f"{file}:{name}" if name else str(file)], "default")
    assert [item.name for item in chosen] == found


def test_a_variant_and_a_scenario_that_has_its_other_name_are_two_of_one_name(tmp_path: Path) -> None:
    one, other = VARIANTS, GOOD.split("\n\n\n")[1].replace("mine", "mine_two")
    assert "mine_two is there a second time (first in line 4)" in str(mistake(tmp_path, f"{one}\n\n{other}"))


def test_a_control_names_one_variant(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = GOOD.replace("change, scenario", "instead, scenario")
    file.write_text(text.replace('change(pin="none")', 'instead("file[shm]")'))
    [mine] = Library().select([str(file)], "default")
    assert Library().control(mine.controls["no-pin"], beside=mine).name == "file[shm]"  # type: ignore[arg-type]
    file.write_text(text.replace('change(pin="none")', 'instead("file")'))
    with pytest.raises(ScenarioFileError, match=r"file has 3 variants; name one: instead\('file\[memfd\]'\)"):
        Library().select([str(file)], "default")


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
        assert file.stem in {item.function for item in load_file(file)}


def test_the_names_of_scenarios_that_became_variants_select_them() -> None:
    names = [f"file_{variant}" for variant in ("memfd", "shm", "on_disk")]
    names += [f"cuda_host_register_{variant}" for variant in ("memfd", "shm", "large", "file")]
    assert [item.names[-1] for item in Library().select(names, "default")] == names

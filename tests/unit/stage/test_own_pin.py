"""A pin by the user's own code: taken, let go, refused, and loaded by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stage_fakes import RealMemory

from regrepro.errors import UsageError
from regrepro.record import FILE_NAME, RecordWriter, read_record
from regrepro.scenario import Change
from regrepro.stage import Stage, own_pin
from regrepro.stage.ports import PAGE_SIZE


class Held:
    api = ""

    def __init__(self, address: int, length: int) -> None:
        self.args, self.released = (address, length), False

    def alive(self) -> bool:
        return not self.released

    def release(self) -> None:
        self.released = True


def test_own_code_pins_and_lets_go(stage: Stage) -> None:
    buffer = stage.buffer(pages=4)
    made: list[Held] = []

    def take(address: int, length: int) -> Held:
        made.append(Held(address, length))
        return made[-1]

    pin = stage.pin(buffer, pages=[1, 2], by=take)
    assert pin
    assert pin.alive() is True
    assert made[0].args == (buffer.address + PAGE_SIZE, 2 * PAGE_SIZE)
    pin.release()
    assert made[0].released
    [event] = [event for event in read_record(stage._writer.path).events if event["event"] == "pin"]
    assert (event["owner"], event["kind"], event["stand_in"]) == ("own-code", "pin", None)
    assert event["api"].endswith("test_own_code_pins_and_lets_go.<locals>.take")


def test_own_code_that_fails_is_recorded_with_its_errno(stage: Stage) -> None:
    def refuse(address: int, length: int) -> None:
        raise OSError(12, "no")

    pin = stage.pin(stage.buffer(pages=1), by=refuse)
    assert not pin
    assert pin.errno == "ENOMEM"


def test_own_code_must_return_what_lets_go(stage: Stage) -> None:
    with pytest.raises(UsageError, match="cannot be released"):
        stage.pin(stage.buffer(pages=1), by=lambda address, length: 7)


def test_own_code_is_left_out_where_a_control_changes_the_pin(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / FILE_NAME, {})
    stage = Stage(RealMemory(), writer, scenario="s", control="c", change=Change("pin", "none"))
    pin = stage.pin(stage.buffer(pages=1), by=lambda address, length: pytest.fail("it was called"))
    assert pin.kind == "none"


def test_own_code_is_loaded_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def pin(address, length):\n    return print\n")
    assert own_pin.load(f"{file}:pin")(0, 0) is print
    assert own_pin.load("os:getpid") is os.getpid


@pytest.mark.parametrize("where", ["mine", "no.such.module:pin", "os:nothing", "/no/such/file.py:pin"])
def test_what_names_no_function_is_said(where: str) -> None:
    with pytest.raises(UsageError, match="by="):
        own_pin.load(where)

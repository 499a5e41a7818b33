"""The runner: whatever becomes of a scenario's process or of the run, the record holds what was seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import runner_fakes
from runner_fakes import HEAD, FakeEnvironment, ends, run, scenario

from regrepro import runner
from regrepro.errors import EnvironmentProblem, UsageError
from regrepro.judge import judge_record
from regrepro.options import RunOptions
from regrepro.record import FILE_NAME, Record, read_record
from regrepro.scenario import Library, ScenarioFileError


def test_a_run(tmp_path: Path) -> None:
    record = run(
        tmp_path,
        scenario(
            """
            buffer = stage.buffer(pages=2, place="unpinnable")
            stage.pin(buffer)
            stage.register(buffer)
            """
        ),
    )
    assert record.problems == []
    assert record.header["node"] == {"hostname": "fake"}
    assert record.header["run"]["names"] == ["mine"]
    assert [event["event"] for event in record.events if "scenario" not in event] == [
        "note",
        "memory-map",
        "run-end",
    ]
    assert "a memory block" in record.events[0]["text"]
    begins = list(record.of("scenario-begin"))
    assert [(event["control"], event["contract"]) for event in begins] == [(None, "pin"), ("no-pin", "none")]
    assert begins[0]["declared"]["expects"] == {"pin": "reproduced"}
    assert begins[0]["file"].endswith("file.py")
    assert all(event["pid"] != os.getpid() for event in begins)
    assert [event["errno"] for event in record.of("register")] == ["ENOMEM", None]
    assert {end["outcome"] for end in ends(record).values()} == {"finished"}
    assert next(record.of("register"))["trace"] == {"status": "unavailable", "why": "no tracefs here"}
    assert record.events[-1]["outcome"] == "finished"


@pytest.mark.parametrize(
    ("body", "outcome", "keys"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", {"signal": "SIGKILL"}),
        ("import ctypes; ctypes.string_at(0)", "killed", {"signal": "SIGSEGV"}),
        ("os.abort()", "killed", {"signal": "SIGABRT"}),
        ("os._exit(0)", "exception", {}),
        ("sys.exit(0)", "exception", {}),
        ("raise KeyboardInterrupt", "exception", {}),
        ("1 / 0", "exception", {}),
        ("stage.buffer()", "exception", {}),
        ('stage.unmet("luck", "none left", "try again")', "unmet", {}),
        ("time.sleep(60)", "timeout", {}),
        ("while True: pass", "timeout", {}),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(60)", "timeout", {}),
    ],
)
def test_ends_of_a_scenario(tmp_path: Path, body: str, outcome: str, keys: dict[str, str]) -> None:
    """Each costs that pass only: what it saw before is there, and the control runs after it."""
    text = scenario(f"stage.step('before')\nif stage._change is None:\n    {body}", timeout=1.5)
    record = run(tmp_path, text)
    assert record.problems == []
    end = ends(record)
    assert end[None]["outcome"] == outcome
    assert keys.items() <= end[None].items()
    steps = list(record.of("step"))
    assert steps[0]["control"] is None
    if outcome == "unmet":
        assert None not in end or "no-pin" not in end
    else:
        assert end["no-pin"]["outcome"] == "finished"
        assert len(steps) == 2
    assert record.events[-1]["event"] == "run-end"


def test_an_exception_names_the_line_of_the_file(tmp_path: Path) -> None:
    record = run(tmp_path, scenario("stage.note('x')\n{}['missing']"))
    event = next(record.of("exception"))
    assert (event["type"], event["text"]) == ("KeyError", "'missing'")
    assert event["file"].endswith("file.py")
    line = Path(event["file"]).read_text().splitlines()[event["line"] - 1]
    assert line.strip() == "{}['missing']"


def test_where_it_hung_is_told(tmp_path: Path) -> None:
    record = run(tmp_path, scenario("time.sleep(60)", timeout=1))
    notes = [event["text"] for event in record.of("note")]
    assert any("file.py" in text and "mine" in text for text in notes)


def test_what_it_printed_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = run(tmp_path, scenario("print('to stdout'); os.write(2, b'to \\xff stderr')"))
    assert any("to stdout" in e["text"] and r"to \xff stderr" in e["text"] for e in record.of("note"))
    assert "stdout" not in capfd.readouterr().out


def test_an_exit_before_the_return_is_no_finish(tmp_path: Path) -> None:
    record = run(tmp_path, scenario("os._exit(0)"))
    assert "before the scenario returned" in next(record.of("exception"))["text"]


def test_children_of_a_scenario_do_not_outlive_it(tmp_path: Path) -> None:
    record = run(
        tmp_path,
        scenario(
            """
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            stage.step("forked", child=pid)
            """
        ),
    )
    for event in record.of("step"):
        assert _gone(event["child"])


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_the_timeout_option_replaces_the_declared_one(tmp_path: Path) -> None:
    started = time.monotonic()
    record = run(tmp_path, scenario("time.sleep(60)", timeout=60), options=RunOptions(timeout=0.5))
    assert ends(record)[None]["outcome"] == "timeout"
    assert time.monotonic() - started < 20


# Needs, placement, reservations


@pytest.mark.parametrize(
    ("need", "why"),
    [
        ("kernel>=99.0", "this kernel is"),
        ("kernel<2.6", "this kernel is"),
        ("lab", "could hurt a node"),
        ("cuda", "there is none"),
        ("movable-zone", "no ZONE_MOVABLE memory"),
    ],
)
def test_an_unmet_need_ends_the_pass_before_its_body(tmp_path: Path, need: str, why: str) -> None:
    record = run(tmp_path, scenario("stage.step('never')", needs=f"({need!r},)"))
    [unmet] = record.of("unmet")
    assert unmet["need"] == need
    assert why in unmet["why"]
    assert unmet["how"]
    assert list(record.of("step")) == []
    assert list(ends(record)) == [None]


def test_needs_that_are_met(tmp_path: Path) -> None:
    needs = '("kernel>=2.6", "unpinnable", "cma", "page-state", "userfaultfd", "io-uring", "registrar")'
    record = run(tmp_path, scenario("stage.step('ran')", needs=needs))
    assert [event["why"] for event in record.of("unmet")] == []
    assert len(list(record.of("step"))) == 2


def test_an_ordinary_user_is_told_what_root_would_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    record = run(tmp_path, scenario("pass", needs='("root",)'))
    [unmet] = record.of("unmet")
    assert "user 1000" in unmet["why"]
    assert "root sees where each page lies" in unmet["how"]


def test_a_memory_block_is_given_back(tmp_path: Path) -> None:
    class Block:
        given_back = False
        report: Any = None

        def give_back(self) -> bool:
            self.given_back = True
            self.report()
            return True

    environment = FakeEnvironment()
    environment.block = Block()
    record = run(
        tmp_path, scenario("1 / 0"), environment=environment, options=RunOptions(place="online-movable")
    )
    assert environment.block.given_back
    assert [(event["block"], event["step"]) for event in record.of("online-movable")] == [
        (7, "online_movable"),
        (7, "given-back"),
    ]


def test_no_memory_block_is_unmet(tmp_path: Path) -> None:
    record = run(tmp_path, scenario("pass"), options=RunOptions(place="online-movable"))
    assert next(record.of("unmet"))["why"] == "no block can be offlined"
    assert next(record.of("online-movable"))["step"] == "failed"


def test_trace_on_insists(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="no tracefs here"):
        run(tmp_path, scenario("pass"), options=RunOptions(trace="on"))


def test_what_the_boot_did_not_give_is_recorded_and_makes_the_run_unmet(tmp_path: Path) -> None:
    lab = {"kernel": "7.3", "boot": ["cmaa=512M"]}
    record = run(tmp_path, scenario("pass"), lab=lab)
    [event] = record.of("reservation")
    assert (event["argument"], event["ok"]) == ("cmaa=512M", False)
    [item] = judge_record(record)["verdicts"]
    assert (item["verdict"], item["unmet"][0]["need"]) == ("unmet", "boot")


# Names and places


def test_mistakes_are_found_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown scenario"):
        runner.run(["no_such_thing"], RunOptions(), tmp_path / "out", environment=FakeEnvironment())
    with pytest.raises(ScenarioFileError):
        run(tmp_path, "1 / 0\n")
    assert not (tmp_path / "out").exists()


def test_a_directory_with_a_run_is_left_alone(tmp_path: Path) -> None:
    run(tmp_path, scenario("pass"))
    before = (tmp_path / "out" / FILE_NAME).read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        run(tmp_path, scenario("pass"))
    assert (tmp_path / "out" / FILE_NAME).read_bytes() == before


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(EnvironmentProblem, match="--out"):
        run(tmp_path, scenario("pass"))


def test_another_scenario_as_control(tmp_path: Path) -> None:
    text = scenario("stage.step('other')", name="other") + scenario(
        "stage.step('mine')", controls='{"order": instead("other")}'
    )
    file = tmp_path / "file.py"
    file.write_text(HEAD + text)
    runner.run([f"{file}:mine"], RunOptions(), tmp_path / "out", environment=FakeEnvironment())
    record = read_record(tmp_path / "out")
    assert [(event["scenario"], event["control"], event["name"]) for event in record.of("step")] == [
        ("mine", None, "mine"),
        ("mine", "order", "other"),
    ]


def test_each_variant_is_judged_by_itself(tmp_path: Path) -> None:
    text = scenario(
        """
        stage.step("ran", by=stage.variant)
        buffer = stage.buffer(pages=2, place="unpinnable")
        stage.pin(buffer)
        stage.register(buffer)
        """
    ).replace(
        "    timeout=",
        """    variants={
        "alone": {"controls": {"no-pin": change(pin="none"), "ordinary": change(place="ordinary")}},
        "unmet": {"needs": ("lab",)},
        "by_another": {"controls": {"other": instead("mine[alone]")}},
    },
    timeout=""",
    )
    record = run(tmp_path, text)
    assert record.header["run"]["names"] == ["mine[alone]", "mine[unmet]", "mine[by_another]"]
    steps = [(event["variant"], event["control"], event["by"]) for event in record.of("step")]
    assert steps == [
        ("alone", None, "alone"),
        ("alone", "no-pin", "alone"),
        ("alone", "ordinary", "alone"),
        ("by_another", None, "by_another"),
        ("by_another", "other", "alone"),
    ]
    assert {event["scenario"] for event in record.events if "scenario" in event} == {"mine"}
    verdicts = {item["variant"]: item for item in judge_record(record)["verdicts"]}
    assert {name: [one["name"] for one in item["controls"]] for name, item in verdicts.items()} == {
        "alone": ["no-pin", "ordinary"],
        "unmet": ["no-pin"],
        "by_another": ["other"],
    }
    assert verdicts["unmet"]["unmet"][0]["need"] == "lab"


# Kills

_PROGRAM = """
import sys
sys.path[:0] = {path!r}
import runner_fakes
from regrepro import runner
from regrepro.options import RunOptions
try:
    runner.run([sys.argv[1]], RunOptions(), sys.argv[2], environment=runner_fakes.FakeEnvironment())
except runner.Interrupted as interrupted:
    sys.exit(interrupted.exit_code)
"""

_ENDLESS = scenario(
    """
    number = 0
    while True:
        number += 1
        stage.step("count", number=number, filler="x" * 2000)
    """
)


def _start(tmp_path: Path, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    file = tmp_path / "file.py"
    file.write_text(HEAD + _ENDLESS)
    source = str(Path(runner.__file__).parent.parent)
    program = _PROGRAM.format(path=[str(Path(runner_fakes.__file__).parent), source])
    out = tmp_path / name
    process = subprocess.Popen([sys.executable, "-c", program, str(file), str(out)])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if (out / FILE_NAME).exists() and b'"number":20,' in (out / FILE_NAME).read_bytes():
            return process, out
        time.sleep(0.02)
    process.kill()
    raise AssertionError("the run did not start")


def _scenario_pid(out: Path) -> int:
    return int(next(read_record(out).of("scenario-begin"))["pid"])


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while _lives(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _counted(record: Record) -> list[int]:
    return [event["number"] for event in record.of("step") if event["control"] is None]


def test_kill_9_of_a_scenario(tmp_path: Path) -> None:
    process, out = _start(tmp_path, "out")
    first = _scenario_pid(out)
    os.kill(first, signal.SIGKILL)
    assert _gone(first)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    record = read_record(out)
    assert record.problems == []
    assert ends(record)[None] == ends(record)[None] | {"outcome": "killed", "signal": "SIGKILL"}
    numbers = _counted(record)
    assert numbers == list(range(1, len(numbers) + 1))


def test_kill_9_of_the_run(tmp_path: Path) -> None:
    """The record is whole line for line, and the kernel takes the scenario along."""
    for attempt in range(5):
        process, out = _start(tmp_path, f"out{attempt}")
        child = _scenario_pid(out)
        time.sleep(0.01 * attempt)
        process.kill()
        process.wait()
        assert _gone(child)
        record = read_record(out)
        # A kill that meets a write(2) between two pages cuts the line that was being written, and no other.
        problems = [problem for problem in record.problems if "is cut and was left out" not in problem]
        assert problems == ["the record ends without run-end: the run was killed or is still going on"]
        numbers = _counted(record)
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process, out = _start(tmp_path, "out")
    child = _scenario_pid(out)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert _gone(child)
    record = read_record(out)
    assert record.problems == []
    assert record.events[-1]["outcome"] == "interrupted"
    assert ends(record)[None]["why"] == "the run was interrupted"


def test_two_runs_at_the_same_time(tmp_path: Path) -> None:
    one, first = _start(tmp_path, "one")
    two, second = _start(tmp_path, "two")
    for process in (one, two):
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert read_record(first).problems == read_record(second).problems == []


def test_the_librarys_files_are_loaded_once(tmp_path: Path) -> None:
    marker = tmp_path / "loaded"
    file = tmp_path / "file.py"
    file.write_text(HEAD + f"open({str(marker)!r}, 'a').write('x')\n" + scenario("pass"))
    library = Library()
    library.select([str(file)], "default")
    runner.run([str(file)], RunOptions(), tmp_path / "out", environment=FakeEnvironment(), library=library)
    assert marker.read_text() == "x"

"""A lab run around its machine: names, the record of a guest that died, progress, the command line."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

import regrepro
from regrepro import judge
from regrepro.cli import group
from regrepro.errors import EnvironmentProblem, UsageError
from regrepro.kernel import journal
from regrepro.lab import run as module
from regrepro.lab.kernels import Kernel, Kernels
from regrepro.lab.machine import Ending, Machine
from regrepro.lab.progress import Lines, Silent
from regrepro.lab.run import LabOptions, append_event, guest_names, guest_script, lab_run
from regrepro.options import RunOptions
from regrepro.record import FILE_NAME, RecordWriter, read_record

SCHEMA = json.loads((Path(regrepro.__file__).parent / "schema/record-2.json").read_text())
FACTS = {"kernel": "7.3.4", "kernel_image": "/k/vmlinuz", "boot": [], "memory": 2 << 30, "numa": 1, "cpus": 2}


def node() -> dict[str, Any]:
    return module._facts_from_outside(FACTS)


def some_record(path: Path, *events: tuple[str, dict[str, Any]]) -> None:
    header = {
        "run": {**RunOptions().as_json(), "names": ["no_pin"]},
        "node": node(),
        "lab": FACTS,
        "stand_ins": [],
    }
    with RecordWriter(path, header) as writer:
        for event, keys in events:
            writer.event(event, **keys)


def test_files_are_named_as_the_guest_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names, homes = guest_names(["no_pin", "mine.py", "sub/other.py"])
    assert names == ["no_pin", f"{tmp_path}/mine.py", f"{tmp_path}/sub/other.py"]
    assert homes == [tmp_path, tmp_path / "sub"]


def test_the_guest_script_is_shell_and_starts_this_python(tmp_path: Path) -> None:
    script, _ = guest_script(tmp_path / "it's a spec.json")
    done = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sys.executable in script
    assert str(Path(regrepro.__file__).resolve().parents[1]) in script


def test_the_guests_import_path_suffices_without_site(tmp_path: Path) -> None:
    """What the script exports must find all that the guest imports: `-S` leaves site out."""
    script, _ = guest_script(tmp_path / "spec.json")
    exports = next(line for line in script.splitlines() if line.startswith("export "))
    program = "import cffi, numpy, regrepro.runner, regrepro.lab.guest, regrepro.lab.softroce"
    done = subprocess.run(
        ["sh", "-c", f"{exports}; exec {sys.executable} -S -c '{program}'"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# The record of a guest that is no more


def test_an_event_from_outside_goes_on_where_the_guest_stopped(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    some_record(path, ("note", {"text": "x", "stand_in": None}))
    before = path.read_bytes()
    append_event(path, "lab", what="panic", console=["a", "b"])
    record = read_record(path)
    assert path.read_bytes().startswith(before)
    assert [event["seq"] for event in record.events] == [1, 2]
    assert record.events[1]["t"] >= record.events[0]["t"]
    jsonschema.Draft202012Validator(SCHEMA).validate(record.events[1])
    assert not [problem for problem in record.problems if "run-end" not in problem]


def test_a_line_that_the_guest_could_not_finish_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    some_record(path, ("note", {"text": "x", "stand_in": None}))
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"seq": 2, "t": 0.5, "event": "pin", "bef')
    append_event(path, "lab", what="panic", console=[])
    assert path.read_bytes().startswith(whole)
    event = read_record(path).events[1]
    assert (event["seq"], event["event"]) == (2, "lab")
    assert event["cut"].startswith('{"seq": 2, "t": 0.5')


def test_a_record_that_cannot_be_completed(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("nonsense\n")
    with pytest.raises(EnvironmentProblem, match="cannot complete"):
        append_event(tmp_path / FILE_NAME, "lab", what="hang", console=[])


def ending(what: str, **keys: Any) -> Ending:
    values: dict[str, Any] = {
        "why": "a reason",
        "console": ["last line"],
        "seconds": 9.0,
        "boot_seconds": None,
    }
    return Ending(what, **{**values, **keys})


@pytest.mark.parametrize("content", [None, b"", b'{"schema": "regrepro.rec'])
def test_a_guest_that_never_wrote_gets_a_header_from_outside(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    module._complete_record(tmp_path, ending("panic"), RunOptions(names=("no_pin",)), FACTS)
    record = read_record(tmp_path)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for line in (tmp_path / FILE_NAME).read_text().splitlines():
        validator.validate(json.loads(line))
    assert record.header["lab"]["kernel"] == "7.3.4"
    assert [event["what"] for event in record.events] == ["panic"]
    verdicts = judge.judge_record(record)["verdicts"]
    assert [(item["scenario"], item["verdict"]) for item in verdicts] == [("no_pin", "error")]
    assert judge.exit_code({"schema": "regrepro.verdicts/1", "verdicts": verdicts}) == 125


def test_a_guest_that_ended_well_is_left_alone(tmp_path: Path) -> None:
    some_record(tmp_path / FILE_NAME, ("run-end", {"outcome": "finished"}))
    before = (tmp_path / FILE_NAME).read_bytes()
    module._complete_record(tmp_path, ending("finished"), RunOptions(), FACTS)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_memory_that_ran_out_on_the_way_is_recorded(tmp_path: Path) -> None:
    some_record(tmp_path / FILE_NAME, ("run-end", {"outcome": "finished"}))
    module._complete_record(tmp_path, ending("finished", killed_for_memory=True), RunOptions(), FACTS)
    assert read_record(tmp_path).events[-1]["what"] == "out-of-memory"


# Progress


def test_progress_follows_the_record_as_it_grows(tmp_path: Path) -> None:
    out = io.StringIO()
    path = tmp_path / FILE_NAME
    follow = module._Follow(path, Lines(out))
    follow.look()  # not there yet
    labels = {"scenario": "no_pin", "variant": "default", "control": None}
    lines = [
        {"schema": "regrepro.record/2"},
        {
            "seq": 1,
            "event": "reservation",
            "argument": "cma=1G",
            "wanted": 1 << 30,
            "got": 0,
            "ok": False,
            "why": "the kernel gave nothing of 1 GiB",
        },
        {"seq": 2, "event": "scenario-begin", **labels},
        {"seq": 3, "event": "scenario-end", **labels, "outcome": "finished", "seconds": 1.25},
        {"seq": 4, "event": "scenario-begin", **labels, "control": "ordinary-memory"},
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines)
    for end in (10, 90, 200, len(data)):  # whatever the guest had written when we looked
        path.write_text(data[:end])
        follow.look()
        follow.look()
    assert out.getvalue().splitlines() == [
        "boot argument cma=1G: the kernel gave nothing of 1 GiB",
        "[1] no_pin …",
        "    no_pin: finished after 1.2 s",
        "[2] control ordinary-memory of no_pin …",
    ]


def test_a_download_is_told_now_and_then() -> None:
    out = io.StringIO()
    tell = Lines(out)
    for done in range(0, 101, 10):
        tell.download("kernel 7.3", done << 20, 100 << 20)
    tell.download("kernel 7.3", 100 << 20, 100 << 20)
    assert out.getvalue().splitlines() == [
        "kernel 7.3: downloading, 0 % of 100 MiB",
        "kernel 7.3: 100 MiB downloaded",
    ]


# A whole run with a shell script in QEMU's place


@pytest.fixture
def fake_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lab whose machine is the shell script `tmp_path/qemu`, with journals and temporary files there."""
    script = tmp_path / "qemu"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    journals = tmp_path / "journals"
    journals.mkdir(mode=0o700)
    monkeypatch.setattr(journal, "places", lambda: [journals])
    monkeypatch.setattr(module, "require_tools", lambda: None)
    monkeypatch.setattr(module, "compile_package", lambda: None)
    monkeypatch.setattr(Kernels, "get", lambda *_: Kernel("7.3.4", tmp_path / "vmlinuz", None, None))
    monkeypatch.setattr(Machine, "_prepare", lambda *_: [str(script)])
    return tmp_path


def qemu(place: Path, body: str) -> None:
    (place / "qemu").write_text(f'#!/bin/sh\ntell() {{ echo "regrepro-lab $1"; }}\n{body}\n')


def go(place: Path) -> Path:
    return lab_run(
        ["no_pin"], RunOptions(names=("no_pin",)), LabOptions(accel="tcg"), place / "run", Silent()
    )


def nothing_left(place: Path) -> bool:
    return not list((place / "tmp").iterdir()) and not list((place / "journals").glob("*.json"))


def test_a_panic_is_judged_and_nothing_stays(fake_lab: Path) -> None:
    qemu(fake_lab, "echo 'Kernel panic - not syncing: test' >&2")
    out = go(fake_lab)
    verdicts = json.loads((out / "verdicts.json").read_text())["verdicts"]
    assert [item["verdict"] for item in verdicts] == ["error"]
    assert "panic" in verdicts[0]["reason"]
    assert "not syncing: test" in (out / "console.log").read_text()
    assert nothing_left(fake_lab)


@pytest.mark.parametrize(
    ("up", "boots"), [("", 2), ('tell \'{"what": "started"}\'', 1)], ids=["before it was up", "after"]
)
def test_only_a_guest_that_was_not_up_is_booted_again(fake_lab: Path, up: str, boots: int) -> None:
    count = fake_lab / "boots"
    qemu(fake_lab, f"echo boot >>{count}\n{up}\necho 'Kernel panic - not syncing: test' >&2")
    out = go(fake_lab)
    assert count.read_text().splitlines() == ["boot"] * boots
    assert json.loads((out / "verdicts.json").read_text())["verdicts"][0]["verdict"] == "error"
    assert nothing_left(fake_lab)


def test_the_second_boot_counts(fake_lab: Path) -> None:
    first = fake_lab / "first"
    panic = f"if [ ! -e {first} ]; then touch {first}; echo 'Kernel panic - not syncing: test' >&2; exit; fi"
    qemu(
        fake_lab,
        panic + '\ntell \'{"what": "started"}\'; tell \'{"what": "error", "text": "up", "code": 2}\'',
    )
    with pytest.raises(UsageError, match="up"):
        go(fake_lab)
    assert nothing_left(fake_lab)


def test_an_error_in_the_guest_is_the_runs(fake_lab: Path) -> None:
    qemu(fake_lab, 'tell \'{"what": "started"}\'; tell \'{"what": "error", "text": "no room", "code": 2}\'')
    with pytest.raises(UsageError, match="no room"):
        go(fake_lab)
    assert nothing_left(fake_lab)


def test_a_directory_that_holds_a_run_is_refused(fake_lab: Path) -> None:
    (fake_lab / "run").mkdir()
    (fake_lab / "run" / FILE_NAME).write_text("{}\n")
    with pytest.raises(UsageError, match="exists already"):
        go(fake_lab)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_machine_and_gives_everything_back(fake_lab: Path, number: signal.Signals) -> None:
    # Later than while it is being started: until Popen has returned it is the kernel that would end it, with
    # its parent, and that is pytest here.
    qemu(fake_lab, f"echo $$ > {fake_lab}/pid\nsleep 0.5\nkill -{number.value} {os.getpid()}\nsleep 60")
    with pytest.raises(module.Interrupted) as caught:
        go(fake_lab)
    assert caught.value.exit_code == 128 + number
    assert not Path(f"/proc/{(fake_lab / 'pid').read_text().strip()}").exists()
    assert nothing_left(fake_lab)
    assert signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}


def test_what_a_killed_host_left_goes_at_the_next_start(
    fake_lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        try:
            with module.workplace():
                (fake_lab / "ready").touch()
                time.sleep(60)
        finally:
            os._exit(1)
    while not (fake_lab / "ready").exists():
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert list((fake_lab / "tmp").iterdir())
    qemu(fake_lab, "echo 'Kernel panic - not syncing: x' >&2")
    go(fake_lab)
    assert nothing_left(fake_lab)


# The command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--boot", "cma=1X"], "bad value"),
        (["--numa", "0"], "--numa 0"),
        (["--numa", "1G,1X"], "is no size"),
        (["--memory", "1M"], "too little"),
    ],
)
def test_bad_options_are_said_before_anything_is_made(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=says):
        CliRunner().invoke(group, ["lab", "run", "no_pin", *arguments], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_scenario_is_said_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="no_such"):
        CliRunner().invoke(group, ["lab", "run", "no_such"], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []

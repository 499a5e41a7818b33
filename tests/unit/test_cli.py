"""The command line: one clear line and the right exit code for whatever a user can get wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import regrepro
from regrepro import cli, runner
from regrepro.errors import UsageError
from regrepro.options import RunOptions, format_size, parse_size
from regrepro.record import FILE_NAME

SOURCE = str(Path(regrepro.__file__).parent.parent)

GOOD = '''from regrepro import Stage, change, scenario


@scenario(
    shows="a test",
    needs=("kernel>=99.0",),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
)
def mine(stage: Stage) -> None:
    """A test that no kernel of today meets."""
'''


def regrepro_command(
    *arguments: str, cwd: Path | None = None, **keys: object
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.run(
        [sys.executable, "-m", "regrepro", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **keys,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "pin_then_registr"], "did you mean 'pin_then_register'"),
        (["run", "missing.py"], "missing.py: cannot be read: No such file or directory"),
        (["run", "--profile", "defualt"], "'defualt'"),
        (["run", "--cuda", "standin"], "'standin'"),
        (["run", "--trace", "maybe"], "'maybe'"),
        (["run", "--place", "pressure", "--pressure-limit", "many"], "'many' is no size"),
        (["run", "--timeout", "0"], "0"),
        (["run", "--no-such-option"], "--no-such-option"),
        (["rnu"], "did you mean 'run'?"),
        (["judge", "no-such-dir"], "no-such-dir does not exist"),
        (["judge"], "Missing argument"),
        (["list", "missing.py"], "missing.py"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    says: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leave:
        cli.main(arguments)
    assert leave.value.code == 2
    out, err = capfd.readouterr()
    assert says in err
    assert err.startswith("regrepro: ")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "file.py:1: is empty"),
        ("def (", "file.py:1: invalid syntax"),
        (GOOD.replace("needs", "need"), "did you mean 'needs'?"),
    ],
)
def test_bad_scenario_files(
    content: str, says: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file.py"
    file.write_text(content)
    with pytest.raises(SystemExit) as leave:
        cli.main(["run", str(file), "--out", str(tmp_path / "out")])
    assert leave.value.code == 2
    assert says in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["run", "--help"], ["judge", "--help"]):
        with pytest.raises(SystemExit) as leave:
            cli.main(arguments)
        assert leave.value.code == 0
    assert regrepro.__version__ in capfd.readouterr().out


def test_list(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["list"])
    text = capfd.readouterr().out
    assert "pin_then_register" in text
    with pytest.raises(SystemExit):
        cli.main(["list", "--json", "--profile", "default"])
    listed = json.loads(capfd.readouterr().out)
    assert {"name", "summary", "file", "shows", "needs", "expects", "controls"} <= set(listed[0])
    assert "no_pin" in [item["name"] for item in listed]


def test_listing_needs_no_core() -> None:
    """A user's first command must not wait for numpy, nor fail for want of the C core."""
    program = (
        "import sys; from regrepro.scenario import Library; Library().shipped(); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'regrepro._core')))"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


def test_a_reader_that_goes_away() -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "regrepro", "list"],
        env=environment,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


def test_an_unmet_scenario_exits_125(tmp_path: Path) -> None:
    """Works for any user on any machine: what is not met is a verdict, not an error."""
    (tmp_path / "mine.py").write_text(GOOD)
    done = regrepro_command("run", "mine.py", "--out", "out", "--json", cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode == 125
    verdicts = json.loads(done.stdout)
    assert [item["verdict"] for item in verdicts["verdicts"]] == ["unmet"]
    assert json.loads((tmp_path / "out" / "verdicts.json").read_text()) == verdicts
    again = regrepro_command("judge", "out", "--json", cwd=tmp_path)
    assert (again.returncode, json.loads(again.stdout)) == (125, verdicts)
    repeated = regrepro_command("run", "mine.py", "--out", "out", cwd=tmp_path)
    assert repeated.returncode == 2
    assert "exists already" in repeated.stderr
    default = regrepro_command("run", "mine.py", "--quiet", cwd=tmp_path)
    assert default.returncode == 125
    [made] = (tmp_path / "regrepro-runs").iterdir()
    assert {file.name for file in made.iterdir()} == {FILE_NAME, "verdicts.json"}


def test_two_runs_in_one_second_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    assert len({cli.default_out() for _ in range(3)}) == 3


def test_an_interrupt_exits_130(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise runner.Interrupted(signal.SIGINT, Path("out"))

    monkeypatch.setattr(runner, "run", interrupted)
    with pytest.raises(SystemExit) as leave:
        cli.main(["run", "no_pin", "--out", "out"])
    assert leave.value.code == 130
    assert "ended by SIGINT" in capfd.readouterr().err


def test_verdicts_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "verdicts.json"
    cli.write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        cli.write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["verdicts.json"]


def test_options_round_trip() -> None:
    options = RunOptions(
        names=("a", "b.py"), cuda="standin:pin", place="pressure", pressure_limit=1 << 30, expect="declared"
    )
    assert RunOptions.from_json(json.loads(json.dumps(options.as_json()))) == options
    with pytest.raises(UsageError, match="unknown run option"):
        RunOptions.from_json({"colour": "blue"})
    with pytest.raises(UsageError, match="--trace"):
        RunOptions(trace="perhaps")


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 512 << 20), ("2G", 2 << 30), ("4096", 4096), ("1 KiB", 1024), ("1t", 1 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5G", "G", "many", "1X"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [format_size(size) for size in (100, 4096, 3 << 19, 2 << 30)] == [
        "100 bytes",
        "4 KiB",
        "1.5 MiB",
        "2 GiB",
    ]

"""How NVIDIA's libraries come to the tests: what is told where one cannot be had; none comes in part."""

from __future__ import annotations

import zipfile
from pathlib import Path

import nvidia_files
import pytest

script = nvidia_files.script
NO_WHEEL = (
    "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: 2.0, 3.0)\n"
    "ERROR: No matching distribution found for x==1"
)


def pip_says(monkeypatch: pytest.MonkeyPatch, said: str, *, wheel: bytes | None = None) -> None:
    """Put `said` in the place of all commands; where it is nothing, a wheel has come."""

    def run(command: list[str], cwd: Path | None = None) -> str:
        if not said:
            file = Path(command[command.index("-d") + 1]) / "x-1-py3-none-any.whl"
            if wheel is not None:
                file.write_bytes(wheel)
            else:
                with zipfile.ZipFile(file, "w") as archive:
                    archive.writestr("nvidia/x/lib/libcudart.so.1", "")
        return said

    monkeypatch.setattr(script, "_run", run)
    monkeypatch.setattr(script, "_unpack_driver", lambda target: None)


def test_what_came_is_there_whole_and_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip_says(monkeypatch, "")
    assert script.main(tmp_path) == 0
    wheels = {f"{name}-{version}" for name, version in (*script.RUNTIMES, *script.CUDA_PYTHON)}
    assert {path.name for path in tmp_path.iterdir()} == wheels | {script.DRIVER}
    pip_says(monkeypatch, "nothing is to be asked for")
    assert script.main(tmp_path) == 0


def test_a_wheel_that_this_platform_never_had_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip_says(monkeypatch, NO_WHEEL)
    assert script.main(tmp_path) == 0
    assert "11.7.99: not for this platform (it has 2.0, 3.0)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [script.DRIVER]


@pytest.mark.parametrize("said", ["ERROR: connection refused", NO_WHEEL.replace("2.0, 3.0", "none")])
def test_an_index_that_does_not_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    pip_says(monkeypatch, said)
    assert script.main(tmp_path) == 1
    assert f"could not be had: {said.splitlines()[-1]}" in capsys.readouterr().err


def test_half_a_wheel_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip_says(monkeypatch, "", wheel=b"PK\x03\x04 and no more")
    assert script.main(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == [script.DRIVER]

"""Instances and probes of our own, and what killed runs have left of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrepro.kernel import trace_fs


def fake_tracefs(root: Path, instances: list[str], probes: list[str]) -> Path:
    for name in instances:
        (root / "instances" / name).mkdir(parents=True)
    (root / "instances").mkdir(exist_ok=True)
    (root / "kprobe_events").write_text("".join(f"{line}\n" for line in probes))
    return root


def test_only_what_the_dead_left_is_ours_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, group = trace_fs.own_names(1)  # a live owner
    suffix = instance.removeprefix("regrepro-").split("-", 2)[2:]
    dead = "-".join(["regrepro-1-1", *suffix])  # PID 1 started at another time: its owner is gone
    dead_group = dead.replace("-", "_")
    strange = "regrepro-1-1-7" if not suffix else "regrepro-1-1"  # of another PID namespace
    root = fake_tracefs(
        tmp_path,
        [instance, dead, strange, "somebody", "regrepro-x"],
        [
            f"r10:{group}/f_1 f ret=$retval:s32",
            f"p:{dead_group}/g_in_1 g",
            f"r:{dead_group}/g_1 g",
            "p:theirs/h h",
            "p:regrepro/h h",
        ],
    )
    appended: list[str] = []
    monkeypatch.setattr(trace_fs, "append", lambda _path, text: appended.append(text))
    said = trace_fs.reclaim(root)
    left = {path.name for path in (root / "instances").iterdir()}
    assert left == {instance, strange, "somebody", "regrepro-x"}
    assert appended == [f"-:{dead_group}/g_in_1\n", f"-:{dead_group}/g_1\n"]
    assert len(said) == 2


@pytest.mark.parametrize("name", ["somebody", "regrepro", "regrepro-1", "../regrepro-1-2"])
def test_names_that_are_not_ours_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="of ours"):
        trace_fs.remove_instance(tmp_path, name)
    with pytest.raises(ValueError, match="of ours"):
        trace_fs.remove_group(tmp_path, name)


def test_probes_that_a_reading_skipped_are_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, group = trace_fs.own_names(1)
    events = [f"f{number}_1" for number in range(90)]
    root = fake_tracefs(tmp_path, [], [f"r:{group}/{event} f" for event in events])
    file = root / "kprobe_events"
    whole = Path.read_text
    readings = 0

    def read_text(path: Path) -> str:
        """Skip what stands where a page ends, the first two times: others removed lines before it."""
        nonlocal readings
        readings += 1
        lines = whole(path).splitlines(keepends=True)
        return "".join(line for number, line in enumerate(lines) if readings > 2 or number % 40 != 39)

    def append(path: Path, text: str) -> None:
        name = text.removeprefix("-:").strip()
        path.write_text("".join(f"{line}\n" for line in whole(path).splitlines() if name + " " not in line))

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(trace_fs, "append", append)
    assert trace_fs.remove_group(root, group) == 90
    assert whole(file) == ""


def test_a_probe_that_will_not_go_ends_the_readings(tmp_path: Path) -> None:
    _, group = trace_fs.own_names(1)
    root = fake_tracefs(tmp_path, [], [f"r:{group}/f_1 f"])  # a file that keeps what is appended
    assert trace_fs.remove_group(root, group) == 1


def test_appending_never_truncates(tmp_path: Path) -> None:
    file = tmp_path / "kprobe_events"
    file.write_text("p:theirs/h h\n")
    trace_fs.append(file, "-:ours/x\n")
    assert file.read_text() == "p:theirs/h h\n-:ours/x\n"

"""docs/gates.md, block by block: each is run or checked as it stands there, here or in tests/lab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from document_blocks import Block, blocks, the_block
from regrepro import cli

ROOT = Path(__file__).parents[3]
GATES = ROOT / "docs/gates.md"
# Which test has which block, by words that stand in no other.
TESTED = {
    "# bisect.sh:": "tests/unit/documents/test_gates.py",
    "git bisect start BAD GOOD": "tests/unit/documents/test_gates.py",
    "# gate.sh NODE": "tests/lab/test_gate_documents.py",
    "Prolog=": "tests/lab/test_gate_documents.py",
    "kind: Job": "tests/unit/documents/test_gates.py",
    "kubectl cordon": "tests/unit/documents/test_gates.py",
    "pytest scenarios/": "tests/unit/documents/test_gates.py",
    "regrepro compare before after": "tests/unit/documents/test_gates.py",
}


def test_every_block_is_run_or_says_why_not() -> None:
    for block in blocks(GATES):
        having = [words for words in TESTED if words in block.text]
        assert len(having) == (0 if block.not_run else 1), f"{block}: neither run nor marked, or both"
    for words, test in TESTED.items():
        the_block(GATES, words)
        assert f'the_block(GATES, "{words}")' in (ROOT / test).read_text(encoding="utf-8"), words


def test_shellcheck_finds_nothing_wrong_with_the_scripts() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    scripts = [block for block in blocks(GATES) if block.text.startswith("#!/bin/sh")]
    assert len(scripts) == 2
    for block in scripts:
        done = subprocess.run(
            ["shellcheck", "-"], input=block.text, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, ""), block


# git bisect: a toy repository, whose commits say how the lab's run on them ends

# In the place of regrepro and of make.
REGREPRO = """#!/bin/sh
echo "$*" >>"$TMPDIR/asked"
. ./answer
"""
MAKE = """#!/bin/sh
[ ! -e broken ]
"""


@pytest.fixture
def bisect(tmp_path: Path) -> Any:
    """Return a function: the answers of the commits, GOOD first and BAD last → exit code, output."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    tree, bin_ = tmp_path / "linux", tmp_path / "bin"
    tree.mkdir()
    bin_.mkdir()
    environment = {
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
    }

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=60,
        )

    def run(*answers: str, regrepro: str = REGREPRO) -> tuple[int, str]:
        for name, text in (("regrepro", regrepro), ("make", MAKE)):
            if text:
                (bin_ / name).write_text(text)
                (bin_ / name).chmod(0o755)
        shell("git init -q && git config user.name t && git config user.email t@t")
        for number, answer in enumerate(answers):
            (tree / "answer").write_text(f"{answer}\n# {number}\n")
            broken = "touch broken" if answer == "broken" else "rm -f broken"
            shell(f"{broken} && git add -A && git commit -q -m 'commit {number}'")
        shell(f"git tag BAD && git tag GOOD HEAD~{len(answers) - 1}")
        (tree / "bisect.sh").write_text(the_block(GATES, "# bisect.sh:").text)
        done = shell(the_block(GATES, "git bisect start BAD GOOD").text)
        return done.returncode, done.stdout

    return run


def test_a_bisection_skips_what_was_not_tried(bisect: Any, tmp_path: Path) -> None:
    """A kernel that cannot be built, and runs that tried nothing, are neither good nor bad."""
    answers = ["exit 0", "exit 0", "broken", "exit 0", "exit 125", "exit 11", "exit 0", "exit 10", "exit 10"]
    code, output = bisect(*answers)
    assert code == 0, output
    assert "is the first bad commit" in output and "    commit 7" in output
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all(
        line.startswith("lab run pin_then_register --ask kernel --kernel . --boot movablecore=512M ")
        for line in asked
    )


def test_a_bisection_that_can_only_skip_names_no_commit(bisect: Any) -> None:
    code, output = bisect("exit 0", "exit 125", "broken", "exit 10")
    assert code == 2 and "only 'skip'ped commits left" in output, output
    assert "is the first bad commit" not in output


@pytest.mark.parametrize("answer", ["exit 2", "exit 1", "exit 130", "kill -9 $$", "exit 77"])
def test_a_bisection_stops_where_regrepro_failed(bisect: Any, answer: str) -> None:
    code, output = bisect("exit 0", answer, answer, answer, "exit 10")
    assert code not in (0, 2) and "is the first bad commit" not in output, output
    assert output.count("regrepro exit code") == 1


def test_a_bisection_stops_where_there_is_no_regrepro(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """127 would be a bad kernel to git."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, output = bisect("exit 0", "exit 0", "exit 10", regrepro="")
    assert code not in (0, 2) and "is the first bad commit" not in output, output
    assert "regrepro exit code 127" in output


# Kubernetes

MANIFESTS = {
    # The oldest Kubernetes that takes each: a rule of podFailurePolicy needs no onPodConditions since 1.29,
    # and appArmorProfile is a field since 1.30.
    "docs/gates.md": "1.29",
    "docs/gpu-node.md": "1.25",
    "packaging/regrepro-watch-daemonset.yaml": "1.30",
}


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Return each manifest of the documents and of packaging/, with the file in which it stands."""
    files = sorted((ROOT / "packaging").glob("*.yaml"))
    texts = [(f"packaging/{file.name}", file.read_text(encoding="utf-8")) for file in files]
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        found = [block.text for block in blocks(document) if "\nkind: " in block.text]
        texts += [(str(document.relative_to(ROOT)), text) for text in found]
    return [(name, whole) for name, text in texts for whole in yaml.safe_load_all(text)]


def newer_than(oldest: str) -> list[str]:
    def number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split("."))

    latest = number(kubernetes_validate.latest_version())[1]
    return [f"1.{minor}" for minor in range(number(oldest)[1], latest + 1)]


@pytest.mark.parametrize(("name", "manifest"), manifests(), ids=[name for name, _ in manifests()])
def test_manifests_are_what_kubernetes_takes(name: str, manifest: dict[str, Any]) -> None:
    """No unknown field, no wrong type, from the oldest version that is named to the newest known."""
    for version in newer_than(MANIFESTS[name]):
        assert kubernetes_validate.validate(manifest, version, strict=True) == version
    wrong = {**manifest, "spec": {**manifest["spec"], "nonsense": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, MANIFESTS[name], strict=True)


def test_every_manifest_is_known_and_says_its_oldest_version() -> None:
    assert sorted(name for name, _ in manifests()) == sorted(MANIFESTS)
    assert f"Kubernetes {MANIFESTS['docs/gates.md']} or later" in GATES.read_text(encoding="utf-8")
    daemon_set = "packaging/regrepro-watch-daemonset.yaml"
    assert f"Kubernetes {MANIFESTS[daemon_set]} or later" in (ROOT / daemon_set).read_text(encoding="utf-8")
    [(_, manifest)] = [entry for entry in manifests() if entry[0] == daemon_set]
    with pytest.raises(kubernetes_validate.ValidationError, match="appArmorProfile"):
        kubernetes_validate.validate(manifest, "1.29", strict=True)


def test_the_job_is_a_gate() -> None:
    """One try, any code but 0 fails it, the node may be cordoned, and regrepro takes the command."""
    job = yaml.safe_load(the_block(GATES, "kind: Job").text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never" and spec["activeDeadlineSeconds"]
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}}
    assert pod["nodeName"] and pod["tolerations"] == [{"operator": "Exists"}]
    [container] = pod["containers"]
    assert {item["name"] for item in container["volumeMounts"]} == {item["name"] for item in pod["volumes"]}
    assert container["command"][-1] == "/out/$(POD)"
    known(" ".join(container["command"]))


@pytest.mark.parametrize(
    ("complete", "calls"), [(0, "cordon create wait uncordon"), (1, "cordon create wait")]
)
def test_the_node_is_uncordoned_only_when_the_job_is_complete(
    complete: int, calls: str, tmp_path: Path
) -> None:
    stub = tmp_path / "kubectl"
    stub.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/calls\n[ "$1" != wait ] || exit {complete}\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", the_block(GATES, "kubectl cordon").text],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False,
        timeout=60,
    )
    assert done.returncode == complete
    assert (tmp_path / "calls").read_text().split() == calls.split()


# Commands that need a GPU node or hours: each exists, with the options that it is shown with


def known(line: str) -> None:
    """A command of regrepro is known, with its options."""
    words = line.split("#", maxsplit=1)[0].split()
    command = words[1 : 3 if words[1] == "lab" else 2]
    help_text = CliRunner().invoke(cli.group, [*command, "--help"])
    assert help_text.exit_code == 0, help_text.output
    for option in (word for word in words if word.startswith("--")):
        assert option in help_text.output, f"{' '.join(command)} has no {option}"


def lines_of(block: Block, program: str) -> list[str]:
    found = [line for line in block.text.splitlines() if line.startswith(f"{program} ")]
    assert len(found) == len([line for line in block.text.splitlines() if line and line[0] != "#"]), block
    return found


def test_the_commands_of_an_upgrade_exist() -> None:
    for line in lines_of(the_block(GATES, "regrepro compare before after"), "regrepro"):
        known(line)


def test_the_options_of_pytest_exist(tmp_path: Path) -> None:
    (tmp_path / "scenarios").mkdir()

    def refused(*words: str) -> bool:
        asked = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", *words]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        return "unrecognized arguments" in done.stderr

    assert refused("--no-such-option")
    for line in lines_of(the_block(GATES, "pytest scenarios/"), "pytest"):
        assert not refused(*line.split("#", maxsplit=1)[0].split()[1:]), line

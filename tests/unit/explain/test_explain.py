"""Grouping, wrapped lines, memory."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from regrepro.explain.explain import Explainer
from regrepro.explain.report import plain
from unit.explain.explaining import CORPUS, LOG, WARN, run


def test_every_result_holds_to_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(
        resources.files("regrepro").joinpath("schema", "explain-1.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in sorted(CORPUS.glob("*.log")):
        result = run(path.read_bytes())
        validator.validate(json.loads(json.dumps(result)))
        assert plain(result)


def test_the_same_failure_of_many_is_one_group() -> None:
    log = "".join(WARN.format(host=number % 50, pid=number) for number in range(3000))
    result = run(log)
    (group,) = result["groups"]
    assert group["count"] == 3000
    assert len(group["hosts"]) == 50
    assert len(group["samples"]) == 3
    assert (group["first"]["line"], group["last"]["line"]) == (1, 3000)


MESSAGE = LOG.index("Call to") + len("Call to ibv_reg_")


@pytest.mark.parametrize("at", range(MESSAGE, len(LOG) - 1, 2))
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_line_wrapped_anywhere_in_the_message_is_read(at: int, ending: str) -> None:
    """Terminals and collectors cut lines where they please."""
    (group,) = run(LOG[:at] + ending + LOG[at:])["groups"]
    assert (group["call"], group["errno"], group["count"]) == ("ibv_reg_mr_iova2", "ENOMEM", 1)


def test_binary_noise_says_nothing() -> None:
    result = run(bytes(range(256)) * 4096)
    assert result["groups"] == []
    assert result["remarks"] == []


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """64 MiB with a failure in every tenth line, all different: the peak stays that of an empty log,
    nearly.
    """
    log = tmp_path / "job.log"
    with log.open("w", encoding="utf-8") as file:
        for number in range(60_000):
            file.write(
                f"[Rank {number % 64}] step {number} loss 2.1 and some more words to fill the line\n" * 9
            )
            file.write(WARN.format(host=number % 100, pid=number))
    program = (
        "import re, sys\nfrom regrepro.explain.explain import explain\n"
        "with open(sys.argv[1], 'rb') as file:\n    result = explain([('log', file)])\n"
        # Not ru_maxrss: that starts from the peak of the process which was forked from.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(result['groups'][0]['count'], peak)\n"
    )
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", program, str(log)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": source},
    )
    count, peak = done.stdout.split()
    assert int(count) == 60_000
    assert int(peak) < 80 * 1024, f"{peak} KiB"


def test_too_many_kinds_are_counted_not_kept() -> None:
    explainer = Explainer()
    log = "".join(
        f"libfabric:{number}:2::efa:mr:efa_mr_{number:04d}():1<warn> Unable to register MR\n"
        for number in range(400)
    )
    explainer.read_file("log", io.BytesIO(log.encode()))
    result = explainer.result()
    assert len(result["groups"]) == 256
    assert result["more_groups"] == 144

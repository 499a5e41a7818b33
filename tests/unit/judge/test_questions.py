"""The four questions: exit code and answer, from records, for each thing that can be the matter."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import record_builder as build
from click.testing import CliRunner
from record_builder import Record
from run_builder import write

from regrepro import cli
from regrepro.errors import UsageError
from regrepro.judge import QUESTIONS, answer, judge_record
from regrepro.judge.questions import OPTIONAL_NEEDS, check_terms, declared_answer, standing
from regrepro.scenario import NEEDS

SCHEMA = json.loads((Path(cli.__file__).parent / "schema/verdicts-1.json").read_text(encoding="utf-8"))


def in_the_lab(record: Record, contract: str, boot: tuple[str, ...] = ("cma=512M",)) -> Record:
    """The same record with the stand-in of a driver as the holder of the scenario's own pin."""
    name = f"standin:{contract}"
    record.header["run"]["cuda"] = name
    record.header["lab"] = {"kernel": "7.3", "boot": list(boot)}
    for event in record.events:
        if event["event"] == "pin" and event["control"] is None:
            event["owner"] = name
            event["kind"] = contract
    return record


def without(record: Record, argument: str, why: str) -> Record:
    """The same record of a boot that did not give an argument."""
    record.header["lab"]["boot"].append(argument)
    event = {"event": "reservation", "argument": argument, "wanted": None, "got": None, "ok": False}
    record.events.append({**event, "seq": len(record.events) + 1, "t": 9.0, "why": why, "kernel_lines": []})
    return record


BY_IO_URING = {"rxe_reg_user_mr": "io_sqe_buffers_register", "__ib_umem_get_va": "io_pin_pages"}


def by_io_uring(record: Record) -> Record:
    for event in record.events:
        if event["event"] == "register":
            event |= {"verb": "io_uring_register_buffers", "device": "io_uring"}
            for step in (*event["trace"].get("events", ()), *event["trace"].get("tree", ())):
                if step.get("fn") in BY_IO_URING:
                    step["fn"] = BY_IO_URING[step["fn"]]
    return record


def unmet(need: str = "root", name: str = "pin_then_register", **run: Any) -> Record:
    builder = build.Builder()
    builder.header["run"] |= run
    builder.memory_map()
    builder.begin(name)
    builder.event("unmet", need=need, why=f"there is no {need}", how="get it")
    builder.end("unmet")
    return builder.done()


def old() -> Record:
    return in_the_lab(build.reproduced_record(), "pin")


def fixed() -> Record:
    return in_the_lab(build.longterm_record(), "longterm")


def mixed(*records: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header of the first, and the verdicts of all as if one run had given them."""
    verdicts = [item for record in records for item in judge_record(record)["verdicts"]]
    return records[0].header, {"verdicts": verdicts, "complete": True, "problems": []}


def judged(record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    return record.header, judge_record(record)


NINE = ("cma=9G", "the kernel gave nothing of 9 GiB")
TYPO = ("cmaa=512M", "this kernel knows no such argument")
# Situation → exit codes for reproduce, driver, kernel, node.
CELLS: dict[str, tuple[Any, tuple[int, int, int, int]]] = {
    "fixed driver": (lambda: judged(fixed()), (0, 0, 10, 0)),
    "old driver": (lambda: judged(old()), (10, 10, 10, 10)),
    "no unpinnable memory": (
        lambda: judged(in_the_lab(build.placement_record(), "pin", ("hugetlb_cma=0",))),
        (0, 125, 125, 0),
    ),
    "failed reservation, old driver": (lambda: judged(without(old(), *NINE)), (125, 125, 125, 125)),
    "failed reservation, fixed driver": (lambda: judged(without(fixed(), *NINE)), (125, 125, 125, 125)),
    "no rights": (lambda: judged(unmet()), (125, 125, 125, 125)),
    "no RDMA, fixed driver": (lambda: judged(by_io_uring(fixed())), (0, 0, 10, 125)),
    "no RDMA, old driver": (lambda: judged(by_io_uring(old())), (10, 10, 10, 10)),
    "unknown boot argument": (lambda: judged(without(fixed(), *TYPO)), (125, 125, 125, 125)),
    "a fixed driver beside vmsplice": (lambda: mixed(fixed(), build.get_record()), (10, 0, 10, 10)),
    "a fixed driver beside an old one": (
        lambda: mixed(fixed(), old_by("standin:longterm")),
        (10, 10, 10, 10),
    ),
    "a fixed driver, and what is optional": (
        lambda: mixed(fixed(), *(unmet(need, f"gpu_{need[:3]}") for need in OPTIONAL_NEEDS)),
        (0, 0, 10, 0),
    ),
    "a fixed driver, and a need that is not optional": (
        lambda: mixed(fixed(), unmet("rdma", "gpu_buffer")),
        (125, 0, 10, 125),
    ),
    "pins of our own, refused": (lambda: judged(build.reproduced_record()), (10, 125, 10, 10)),
    "pins of our own, allowed": (lambda: judged(build.kernel_record()), (0, 125, 0, 0)),
    "pins of our own that ask for it": (lambda: judged(build.longterm_record()), (0, 125, 10, 0)),
}


def old_by(owner: str) -> Record:
    record = old()
    for event in record.events:
        if event["event"] == "pin" and event["control"] is None:
            event["owner"] = owner
    return record


@pytest.mark.parametrize("situation", CELLS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_cell(situation: str, question: str) -> None:
    make, codes = CELLS[situation]
    header, verdicts = make()
    found = answer(verdicts, question, header)
    assert found.code == codes[list(QUESTIONS).index(question)], found.line
    assert found.line.startswith(f"Asked {question} ({QUESTIONS[question]}): ")
    assert f"Exit code {found.code}: " in found.line and "\n" not in found.line
    told = {0: "no, ", 10: "yes, ", 125: "not told, "}[found.code]
    assert found.text.startswith(told)
    jsonschema.validate({"schema": "regrepro.verdicts/1", **verdicts, **found.as_json()}, SCHEMA)


def test_a_boot_that_gave_less_makes_every_verdict_unmet_and_names_the_argument() -> None:
    for record in (without(old(), *NINE), without(in_the_lab(unmet(), "pin"), *TYPO)):
        [item] = judge_record(record)["verdicts"]
        assert item["verdict"] == "unmet" and item["basis"] is None and item["layer"] is None
        [lack] = item["unmet"]
        assert lack["need"] == "boot" and record.header["lab"]["boot"][-1] in lack["why"]
    # Nothing can allow it, and what a pin did to its pages does not decide it either.
    header, verdicts = judged(without(old(), *NINE))
    assert answer(verdicts, "driver", header, allow_unmet=("all", "boot")).code == 125


def test_what_the_command_line_of_a_node_did_not_get_is_no_matter_of_a_run() -> None:
    record = without(old(), *NINE)
    record.header["lab"]["boot"].remove("cma=9G")
    assert judge_record(record)["verdicts"][0]["verdict"] == "reproduced"
    record.header["lab"] = None
    assert judge_record(record)["verdicts"][0]["verdict"] == "reproduced"


def test_a_stand_in_is_a_driver_in_the_lab_alone_and_only_the_chosen_one() -> None:
    header, verdicts = judged(fixed())
    assert answer(verdicts, "driver", {**header, "lab": None}).code == 125
    other = copy.deepcopy(header)
    other["run"]["cuda"] = "standin:pin"
    assert answer(verdicts, "driver", other).code == 125
    assert "is a stand-in" in answer(verdicts, "driver", other).line


def by_the_driver(flags: list[str], moved: int) -> dict[str, Any]:
    """The trace of a pin that NVIDIA's module took."""
    stack = ["os_lock_user_pages [nvidia]"]
    args = {"start": build.ADDRESS, "nr_pages": 8, "flags": flags}
    call = {"t": 0.3, "fn": "pin_user_pages", "ret": 8, "caller": stack[0], "stack": stack, "args": args}
    return build.trace(events=[*(build.migration(moved, 0, 0) if moved else []), call])


def test_cuda_is_a_driver_anywhere() -> None:
    for record, code in ((fixed(), 0), (old(), 10)):
        for event in record.events:
            if event["event"] == "pin" and event["control"] is None:
                moves = event["kind"] == "longterm"
                flags = ["FOLL_WRITE", *(["FOLL_LONGTERM"] if moves else [])]
                event |= {"owner": "cuda", "trace": by_the_driver(flags, moved=8 if moves else 0)}
        record.header["lab"] = None
        record.header["node"] |= {"nvidia_driver": "550.67", "nvidia_module": True}
        header, verdicts = judged(record)
        found = answer(verdicts, "driver", header)
        assert found.code == code and "NVIDIA driver 550.67" in found.line


def contract_of(verdict: str, needs: list[str], contract: str) -> dict[str, Any]:
    value = {"1": {"contract": contract, "owner": "cuda", "why": "it moved"}}
    return {
        "scenario": "pin_contract", "verdict": verdict, "pin_owner": "cuda", "reason": "because",
        "unmet": [{"need": need, "why": "", "how": ""} for need in needs], "checks": [],
        "evidence": {"pin_contract": {"value": value, "how": "inferred", "source": ""}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "needs", "contract", "code"),
    [
        ("unmet", ["trace"], "plain", 10),  # without a trace the pages still tell
        ("unmet", ["control", "release"], "plain", 10),
        ("unmet", ["references"], "plain", 125),
        ("unmet", ["trace", "consistency"], "plain", 125),
        ("unmet", ["boot"], "plain", 125),
        ("unmet", ["trace"], "longterm", 125),
        ("other-failure", [], "plain", 10),
        ("other-failure", [], "longterm", 125),
        ("error", [], "plain", 125),
        ("not-reproduced", [], "longterm", 0),
        ("not-reproduced", [], "unknown", 125),
    ],
)
def test_what_the_pages_say_of_a_driver(verdict: str, needs: list[str], contract: str, code: int) -> None:
    item = contract_of(verdict, needs, contract)
    assert answer({"verdicts": [item], "complete": True}, "driver", {}).code == code
    # The contract of another's pin is nobody's.
    item["evidence"]["pin_contract"]["value"]["1"]["owner"] = "io-uring"
    assert answer({"verdicts": [item], "complete": True}, "driver", {}).code == 125


def test_a_contract_beside_contradicted_evidence_decides_nothing() -> None:
    item = contract_of("other-failure", [], "plain")
    item["checks"] = [{"name": "movement", "state": "contradicted", "text": ""}]
    assert answer({"verdicts": [item], "complete": True}, "driver", {}).code == 125


def test_require_and_allow_unmet() -> None:
    header, verdicts = mixed(fixed(), unmet("peer-memory", "gpu_buffer_peermem"), unmet("rdma", "gpu_rdma"))

    def code(question: str, **terms: Any) -> int:
        return answer(verdicts, question, header, **terms).code

    assert code("node") == 125
    assert code("node", allow_unmet=["rdma"]) == 0
    assert code("node", allow_unmet=["rdma"], require=["peer-memory"]) == 125
    assert code("node", allow_unmet=["rdma"], require=["gpu_buffer_peermem"]) == 125
    assert code("driver") == 0
    assert code("driver", require=["gpu_rdma"]) == 125
    assert code("driver", require=["rdma"]) == 125
    assert code("driver", require=["longterm_pin_then_register"]) == 0
    kernel = judged(unmet("kernel>=5.13"))[1]
    assert standing(kernel["verdicts"][0], "node", {}, allow_unmet=["kernel"]).state == "aside"
    assert answer(kernel, "node", {}, allow_unmet=["kernel"]).code == 125  # nothing is left that answers


def test_a_run_that_was_cut_or_is_empty_is_undecided() -> None:
    header, verdicts = judged(fixed())
    for question in QUESTIONS:
        assert answer({"verdicts": [], "complete": False}, question, header).code == 125
        cut = answer({**verdicts, "complete": False}, question, header).code
        assert cut == (10 if question == "kernel" else 125)
    assert declared_answer({"verdicts": [], "complete": True}).code == 125


def test_names_that_are_not_there() -> None:
    def check(require: tuple[str, ...] = (), allow: tuple[str, ...] = ()) -> None:
        check_terms(require, allow, scenarios=["no_pin"], needs=(*NEEDS, "kernel"))

    check(("no_pin", "rdma", "kernel>=6.1"), ("cuda", "kernel"))
    for require, allow, says in (
        (("pin_contract",), (), "no_pin, root"),
        ((), ("no_pin",), "root, unpinnable"),
        (("rdma",), ("rdma",), "exclude each other"),
    ):
        with pytest.raises(UsageError, match=says):
            check(require, allow)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_command_line_says_it_last_and_exits_with_it(tmp_path: Path, question: str) -> None:
    directory = write(tmp_path / "run", fixed(), verdicts=False)
    expected = answer(judge_record(fixed()), question, fixed().header)
    done = CliRunner().invoke(cli.group, ["judge", str(directory), "--ask", question])
    assert (done.exit_code, done.output.splitlines()[-1]) == (expected.code, expected.line)
    done = CliRunner().invoke(cli.group, ["judge", str(directory), "--ask", question, "--json"])
    value = json.loads(done.output)
    jsonschema.validate(value, SCHEMA)
    assert {key: value[key] for key in ("question", "answer", "exit_code")} == expected.as_json()
    assert done.exit_code == expected.code


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ask", "driver", "--expect", "declared"],
        ["--require", "no_such", ],
        ["--allow-unmet", "no_such"],
        ["--allow-unmet", "rdma", "--expect", "declared"],
        ["--ask", "fleet"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["run", "lab", "judge", "compare"])
def test_what_cannot_be_asked_is_a_usage_error(
    tmp_path: Path, command: str, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    directory = str(write(tmp_path / "run", fixed(), verdicts=False))
    words = {"run": ["run", "no_pin"], "lab": ["lab", "run", "no_pin"], "judge": ["judge", directory]}
    given = words.get(command, ["compare", directory, directory])
    with pytest.raises(SystemExit) as ended:
        cli.main([*given, *arguments])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said

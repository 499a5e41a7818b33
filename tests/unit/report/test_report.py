"""Reports: what they open with, what they hold, and what becomes of records that are flawed."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import record_builder as build
from click.testing import CliRunner

from regrepro import judge
from regrepro.errors import UsageError
from regrepro.report import cprogram, html, markdown, tap, text
from regrepro.report.commands import make, report
from regrepro.report.load import load
from regrepro.report.model import build as build_report

RECORDS = {
    "reproduced": build.reproduced_record,
    "get": build.get_record,
    "partly-pinned": build.partly_pinned_record,
    "kernel": build.kernel_record,
    "longterm": build.longterm_record,
    "placement": build.placement_record,
    "no-pin": build.no_pin_record,
}


def in_lab(record: Any) -> Any:
    record.header["lab"] = {
        "kernel": "7.3.4",
        "boot": ["cma=512M"],
        "memory": 2 << 30,
        "numa": 1,
        "accel": "tcg",
    }
    return record


def with_driver(record: Any) -> Any:
    """The same run with CUDA's own driver holding the pin."""
    record.header["node"]["nvidia_driver"] = "535.129.03"
    for event in record.events:
        if event["event"] == "pin" and event["kind"] != "none":
            event |= {"owner": "cuda", "api": "cudaHostRegister", "driver": "535.129.03"}
        for pin in event.get("pins", []):
            pin |= {"alive_before": None, "alive_after": None}
    return record


class Outline(HTMLParser):
    """The text of a document, and whether every tag is closed in order."""

    VOID = ("meta", "rect", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def outline(document: str) -> Outline:
    parser = Outline()
    parser.feed(document)
    assert parser.open == []
    return parser


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("kind", ["html", "markdown", "text"])
def test_every_format_says_the_answer_before_anything_else(name: str, kind: str, tmp_path: Path) -> None:
    run = build.write(tmp_path, RECORDS[name]())
    content = build_report(load(run))
    made = make(run, kind)
    plain = " ".join(" ".join(outline(made).text).split()) if kind == "html" else " ".join(made.split())
    plain = plain.replace("\\", "")
    answer = " ".join(content.answer.split())
    assert plain.index(answer) < plain.index(content.concerns[0][1])
    for gap in content.gaps:
        assert " ".join(gap.split()) in plain


def test_a_lab_run_says_in_its_first_line_that_no_driver_took_part(tmp_path: Path) -> None:
    run = build.write(tmp_path, in_lab(build.reproduced_record()))
    assert make(run, "text").startswith("Lab run, in a virtual machine: no vendor driver")
    assert make(run, "markdown").startswith("> Lab run, in a virtual machine: no vendor driver")
    words = [part.strip() for part in outline(make(run, "html")).text if part.strip()]
    assert words[1].startswith("Lab run, in a virtual machine: no vendor driver")  # words[0] is the title


def test_only_the_drivers_own_pin_blames_the_driver(tmp_path: Path) -> None:
    stand_in = build_report(
        load(build.write(tmp_path / "a", build.reproduced_record(nvidia_driver="535.129.03")))
    )
    assert "it is this bug" not in stand_in.answer
    assert "susceptible" in stand_in.answer
    assert dict(stand_in.concerns)["driver"].startswith("none took part")
    assert "driver vendor" not in dict(stand_in.asks)
    real = build_report(load(build.write(tmp_path / "b", with_driver(build.reproduced_record()))))
    assert real.verdict == "reproduced"
    assert real.answer.startswith("Yes, it is this bug: a pin held by NVIDIA driver 535.129.03")
    assert dict(real.concerns)["driver"] == "NVIDIA driver 535.129.03"
    assert "FOLL_LONGTERM" in dict(real.asks)["driver vendor"]
    assert not any("No vendor driver" in gap for gap in real.gaps)


def test_placement_says_nothing_of_a_driver(tmp_path: Path) -> None:
    content = build_report(load(build.write(tmp_path, build.placement_record())))
    assert "has no unpinnable memory at all" in content.answer
    assert "nothing of a driver" in content.answer


def test_the_chain_shows_each_link_and_how_it_is_known(tmp_path: Path) -> None:
    content = build_report(load(build.write(tmp_path, build.reproduced_record())))
    [finding] = content.findings
    links = {link.claim: link for link in finding.chain}
    assert links["Where the pages lay"].seen.startswith("all 8 pages in CMA")
    assert links["Who held a pin on them"].how == "observed"
    assert links["What the registration asked for"].how == "inferred"  # this trace shows no flags
    assert links["What the caller saw"].seen == "ibv_reg_mr_iova2 failed with ENOMEM"
    assert all(link.state in ("", "ok") for link in finding.chain)
    assert [line.text for line in finding.path if line.deepest] == ["migrate_pages = 8"]


def test_flags_in_the_trace_are_observed(tmp_path: Path) -> None:
    record = build.reproduced_record()
    for event in record.events:
        for part in (event.get("trace") or {}).get("events", []):
            if part.get("fn") == "pin_user_pages_fast":
                part["args"] = {"flags": ["FOLL_WRITE", "FOLL_LONGTERM"]}
    [finding] = build_report(load(build.write(tmp_path, record))).findings
    [link] = [link for link in finding.chain if link.claim == "What the registration asked for"]
    assert link.how == "observed"
    assert "FOLL_WRITE|FOLL_LONGTERM" in link.seen


def test_pictures_show_places_pins_and_movement(tmp_path: Path) -> None:
    [finding] = build_report(load(build.write(tmp_path, build.partly_pinned_record()))).findings
    moments = {moment.label: moment for moment in finding.moments}
    assert list(moments) == [
        "as placed",
        "pin 1 taken",
        "after registration 1: ENOMEM",
        "pin 1 released",
        "after registration 2: OK",
    ]
    assert moments["pin 1 taken"].cells == ((0, 3, "cma", False), (3, 4, "cma", True), (4, 8, "cma", False))
    assert moments["after registration 1: ENOMEM"].note == "7 pages moved"
    assert moments["after registration 1: ENOMEM"].cells[1] == (3, 4, "cma", True)
    assert moments["after registration 2: OK"].note == "1 page moved"
    shown = make(tmp_path, "text")
    assert "oooCoooo" in shown
    assert shown.index("CCCCCCCC") < shown.index("oooCoooo") < shown.index("oooooooo")


def test_controls_stand_beside_the_scenario(tmp_path: Path) -> None:
    [finding] = build_report(load(build.write(tmp_path, build.reproduced_record()))).findings
    assert [(trial.name, trial.result, trial.held) for trial in finding.trials] == [
        ("the scenario itself", "ENOMEM", None),
        ("no-pin", "OK", True),
        ("ordinary-memory", "OK", True),
    ]
    assert finding.trials[1].moved == "8 moved, 0 stayed"
    assert finding.trials[2].placed == "8 in ordinary memory"


def test_what_a_record_holds_cannot_become_markup(tmp_path: Path) -> None:
    record = build.reproduced_record(hostname="<script>alert(1)</script>", kernel="7.3 | **x** `y`")
    record.header["stand_ins"][0]["what"] = "<img src=x onerror=alert(1)>"
    run = build.write(tmp_path, record)
    tags = outline(make(run, "html")).tags
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in tags}
    assert not [value for _, attrs in tags for name, value in attrs.items() if name in ("src", "srcset")]
    lines = [line for line in make(run, "markdown").split("\n") if line.startswith("| kernel |")]
    assert lines
    assert all("7.3 \\| \\*\\*x\\*\\* \\`y\\`" in line for line in lines)


def test_html_needs_no_network(tmp_path: Path) -> None:
    made = make(build.write(tmp_path, build.reproduced_record()), "html")
    hrefs = [attrs["href"] for _, attrs in outline(made).tags if attrs.get("href")]
    assert all(str(href).startswith("#") for href in hrefs)
    assert "url(" not in made
    assert "@import" not in made


def test_large_buffers_are_drawn_as_strips(tmp_path: Path) -> None:
    record = build.reproduced_record()
    many = list(range(1, 900))
    for event in record.events:
        if event["event"] == "buffer" and event["control"] is None:
            event["pages"] = build.state(many)
    document = make(build.write(tmp_path, record), "html")
    assert 'class="strip"' in document
    assert "899 x C" in make(tmp_path, "text")


@pytest.mark.parametrize("kind", ["html", "markdown", "text", "tap"])
@pytest.mark.parametrize("flaw", ["cut", "killed", "no-scenario", "future-verdict", "other-verdicts-schema"])
def test_flawed_runs_are_shown_with_what_is_wrong(kind: str, flaw: str, tmp_path: Path) -> None:
    record = build.reproduced_record()
    expected = ""
    if flaw == "no-scenario":
        record.events = record.events[:1]
    build.write(tmp_path, record)
    file = tmp_path / "record.jsonl"
    if flaw == "cut":
        file.write_bytes(file.read_bytes()[:-20])
        expected = "is cut and was left out"
    elif flaw == "killed":
        lines = file.read_text().splitlines()
        file.write_text("\n".join(lines[:-1]) + "\n")
        expected = "the run was killed or is still going on"
    elif flaw == "no-scenario":
        expected = "the record holds no scenario"
    else:
        verdicts = json.loads((tmp_path / "verdicts.json").read_text())
        if flaw == "future-verdict":
            verdicts["verdicts"][0]["verdict"] = "half-reproduced"
            expected = "holds the verdict 'half-reproduced', which this version does not know"
        else:
            verdicts["schema"] = "regrepro.verdicts/9"
            expected = "has schema 'regrepro.verdicts/9'"
        (tmp_path / "verdicts.json").write_text(json.dumps(verdicts))
        if kind == "tap":
            expected = "not ok 1"  # it judges the record anew and shows nothing of verdicts.json
    result = CliRunner().invoke(report, [str(tmp_path), "--format", kind])
    assert result.exit_code == 0, result.output
    shown = result.output.replace("&#x27;", "'").replace("\\", "")
    assert expected in " ".join(shown.split())
    if flaw in ("cut", "killed"):
        assert "ENOMEM" in shown  # what was seen before is shown


def test_a_record_of_another_version_shows_the_verdicts_that_lie_there(tmp_path: Path) -> None:
    record = build.reproduced_record()
    build.write(tmp_path, record)
    lines = (tmp_path / "record.jsonl").read_text().replace("regrepro.record/2", "regrepro.record/7")
    (tmp_path / "record.jsonl").write_text(lines)
    shown = " ".join(make(tmp_path, "text").split())
    assert "this version of regrepro" in shown
    assert "could not be judged again" in shown
    assert "pin_then_register" in shown
    (tmp_path / "verdicts.json").unlink()
    with pytest.raises(UsageError, match=r"regrepro\.record/7"):
        make(tmp_path, "text")


def test_empty_directories_and_missing_ones_are_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no record"):
        make(tmp_path, "html")
    with pytest.raises(UsageError, match="does not exist"):
        make(tmp_path / "nowhere", "html")


@pytest.mark.parametrize("kind", ["html", "markdown", "text"])
def test_no_malformed_event_ends_a_report(kind: str, tmp_path: Path) -> None:
    """Every value of every event replaced by something else, one at a time: still a report."""
    record = build.partly_pinned_record()
    render = {"html": html.render, "markdown": markdown.render, "text": text.render}[kind]
    wrong: tuple[Any, ...] = (None, "x", -1, [], {}, [[1]], True)
    from regrepro.record import Record
    from regrepro.report.load import Run

    tried = 0
    for index, event in enumerate(record.events):
        for number, key in enumerate(event):
            if key in ("event", "seq"):
                continue
            changed = copy.deepcopy(record.events)
            changed[index][key] = wrong[(index + number) % len(wrong)]
            read = Record(record.header, changed, [])
            assert render(build_report(Run(tmp_path, read, judge.judge_record(read))))
            tried += 1
    assert tried > 100


# TAP


def test_tap_calls_the_bug_not_ok_and_undecided_a_skip() -> None:
    verdicts = judge.judge_record(build.reproduced_record())
    lines = tap.render(verdicts).splitlines()
    assert lines[:3] == ["TAP version 13", "1..1", "not ok 1 - pin_then_register"]
    assert "Bail out!" not in "\n".join(lines)
    assert tap.render(verdicts, expect_declared=True).splitlines()[2] == "ok 1 - pin_then_register"
    unmet = {
        "verdicts": [{"scenario": "a", "verdict": "unmet", "reason": "needs # root\nhere"}],
        "complete": True,
    }
    lines = tap.render(unmet).splitlines()
    assert lines[2] == "ok 1 - a # SKIP needs # root here"
    assert lines[-1] == "Bail out! nothing was decided"


def test_tap_is_never_green_for_a_run_that_did_not_end() -> None:
    verdicts = judge.judge_record(build.kernel_record())
    assert tap.render(verdicts).splitlines()[2].startswith("ok 1")
    assert tap.render({**verdicts, "complete": False}).splitlines()[-1].startswith("Bail out!")
    assert tap.render({"verdicts": []}).splitlines()[-1].startswith("Bail out!")


# The C program


def compile_c(source: str, directory: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("needs a C compiler and the headers of libibverbs")
    file = directory / "program.c"
    file.write_text(source)
    made = directory / "program"
    flags = ["-Wall", "-Wextra", "-Werror", "-O2"]
    done = subprocess.run(
        [compiler, *flags, "-o", str(made), str(file), "-libverbs", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return made


def retry_record() -> Any:
    """The longest of the shipped ones: pinned, refused twice, released, pinned again on ordinary memory."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin("release_and_retry")
    cma, out = build.state(build.CMA), build.state(build.OUT)
    builder.buffer(cma)
    builder.pin(cma, build.state(build.CMA, 1025))
    for number in (1, 2):
        builder.register(
            build.state(build.CMA, 1025), build.state(build.CMA, 1025), number, "ENOMEM", pins=[1]
        )
    builder.release(cma)
    builder.register(cma, build.state(build.OUT, 1025), 3)
    builder.event("deregister", registration=3, errno=None)
    builder.pin(out, build.state(build.OUT, 1025), 2)
    builder.register(build.state(build.OUT, 1025), build.state(build.OUT, 2049), 4, pins=[2])
    builder.event("deregister", registration=4, errno=None)
    builder.release(build.state(build.OUT, 1025), 2)
    builder.end()
    return builder.done()


def io_uring_record() -> Any:
    record = build.reproduced_record()
    for event in record.events:
        if event["event"] == "register":
            event |= {"verb": "io_uring_register_buffers", "device": None}
    return record


C_RECORDS = {
    "pin": build.reproduced_record,
    "get": build.get_record,
    "longterm": build.longterm_record,
    "one-page": build.partly_pinned_record,
    "retry": retry_record,
    "io-uring": io_uring_record,
}


@pytest.mark.parametrize("name", C_RECORDS)
def test_c_programs_compile_without_a_warning_and_are_short(name: str, tmp_path: Path) -> None:
    source = cprogram.render(C_RECORDS[name]())
    assert source.count("\n") < 450
    assert "@@" not in source
    assert "//@" not in source
    made = compile_c(source, tmp_path)
    # No memory lies in this range: no page can be placed there, or no PFN, or no device is seen.
    done = subprocess.run(
        [str(made), "1-1"], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode in (4, 1), done.stdout + done.stderr
    assert done.stdout.startswith("TAP version 13\n")
    assert "SKIP" in done.stdout
    assert subprocess.run([str(made), "-x"], capture_output=True, check=False).returncode == 2
    assert subprocess.run([str(made), "nonsense"], capture_output=True, check=False).returncode == 2


def test_a_c_program_registers_only_once_its_pin_is_held(tmp_path: Path) -> None:
    """The pinning system call is held up for a second; nothing may be registered or called pinned before."""
    if os.geteuid() != 0:
        pytest.skip("needs root: PFNs and userfaultfd")
    program = compile_c(cprogram.render(io_uring_record()), tmp_path)
    late = tmp_path / "late.c"
    late.write_text(
        "#define _GNU_SOURCE\n#include <stdio.h>\n#include <string.h>\n#include <sys/syscall.h>\n"
        "#include <sys/uio.h>\n#include <unistd.h>\n"
        "ssize_t process_vm_writev(pid_t p, const struct iovec *l, unsigned long n, const struct iovec *r,\n"
        'unsigned long m, unsigned long f)\n{ sleep(1); puts("# the pin begins");\n'
        "return syscall(SYS_process_vm_writev, p, l, n, r, m, f); }\n"
        # Without counts of pageblocks any range can be given: a node without such memory runs the steps.
        "FILE *fopen64(const char *, const char *);\n"
        'FILE *fopen(const char *name, const char *mode)\n{ return strcmp(name, "/proc/pagetypeinfo") ?\n'
        "fopen64(name, mode) : NULL; }\n"
    )
    library = tmp_path / "late.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(late)], check=True)
    done = subprocess.run(
        [str(program), "0-0xfffffffff"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "LD_PRELOAD": str(library)},
    )
    if done.returncode == 4:
        pytest.skip(f"needs what this machine lacks: {done.stdout.splitlines()[-1]}")
    out = done.stdout
    assert (
        out.index("# the pin begins")
        < out.index("# pinned: ")
        < out.index("ok 1 ")
        < out.index("# pin released")
    )
    assert "nothing was written" in out
    assert "ok 1 io_uring_register_buffers of 8 pages, pins held: 1" in out
    assert "assumed, as given" in out
    assert "are unpinnable" not in out


def test_a_c_program_does_the_recorded_steps_in_order() -> None:
    source = cprogram.render(retry_record())
    main = source[source.index("int main(") :]
    calls = ["make_buffer(8", "pin_pages(&b1, 0, 8)", "mr1", "mr2", "release_pin(p1)", "mr3", "p2", "mr4"]
    places = [main.index(call) for call in calls]
    assert places == sorted(places)
    assert "1..4" in source
    assert main.count('"ENOMEM"') == 2
    assert "uring" not in main


def test_a_c_program_pins_only_what_was_pinned() -> None:
    record = build.partly_pinned_record()
    assert "pin_pages(&b1, 3, 1)" in cprogram.render(record)
    for event in record.events:
        if event["event"] == "buffer":
            event["place"] = {"unpinnable": [3]}
    assert "{ 0, 3, ORDINARY }, { 3, 1, UNPINNABLE }, { 4, 4, ORDINARY }" in cprogram.render(record)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("buffer", {"backing": "hugetlb"}), "backed by hugetlb"),
        (("pin", {"length": "eight"}), "does not say what it pinned"),
        (("register", {"access": ['LOCAL_WRITE); system("x"']}), "no names"),
        (("register", {"verb": "ibv_reg_dmabuf_mr"}), "ibv_reg_dmabuf_mr"),
        (("register", {"registration": "1; x"}), "has no number"),
        (("free", {"event": "step", "name": "set_memlock"}), "set_memlock"),
    ],
)
def test_what_no_c_program_can_do_is_refused_with_the_reason(
    change: tuple[str, dict[str, Any]], why: str
) -> None:
    record = build.reproduced_record()
    kind, keys = change
    next(event for event in record.events if event["event"] == kind).update(keys)
    with pytest.raises(UsageError, match=why):
        cprogram.render(record)
    assert cprogram.exportable(record) == []


def test_what_a_run_looks_at_between_the_steps_is_no_step() -> None:
    """Every pass of a run ends with a check of its memory map; it once kept every run from being exported."""
    record = build.reproduced_record()
    free = next(event for event in record.events if event["event"] == "free")
    at = record.events.index(free) + 1
    for kind in ("memory-map-check", "reservation", "note"):
        record.events.insert(at, {**free, "event": kind})
    assert cprogram.exportable(record) == ["pin_then_register"]


@pytest.mark.parametrize("given", ["5-", "20-10", "0x100-0x200junk", "0x10--1", "1-2 3-4", "-x"])
def test_a_range_that_is_none_is_a_usage_error(given: str, tmp_path: Path) -> None:
    program = compile_c(cprogram.render(io_uring_record()), tmp_path)
    done = subprocess.run([program, *given.split()], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert not done.stdout


def test_a_registration_that_fails_without_a_pin_does_not_count_as_this_bug(tmp_path: Path) -> None:
    """A locked-memory limit fails the registration with and without the pin: no `bad` for a bisection."""
    source = cprogram.render(io_uring_record())
    assert "unexplained += failed && !pins;" in source
    assert "return unexplained ? 4 : failures ? 1 : 0;" in source


def test_scenarios_without_a_pin_are_not_exported() -> None:
    with pytest.raises(UsageError, match="holds no pin"):
        cprogram.render(build.no_pin_record(), "no_pin")
    with pytest.raises(UsageError, match="holds no scenario 'other'"):
        cprogram.render(build.reproduced_record(), "other")


def test_an_errno_in_a_record_cannot_end_the_string() -> None:
    record = build.reproduced_record()
    register = next(event for event in record.events if event["event"] == "register")
    register["errno"] = 'EX"); system("x'
    assert "system" not in cprogram.render(record)


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    run = build.write(tmp_path / "run", build.reproduced_record())
    out = tmp_path / "report.html"
    result = CliRunner().invoke(report, [str(run), "--format", "html", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    bad = CliRunner().invoke(report, [str(run), "-o", str(tmp_path / "no" / "where")])
    assert "cannot write" in str(bad.exception)


def test_each_variant_is_exported_by_its_own_name(tmp_path: Path) -> None:
    builder = build.Builder()
    builder.memory_map()
    for variant in ("anonymous", "memfd"):
        first = len(builder.events)
        build.failing_pass(builder, "file")
        for event in builder.events[first:]:
            event["variant"] = variant
    record = builder.done()
    assert cprogram.exportable(record) == ["file[anonymous]", "file[memfd]"]
    assert cprogram.render(record, "file_memfd") == cprogram.render(record, "file[memfd]")
    names = [finding.name for finding in build_report(load(build.write(tmp_path, record))).findings]
    assert names == ["file[anonymous]", "file[memfd]"]


def test_of_several_scenarios_the_nearest_to_a_driver_comes_first(tmp_path: Path) -> None:
    builder = build.Builder()
    builder.memory_map()
    build.failing_pass(builder, "by_reference", kind="get", owner="vmsplice")
    build.no_pin_control(builder, "by_reference")
    build.ordinary_control(builder, "by_reference")
    build.failing_pass(builder, "by_pin")
    build.no_pin_control(builder, "by_pin")
    build.ordinary_control(builder, "by_pin")
    builder.begin("fine", contract="none", expects={"none": "not-reproduced"})
    builder.buffer(build.state(build.CMA))
    builder.register(build.state(build.CMA), build.state(build.OUT, 1025))
    builder.end()
    content = build_report(load(build.write(tmp_path, builder.done())))
    assert [finding.verdict for finding in content.findings][:2] == ["reproduced", "reproduced"]
    assert "process_vm_writev" in content.answer
    assert content.answer.endswith("(2 of 3 scenarios).")
    assert 'class="verdicts"' in html.render(content)

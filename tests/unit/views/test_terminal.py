"""The terminal view: what a person must be able to read in it, at any width, with and without colour."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import record_builder as build
from record_builder import Record, find

from regrepro.judge import judge_record
from regrepro.views import terminal


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(record: Record, *, out: io.StringIO | None = None, width: int | None = None) -> str:
    stream = out or io.StringIO()
    terminal.show(judge_record(record), record, "runs/1", file=stream, width=width)
    return stream.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_proof_is_told_whole() -> None:
    text = words(shown(build.partly_pinned_record()))
    for part in (
        "pin_then_register reproduced process-vm - ENOMEM page-migration",
        "this kernel, with this placement, is susceptible",
        "all 8 pages in CMA (observed)",
        "process-vm held 1 page by process_vm_writev+userfaultfd (FOLL_PIN without FOLL_LONGTERM), alive",
        "before 1025, mapped 1x; after 1025, mapped 1x",
        "7 pages moved, 1 stayed in unpinnable memory",
        "ibv_reg_mr_iova2 on rxe0 (rdma_rxe, a stand-in)",
        "the same call again: OK, on the same 1 page, still unpinnable before; 1 page moved",
        "no-pin (pin=none): success, as it must be [held]",
        "rdma_rxe, in the place of an RDMA card: RDMA in software",
        "This bug was reproduced.",
        "The run lies in runs/1",
    ):
        assert part in text, part


def test_the_kernels_path_is_indented_and_its_end_marked() -> None:
    lines = shown(build.reproduced_record()).splitlines()
    path = [
        line for line in lines if re.search(r"rxe_reg_user_mr|ib_umem_get|gup|user_pages|migrate_pages", line)
    ]
    depths = [len(line) - len(line.lstrip(" ✗")) for line in path]
    assert len(path) == 5
    assert depths == sorted(set(depths))
    assert [line for line in path if "✗" in line] == [path[-1]]
    assert "-12 ENOMEM" in path[0]


def test_the_deepest_failure_is_the_one_that_says_so() -> None:
    record = build.reproduced_record()
    tree = find(record, "register")["trace"]["tree"]
    tree[2]["deepest"] = True
    tree.append(
        {"depth": 6, "fn": "mm_migrate_pages", "ret": None, "errno": None, "failing": False, "text": "x"}
    )
    marked = [line for line in shown(record).splitlines() if "✗" in line]
    assert len(marked) == 1
    assert "pin_user_pages_fast" in marked[0]


def test_no_line_is_wider_than_it_may_be() -> None:
    record = build.partly_pinned_record()
    for width in (40, 60, 80, 100, 118):
        longest = max(len(line) for line in shown(record, width=width).splitlines())
        # A word that does not fit (a function's name, the table's rule) is not cut.
        assert longest <= max(width, 74), width


def test_a_narrow_table_loses_nothing() -> None:
    text = words(shown(build.reproduced_record(), width=50))
    assert "pin by process-vm, errno ENOMEM, layer page-migration" in text


def test_what_is_missing_is_listed() -> None:
    record = build.reproduced_record()
    find(record, "register")["trace"] = None
    find(record, "register", 1)["after"] = None
    text = words(shown(record))
    assert "pin_then_register: what is missing" in text
    assert "run with --trace on" in text
    assert "Undecided" in text


@pytest.mark.parametrize(
    ("record", "headline"),
    [
        (build.kernel_record, "This bug was not reproduced."),
        (build.placement_record, "This bug was not reproduced."),
        (build.longterm_record, "This bug was not reproduced."),
    ],
)
def test_headlines(record: Any, headline: str) -> None:
    assert headline in shown(record())


def test_a_killed_run_is_never_called_clean() -> None:
    record = build.kernel_record()
    record.events.pop()
    text = shown(record)
    assert "not reproduced." not in text
    assert "Undecided" in text
    assert "run-end" in text


def test_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    record = build.reproduced_record()
    coloured = shown(record, out=Terminal(), width=100)
    plain = shown(record, width=100)
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in shown(record, out=Terminal(), width=100)


def test_without_rich_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" not in shown(build.reproduced_record(), out=Terminal())


def test_a_stream_that_knows_ascii_only() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    record = build.reproduced_record()
    terminal.show(judge_record(record), record, "läufe/1", file=stream)
    text = raw.getvalue().decode("ascii")
    assert "  x " in text
    assert "----" in text


def test_markup_in_names_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    record = build.reproduced_record()
    record.header["node"]["hostname"] = "[bold]node[/bold]"
    assert "[bold]node[/bold]" in re.sub(r"\x1b\[[0-9;]*m", "", shown(record, out=Terminal()))


def test_the_driver_is_named_with_its_pin() -> None:
    record = build.reproduced_record(nvidia_driver="535.54.03")
    find(record, "pin")["owner"] = "cuda"
    text = words(shown(record))
    assert "cuda 535.54.03" in text
    assert "NVIDIA driver 535.54.03" in text


def test_the_flags_that_the_kernel_saw() -> None:
    record = build.reproduced_record(nvidia_driver="535.54.03", nvidia_module=True)
    args = {"start": build.ADDRESS, "nr_pages": 8, "gup_flags": 1, "flags": ["FOLL_WRITE"]}
    call = {"t": 0.1, "fn": "pin_user_pages", "ret": 8, "caller": "os_lock_user_pages [nvidia]", "args": args}
    find(record, "pin").update(owner="cuda", trace=build.trace(events=[call]))
    assert "pin_user_pages(FOLL_WRITE) by [nvidia] (seen by the kernel's trace)" in words(shown(record))


@pytest.mark.parametrize(
    "verdicts", [{}, {"verdicts": []}, {"verdicts": [{}]}, {"verdicts": [{"evidence": 3}]}]
)
def test_half_made_verdicts_are_shown_too(verdicts: dict[str, Any]) -> None:
    stream = io.StringIO()
    terminal.show(verdicts, None, None, file=stream)
    assert stream.getvalue().strip()


def test_evidence_names_how_each_piece_is_known() -> None:
    record = build.reproduced_record()
    stream = io.StringIO()
    terminal.show_evidence(judge_record(record)["verdicts"][0], file=stream)
    text = words(stream.getvalue())
    for part in (
        "pages_unmoved 8 (observed:",
        "registrar",
        "(stand-in:",
        "the rules of proof:",
        "the kernel's own path:",
    ):
        assert part in text
    assert text.count(" ok ") >= 9


def test_what_a_pin_promises_is_told_also_where_the_rest_is_not_proven() -> None:
    record = build.longterm_record()
    verdicts = judge_record(record)

    def said() -> str:
        out = io.StringIO()
        terminal.show(verdicts, record, "runs/1", file=out)
        return words(out.getvalue())

    verdicts["verdicts"][0]["evidence"]["pin_contract"]["value"] = {
        "1": {"contract": "plain", "why": "its pages stayed"},
        "2": {"contract": "unknown", "why": "nobody looked"},
    }
    assert "no FOLL_LONGTERM: its pages stayed" in said()
    assert "nobody looked" not in said()
    verdicts["verdicts"][0] |= {"verdict": "unmet", "unmet": [{"need": "trace", "why": "off", "how": ""}]}
    assert "no FOLL_LONGTERM: its pages stayed" in said()

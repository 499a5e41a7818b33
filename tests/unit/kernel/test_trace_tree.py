"""From the events of a trace to a tree, on traces of real kernels."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from regrepro.kernel import trace_flags, trace_parse, trace_probes, trace_tree

RECORDED = Path(__file__).parent / "trace"
PAGE = 4096


def names(pid: int) -> dict[str, tuple[str, str]]:
    known = {}
    for point in trace_probes.PROBED:
        for name in point.names:
            known[f"{name}_{pid}"] = name, "return"
            known[f"{name}_in_{pid}"] = name, "entry"
    known["mm_migrate_pages"] = "mm_migrate_pages", "tracepoint"
    return known


def recorded(file: str, **options: Any) -> trace_parse.Parsed:
    """Parse a recorded text; its first line is `# pid PID kernel RELEASE`."""
    head, text = (RECORDED / file).read_text().split("\n", 1)
    _, _, pid, _, release = head.split()
    return trace_parse.parse(text, names(int(pid)), trace_flags.from_version(release), **options)


def events_of(file: str) -> list[dict[str, Any]]:
    return trace_parse.merge_chunks(trace_parse.pair_entries(recorded(file).events), PAGE)


REFUSED = ["7.3-refused.txt", "6.12-refused.txt", "6.1-refused.txt"]


@pytest.mark.parametrize("file", REFUSED)
def test_the_failing_path_of_a_pinned_page(file: str) -> None:
    tree = trace_tree.build(events_of(file))
    functions = [item["fn"].split()[0] for item in tree]
    umem = "__ib_umem_get_va" if file.startswith("7") else "ib_umem_get"
    at = [
        functions.index(name)
        for name in (
            "ib_uverbs_reg_mr",
            "rxe_reg_user_mr",
            umem,
            "pin_user_pages_fast",
            "__gup_longterm_locked",
        )
    ]
    assert at == sorted(at)
    assert [item["depth"] for item in tree[:-1]] == list(range(len(tree) - 1))
    migration = tree[functions.index("migrate_pages")]
    assert (migration["ret"], migration["errno"], migration["failing"]) == (8, None, True)
    assert migration["text"] == "migrate_pages: 8 pages not migrated"
    (deepest,) = [item for item in tree if item.get("deepest")]
    assert deepest["fn"] == "migrate_pages"
    gup = tree[functions.index("pin_user_pages_fast")]
    assert gup["errno"] == "ENOMEM"
    assert gup["text"].endswith("8 pages, FOLL_WRITE|FOLL_LONGTERM) = -ENOMEM")
    assert tree[-1]["fn"] == "mm_migrate_pages"
    assert "nr_failed=8" in tree[-1]["text"]
    assert "reason=longterm_pin" in tree[-1]["text"]


@pytest.mark.parametrize("file", ["7.3-moved.txt", "6.12-moved.txt", "6.1-moved.txt", "5.10-registered.txt"])
def test_a_registration_that_succeeded_has_no_failing_path(file: str) -> None:
    events = events_of(file)
    assert events
    assert trace_tree.build(events) == []
    (call,) = trace_tree.gup_calls({"events": events})
    assert call["longterm"] is True
    assert call["ret"] == call["nr_pages"] == 8


@pytest.mark.parametrize(
    ("file", "function", "longterm"),
    [
        ("7.3-process-vm.txt", "pin_user_pages_remote", False),
        ("6.12-process-vm.txt", "pin_user_pages_remote", False),
        ("6.1-process-vm.txt", "pin_user_pages_remote", False),
        ("5.10-process-vm.txt", "pin_user_pages_remote", False),
    ],
)
def test_who_pinned_and_how(file: str, function: str, longterm: bool) -> None:
    calls = [call for call in trace_tree.gup_calls({"events": events_of(file)}) if call["nr_pages"] == 8]
    assert [(call["fn"], call["longterm"], call["ret"]) for call in calls] == [(function, longterm, 8)]
    stacks = [event["stack"] for event in events_of(file) if "stack" in event]
    assert any("process_vm_rw" in " ".join(stack) for stack in stacks)


def test_an_unmapped_address_fails_in_gup_and_not_in_migration() -> None:
    tree = trace_tree.build(events_of("7.3-unmapped.txt"))
    assert {item["errno"] for item in tree if item["failing"]} == {"EFAULT"}
    assert not any("migrate" in item["fn"] for item in tree)


def ret(fn: str, value: int, caller: str | None = None, tid: int = 1, **more: Any) -> dict[str, Any]:
    return {"fn": fn, "ret": value, "caller": caller, "tid": tid, **more}


def test_a_umem_that_fails_says_whether_pages_were_pinned() -> None:
    pinned = ret("pin_user_pages_fast", 8, args={"start": PAGE, "nr_pages": 8, "gup_flags": 0})
    umem, driver = ret("ib_umem_get", -12), ret("mlx5_ib_reg_user_mr", -12)
    before = trace_tree.build([umem, driver])
    after = trace_tree.build([pinned, umem, driver])
    assert before[-1]["text"] == "ib_umem_get = -ENOMEM, before any page was pinned"
    assert after[-1]["text"] == "ib_umem_get = -ENOMEM, after 8 pages were pinned"
    mapped = trace_tree.build([pinned, ret("dma_map_sgtable", -12, "ib_umem_get [ib_uverbs]"), umem, driver])
    assert mapped[-1]["fn"] == "dma_map_sgtable"
    assert mapped[-1]["deepest"]


def test_a_retry_that_succeeded_is_noise() -> None:
    events = [
        ret("migrate_pages", 1),
        ret("migrate_longterm_unpinnable_folios", -errno.EAGAIN),
        ret("pin_user_pages_fast", 8),
        ret("__ib_umem_get_va", 1),
        ret("rxe_reg_user_mr", 1),
    ]
    assert trace_tree.build(events) == []


def test_moved_once_and_failed_later_shows_the_later_failure() -> None:
    events = [
        ret("migrate_pages", 0),
        ret("migrate_longterm_unpinnable_folios", -errno.EAGAIN),
        ret("migrate_pages", 2),
        ret("migrate_longterm_unpinnable_folios", -12),
        ret("__gup_longterm_locked", -12),
        ret("pin_user_pages_fast", -12),
        ret("__ib_umem_get_va", -12),
        ret("rxe_reg_user_mr", -12),
    ]
    assert [item["text"] for item in trace_tree.build(events)][-1] == "migrate_pages: 2 pages not migrated"


def test_no_page_to_move_to_is_named() -> None:
    events = [
        ret("alloc_migration_target", 0),
        ret("migrate_pages", -12),
        ret("__gup_longterm_locked", -12),
        ret("pin_user_pages_fast", -12),
    ]
    assert trace_tree.build(events)[-1]["text"] == "alloc_migration_target = NULL: no page to move to"


def test_the_calling_threads_path_comes_first() -> None:
    events = [ret("pin_user_pages", -12, tid=5), ret("pin_user_pages_fast", -14, tid=7)]
    assert trace_tree.build(events, 7)[0]["errno"] == "EFAULT"
    assert trace_tree.build(events, 5)[0]["errno"] == "ENOMEM"
    assert trace_tree.build(events, 6)  # the caller's own thread failed nowhere: the other's is shown


def test_nvidias_status_is_no_errno() -> None:
    tree = trace_tree.build([ret("os_lock_user_pages", 0x1E, "nvidia_ioctl [nvidia]")])
    assert tree[-1]["errno"] is None
    assert tree[-1]["failing"]


def test_what_render_says() -> None:
    tree = trace_tree.build([ret("ib_umem_get", -12), ret("mlx5_ib_reg_user_mr", -12)])
    lines = trace_tree.render({"status": "complete", "tree": tree})
    assert lines == [
        "mlx5_ib_reg_user_mr = -ENOMEM",
        "  ib_umem_get = -ENOMEM, before any page was pinned" + trace_tree.MARK,
    ]
    assert trace_tree.render({"status": "complete", "tree": []}) == ["no probed kernel function failed"]
    assert trace_tree.render({"status": "spoiled", "why": "2 hits were missed", "tree": tree})[-1] == (
        "trace spoiled: 2 hits were missed"
    )
    assert trace_tree.render({"status": "unavailable", "why": "no root"}) == ["trace unavailable: no root"]

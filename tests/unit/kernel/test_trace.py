"""From the text of a trace to a tree, on traces of real kernels; and the tracer where it cannot work."""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Any

import pytest

from regrepro.kernel import trace, trace_flags, trace_fs, trace_parse, trace_probes, trace_tree

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


# flags


@pytest.mark.parametrize(
    ("release", "bits", "expected"),
    [
        ("5.10.0-46-amd64", 0x10001, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("6.1.0-57-amd64", 0x10001, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("6.2.1", 0x101, ["FOLL_WRITE", "FOLL_HWPOISON"]),
        ("6.3.0", 0x101, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("7.3.4+deb13-amd64", 0x101, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("7.3.4", 0, []),
        ("7.3.4", 1 << 30 | 1, ["FOLL_WRITE", "0x40000000"]),
        ("5.13.19", 0x80, ["FOLL_SPLIT"]),
        ("6.1.0", 0x80, ["FOLL_NOFAULT"]),
    ],
)
def test_flags_are_named_by_the_kernels_version(release: str, bits: int, expected: list[str]) -> None:
    assert trace_flags.from_version(release).decode(bits) == expected


@pytest.mark.parametrize("release", ["4.19.0", "5.5.19", "not a version"])
def test_flags_of_an_unknown_kernel_are_not_guessed(release: str) -> None:
    assert trace_flags.from_version(release).values == {}


def btf(enums: list[list[tuple[str, int]]], decoy: bool = False) -> bytes:
    strings, types = b"\0", b""
    if decoy:  # an int whose name and encoding look like the first member of the enum
        strings += b"FOLL_WRITE\0"
        types += struct.pack("=Ii", 1, 1) + struct.pack("=II", 0, 0)
    for members in enums:
        types += struct.pack("=III", 0, 6 << 24 | len(members), 4)
        for name, value in members:
            at = strings.find(b"\0" + name.encode() + b"\0")
            if at < 0:
                at = len(strings) - 1
                strings += name.encode() + b"\0"
            types += struct.pack("=Ii", at + 1, value)
    header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return header + types + strings


PUBLIC = [("FOLL_WRITE", 1), ("FOLL_GET", 2), ("FOLL_DUMP", 4), ("FOLL_LONGTERM", 1 << 9)]
PRIVATE = [("FOLL_TOUCH", 1 << 16), ("FOLL_TRIED", 1 << 17), ("FOLL_PIN", 1 << 19)]


@pytest.mark.parametrize("decoy", [False, True])
def test_flags_from_btf_win_over_the_table(decoy: bool) -> None:
    found = trace_flags.from_btf(btf([[("OTHER", 1)], PUBLIC, PRIVATE, [("LAST", 3)]], decoy))
    assert found is not None
    assert found.values == dict(PUBLIC + PRIVATE)
    assert "BTF" in found.source
    assert found.decode(1 << 9) == ["FOLL_LONGTERM"]


def test_btf_without_the_flags_or_no_btf_says_nothing() -> None:
    assert trace_flags.from_btf(btf([[("OTHER", 1), ("MORE", 2), ("STILL", 3)]])) is None
    assert trace_flags.from_btf(b"no BTF at all, only some text") is None
    assert trace_flags.from_btf(b"") is None


# text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__ib_umem_get_va+0x217/0x400 [ib_core]", "__ib_umem_get_va [ib_core]"),
        ("do_syscall_64+0x55/0xb0", "do_syscall_64"),
        ("io_pin_pages", "io_pin_pages"),
        ("[unknown/kretprobe'd]", None),
        ("arch_rethook_trampoline+0x0/0x60", None),
        ("kretprobe_trampoline+0x0/0x50", None),
        ("0xffffffffc0a01234", None),
    ],
)
def test_symbols(text: str, expected: str | None) -> None:
    assert trace_parse.symbol(text) == expected


def line(event: str, rest: str, seconds: str = "12.000100", cpu: int = 3, tid: int = 1234) -> str:
    return f"     some app (x)-{tid}  [{cpu:03}] .....    {seconds}: {event}: {rest}\n"


MAPPED = {
    "pin_user_pages_fast_9": ("pin_user_pages_fast", "return"),
    "pin_user_pages_fast_in_9": ("pin_user_pages_fast", "entry"),
    "rxe_reg_user_mr_9": ("rxe_reg_user_mr", "return"),
    "migrate_pages_9": ("migrate_pages", "return"),
    "mm_migrate_pages": ("mm_migrate_pages", "tracepoint"),
}
FLAGS = trace_flags.from_version("7.3")
PIN = (
    "(__ib_umem_get_va+0x217/0x400 [ib_core] <- pin_user_pages_fast) "
    "start=0x{start:x} nr_pages={n} gup_flags=0x101 ret={ret}"
)


def test_a_return_with_arguments() -> None:
    text = line("pin_user_pages_fast_9", PIN.format(start=0x7F0000000000, n=8, ret=-12))
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert event == {
        "fn": "pin_user_pages_fast",
        "ret": -12,
        "caller": "__ib_umem_get_va [ib_core]",
        "args": {
            "start": 0x7F0000000000,
            "nr_pages": 8,
            "gup_flags": 0x101,
            "flags": ["FOLL_WRITE", "FOLL_LONGTERM"],
        },
        "us": 12000100,
        "tid": 1234,
    }


def test_a_thread_group_id_in_the_line_does_no_harm() -> None:
    text = (
        "   app-77    (     70) [001] d..2.     1.000002: migrate_pages_9: "
        "(__gup_longterm_locked+0x1/0x2 <- migrate_pages) ret=3\n"
    )
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert (event["tid"], event["ret"], event["us"]) == (77, 3, 1000002)


def test_kernel_addresses_are_not_kept() -> None:
    text = line(
        "rxe_reg_user_mr_9",
        "(ib_uverbs_reg_mr+0x1/0x2 [ib_uverbs] <- rxe_reg_user_mr) ret=-65696752740168896",
    )
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert event["ret"] == 1
    text = line("rxe_reg_user_mr_9", "(ib_uverbs_reg_mr+0x1/0x2 [ib_uverbs] <- rxe_reg_user_mr) ret=-22")
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert event["ret"] == -22


def test_events_of_others_and_from_before_are_passed_over() -> None:
    text = (
        line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=1", "11.999999")
        + line("migrate_pages_10", "(a+0x1/0x2 <- migrate_pages) ret=2")
        + line("sched_switch", "prev_comm=a prev_pid=1")
        + "not a line of a trace\n"
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=4")
    )
    parsed = trace_parse.parse(text, MAPPED, FLAGS, since_us=12_000_000)
    assert [event["ret"] for event in parsed.events] == [4]
    assert parsed.lost == {}


def test_a_stack_belongs_to_the_event_before_it_in_its_thread() -> None:
    text = (
        line("pin_user_pages_fast_9", PIN.format(start=PAGE, n=1, ret=1), tid=1)
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=4", tid=2)
        + "     some app (x)-1  [003] ..... 12.000101: <stack trace>\n"
        + " => os_lock_user_pages+0x10/0x20 [nvidia]\n => nvidia_ioctl+0x1/0x2 [nvidia]\n"
        + " => __x64_sys_ioctl+0x1/0x2\n"
    )
    events = trace_parse.parse(text, MAPPED, FLAGS).events
    assert events[0]["stack"] == ["os_lock_user_pages [nvidia]", "nvidia_ioctl [nvidia]", "__x64_sys_ioctl"]
    assert "stack" not in events[1]


def test_an_old_events_stack_goes_with_it() -> None:
    text = (
        line("pin_user_pages_fast_9", PIN.format(start=PAGE, n=1, ret=1), "11.0000001"[:9])
        + "     some app (x)-1234  [003] ..... 11.000001: <stack trace>\n"
        + " => f+0x10/0x20\n"
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=4")
    )
    (event,) = trace_parse.parse(text, MAPPED, FLAGS, since_us=12_000_000).events
    assert "stack" not in event


def test_lost_events_count_unless_older_ones_follow_on_that_cpu() -> None:
    old = line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=1", "11.000000", cpu=1)
    new = line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=1", cpu=2)
    text = "CPU:1 [LOST 7 EVENTS]\n" + old + "CPU:2 [LOST 5 EVENTS]\n" + new + "CPU:4 [LOST EVENTS]\n"
    assert trace_parse.parse(text, MAPPED, FLAGS, since_us=12_000_000).lost == {2: 5, 4: 1}
    assert trace_parse.parse(text, MAPPED, FLAGS).lost == {1: 7, 2: 5, 4: 1}


def test_entries_and_returns_become_one_event() -> None:
    text = (
        line(
            "pin_user_pages_fast_in_9",
            "(pin_user_pages_fast+0x0/0x60) start=0x1000 nr_pages=8 gup_flags=0x101",
        )
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=8")
        + line("pin_user_pages_fast_9", "(ib_umem_get+0x1/0x2 [ib_uverbs] <- pin_user_pages_fast) ret=-12")
        + line(
            "pin_user_pages_fast_in_9", "(pin_user_pages_fast+0x0/0x60) start=0x9000 nr_pages=1 gup_flags=0x1"
        )
    )
    events = trace_parse.pair_entries(trace_parse.parse(text, MAPPED, FLAGS).events)
    assert [event["fn"] for event in events] == [
        "migrate_pages",
        "pin_user_pages_fast",
        "pin_user_pages_fast",
    ]
    assert events[1]["ret"] == -12
    assert events[1]["args"]["nr_pages"] == 8
    assert "ret" not in events[2]  # still under way
    assert trace_tree.gup_calls({"events": events})[1]["ret"] is None


def chunk(start: int, pages: int, ret: int, flags: int = 0x101) -> dict[str, Any]:
    args = {"start": start, "nr_pages": pages, "gup_flags": flags}
    return {"fn": "pin_user_pages_fast", "tid": 1, "caller": "f", "ret": ret, "args": args}


@pytest.mark.parametrize("page", [4096, 65536])
def test_parts_of_one_range_are_one_event(page: int) -> None:
    parts = [chunk(0x10000000 + at * 512 * page + 5 * (at == 0), 512, 512) for at in range(4)]
    (event,) = trace_parse.merge_chunks(parts, page)
    assert event["args"]["nr_pages"] == event["ret"] == 2048
    assert event["args"]["start"] == 0x10000005
    assert event["calls"] == 4


@pytest.mark.parametrize(
    "second",
    [
        chunk(512 * PAGE, 512, -12),  # failed
        chunk(512 * PAGE, 512, 100),  # short
        chunk(513 * PAGE, 512, 512),  # elsewhere
        chunk(512 * PAGE, 512, 512, 0x1),  # for another purpose
        {**chunk(512 * PAGE, 512, 512), "tid": 2},
        {**chunk(512 * PAGE, 512, 512), "caller": "g"},
    ],
)
def test_only_successful_parts_that_follow_each_other_are_merged(second: dict[str, Any]) -> None:
    assert len(trace_parse.merge_chunks([chunk(0, 512, 512), second], PAGE)) == 2


# trees of real kernels


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


# trees by hand


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


# probes


def test_probe_lines() -> None:
    (point,) = [point for point in trace_probes.PROBED if "pin_user_pages_fast" in point.names]
    assert (
        trace_probes.return_probe("g", "e", "pin_user_pages_fast", point, with_arguments=True)
        == "r:g/e pin_user_pages_fast start=$arg1:x64 nr_pages=$arg2:s32 gup_flags=$arg3:x32 ret=$retval:s32"
    )
    assert (
        trace_probes.return_probe("g", "e", "pin_user_pages_fast", point, with_arguments=False)
        == "r:g/e pin_user_pages_fast ret=$retval:s32"
    )
    assert trace_probes.entry_probe("g", "e", "pin_user_pages_fast", point).startswith(
        "p:g/e pin_user_pages_fast "
    )


def test_every_name_stands_once_and_event_names_fit() -> None:
    every = [name for point in trace_probes.PROBED for name in point.names]
    assert len(every) == len(set(every))
    longest = max(len(f"{name}_in_{2**22}") for name in every)
    assert longest < 64  # MAX_EVENT_NAME_LEN, kernel/trace/trace_probe.h


# names and leftovers


def fake_tracefs(root: Path, instances: list[str], probes: list[str]) -> Path:
    for name in instances:
        (root / "instances" / name).mkdir(parents=True)
    (root / "instances").mkdir(exist_ok=True)
    (root / "kprobe_events").write_text("".join(f"{line}\n" for line in probes))
    return root


def test_only_leftovers_of_the_dead_are_ours_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_appending_never_truncates(tmp_path: Path) -> None:
    file = tmp_path / "kprobe_events"
    file.write_text("p:theirs/h h\n")
    trace_fs.append(file, "-:ours/x\n")
    assert file.read_text() == "p:theirs/h h\n-:ours/x\n"


# the tracer where it cannot work


class NoJournal:
    def add(self, kind: str, **_data: Any) -> None:
        raise AssertionError(f"{kind}: nothing may be changed here")


@pytest.mark.parametrize(
    ("lockdown", "euid", "word"),
    [("confidentiality", 0, "locked down"), ("none", 1000, "root"), ("integrity", 1000, "root")],
)
def test_without_rights_it_says_so_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, lockdown: str, euid: int, word: str
) -> None:
    monkeypatch.setattr(trace_fs, "lockdown", lambda: lockdown)
    monkeypatch.setattr("os.geteuid", lambda: euid)
    tracer = trace.Tracer(NoJournal())  # type: ignore[arg-type]
    assert tracer.status()[0] is False
    assert tracer.arm() is False
    available, why = tracer.status()
    assert not available
    assert word in why
    token = tracer.begin()
    assert token is None
    result = tracer.end(token)
    assert (result["status"], result["why"], result["events"], result["tree"]) == ("unavailable", why, [], [])
    tracer.disarm()
    assert trace_tree.render(result) == [f"trace unavailable: {why}"]


def test_without_kprobes_or_write_access_it_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_fs, "lockdown", lambda: "")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(trace_fs, "PLACES", (tmp_path,))
    (tmp_path / "trace_clock").touch()
    assert "CONFIG_KPROBE_EVENTS" in trace.Tracer(NoJournal()).status()[1]  # type: ignore[arg-type]
    (tmp_path / "kprobe_events").touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "read-only" in trace.Tracer(NoJournal()).status()[1]  # type: ignore[arg-type]


def test_a_kernel_without_tracefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_fs, "lockdown", lambda: "")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(trace_fs, "PLACES", (tmp_path / "none",))
    monkeypatch.setattr(trace_fs, "kernel_has_tracefs", lambda: False)
    assert "no tracefs" in trace.Tracer(NoJournal()).status()[1]  # type: ignore[arg-type]

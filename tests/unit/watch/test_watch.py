"""`regrepro watch` without a kernel: its program's text, its lines, its records, its limits."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from kernel_fakes import BtfWriter

import regrepro
from regrepro.errors import EnvironmentProblem
from regrepro.judge import exit_code, judge_record
from regrepro.kernel.btf import Signature
from regrepro.kernel.leftovers import Journal
from regrepro.kernel.trace_flags import FlagNames
from regrepro.kernel.trace_probes import Returns
from regrepro.record import Record, read_record
from regrepro.watch import copies, engine, events, process, registrations, watch
from regrepro.watch.again import Waiting
from regrepro.watch.events import Correlator, Failure, LibraryWord
from regrepro.watch.evidence import LOOKS, Evidence, Observer, modules_of, record_events
from regrepro.watch.functions import (
    BtfFunctions,
    Function,
    Functions,
    find_functions,
    loaded_modules,
    read_symbols,
    without_coming,
)
from regrepro.watch.limiter import Limiter
from regrepro.watch.lock import Lock
from regrepro.watch.marker import Marker
from regrepro.watch.metrics import Metrics
from regrepro.watch.output import Output
from regrepro.watch.process import Process
from regrepro.watch.program import (
    REQUESTS,
    Dialect,
    Layout,
    Library,
    PageOffsets,
    Program,
    RequestOffsets,
    TaskOffsets,
    attribute_index,
    make_program,
)
from regrepro.watch.registrations import KEY, NO_SIZE, SIZE_KEY, Account
from regrepro.watch.watch import Options, Watch

REG = ("ibpd", "start", "length", "iova", "access", "udata")
FUNCTIONS = Functions(
    entries=[
        Function("ib_uverbs_reg_mr", "ib_uverbs", ("attrs",)),
        Function("ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR", "ib_uverbs", ("attrs",)),
    ],
    drivers=[Function("rxe_reg_user_mr", "rdma_rxe", REG, Returns.POINTER)],
    pins=[
        Function(name, "", ("start", "nr_pages", "gup_flags", "pages"))
        for name in ("pin_user_pages_fast", "pin_user_pages")
    ],
    inner=[Function("__gup_longterm_locked", "", ("mm",), Returns.LONG)],
    open=Function("ib_uverbs_open", "ib_uverbs", ("inode", "filp")),
    migrate=Function("migrate_pages", "", ("from", "a", "b", "c", "mode", "reason", "ret_succeeded")),
    reasons={9: "longterm_pin"},
)
NAMES = make_program(FUNCTIONS).names
SCHEMAS = Path(regrepro.__file__).parent / "schema"
SCHEMA = json.loads((SCHEMAS / "record-2.json").read_text())
VERDICTS = json.loads((SCHEMAS / "verdicts-1.json").read_text())
HEADER: dict[str, Any] = {
    "version": "0",
    "started": "2026-11-30T00:00:00+00:00",
    "run": {"profile": "watch", "names": [], "cuda": "auto", "trace": "on", "place": "as-allocated"},
    "node": {
        "hostname": "h",
        "kernel": "7.3.4",
        "kernel_version": "v",
        "arch": "x86_64",
        "page_size": 4096,
        "cmdline": "",
        "cpus": 1,
        "memory_total": 1,
        "euid": 0,
        "capabilities": [],
        "lockdown": None,
        "vm": {},
        "nvidia_driver": None,
        "limits": {"memlock_soft": None, "memlock_hard": None},
    },
    "lab": None,
    "stand_ins": [],
}
OFFSETS = PageOffsets(8, 0, 52, 48, 100)
REQUEST = RequestOffsets(command=1111, present=2222, attributes=3333, size=44)


def number(name: str) -> int:
    return NAMES.index(name)


def line(text: str) -> str:
    return json.dumps({"type": "printf", "data": text})


class Seen:
    """What a correlator hands out."""

    def __init__(self) -> None:
        self.at_once: list[Failure] = []
        self.complete: list[Failure] = []
        self.time = 0.0
        self.correlator = Correlator(
            NAMES,
            self.at_once.append,
            self.complete.append,
            reasons=FUNCTIONS.reasons,
            now=lambda: self.time,
        )

    def lines(self, *texts: str) -> None:
        for text in texts:
            self.correlator.line(line(text))


# The program


def test_the_program_is_silent_on_success() -> None:
    """Every printf but the sign of life stands under a condition on a return value."""
    text = make_program(FUNCTIONS, offsets=OFFSETS).text
    for probe in text.splitlines():
        if "printf" in probe and not probe.startswith(("BEGIN", "interval")):
            assert "if (" in probe.partition("printf")[0], probe


def test_every_probe_is_closed() -> None:
    task = TaskOffsets(1, 2, 3, 4, 5, 6)
    library = Library("/x.so", {"ibv_reg_mr_iova2": 0x100, "ibv_reg_dmabuf_mr": 0x200})
    text = make_program(
        FUNCTIONS, [library], offsets=OFFSETS, task=task, request=REQUEST, plain_pins=("pin_user_pages",)
    ).text
    for probe in text.splitlines():
        assert probe.count("{") == probe.count("}") > 0, probe
        assert probe.count("(") == probe.count(")"), probe


def test_the_heartbeat_is_attached_last() -> None:
    probes = make_program(FUNCTIONS).text.splitlines()
    assert probes[1].startswith("interval:s:2")


def test_kernels_with_and_without_btf_are_followed_in_their_own_way() -> None:
    by_trampoline = make_program(FUNCTIONS).text
    assert "kretfunc:rdma_rxe:rxe_reg_user_mr" in by_trampoline
    assert "args->start" in by_trampoline and "kretprobe:rxe_reg_user_mr" not in by_trampoline
    new = make_program(FUNCTIONS, dialect=Dialect.of((0, 23))).text
    assert "fexit:rdma_rxe:rxe_reg_user_mr" in new and "args.start" in new and "kfunc" not in new
    bare = Functions(
        entries=[Function("ib_uverbs_reg_mr", "ib_uverbs")],
        drivers=[Function("rxe_reg_user_mr", "rdma_rxe", None, Returns.POINTER)],
        migrate=Function("migrate_pages", ""),
    )
    old = make_program(bare, offsets=OFFSETS).text
    assert "kretprobe:rxe_reg_user_mr" in old and "args" not in old
    assert "kprobe:rxe_reg_user_mr" in old and "arg4" in old


def test_a_function_of_more_than_six_parameters_is_followed_by_kprobes() -> None:
    many = Functions(drivers=[Function("mlx5_ib_reg_user_mr", "mlx5_ib", (*REG, "dmah"), Returns.POINTER)])
    text = make_program(many).text
    assert "kretprobe:mlx5_ib_reg_user_mr" in text and "kfunc" not in text and "arg4" in text


def test_what_succeeds_takes_nothing_out_of_a_map() -> None:
    """Making a map's entry and deleting it again is what costs; the next request writes it again."""
    many = replace(FUNCTIONS.drivers[0], parameters=(*REG, "dmah"))
    functions = replace(FUNCTIONS, drivers=[many])
    text = make_program(functions, offsets=OFFSETS, request=REQUEST).text
    hot = [*functions.entries, *functions.drivers, *functions.pins, *functions.inner]
    for probe in text.splitlines():
        place, _, body = probe.partition("{")
        if any(place.strip().endswith(f":{item.name}") for item in hot):
            assert "delete" not in body.replace("delete(@ret[tid])", ""), probe
    assert "kprobe:rxe_reg_user_mr" not in text.replace("kretprobe", "")
    assert (
        "kprobe:rxe_reg_user_mr" in make_program(functions).text
    )  # where nobody else tells what was asked for
    assert "kprobe:rxe_reg_user_mr" in make_program(functions, request=REQUEST, account=True).text


def test_what_was_asked_for_is_read_where_btf_says_it_lies() -> None:
    assert '"A|' not in make_program(FUNCTIONS).text
    told = [probe for probe in make_program(FUNCTIONS, request=REQUEST).text.splitlines() if '"A|' in probe]
    assert len(told) == 2
    assert "+ 1111)" in told[0] and "uptr($u + 8)" in told[0]
    assert all(f"+ {3333 + 44 * attribute_index(item)})" in told[1] for item in (2, 3, 4, 6, 5))
    assert "+ 2222)" in told[1]
    # A kprobe does not see at the return what it was called with.
    bare = Functions(entries=[Function("ib_uverbs_reg_mr", "ib_uverbs")])
    assert '"A|' not in make_program(bare, request=REQUEST).text


def test_only_migrations_of_pins_are_told_where_their_reasons_are_known() -> None:
    for migrate in (
        FUNCTIONS.migrate,
        Function("migrate_pages", "", ("from", "a", "b", "c", "mode", "reason")),
    ):
        assert migrate is not None
        known, unknown = (
            make_program(replace(FUNCTIONS, migrate=migrate, reasons=reasons), offsets=OFFSETS).text
            for reasons in ({9: "longterm_pin"}, {})
        )
        assert "== 9" in known and "== 9" not in unknown


def test_a_library_whose_reg_mr_jumps_into_iova2_is_followed_there() -> None:
    functions = {"ibv_reg_mr": 0x200, "ibv_reg_mr_iova2": 0x100, "ibv_reg_mr:size": 11}
    text = make_program(FUNCTIONS, [Library("/x.so", functions)]).text
    assert text.count("uretprobe:/x.so:0x100") == 1 and "0x200" not in text
    functions["ibv_reg_mr:size"] = 124
    text = make_program(FUNCTIONS, [Library("/x.so", functions)]).text
    assert "uretprobe:/x.so:0x100" in text and "uretprobe:/x.so:0x200" in text


def test_what_cannot_be_attached_to_is_followed_by_a_kprobe_and_then_not_at_all() -> None:
    given = Functions(
        entries=[Function("ib_uverbs_reg_mr", "ib_uverbs")],
        pins=[Function(name, "", ("start",)) for name in ("pin_user_pages", "pin_user_pages_fast")],
        migrate=Function("migrate_pages", "", ("from",)),
    )
    why = "ERROR: Error loading program: kretfunc:vmlinux:pin_user_pages_fast (try -v)"
    assert given.do_without(why) and [item.by_trampoline for item in given.pins] == [True, False]
    assert given.do_without(why) and [item.name for item in given.pins] == ["pin_user_pages"]
    assert "pin_user_pages_fast" in given.missing
    assert given.do_without("kretfunc:vmlinux:migrate_pages") and given.migrate is not None
    assert given.do_without("'kretprobe:migrate_pages'") and given.migrate is None
    assert not given.do_without("kprobe:ib_uverbs_reg_mr") and not given.do_without("something else")


def test_plain_pins_are_told_only_where_they_are_asked_for() -> None:
    given = Functions(plain_pins=[Function("pin_user_pages", "", ("start", "nr_pages", "gup_flags"))])
    assert "P|" not in make_program(given).text
    text = make_program(given, plain_pins=("pin_user_pages",), longterm=256).text
    assert "& 256) == 0" in text and '"P|' in text


def test_symbols_are_found_with_their_module_and_only_if_they_are_one() -> None:
    text = (
        b"0000000000000000 t twice\n0000000000000000 T twice\n0000000000000000 T pin_user_pages\n"
        b"0000000000000000 t ib_uverbs_reg_mr\t[ib_uverbs]\n0000000000000000 d data\n"
        b"0000000000000000 T pin_user_pages_fast\n"
    )
    names = ["twice", "pin_user_pages", "ib_uverbs_reg_mr", "data", "absent"]
    assert read_symbols(text, names) == {"pin_user_pages": "", "ib_uverbs_reg_mr": "ib_uverbs"}


def test_signatures_are_those_of_the_kernel_and_of_each_module(tmp_path: Path) -> None:
    writer = BtfWriter()
    long = writer.integer("long", 8)
    pin = writer.function("pin_user_pages", {"start": long, "nr_pages": long})
    (tmp_path / "vmlinux").write_bytes(writer.blob())
    types, strings = writer.marks()
    ids = {}
    for module, function in (("rdma_rxe", "rxe_reg_user_mr"), ("ib_uverbs", "ib_uverbs_reg_mr")):
        split = BtfWriter()
        split._types, split._strings, split._count = writer._types, writer._strings, writer._count
        ids[module] = split.function(function, {"attrs": long})
        (tmp_path / module).write_bytes(split.blob(types, strings))
    (tmp_path / "damaged").write_bytes(b"none")
    btf = BtfFunctions(tmp_path)
    for _ in range(2):
        assert btf.function("pin_user_pages", "") == Signature(pin, ("start", "nr_pages"))
        assert btf.function("rxe_reg_user_mr", "rdma_rxe") == Signature(ids["rdma_rxe"], ("attrs",))
        assert btf.function("ib_uverbs_reg_mr", "ib_uverbs") == Signature(ids["ib_uverbs"], ("attrs",))
    assert (
        btf.function("rxe_reg_user_mr", "") is None and btf.function("rxe_reg_user_mr", "ib_uverbs") is None
    )
    assert btf.function("pin_user_pages", "damaged") is None and btf.function("x", "missing") is None
    empty = BtfFunctions(tmp_path / "nowhere")
    assert empty.kernel is None and empty.function("pin_user_pages", "") is None
    assert empty.function("rxe_reg_user_mr", "rdma_rxe") is None


def test_functions_with_a_type_are_followed_by_trampolines(tmp_path: Path) -> None:
    writer = BtfWriter()
    long = writer.integer("long", 8)
    many = {f"p{number}": long for number in range(7)}
    ids = {
        "pin_user_pages": writer.function("pin_user_pages", {"start": long}),
        "migrate_pages": writer.function("migrate_pages", many),
    }
    (tmp_path / "vmlinux").write_bytes(writer.blob())
    text = b"".join(b"0 T " + name + b"\n" for name in (b"pin_user_pages", b"migrate_pages", b"dma_buf_get"))
    btf = BtfFunctions(tmp_path)
    found = find_functions(btf, text, {})
    assert found.pins == [
        Function("pin_user_pages", "", ("start",), Returns.LONG, ids["pin_user_pages"]),
    ]
    assert found.plain_pins == found.pins
    assert found.migrate == Function("migrate_pages", "", tuple(many), type_id=ids["migrate_pages"])
    assert not found.migrate.by_trampoline  # bpftrace has none for so many
    assert found.inner == [Function("dma_buf_get", "", None, Returns.POINTER)]
    by_kprobes = find_functions(btf, text, {}, trampolines=False)
    assert all(item.parameters is None and item.type_id == 0 for item in by_kprobes.all())


# Lines → failures


def held_pin(tid: int = 7, user: int = 2) -> list[str]:
    return [
        f"M|{tid}|100|8|9",
        f"S|{tid}|101|ffffea0000000040|1026|0|0|17",
        f"I|{tid}|110|{number('__gup_longterm_locked')}|-12",
        f"G|{tid}|120|{number('pin_user_pages_fast')}|-12|7f0000000000|8|101",
        f"D|{tid}|130|{number('rxe_reg_user_mr')}|-12|7f0000000000|32768|7f0000000000|7",
        f"K|{tid}|6|140|90|{number('ib_uverbs_reg_mr')}|-12|{1 << 40}|{user}|0|-|-|-|python3",
    ]


LIBRARY = "U|7|6|150|2|7f0000000000|32768|7f0000000000|7|0|python3"


def test_a_failure_is_handed_out_at_once_and_is_complete_with_the_librarys_word() -> None:
    seen = Seen()
    seen.lines(*held_pin())
    assert len(seen.at_once) == 1 and not seen.complete
    seen.lines(LIBRARY)
    (failure,) = seen.complete
    assert failure is seen.at_once[0]
    assert (failure.verb, failure.errno, failure.address, failure.length, failure.access) == (
        "ibv_reg_mr_iova2",
        "ENOMEM",
        0x7F0000000000,
        32768,
        7,
    )
    assert [item.function for item in failure.inner] == [
        "migrate_pages",
        "__gup_longterm_locked",
        "pin_user_pages_fast",
        "rxe_reg_user_mr",
    ]
    assert failure.stuck[0].refcount == 1026 and failure.pin_calls == 1


def test_a_program_that_does_not_use_a_followed_library_is_caught_by_the_kernel_alone() -> None:
    seen = Seen()
    seen.lines(*held_pin(user=0))
    assert len(seen.complete) == 1 and seen.complete[0].verb == ""
    assert seen.complete[0].shown_verb == "ibv_reg_mr" and seen.complete[0].address == 0x7F0000000000


def test_a_process_that_dies_before_the_library_returns_is_not_waited_for() -> None:
    seen = Seen()
    seen.lines(*held_pin())
    seen.correlator.overdue(0.5)
    assert not seen.complete
    seen.correlator.overdue(1.5)
    assert len(seen.complete) == 1 and seen.complete[0].user_missing


def test_two_threads_that_fail_at_the_same_moment_are_told_apart() -> None:
    seen = Seen()
    mixed = [text for pair in zip(held_pin(7), held_pin(8), strict=True) for text in pair]
    seen.lines(*mixed, LIBRARY, LIBRARY.replace("U|7|", "U|8|"))
    assert {failure.tid for failure in seen.complete} == {7, 8}
    assert all(len(failure.inner) == 4 and len(failure.stuck) == 1 for failure in seen.complete)


def test_inner_failures_of_a_request_that_went_on_well_belong_to_no_later_one() -> None:
    seen = Seen()
    seen.lines(f"I|7|110|{number('__gup_longterm_locked')}|-12")
    seen.lines(f"K|7|6|9000|8000|{number('ib_uverbs_reg_mr')}|-22|0|0|0|-|-|-|x")
    assert seen.complete[0].inner == []


@pytest.mark.parametrize(("older", "mine", "doubted"), [(0, 300, True), (300, 10, False), (250, 250, False)])
def test_of_very_many_inner_failures_the_newest_are_kept_and_it_is_said_if_some_were_of_this_request(
    older: int, mine: int, doubted: bool
) -> None:
    seen = Seen()
    gup = number("__gup_longterm_locked")
    seen.lines(*(f"I|7|{100 + at}|{gup}|-12" for at in range(older)))
    seen.lines(*(f"I|7|{2000 + at}|{gup}|-12" for at in range(mine)))
    seen.lines(f"D|7|2990|{number('rxe_reg_user_mr')}|-12|7f0000000000|32768|7f0000000000|7")
    seen.lines(f"K|7|6|3000|1000|{number('ib_uverbs_reg_mr')}|-12|0|0|0|-|-|-|x")
    (failure,) = seen.complete
    assert bool(failure.doubt) == doubted and len(failure.inner) == min(mine + 1, 256)
    assert failure.inner[-1].function == "rxe_reg_user_mr" and failure.address == 0x7F0000000000
    assert failure.inner[0].ns == 2000 + mine - (len(failure.inner) - 1)
    trace = observer().trace(failure, 0)
    assert (trace["status"] == "spoiled") == doubted and ("last 256" in (trace["why"] or "")) == doubted


def test_what_failed_in_a_request_is_kept_for_two_minutes() -> None:
    second = 10**9
    seen = Seen()
    for tid, at in ((7, 1000), (8, 1010)):
        seen.lines(f"I|{tid}|{at * second}|{number('__gup_longterm_locked')}|-12")
    seen.correlator.forget_stale(1119 * second)
    assert set(seen.correlator._inner) == {7, 8}
    seen.correlator.forget_stale(1121 * second)
    assert set(seen.correlator._inner) == {8}
    seen.lines(f"K|8|6|{1125 * second}|{1009 * second}|{number('ib_uverbs_reg_mr')}|-12|0|0|0|-|-|-|x")
    assert len(seen.complete[0].inner) == 1


def test_a_failure_of_a_device_that_is_gone_has_the_errno_of_that() -> None:
    for gone in (True, False):
        seen = Seen()
        seen.correlator.device_is_gone = lambda pid, gone=gone: gone and pid == 6  # type: ignore[misc]
        seen.lines(LIBRARY)
        (failure,) = seen.complete
        assert failure.function == "" and failure.errno == ("EIO" if gone else None)
        assert failure.errno_how == ("inferred" if gone else "missing")
        # The kernel's own word is better.
        seen.lines(*held_pin(tid=8), LIBRARY.replace("U|7|", "U|8|"))
        assert seen.complete[1].errno == "ENOMEM" and seen.complete[1].errno_how == "observed"


def test_a_file_too_large_to_be_a_library_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "libibverbs.so.1"
    with path.open("wb") as file:
        file.truncate(copies.SIZE_LIMIT + 1)
    found = copies.Copies()
    assert not found.add_file(path, "theirs") and "no libibverbs" in found.problems["theirs"]
    assert not found.known


def test_a_device_is_gone_when_its_file_or_the_kernels_own_account_is(tmp_path: Path) -> None:
    descriptors, sysfs = tmp_path / "6" / "fd", tmp_path / "sys"
    descriptors.mkdir(parents=True)
    (sysfs / "uverbs0").mkdir(parents=True)
    assert not copies.devices_are_gone(6, tmp_path, sysfs) and not copies.devices_are_gone(7, tmp_path, sysfs)
    (descriptors / "1").symlink_to("/dev/null")
    (descriptors / "3").symlink_to("/dev/infiniband/uverbs0 (deleted)")
    assert copies.devices_are_gone(6, tmp_path, sysfs)
    (descriptors / "4").symlink_to("/dev/infiniband/uverbs1")
    assert copies.devices_are_gone(6, tmp_path, sysfs)
    (descriptors / "5").symlink_to("/dev/infiniband/uverbs0")
    assert not copies.devices_are_gone(6, tmp_path, sysfs)


def test_what_a_failed_request_had_asked_for_is_known_without_its_driver() -> None:
    seen = Seen()
    seen.lines(
        f"I|7|130|{number('rxe_reg_user_mr')}|-12",
        "A|7|139|7f0000000000|32768|7f0000001000|7|-1|-",
        f"K|7|6|140|90|{number('ib_uverbs_reg_mr')}|-12|0|0|0|-|-|-|x",
        # One of which the K was lost: nothing of it is of a later request.
        "A|7|200|1000|1|1000|1|-1|-",
        f"K|7|6|340|290|{number('ib_uverbs_reg_mr')}|-22|0|0|0|-|-|-|x",
    )
    first, second = seen.complete
    assert (first.address, first.length, first.iova, first.access, first.fd) == (
        0x7F0000000000,
        32768,
        0x7F0000001000,
        7,
        None,
    )
    assert [item.function for item in first.inner] == ["rxe_reg_user_mr"] and not first.dmabuf
    assert (second.address, second.length, second.access) == (None, None, None)


def test_of_a_request_by_attributes_only_those_that_it_had_are_known() -> None:
    handler = "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR"
    start, length, iova, access, fd = (1 << attribute_index(item) for item in REQUESTS[handler])
    seen = Seen()
    for present in (start | length | iova | access | fd, length | fd):
        seen.lines(
            f"A|7|139|0|4096|1000|7|9|{present:x}",
            f"K|7|6|140|90|{number(handler)}|-9|0|0|0|-|-|-|x",
        )
    whole, part = seen.complete
    assert (whole.address, whole.length, whole.iova, whole.access, whole.fd) == (0, 4096, 0x1000, 7, 9)
    assert (part.address, part.length, part.iova, part.access, part.fd) == (None, 4096, None, None, 9)


def test_a_request_that_nobody_saw_begin_claims_nothing_that_came_before() -> None:
    seen = Seen()
    seen.lines(
        f"I|7|110|{number('__gup_longterm_locked')}|-12",
        f"K|7|6|140|0|{number('ib_uverbs_reg_mr')}|-22|0|0|0|-|-|-|x",
    )
    (failure,) = seen.complete
    assert failure.inner == [] and failure.doubt
    trace = observer().trace(failure, 0)
    assert trace["status"] == "spoiled" and "begin" in trace["why"]


WORD = {"address": 0x7F0000000000, "length": 32768, "iova": 0x7F0000000000}


def test_the_librarys_word_by_its_own_way_may_come_before_or_after_the_kernels() -> None:
    for kernel_first in (True, False):
        seen = Seen()
        seen.correlator.library_speaks = True
        word = LibraryWord(7, 6, 150, 2, WORD, "python3")
        if kernel_first:
            seen.lines(*held_pin(user=0))
            assert not seen.complete
            seen.correlator.library_failed(word)
        else:
            seen.correlator.library_failed(word)
            assert seen.correlator.alone and not seen.at_once
            seen.lines(*held_pin(user=0))
        (failure,) = seen.complete
        assert failure.verb == "ibv_reg_mr_iova2" and failure.errno == "ENOMEM" and len(failure.inner) == 4
        assert failure.access == 7  # which the library no longer knew, and the kernel did
        seen.correlator.settle(10_000)
        seen.correlator.overdue(100.0)
        assert len(seen.complete) == len(seen.at_once) == 1


def test_a_word_that_the_kernel_has_nothing_to_add_to_is_told_when_that_is_sure() -> None:
    seen = Seen()
    seen.correlator.library_failed(LibraryWord(7, 6, 150, 2, WORD, "python3"))
    seen.correlator.settle(150)
    assert not seen.complete
    seen.correlator.settle(151)
    (failure,) = seen.complete
    assert failure.verb == "ibv_reg_mr_iova2" and failure.function == "" and failure.errno is None
    assert (failure.address, failure.length, failure.access) == (0x7F0000000000, 32768, None)


def test_a_word_that_comes_after_all_is_not_told_a_second_time() -> None:
    seen = Seen()
    seen.correlator.library_speaks = True
    seen.lines(*held_pin(user=0))
    seen.correlator.overdue(1.5)
    assert len(seen.complete) == 1 and not seen.complete[0].user_missing
    seen.correlator.library_failed(LibraryWord(7, 6, 150, 2, WORD, "python3"))
    seen.correlator.settle(10_000)
    assert len(seen.complete) == 1


def test_of_many_failures_that_are_read_at_once_each_has_its_own_word() -> None:
    """A thread that fails as fast as it can: some of both sides are read late, and one word is lost."""
    for kernel_first in (True, False):
        seen = Seen()
        seen.correlator.library_speaks = True

        def fails(at: int, seen: Seen = seen) -> None:
            ret = f"{number('ib_uverbs_reg_mr')}|-14|0|0|0|-|-|-|x"
            seen.lines(f"A|7|{at + 1}|1000|4096|1000|7|-1|-", f"K|7|6|{at + 1}|{at}|{ret}")

        times = range(1000, 11000, 1000)
        words = [LibraryWord(7, 6, at + 2, 2, {"address": 0x1000, "length": 4096}, "x") for at in times]
        del words[4]
        for turn in (True, False):
            for at in times if turn is kernel_first else ():
                fails(at)
            for word in words if turn is not kernel_first else ():
                seen.correlator.library_failed(word)
        seen.correlator.settle(1 << 60)
        seen.correlator.overdue(100.0)
        assert len(seen.complete) == len(seen.at_once) == 10, kernel_first


def test_a_word_of_another_call_of_the_thread_is_a_failure_of_its_own() -> None:
    seen = Seen()
    seen.correlator.library_speaks = True
    seen.lines(*held_pin(user=0))
    later = LibraryWord(7, 6, 200_000_150, 2, {"address": 0x1000, "length": 4096}, "python3")
    seen.correlator.library_failed(later)
    seen.correlator.settle(300_000_000)
    seen.correlator.overdue(100.0)
    assert sorted(failure.address or 0 for failure in seen.complete) == [0x1000, 0x7F0000000000]


def test_what_a_thread_told_of_itself_is_a_marker_and_no_new_process() -> None:
    seen = Seen()
    told: list[tuple[str, int]] = []
    seen.correlator.on_open = lambda pid: told.append(("open", pid))
    seen.correlator.on_marker = lambda ns, cpu: told.append((f"on {cpu}", ns))
    seen.lines("O|6|100|0", f"O|{os.getpid()}|200|3")
    assert told == [("open", 6), ("on 3", 200)]


def test_an_errno_that_nobody_said_is_not_made_up() -> None:
    seen = Seen()
    seen.lines(LIBRARY)
    assert seen.complete[0].errno is None and seen.complete[0].errno_how == "missing"


def test_a_provider_without_dmabuf_is_inferred() -> None:
    seen = Seen()
    seen.lines("U|7|6|150|3|0|4096|0|0|0|python3")
    assert seen.complete[0].errno == "EOPNOTSUPP" and seen.complete[0].errno_how == "inferred"


def test_where_the_kernels_word_may_be_lost_nothing_is_inferred_of_a_dmabuf() -> None:
    for doubt, errno in (("", "EOPNOTSUPP"), ("events were lost", None)):
        seen = Seen()
        seen.correlator.library_failed(
            LibraryWord(7, 6, 150, 3, {"address": 0, "length": 4096, "fd": 9}, "x")
        )
        seen.correlator.settle(151, doubt)
        (failure,) = seen.complete
        assert (failure.errno, failure.errno_inferred, failure.doubt) == (errno, not doubt, doubt)
        assert failure.dmabuf and failure.fd == 9


def test_how_late_a_failure_came_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "kernel_boottime", lambda: 5_000_000_000)
    seen = Seen()
    seen.time = 100.0
    seen.lines(f"K|7|6|3000000000|2000000000|{number('ib_uverbs_reg_mr')}|-12|0|0|0|-|-|-|x")
    seen.correlator.library_failed(LibraryWord(8, 6, 4_500_000_000, 2, WORD, "x"))
    seen.correlator.settle(5_000_000_000)
    assert [(failure.since, failure.late) for failure in seen.complete] == [(100.0, 2.0), (100.0, 0.5)]


def test_events_of_an_engine_that_is_not_in_charge_do_not_count() -> None:
    seen = Seen()
    seen.correlator.accepts = lambda ns: ns >= 1000
    seen.lines(*held_pin(), LIBRARY)
    assert not seen.at_once and not seen.complete


def test_what_is_lost_or_malformed_is_counted() -> None:
    seen = Seen()
    said: list[str] = []
    seen.correlator.on_error = said.append
    seen.correlator.line('{"type": "lost_events", "data": {"events": 12}}')
    seen.correlator.line('{"type": "attached_probes", "data": {"probes": 12}}')
    seen.lines("K|7|oops", "H|5")
    seen.correlator.line("stdin:1:1: ERROR: no")
    counts = seen.correlator.counts
    assert (counts.lost, counts.attached, counts.malformed, counts.heartbeats) == (12, 12, 1, 1)
    assert said == ["stdin:1:1: ERROR: no"]


def test_a_command_name_may_hold_anything() -> None:
    seen = Seen()
    seen.lines(f"K|7|6|140|90|{number('ib_uverbs_reg_mr')}|-12|0|0|0|-|-|-|a|b c")
    assert seen.complete[0].comm == "a|b c"


# Copies of libibverbs


def test_copies_are_found_by_what_processes_have_mapped() -> None:
    maps = (
        "7f00-7f01 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n"
        "7f01-7f02 r-xp 00001000 08:01 11 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n"
        "7f03-7f04 r-xp 00001000 08:01 12 /opt/app/libibverbs-1234abcd.so.1 (deleted)\n"
        "7f05-7f06 r-xp 00001000 08:01 13 /usr/lib/libmlx5.so.1\n"
    )
    assert list(copies.mapped_copies(maps)) == [
        copies.Mapped("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0", "7f01-7f02"),
        copies.Mapped("/opt/app/libibverbs-1234abcd.so.1", "7f03-7f04", deleted=True),
    ]


def test_a_copy_is_reached_by_its_mapping_or_else_below_the_process_root(tmp_path: Path) -> None:
    """In a chroot the kernel shows us the path from our root, which is not there below the process' own."""
    found = copies.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    own, deleted, at_root = (tmp_path / f"{name}-libibverbs.so.1" for name in ("own", "deleted", "root"))
    for path in (own, deleted, at_root):
        path.write_bytes(found[0].read_bytes())
    proc = tmp_path / "proc"
    for pid, path, gone in ((41, own, False), (42, deleted, True), (43, at_root, False), (44, deleted, True)):
        (proc / str(pid)).mkdir(parents=True)
        text = (
            f"00400000-00401000 r-xp 00000000 08:01 {pid} /a/libibverbs.so.1{' (deleted)' if gone else ''}\n"
        )
        (proc / str(pid) / "maps").write_text(text)
        if pid in (41, 42):
            (proc / str(pid) / "map_files").mkdir()
            (proc / str(pid) / "map_files" / "400000-401000").symlink_to(path)
    (proc / "43" / "root" / "a").mkdir(parents=True)
    (proc / "43" / "root" / "a" / "libibverbs.so.1").symlink_to(at_root)
    known = copies.Copies(proc)
    assert [known.look_at(pid) for pid in (41, 42, 43, 44)] == [True, True, True, False]
    assert (
        list(known.problems) == ["/a/libibverbs.so.1"] and "deleted" in known.problems["/a/libibverbs.so.1"]
    )
    assert {copy.key[1] for copy in known.known.values()} == {
        path.stat().st_ino for path in (own, deleted, at_root)
    }
    known.close()


def test_the_default_version_of_a_function_is_the_one_that_programs_call() -> None:
    found = copies.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    functions = copies.verbs_in(found[0].read_bytes())
    assert {"ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr"} <= set(functions)
    known = copies.dynamic_functions(found[0].read_bytes())
    assert known["ibv_reg_mr"][0] == functions["ibv_reg_mr"]


@pytest.mark.parametrize("blob", [b"", b"\x7fELF\x01\x01", b"\x7fELF\x02\x01" + bytes(58), os.urandom(512)])
def test_what_is_no_library_is_said_to_be_none(blob: bytes) -> None:
    with pytest.raises(copies.NotElf):
        copies.dynamic_functions(blob)


def test_a_copy_is_followed_once_however_it_is_reached(tmp_path: Path) -> None:
    found = copies.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    link = tmp_path / "libibverbs.so.1"
    link.symlink_to(found[0])
    known = copies.Copies()
    assert known.add_file(found[0], "one") and not known.add_file(link, "two")
    other = tmp_path / "copy.so"
    other.write_bytes(found[0].read_bytes())
    assert known.add_file(other, "three") and len(known.libraries()) == 2
    other.unlink()
    assert Path(known.libraries()[1].path).read_bytes()[:4] == b"\x7fELF"
    known.close()


def test_copies_of_containers_that_are_gone_are_let_go(tmp_path: Path) -> None:
    found = copies.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    known = copies.Copies(tmp_path)
    assert known.add_file(found[0], "the system's")
    other = tmp_path / "libibverbs.so.1"
    other.write_bytes(found[0].read_bytes())
    (tmp_path / "42").mkdir()
    assert known.add_file(other, "a container's", 42) and not known.add_file(other, "again", 43)
    known.forget_unused()
    assert len(known.known) == 2
    (tmp_path / "42").rmdir()
    known.forget_unused()
    assert [copy.shown for copy in known.known.values()] == ["the system's"]
    known.close()


# Processes


def test_rank_variables_are_kept_and_nothing_else_of_an_environment() -> None:
    environ = "HOME=/root\0RANK=3\0SLURM_JOB_ID=77\0SECRET=x\0OMPI_COMM_WORLD_RANK=3\0SLURM_TOKEN=y\0"
    assert process.rank_variables(environ) == {"RANK": "3", "SLURM_JOB_ID": "77", "OMPI_COMM_WORLD_RANK": "3"}


def test_a_container_is_told_by_its_control_group() -> None:
    name = "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + "ab" * 32 + ".scope"
    assert process.container_of(name) == {"runtime": "kubepods", "id": "ab" * 32}
    assert process.container_of("0::/user.slice/session-1.scope") is None


def test_the_mapping_of_an_address_and_what_backs_it() -> None:
    maps = (
        "10000-20000 rw-p 00000000 00:00 0 \n20000-30000 rw-s 00000000 00:01 5 /memfd:x (deleted)\n"
        "30000-40000 rw-s 00000000 08:01 6 /data/file\n40000-50000 rw-s 00000000 00:05 7 /dev/nvidia0\n"
    )
    first, lines = process.vma_of(maps, 0x1F000, 0x2000)
    assert first.startswith("10000-20000") and len(lines) == 2
    backings = [process.backing_of(text) for text in maps.splitlines()]
    assert backings == ["anonymous", "memfd", "file", "device"]
    assert process.vma_of(maps, 0x90000, 1) == ("", []) and process.backing_of("") == "unknown"


def test_a_process_that_is_gone_leaves_names_of_what_was_not_read(tmp_path: Path) -> None:
    gone = process.read_process(4, tmp_path)
    assert gone.facts["pid"] == 4 and gone.capabilities is None
    assert any("status" in text for text in gone.problems)


def test_this_process_is_read() -> None:
    own = process.read_process(os.getpid())
    assert own.facts["comm"] and own.capabilities is not None
    # Only root may look at the first process, which has the node's namespaces.
    assert not [text for text in own.problems if not text.startswith("/proc/1/ns/")]
    assert "memlock_soft" in own.limits


@pytest.mark.parametrize(
    ("offsets", "added"),
    [
        (
            "monotonic           0         0\nboottime       -86400 250000000\n",
            -86_400_000_000_000 + 250_000_000,
        ),
        ("monotonic           5         0\nboottime            7         3\n", 7_000_000_003),
        ("monotonic           5         0\n", 0),
        (None, 0),
    ],
)
def test_the_kernels_clock_is_known_in_a_time_namespace(
    offsets: str | None, added: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if offsets is not None:
        (tmp_path / "timens_offsets").write_text(offsets)
    real = Path

    def path(given: str) -> Path:
        return tmp_path / "timens_offsets" if given == "/proc/self/timens_offsets" else real(given)

    monkeypatch.setattr(process, "Path", path)
    process._boottime_offset.cache_clear()
    try:
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        kernel = process.kernel_boottime()
        assert before <= kernel + added <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        assert process.start_ticks(90_000 * 10**9) == (90_000 * 10**9 + added) // tick
    finally:
        process._boottime_offset.cache_clear()


def test_modules_that_are_only_coming_or_going_are_not_loaded(tmp_path: Path) -> None:
    for name, state in (("rdma_rxe", "live"), ("mlx5_ib", "coming"), ("efa", "going"), ("kernel", None)):
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "initstate").write_text(f"{state}\n")
    assert loaded_modules(tmp_path) == {"rdma_rxe", "kernel"}


# Limits, output, metrics, lock


def test_the_limiter_lets_bursts_through_and_not_the_same_over_and_over() -> None:
    time = [0.0]
    limiter = Limiter(rate=1.0, burst=4, each=2, window=60.0, now=lambda: time[0])
    assert [limiter.allows("a") for _ in range(3)] == [True, True, False]
    assert [limiter.allows(key) for key in "bcd"] == [True, True, False]
    time[0] = 1.0
    assert limiter.allows("e") and not limiter.allows("f")
    time[0] = 61.0
    assert limiter.allows("a")


def header() -> dict[str, Any]:
    return {"run": {}, "node": {}, "lab": None, "stand_ins": []}


def output(path: Path, **limits: int) -> Output:
    return Output(path, header, **{"rotate": 1 << 20, "quota": 1 << 20, **limits})


def test_a_record_that_is_full_or_moved_away_is_followed_by_a_new_one(tmp_path: Path) -> None:
    out = output(tmp_path, rotate=1000)
    out.event("watch", what="x" * 900)
    first = out.path
    assert out.due()
    out.begin()
    assert out.path != first and not out.due()
    assert '"run-end"' in (first / "record.jsonl").read_text()
    (out.path / "record.jsonl").rename(out.path / "record.jsonl.1")
    assert out.due()


def test_the_oldest_directories_give_way_to_the_quota_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "20200101-000000-someone").mkdir()
    ended: list[Path] = []
    out = output(tmp_path, quota=5000)
    out.on_end = ended.append
    for _ in range(4):
        out.begin()
        out.event("watch", what="x" * 2000)
    out.begin()
    assert len(ended) == 4 and out.removed >= 2
    assert (tmp_path / "notes").exists() and (tmp_path / "20200101-000000-someone").exists()
    assert out.path.exists() and out.used() <= 5000 + 3000
    assert sum(path.exists() for path in ended) < 4


@pytest.mark.parametrize("marker", [".watch", "program.bt"])
def test_directories_of_earlier_watches_with_either_engine_are_the_quotas_too(
    marker: str, tmp_path: Path
) -> None:
    for name, mine in (
        ("20200101-000000-host", True),
        ("20200102-000000-host-2", True),
        ("20200103-0-x", True),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.jsonl").write_text("x" * 3000)
        if mine:
            (tmp_path / name / marker).touch()
    others = tmp_path / "20200101-000000-other"
    others.mkdir()
    (others / "record.jsonl").write_text("x" * 3000)
    out = output(tmp_path, quota=5000)
    assert out.used() == 6000 and not out.room()
    for age, name in enumerate(("20200102-000000-host-2", "20200101-000000-host")):
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    out.begin()
    assert (out.path / ".watch").exists() and not (out.path / "program.bt").exists()
    assert out.removed == 1 and out.room() and out.used() < 5000
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"20200102-000000-host-2", "20200103-0-x", others.name, out.path.name}


def test_a_second_watch_says_who_holds_the_first(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "out", tmp_path / "lock")
    with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()} since .*{tmp_path}/out"):
        Lock(tmp_path / "other", tmp_path / "lock")
    lock.release()
    Lock(tmp_path / "other", tmp_path / "lock").release()


def test_metrics_are_text_that_prometheus_reads(tmp_path: Path) -> None:
    metrics = Metrics(watching=1, started=1.5)
    metrics.failed("page-migration", "B proven")
    metrics.failed("page-migration", "B proven")
    metrics.failed('odd"layer')
    metrics.registrations = {("host", "rxe"): (3, 4096)}
    path = tmp_path / "regrepro.prom"
    metrics.write(path)
    lines = path.read_text().splitlines()
    assert 'regrepro_watch_failures_total{layer="page-migration",class="B proven"} 2' in lines
    assert 'regrepro_watch_failures_total{layer="odd\\"layer",class=""} 1' in lines
    assert "regrepro_watch_up 1" in lines and "regrepro_watch_lost_events_total 0" in lines
    assert 'regrepro_watch_registered_bytes_total{path="host",driver="rxe"} 4096' in lines
    names = [text.split()[2] for text in lines if text.startswith("# TYPE")]
    assert len(names) == len(set(names)) and list(tmp_path.iterdir()) == [path]


def test_the_account_adds_what_the_kernel_counted() -> None:
    account = Account()
    names = ["rxe_reg_user_mr"]
    for _ in range(2):
        account.take({"@count": {"0,1,42,app,x": 3}}, names)
        account.take({"@bytes": {"0,1,42,app,x": 12288}}, names)
        account.take({"@sizes": {"0,1": [{"min": 4096, "max": 8191, "count": 3}]}}, names)
    account.take({"@other": {"9": 1}, "@count": {"7,9,x": 1}}, names)
    assert account.totals() == {("host", "rxe"): (6, 24576)}
    told = account.as_record()
    assert told["registrations"][0]["comm"] == "app,x" and told["sizes"][0]["buckets"] == [[4096, 6]]


def test_the_account_adds_what_our_own_programs_counted() -> None:
    account = Account()
    names = ["rxe_reg_user_mr", "mlx5_ib_reg_user_mr_dmabuf"]
    host = KEY.pack(0, 1, 42, 0, "é app".encode()[:15])
    dmabuf = KEY.pack(1, 2, 43, 0, b"x" * 16)
    account.take_counted({}, {}, names)
    assert not account.changed
    account.take_counted({host: (3, 12288)}, {SIZE_KEY.pack(0, 1, 12): 3}, names)
    rows, sizes = {host: (1, 0), dmabuf: (2, 8192)}, {SIZE_KEY.pack(0, 1, 12): 1}
    account.take_counted(rows, sizes | {SIZE_KEY.pack(0, 1, 0): 5, SIZE_KEY.pack(0, 1, NO_SIZE): 7}, names)
    assert account.changed
    assert account.totals() == {("host", "rxe"): (4, 12288), ("dma-buf", "mlx5_ib"): (2, 8192)}
    told = account.as_record()
    assert [(row["fn"], row["pid"], row["comm"]) for row in told["registrations"]] == [
        (names[1], 43, "x" * 16),
        (names[0], 42, "é app"),
    ]
    assert told["sizes"] == [{"fn": names[0], "path": "host", "buckets": [[0, 7], [1, 5], [4096, 4]]}]


def test_what_too_many_processes_did_is_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_ROWS", 2)
    account = Account()
    names = ["rxe_reg_user_mr", "efa_reg_mr"]
    for pid in (41, 42, 43, 44, 42):
        account.take({"@count": {f"0,1,{pid},app": 1}}, names)
        account.take({"@bytes": {f"0,1,{pid},app": 4096}}, names)
    account.take_counted(
        {KEY.pack(0, 1, 45, 0, b"app"): (5, 9), KEY.pack(1, 1, 41, 0, b"app"): (1, 1)}, {}, names
    )
    told = account.as_record()["registrations"]
    assert [(row["fn"], row["pid"], row["comm"], row["count"], row["bytes"]) for row in told] == [
        ("efa_reg_mr", 0, "(others)", 1, 1),
        ("rxe_reg_user_mr", 0, "(others)", 7, 2 * 4096 + 9),
        ("rxe_reg_user_mr", 41, "app", 1, 4096),
        ("rxe_reg_user_mr", 42, "app", 2, 8192),
    ]
    assert account.totals() == {("host", "rxe"): (10, 5 * 4096 + 9), ("host", "efa"): (1, 1)}


# What is lost, missed, opened and begun anew


@dataclass
class Following:
    """In the place of an engine."""

    correlator: Correlator = field(default_factory=lambda: Seen().correlator)
    lost: int = 0
    hits: int | None = 0
    ended: bool = False
    attached: bool = True
    started: float = -1000.0
    last_line: float = float("inf")
    stopped: int = 0

    def missed(self) -> int | None:
        return self.hits

    def why(self) -> str:
        return "it ended"

    def stop(self) -> None:
        self.stopped += 1


class Alone:
    """Watch with an engine that does nothing, at a time that is set; it only says what it would write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time, sleep=lambda _seconds: None)
        monkeypatch.setattr(watch, "time", clock)
        monkeypatch.setattr(watch.look, "record_events", lambda *_: [])
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.traced: list[tuple[int, int | None]] = []
        self.met: list[int] = []
        self.begun = 0
        self.engine = Following()
        self.watch = made = Watch(Options(path, libraries=False), lambda _text: None)
        made._engine = self.engine  # type: ignore[assignment]
        made._tell = lambda what, **keys: self.told.append((what, keys))  # type: ignore[method-assign]
        made._judge = lambda _events: {}  # type: ignore[method-assign]
        made._show = lambda *_: None  # type: ignore[method-assign]
        made._observer = SimpleNamespace(  # type: ignore[assignment]
            trace=lambda _failure, lost, missed: self.traced.append((lost, missed)), meet=self.met.append
        )
        made._output = SimpleNamespace(written=0, begin=self.begin, event=lambda *_, **__: 1)  # type: ignore[assignment]

    def begin(self) -> None:
        self.begun += 1

    def trace(self, since: float, late: float = 0.0) -> tuple[int, int | None]:
        """Return what a failure's trace is told of what was lost and missed near it."""
        failure = Failure(7, 6, "app", 1, since=since, late=late)
        self.watch._record(failure, Evidence(failure, Process(6)))
        return self.traced[-1]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Alone]:
    made = Alone(monkeypatch, tmp_path)
    yield made
    for fd in made.watch._waker:
        os.close(fd)


def test_losses_spoil_what_happened_since_the_last_look_and_around(alone: Alone) -> None:
    alone.now = 110.0
    alone.watch._count_lost()
    alone.now, alone.engine.lost = 120.0, 4
    alone.watch._count_lost()
    alone.now = 130.0
    alone.watch._count_lost()
    assert alone.told == [("lost", {"events": 4})]
    near = {when: alone.watch._lost_near(when) for when in (107.9, 108.1, 115.0, 121.9, 122.1, 130.0)}
    assert near == {107.9: 0, 108.1: 4, 115.0: 4, 121.9: 4, 122.1: 0, 130.0: 0}
    alone.engine.lost = 5  # nobody has looked yet
    assert alone.watch._lost_near(500.0) == 1


def test_a_failure_that_came_late_is_spoiled_by_what_was_lost_when_it_happened(alone: Alone) -> None:
    alone.now, alone.engine.lost = 110.0, 4
    alone.watch._count_lost()
    alone.now = 200.0
    assert alone.trace(since=200.0)[0] == 0
    assert alone.trace(since=200.0, late=95.0)[0] == 4
    assert alone.trace(since=111.0, late=50.0)[0] == 4  # when it came counts, too
    assert alone.trace(since=200.0, late=-95.0)[0] == 0


def test_hits_that_were_missed_are_looked_for_at_each_failure(alone: Alone) -> None:
    assert alone.trace(100.0) == (0, 0)
    alone.engine.hits = 3
    alone.watch._count_missed()  # too soon
    assert not alone.told and alone.watch.metrics.missed == 0
    assert alone.trace(100.0) == (0, 3) and alone.told == [("missed", {"hits": 3})]
    alone.now += 1.5
    alone.engine.hits = 5
    assert alone.trace(101.0) == (0, 5)
    alone.now += 1.0
    assert alone.trace(102.0) == (0, 2)
    alone.now += 1.5
    assert alone.trace(104.0) == (0, 0) and alone.watch.metrics.missed == 5


def test_where_the_kernel_does_not_say_what_it_missed_that_is_not_known(alone: Alone) -> None:
    alone.engine.hits = None
    assert alone.trace(100.0) == (0, None)


def test_a_process_that_opens_devices_in_a_loop_is_looked_at_once_a_second_and_once_more(
    alone: Alone,
) -> None:
    def go_on() -> None:
        for pid in list(alone.watch._opened_again):
            alone.watch._opened(pid)

    for _ in range(50):
        alone.watch._opened(6)
        alone.watch._opened(7)
        go_on()
        alone.now += 0.01
    assert alone.met == [6, 7] and alone.watch._opened_again == {6, 7}
    alone.now += 1.0
    go_on()
    assert sorted(alone.met[2:]) == [6, 7]
    alone.now += 5.0
    go_on()
    assert len(alone.met) == 4 and not alone.watch._opened_again
    alone.watch._opened(6)
    assert len(alone.met) == 5


def test_openings_of_very_many_processes_are_not_remembered_for_ever(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_OPENED_KEPT", 10)
    for pid in range(100):
        alone.watch._opened(pid)
    assert alone.met == list(range(100)) and len(alone.watch._opened_at) <= 11


@pytest.mark.parametrize("falls_back", [False, True])
def test_an_engine_that_ended_is_begun_anew_and_what_it_lost_counts_once(
    alone: Alone, falls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, old, new = alone.watch, alone.engine, Following()

    def start_bpf() -> Following | None:
        if not falls_back:
            return new
        made._bpftrace = "/bpftrace", (0, 20)
        return None

    monkeypatch.setattr(made, "_start_bpf", start_bpf)
    monkeypatch.setattr(made, "_start_bpftrace", lambda: new)
    old.lost = 4
    made._count_lost()
    old.lost, old.ended = 6, True
    made._watch_engines(alone.now)
    assert made._engine is new and old.stopped == 1 and made.metrics.engine_restarts == 1
    assert made._lost_now() == made.metrics.lost == 6 and made.metrics.watching == 1
    new.lost = 1
    made._count_lost()
    made._count_lost()
    assert [keys["events"] for what, keys in alone.told if what == "lost"] == [4, 3]
    assert alone.begun == int(falls_back)  # its record says which engine made it


def test_what_an_engine_missed_is_no_more_than_that_once_another_has_begun(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone.watch, "_start_bpf", lambda: Following(hits=2))
    alone.engine.hits = 5
    alone.watch._count_missed(now=True)
    alone.engine.ended = True
    alone.watch._watch_engines(alone.now)
    alone.watch._count_missed(now=True)
    assert alone.watch.metrics.missed == 7


# A failure in the record, and its verdict


def observer() -> Observer:
    """One that looks at nothing: it only knows what the program follows."""
    made = Observer.__new__(Observer)
    made._functions = FUNCTIONS
    made._flags = FlagNames({"FOLL_WRITE": 1, "FOLL_LONGTERM": 256}, "a test")
    return made


def state(place: str, refcount: int) -> dict[str, Any]:
    return {
        "pages": 8,
        "pfn": [[0, 4096, 8]],
        "place": [[0, 8, place]],
        "refcount": [[0, 8, refcount]],
        "mapcount": [[0, 8, 1]],
        "pincount": None,
        "baseline": [[0, 8, 1]],
        "node": [[0, 8, 0]],
        "how": "observed",
        "source": "a test",
    }


class Pages:
    """In the place of a PageState."""

    def __init__(self, place: str, refcount: int) -> None:
        self.state = state(place, refcount)

    def as_record(self) -> dict[str, Any]:
        return self.state


def judged(
    failure: Failure, lost: int = 0, looks: Sequence[dict[str, Any]] = (), checked: bool = True, **seen: Any
) -> dict[str, Any]:
    """Write a failure's pass and later looks, hold them to the schema, and judge it."""
    process_ = Process(failure.pid, limits=seen.pop("limits", {}), capabilities=seen.pop("capabilities", []))
    found = Evidence(failure, process_, **seen)
    record = [{"schema": "regrepro.record/2", **HEADER}]
    for kind, keys in record_events(found, observer().trace(failure, lost), "failure-1"):
        record.append({"seq": len(record), "t": 0.0, "event": kind, **keys})
    item = Waiting(failure, found, {}, "failure-1")
    for seen_later in looks:
        after = seen_later["after_seconds"]  # what a record holds may be no number; what is counted is one
        kind, keys = item.add({**seen_later, "after_seconds": after if type(after) in (int, float) else 0.0})
        keys["after_seconds"] = after
        record.append({"seq": len(record), "t": 0.0, "event": kind, **keys})
    record.append({"seq": len(record), "t": 0.0, "event": "run-end", "outcome": "finished"})
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for item in record if checked else []:
        problems = [error.message for error in validator.iter_errors(item)]
        assert not problems, (item.get("event"), problems)
    verdicts = judge_record(Record(record[0], record[1:]))
    jsonschema.Draft202012Validator(VERDICTS).validate(verdicts)
    assert verdicts["complete"] and (not verdicts["problems"] or not checked)
    return dict(verdicts["verdicts"][0])


def later(after: float, refcount: int = 1025, words: str = "lru", **change: Any) -> dict[str, Any]:
    """A later look at the eight pages."""
    seen: dict[str, Any] = {
        "after_seconds": after,
        "address": 0x7F0000000000,
        "length": 32768,
        "pages": {**state("cma", refcount), **change},
        "lists": [[0, 8, words]],
        "ended": "",
    }
    return seen


def lasting(refcount: int = 1025, words: str = "lru", **change: Any) -> list[dict[str, Any]]:
    """All later looks, each with the same references."""
    return [later(after, refcount, words, **change) for after in LOOKS]


def held(refcount: int = 1026, place: str = "cma", **seen: Any) -> dict[str, Any]:
    seen_lines = Seen()
    seen_lines.lines(*held_pin(), LIBRARY)
    keys: dict[str, Any] = {
        "first": 0x7F0000000000,
        "length": 32768,
        "vma": "7f0000000000-7f0000008000 rw-p 00000000 00:00 0 ",
        "pages": Pages(place, refcount - 1),
        "again": Pages(place, refcount - 1),
        "again_after": 0.25,
        "stuck": [{"pfn": 4096, "place": place, "refcount": refcount, "mapcount": 1}],
        "looks": lasting(refcount - 1),
    }
    return judged(seen_lines.complete[0], **{**keys, **seen})


def test_a_held_pin_that_was_seen_in_full_is_class_b_proven() -> None:
    verdict = held()
    assert verdict["verdict"] == "caught" and verdict["layer"] == "page-migration"
    assert verdict["class"] == {"name": "B", "state": "proven", "missing": []}
    assert verdict["pin_owner"] == "unknown" and "whose holder was not seen" in verdict["reason"]
    assert exit_code({"verdicts": [verdict]}) == 10
    assert all(check["state"] == "ok" for check in verdict["checks"] if check["name"] != "holder")


def test_modules_of_a_stack_are_those_of_drivers(tmp_path: Path) -> None:
    symbols = tmp_path / "kallsyms"
    symbols.write_text(
        "0 t bpf_prog_1234\t[bpf]\n0 t ftrace_trampoline\t[__builtin__ftrace]\n0 T pin_user_pages\n"
        "0 t os_lock_user_pages\t[nvidia]\n0 t ib_umem_get\t[ib_core]\n"
    )
    stack = ["bpf_prog_1234+5", "ftrace_trampoline+1", "pin_user_pages+9", "os_lock_user_pages+77", "0x12"]
    assert modules_of(stack, symbols) == ["nvidia"]


def test_the_holder_is_named_where_its_pin_was_seen() -> None:
    pin = {
        "fn": "pin_user_pages",
        "start": 0x7F0000000000,
        "nr_pages": 8,
        "flags": ["FOLL_WRITE"],
        "stack": ["pin_user_pages+1", "os_lock_user_pages+5"],
        "modules": ["nvidia"],
    }
    verdict = held(plain_pins=[pin])
    assert verdict["pin_owner"] == "cuda" and "a pin by cuda" in verdict["reason"]


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({"looks": []}, "not looked at again"),
        ({"stuck": []}, "the references of the pages left behind were not seen"),
        ({"looks": lasting(1)}, "I/O in flight"),
        ({"pages": None, "again": None, "pages_unknown": "it was gone"}, "it was gone"),
        ({"lost": 3}, "3 events were lost"),
    ],
)
def test_what_is_missing_makes_it_likely_and_is_named(change: dict[str, Any], lacks: str) -> None:
    verdict = held(**change)
    assert verdict["class"]["state"] == "likely" and lacks in verdict["reason"], verdict["reason"]


def test_pages_in_ordinary_memory_lay_in_other_memory_when_the_kernel_moved_them() -> None:
    """The kernel migrates for a long-term pin out of unpinnable memory only."""
    verdict = held(place="ordinary")
    assert verdict["class"]["state"] == "likely" and "has changed" in verdict["reason"]


def test_a_process_that_died_is_judged_by_what_the_kernel_told() -> None:
    verdict = held(pages=None, again=None, first=0, length=0, pages_unknown="it was gone")
    assert verdict["class"]["state"] == "likely"
    assert {check["name"] for check in verdict["checks"] if check["state"] == "ok"} >= {
        "trace",
        "placement",
        "references",
    }


def umem_failed(ret: int) -> Failure:
    seen = Seen()
    seen.lines(
        f"D|7|130|{number('rxe_reg_user_mr')}|{ret}|7f0000000000|32768|7f0000000000|7",
        f"K|7|6|140|90|{number('ib_uverbs_reg_mr')}|{ret}|0|2|0|-|-|-|python3",
        LIBRARY,
    )
    return seen.complete[0]


def test_one_that_died_is_what_it_was_when_it_opened_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = tmp_path / "6"
    base.mkdir()
    (base / "status").write_text("Name:\tapp\nUid:\t1000 1000 1000 1000\nCapEff:\t0\nVmPin:\t16 kB\n")
    (base / "limits").write_text("Max locked memory   4096   4096   bytes\n")
    real = process.read_process
    monkeypatch.setattr(process, "read_process", lambda pid: real(pid, tmp_path))
    made = observer()
    made._met = {}
    made.meet(6)
    assert made._of_process(Failure(6, 6, "app", 1)).limits == {"memlock_soft": 4096, "vmpin": 16384}
    for path in base.iterdir():
        path.unlink()
    gone = made._of_process(Failure(6, 6, "app", 1))
    assert gone.limits == {"memlock_soft": 4096} and gone.capabilities == []
    assert gone.facts["comm"] == "app" and set(gone.facts["of_opening"]) >= {"comm", "uid"}
    assert "of_opening" not in made._of_process(Failure(7, 7, "app", 1)).facts
    assert any("status" in problem for problem in gone.problems)
    assert any("ns/mnt" in problem for problem in gone.problems)
    assert made._of_process(Failure(7, 7, "app", 1)).limits == {}
    # So that the layer of its failure is known.
    seen = Seen()
    seen.lines(
        f"I|7|110|{number('__gup_longterm_locked')}|0",
        f"D|7|130|{number('rxe_reg_user_mr')}|-12|7f0000000000|32768|7f0000000000|7",
        f"K|7|6|140|90|{number('ib_uverbs_reg_mr')}|-12|0|0|1000|-|-|-|app",
    )
    verdict = judged(seen.complete[0], limits=gone.limits, capabilities=gone.capabilities)
    assert verdict["layer"] == "memlock-accounting"


def at_start(pid: int, start: int, limit: int) -> Process:
    return Process(pid, {"pid": pid, "starttime": start, "comm": f"of {start}"}, {"memlock_soft": limit})


@pytest.mark.parametrize(("now", "met"), [(500, None), (None, 500), (None, None)])
def test_another_process_of_the_same_number_lends_it_nothing(
    now: int | None, met: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is of one that started at 300: neither who has its number now nor who had it counts."""
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    shown = Process(6) if now is None else at_start(6, now, 4096)
    monkeypatch.setattr(process, "read_process", lambda _pid: shown)
    made = observer()
    made._met = {} if met is None else {6: at_start(6, met, 8192)}
    limits: dict[str, int | None] = {"memlock_soft": None, "vmpin": 0}
    seen = made._of_process(Failure(6, 6, "app", 1, process_start=300 * tick + 5, limits=limits))
    assert seen.facts["starttime"] == 300 and "comm" not in seen.facts and seen.limits == limits
    assert ("process 6 is another one by now" in seen.problems) == (now is not None)


def test_what_its_limits_were_the_kernel_has_told_of_that_very_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(process, "read_process", lambda _pid: at_start(6, 300, 1 << 30))
    made = observer()
    made._met = {6: at_start(6, 300, 8192)}
    seen_lines = Seen()
    seen_lines.lines(
        f"K|7|6|140|90|{number('ib_uverbs_reg_mr')}|-12|0|0|1000|{300 * tick}|65536|4|app",
        f"K|8|6|150|90|{number('ib_uverbs_reg_mr')}|-12|0|0|1000|{300 * tick}|-1|0|app",
    )
    page = os.sysconf("SC_PAGE_SIZE")
    first, second = (made._of_process(failure) for failure in seen_lines.complete)
    assert first.limits == {"memlock_soft": 65536, "vmpin": 4 * page} and first.facts["comm"] == "of 300"
    assert second.limits == {"memlock_soft": None, "vmpin": 0}


def test_the_program_reads_a_process_limits_where_btf_says_they_lie() -> None:
    bare = make_program(FUNCTIONS).text
    assert "curtask" not in bare and "|-|-|-|%s" in bare
    text = make_program(FUNCTIONS, task=TaskOffsets(1111, 2222, 3333, 4444, 5555, 6666)).text
    told = [probe for probe in text.splitlines() if "curtask" in probe]
    assert len(told) == len(FUNCTIONS.entries) and all('printf("K|' in probe for probe in told)
    assert all(f" + {offset})" in told[0] for offset in (1111, 2222, 3333, 4444, 5555, 6666))


def test_memlock_is_told_by_the_process_own_limit_and_what_it_has_pinned() -> None:
    limits = {"memlock_soft": 65536, "vmpin": 0}
    verdict = judged(umem_failed(-12), limits=limits, first=0x7F0000000000, length=32768)
    assert verdict["layer"] != "memlock-accounting"
    verdict = judged(umem_failed(-12), limits={**limits, "vmpin": 65536}, first=0x7F0000000000, length=32768)
    assert verdict["layer"] == "memlock-accounting" and verdict["evidence"]["layer"]["how"] == "observed"
    verdict = judged(umem_failed(-12), limits={**limits, "vmpin": 65536}, capabilities=["CAP_IPC_LOCK"])
    assert verdict["layer"] != "memlock-accounting"


def test_a_bad_address_a_bad_flag_and_no_dmabuf() -> None:
    seen = Seen()
    seen.lines(
        f"G|7|120|{number('pin_user_pages_fast')}|-14|10000|1|101",
        f"D|7|130|{number('rxe_reg_user_mr')}|-14|10000|4096|10000|7",
        f"K|7|6|140|90|{number('ib_uverbs_reg_mr')}|-14|{1 << 40}|1|0|-|-|-|x",
        "U|7|6|150|1|10000|4096|10000|7|0|x",
        f"K|7|6|240|190|{number('ib_uverbs_reg_mr')}|-22|0|1|0|-|-|-|x",
        "U|7|6|250|1|7f0000000000|4096|7f0000000000|2|0|x",
        f"K|7|6|340|290|{number('ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR')}|-95|0|3|0|-|-|-|x",
        "U|7|6|350|3|0|4096|0|7|0|x",
    )
    assert [judged(failure)["layer"] for failure in seen.complete] == ["page-fault", "arguments", "dma-buf"]
    assert [failure.verb for failure in seen.complete] == ["ibv_reg_mr", "ibv_reg_mr", "ibv_reg_dmabuf_mr"]


def test_an_errno_that_nobody_said_stands_as_unknown_in_the_record() -> None:
    seen = Seen()
    seen.lines(LIBRARY)
    verdict = judged(seen.complete[0])
    assert verdict["errno"] == "EUNKNOWN" and verdict["layer"] == "unknown"


def test_a_migration_of_compaction_is_no_part_of_the_path() -> None:
    seen = Seen()
    seen.lines(
        "M|7|100|5|0",
        f"D|7|130|{number('rxe_reg_user_mr')}|-12|7f0000000000|32768|7f0000000000|7",
        f"K|7|6|140|90|{number('ib_uverbs_reg_mr')}|-12|0|0|0|-|-|-|x",
    )
    trace = observer().trace(seen.complete[0], 0)
    assert "migrate_pages" not in [event["fn"] for event in trace["events"]]


# What stands in the way


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentProblem, match="needs root"):
        engine.require_rights()


def test_a_locked_down_kernel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(engine, "lockdown", lambda: "confidentiality")
    with pytest.raises(EnvironmentProblem, match="locked down"):
        engine.require_rights()


def test_without_bpftrace_or_with_an_old_one_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine.shutil, "which", lambda *_args, **_keys: None)
    with pytest.raises(EnvironmentProblem, match="apt-get install bpftrace"):
        engine.find_bpftrace()
    program = tmp_path / "bpftrace"
    monkeypatch.setattr(engine.shutil, "which", lambda *_args, **_keys: str(program))
    for said, wanted in (("bpftrace v0.9.4", "too old"), ("hello", "nothing that is known")):
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
        with pytest.raises(EnvironmentProblem, match=wanted):
            engine.find_bpftrace()
    program.write_text("#!/bin/sh\necho 'bpftrace v0.23.2'\n")
    assert engine.find_bpftrace() == (str(program), (0, 23))


def test_a_child_that_fails_is_told_and_struck_from_the_journal(tmp_path: Path) -> None:
    program = tmp_path / "bpftrace"
    program.write_text("#!/bin/sh\necho 'stdin:1:1: ERROR: no such probe' >&2\nexit 1\n")
    program.chmod(0o755)
    with Journal(tmp_path) as journal:
        correlator = Seen().correlator
        child = engine.Engine(str(program), Program("BEGIN {}\n"), correlator, tmp_path / "p.bt", journal)
        while not child.ended:
            child.take()
        child.stop()
        assert child.why() == "stdin:1:1: ERROR: no such probe" and not journal.entries
    assert (tmp_path / "p.bt").read_text() == "BEGIN {}\n"


def test_one_that_has_much_to_say_is_not_listened_to_for_ever(tmp_path: Path) -> None:
    """The library's words come by another way, and wait meanwhile."""
    (tmp_path / "lines").write_text((line("H|5") + "\n") * 1200)  # some 50 KiB: a pipe holds all of it
    program = tmp_path / "bpftrace"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/lines\n")
    program.chmod(0o755)
    with Journal(tmp_path) as journal:
        correlator = Seen().correlator
        child = engine.Engine(str(program), Program("BEGIN {}\n"), correlator, tmp_path / "p.bt", journal)
        while not child.ended:
            time.sleep(0.01)
        assert child.take() and 0 < correlator.counts.heartbeats < 1200
        child.stop()
        assert correlator.counts.heartbeats == 1200


def test_a_child_that_goes_on_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "bpftrace"
    program.write_text(
        "#!/bin/sh\ntrap 'exit 0' INT\n"
        """printf '%s\\n' '{"type": "printf", "data": "H|1"}' '{"type": "printf", "data": "H|2"}'\n"""
        "while :; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    with Journal(tmp_path) as journal:
        correlator = Seen().correlator
        child = engine.Engine(str(program), Program(), correlator, tmp_path / "p.bt", journal)
        assert [entry.kind for entry in journal.entries] == ["process"]
        while not child.attached:
            child.take()
        child.stop()
        assert child.ended and not journal.entries


# All of it, with a bpftrace that reads its lines from a file


class Node:
    """In the place of Observer: its process is this one, its pages are made up."""

    def __init__(self, *_: object) -> None:
        self.memory_map = self
        self.trace = observer().trace
        self.remembered: list[Any] = []
        self.remember = self.remembered.append
        self.unpinned = lambda _pid, _ns, _page: None

    def as_record(self) -> dict[str, Any]:
        return {
            "page_size": 4096,
            "pageblock_order": 9,
            "complete": True,
            "has_unpinnable": True,
            "zones": [],
            "cma_areas": [],
            "unpinnable_ranges": [],
            "selfcheck": None,
            "sources": [],
            "problems": [],
        }

    def refresh_if_old(self) -> None: ...

    def meet(self, pid: int) -> None: ...

    def complete(self, evidence: Evidence) -> None: ...

    def look(self, failure: Failure) -> Evidence:
        stuck = [
            {"pfn": 4096, "place": "cma", "refcount": page.refcount, "mapcount": 1} for page in failure.stuck
        ]
        return Evidence(failure, Process(failure.pid, {"rank": {"RANK": "5"}}), stuck=stuck)

    def look_again(self, evidence: Evidence) -> None: ...


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs watch over lines, and returns it with what it said."""

    def run(lines: list[str], then: str = "sleep 60", **options: Any) -> tuple[Watch, list[str], Path]:
        script = tmp_path / "lines"
        script.write_text("".join(text + "\n" for text in [line("H|1"), line("H|2"), *lines]))
        program = tmp_path / "bpftrace"
        program.write_text(f"#!/bin/sh\ntrap 'exit 0' INT\ncat {script}\n{then} &\nwait\n")
        program.chmod(0o755)
        monkeypatch.setattr(watch, "require_rights", lambda: None)
        monkeypatch.setattr(watch, "find_bpftrace", lambda: (str(program), (0, 17)))
        monkeypatch.setattr(watch, "Lock", lambda out: Lock(out, tmp_path / "lock"))
        monkeypatch.setattr(watch, "Observer", Node)
        monkeypatch.setattr(watch.leftovers, "reclaim", list)
        monkeypatch.setattr(watch.leftovers, "Journal", lambda: Journal(tmp_path))

        def read_kernel(self: Watch) -> None:
            self._functions, self._layout = FUNCTIONS, Layout()

        monkeypatch.setattr(Watch, "_read_kernel", read_kernel)
        said: list[str] = []
        made = Watch(
            Options(tmp_path / "out", libraries=False, duration=2.0, engine="bpftrace", **options),
            said.append,
        )
        made.run()
        return made, said, tmp_path / "out"

    return run


def test_failures_are_recorded_judged_and_counted(
    watched: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts = [*held_pin(), LIBRARY, "P|9|9|1|0|7f|1|1|a\nb\n"]
    made, said, out = watched([line(text) for text in texts], metrics=tmp_path / "m.prom")
    assert made.metrics.failures == {("page-migration", "B likely"): 1}
    shown = capsys.readouterr().out
    assert "python3 (6, rank 5): class B, likely" in shown and "failure-1]" in shown
    assert any(text.startswith("watching: ") for text in said)
    (run,) = out.iterdir()
    record = read_record(run)
    assert not record.problems
    verdicts = json.loads((run / "verdicts.json").read_text())
    assert verdicts["complete"] and verdicts["verdicts"][0]["class"]["state"] == "likely"
    assert verdicts == judge_record(record)
    assert 'layer="page-migration",class="B likely"} 1' in (tmp_path / "m.prom").read_text()
    for event in record.events:
        jsonschema.Draft202012Validator(SCHEMA).validate(event)


def test_metrics_that_cannot_be_written_are_said_once(watched: Any, tmp_path: Path) -> None:
    place = tmp_path / "later"
    made, said, _ = watched([], metrics=place / "m.prom")

    def times() -> int:
        return sum("cannot write" in text for text in said)

    assert times() == 1
    made._write_metrics()
    assert times() == 1
    place.mkdir()
    made._write_metrics()
    assert times() == 1 and (place / "m.prom").exists()
    (place / "m.prom").unlink()
    place.rmdir()
    made._write_metrics()
    assert times() == 2


def test_what_exceeds_the_rate_is_counted_under_the_layer_of_its_kind(watched: Any) -> None:
    texts = [text for _ in range(30) for text in (*held_pin(), LIBRARY)]
    made, _, out = watched([line(text) for text in texts], each=3, quiet=True)
    assert made.metrics.suppressed == 27
    # They came together, before the first was judged.
    assert made.metrics.failures == {("page-migration", "B likely"): 30}
    (run,) = out.iterdir()
    events = read_record(run).events
    assert sum(event["event"] == "register" for event in events) == 3
    told = [event["failures"] for event in events if event.get("what") == "suppressed"]
    assert sum(item["count"] for items in told for item in items) == 27


def test_lost_events_are_said_and_spoil_what_is_near(watched: Any) -> None:
    lost = '{"type": "lost_events", "data": {"events": 4}}'
    made, said, out = watched([lost, *map(line, [*held_pin(), LIBRARY])], quiet=True)
    assert made.metrics.lost == 4 and any("4 events were lost" in text for text in said)
    (run,) = out.iterdir()
    (register,) = [event for event in read_record(run).events if event["event"] == "register"]
    assert register["trace"]["status"] == "spoiled"


def test_hits_that_the_kernel_missed_are_said_and_spoil_what_is_near(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.Engine, "missed", lambda _self: 5)
    made, said, out = watched([line(text) for text in [*held_pin(), LIBRARY]], quiet=True)
    assert made.metrics.missed == 5 and "the kernel missed 5 hits of probes" in said
    (run,) = out.iterdir()
    events = read_record(run).events
    (register,) = [event for event in events if event["event"] == "register"]
    assert register["trace"]["status"] == "spoiled" and register["trace"]["misses"] == 5
    assert [event["hits"] for event in events if event.get("what") == "missed"] == [5]
    assert "regrepro_watch_missed_hits_total 5" in made.metrics.text()


def test_buffers_are_powers_of_two_and_stay_within_their_bound() -> None:
    pages = {cpus: engine._buffer_pages(cpus) for cpus in (1, 16, 64, 96, 128, 192, 256, 512, 1024)}
    assert list(pages.values()) == [256, 256, 256, 128, 128, 64, 64, 32, 16]
    assert all(cpus * count <= 16384 for cpus, count in pages.items())


def test_misses_are_those_of_programs_for_probes(tmp_path: Path) -> None:
    place = tmp_path / "42" / "fdinfo"
    place.mkdir(parents=True)
    (place / "3").write_text("pos:\t0\nmap_type:\t1\n")
    assert engine.probe_programs(42, tmp_path) == engine.probe_programs(43, tmp_path) == []
    assert engine.missed_hits([]) is None
    for number, (kind, misses) in enumerate([(2, 1), (26, 2), (5, 100), (7, 100)], start=4):
        (place / str(number)).write_text(f"prog_type:\t{kind}\nrecursion_misses:\t{misses}\nx:\t1\n")
    programs = engine.probe_programs(42, tmp_path)
    assert len(programs) == 2 and engine.missed_hits(programs) == 3


def test_a_process_that_goes_on_opening_is_looked_at_again_by_the_loop(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []
    monkeypatch.setattr(Node, "meet", lambda _self, pid: met.append(pid))
    watched([line(f"O|6|{100 + at}|0") for at in range(20)])
    assert met == [6, 6]


def test_a_bpftrace_that_dies_is_started_anew_and_said(watched: Any) -> None:
    made, said, _ = watched([], then="sleep 0.5")
    assert made.metrics.engine_restarts >= 1 and any("starting it anew" in text for text in said)


def test_one_json_line_a_failure(watched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    watched([line(text) for text in [*held_pin(), LIBRARY]], as_json=True)
    (told,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert told["layer"] == "page-migration" and told["rank"] == {"RANK": "5"} and told["errno"] == "ENOMEM"


PACKAGING = Path(__file__).parents[3] / "packaging"


@pytest.mark.parametrize("name", ["regrepro-watch.service", "regrepro-watch-daemonset.yaml"])
def test_what_is_packaged_calls_watch_with_options_that_it_has(name: str) -> None:
    from regrepro.watch.commands import watch as command

    text = (PACKAGING / name).read_text(encoding="utf-8")
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("ExecStart=") or line.lstrip().startswith("- --")
    ]
    given = set(re.findall(r" (--[a-z]+)", "\n".join(lines)))
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {"--out", "--metrics"} <= given <= known
    for capability in ("SYS_ADMIN", "SYS_PTRACE", "BPF", "PERFMON"):
        assert capability in text


def test_a_restart_that_fails_still_tells_what_was_seen(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EnvironmentProblem("no more")

    monkeypatch.setattr(alone.watch, "_start_bpf", refuse)
    alone.watch._suppressed["memlock", "ENOMEM", "app"] = 5
    alone.engine.ended = True
    alone.watch._output.end = lambda _outcome: None
    with pytest.raises(EnvironmentProblem):
        alone.watch._watch_engines(alone.now)
    alone.watch._finish()
    assert {"stopped", "suppressed"} <= {what for what, _ in alone.told}


def test_what_an_engine_lost_that_never_took_over_stays_counted(alone: Any) -> None:
    alone.watch._next = Following(lost=3)
    alone.watch._count_lost()
    alone.watch._drop_next()
    assert alone.watch._lost_now() == 3 and alone.watch._lost_near(1e6) == 0


def test_the_marker_asks_by_the_kernels_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_boottime_offset", lambda: 10**15)
    made = Marker(lambda *_: None, tmp_path)
    made.ask(10.0)
    assert made._ns <= process.kernel_boottime()


def test_functions_of_a_module_that_is_only_coming_are_left_out_until_it_is_loaded() -> None:
    found = Functions(
        inner=[Function("dma_buf_get", ""), Function("mlx5_core_create_mkey", "mlx5_core")],
        drivers=[Function("rxe_reg_user_mr", "rdma_rxe"), Function("efa_reg_mr", "efa")],
    )
    left = without_coming(found, {"rdma_rxe"})
    assert [item.name for item in (*left.inner, *left.drivers)] == ["dma_buf_get", "rxe_reg_user_mr"]


def test_names_cannot_do_anything_to_a_terminal() -> None:
    assert watch.printable("a\nFAKE\x1b[2Jü\u202e") == "a?FAKE?[2Jü?"


def test_what_was_counted_between_two_looks_is_near_what_happened_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    made = watch.Lately(2.0)
    made.add(110.0, 3)
    made.add(130.0, 0)
    made.add(140.0, 4)
    assert [made.near(moment) for moment in (97.0, 99.0, 105.0, 111.0, 113.0, 127.0, 129.0, 143.0)] == [
        *(0, 3, 3, 3, 0),
        *(0, 4, 0),
    ]
    assert made.near(105.0, 141.0) == 7

"""A trace in a log and the same trace in a record go through one decision of the layer."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from record_builder import Record, find

from regrepro.explain.explain import explain
from regrepro.explain.text import ERRNO_TEXTS
from regrepro.judge import judge_record
from unit.judge.layer_cases import CASES, COUNTED, FILES

TEXTS = {name: text for text, name in ERRNO_TEXTS.items()}
GIVEN = {**FILES, **COUNTED, **CASES}


def as_log(record: Record) -> str:
    """Write a registration that failed as somebody would paste it: the trace's lines, else the errno."""
    register = find(record, "register")
    lines = []
    for event in (register["trace"] or {}).get("events", ()):
        if "tracepoint" in event:
            fields = " ".join(f"{name}={value}" for name, value in event["fields"].items())
            lines.append(f"  python-1234    [001] .....    12.3: {event['tracepoint']}: {fields}")
        else:
            place = f"({event.get('caller') or 'caller'}+0x1a0/0x3a0 <- {event['fn']})"
            lines.append(f"  python-1234    [001] .....    12.3: r_it: {place} ret={event['ret']}")
    return "\n".join(lines or [f"{register['verb']}() failed: {TEXTS[register['errno']]}"]) + "\n"


def groups_of(record: Record) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = explain([("log", io.BytesIO(as_log(record).encode()))])["groups"]
    return groups


@pytest.mark.parametrize("name", GIVEN)
def test_what_the_judge_names_is_never_excluded(name: str) -> None:
    """A log tells less than a record, so that more layers may be left: the judge's is one of them."""
    record, (layer, _) = GIVEN[name]
    (group,) = groups_of(record)
    status = {one["cause"]: one["status"] for one in group["causes"]}
    if layer != "unknown":
        assert status[layer] != "impossible", json.dumps(group["causes"], indent=1)
    assert layer == "unknown" or group["layer"] in (None, layer)


def test_a_gpu_address_and_a_huge_page_are_as_the_judge_has_them() -> None:
    """A GPU's address without nvidia-peermem is -EFAULT of GUP; 6.1 refuses a huge page with -ENOMEM."""
    for name, layer in (
        ("a GPU address", "peer-memory"),
        ("a huge page that the kernel does not try to move", "longterm-refused"),
    ):
        record, (due, _) = CASES[name]
        assert due == layer == judge_record(record)["verdicts"][0]["layer"]
        (group,) = groups_of(record)
        assert layer in {one["cause"] for one in group["causes"] if one["status"] == "possible"}


def possible(*returned: tuple[str, int]) -> list[str]:
    """Return what a pasted trace leaves, in the order in which it is named."""
    log = "".join(f"kretprobe:{name}: {value}\n" for name, value in returned)
    (group,) = explain([("log", io.BytesIO(log.encode()))])["groups"]
    return [one["cause"] for one in group["causes"] if one["status"] == "possible"]


def test_peer_memory_is_named_before_a_page_fault() -> None:
    """Where the address may be a GPU's, a missing nvidia-peermem is sooner looked up."""
    (group,) = groups_of(CASES["a GPU address"][0])
    named = [one["cause"] for one in group["causes"] if one["status"] == "possible"]
    assert named == ["peer-memory", "bar-map", "page-fault", "longterm-refused"]


MOVE = ["page-migration", "migration-target", "memory-cgroup"]


@pytest.mark.parametrize(
    ("inner", "due"),
    [
        # Nothing tells the kernel, nor how far the pin came: a huge page is refused from 5.12 to 6.5.
        ([("ib_umem_get", -12)], [*MOVE, "umem-alloc", "longterm-refused"]),
        ([("__gup_longterm_locked", -12), ("ib_umem_get", -12)], [*MOVE, "longterm-refused"]),
        # Pages were found, and then looked at for the move: none was refused.
        ([("check_and_migrate_movable_pages", -12), ("ib_umem_get", -12)], MOVE),
        # 7.2 or later, by the name of the function.
        ([("__ib_umem_get_va", -12)], [*MOVE, "umem-alloc"]),
    ],
)
def test_a_huge_page_is_refused_where_the_kernel_can(inner: list[tuple[str, int]], due: list[str]) -> None:
    inner.insert(len(inner) - 1, ("pin_user_pages_fast", -12))
    assert possible(*inner, ("mlx5_ib_reg_user_mr", -12)) == due


def test_another_kernel_s_call_in_the_text_says_nothing_of_this_one() -> None:
    of_72 = (("__ib_umem_get_va", 1), ("rxe_reg_user_mr", 1))
    failed = (("pin_user_pages_fast", -12), ("ib_umem_get", -12), ("mlx5_ib_reg_user_mr", -12))
    assert "longterm-refused" in possible(*of_72, *failed)


def test_a_driver_whose_own_pin_found_no_page_to_move_to_is_no_registration() -> None:
    """What fails is the pin of os_lock_user_pages, whatever made it fail."""
    log = "".join(
        f"  python-1 [001] ..... 12.3: r_it: ({caller}+0x1a0/0x3a0 <- {name}) ret={value}\n"
        for caller, name, value in (
            ("__gup_longterm_locked", "migrate_pages", "-12"),
            ("os_lock_user_pages", "pin_user_pages", "-12"),
            ("RmCreateOsDescriptor", "os_lock_user_pages", "0x1e"),
        )
    )
    (group,) = explain([("log", io.BytesIO(log.encode()))])["groups"]
    assert group["layer"] == "cuda-pin"

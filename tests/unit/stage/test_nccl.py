"""NCCL 2.17.1's connection: the numbers of its source, and the order in which it registers."""

from __future__ import annotations

import pytest

from regrepro.stage import nccl

KIB = 1 << 10


def test_a_sender_with_gpudirect_keeps_ll_on_the_host() -> None:
    made = nccl.layout("send")
    assert [(part.protocol, part.memory, part.offset, part.length) for part in made.subranges] == [
        ("LL", "host", 0, 524288),
        ("LL128", "cuda", 0, 4915200),
        ("SIMPLE", "cuda", 4915200, 4194304),
    ]
    assert (made.send_mem, made.recv_mem, made.host) == (524288, 528384, 532480)
    assert made.device == 9109504


def test_a_receiver_with_gpudirect_keeps_only_the_control_structures_on_the_host() -> None:
    made = nccl.layout("recv")
    assert {part.memory for part in made.subranges} == {"cuda"}
    assert (made.host, made.send_mem, made.device) == (8192, 0, 9633792)


def test_without_gpudirect_all_is_on_the_host() -> None:
    made = nccl.layout("send", gpudirect=False)
    assert [part.offset for part in made.subranges] == [0, 524288, 5439488]
    assert (made.host, made.device) == (9641984, 0)


@pytest.mark.parametrize(
    ("arch", "given", "simple"), [("x86-64", 0, 4 << 20), ("arm64", 0, 1 << 20), ("arm64", 2 << 20, 2 << 20)]
)
def test_sizes(arch: str, given: int, simple: int) -> None:
    assert nccl.sizes_of(arch, simple=given) == {"LL": 524288, "LL128": 4915200, "SIMPLE": simple}


def test_this_machine_has_sizes() -> None:
    assert nccl.sizes_of("auto", ll=4096)["LL"] == 4096
    assert nccl.sizes_of("auto")["SIMPLE"] in (1 << 20, 4 << 20)


@pytest.mark.parametrize(
    ("address", "length", "page", "expected"),
    [
        (0x10000, 4096, 4 * KIB, (0x10000, 4096)),
        (0x10020, 16384, 4 * KIB, (0x10000, 20480)),
        (0x10FFF, 2, 4 * KIB, (0x10000, 8192)),
        (0x11000, 524288, 64 * KIB, (0x10000, 589824)),
    ],
)
def test_ranges_are_rounded_to_pages(address: int, length: int, page: int, expected: tuple[int, int]) -> None:
    assert nccl.rounded(address, length, page) == expected


def test_the_fifo_is_a_structure_within_a_page_aligned_one() -> None:
    assert nccl.FIFO_SIZE == 16384
    assert nccl.FIFO_OFFSET % 32 == 0

"""Messages of netlink, as they are laid out."""

from __future__ import annotations

import errno
import sys

import pytest

from regrepro.kernel import netlink


def test_messages_and_attributes_read_back_as_they_were_written() -> None:
    one, two = netlink.attribute(3, b"abc"), netlink.attribute(0x8004, b"12345678")
    assert (len(one), len(two)) == (8, 12)
    assert list(netlink.attributes(one + two)) == [(3, b"abc"), (4, b"12345678")]
    built = netlink.message(16, 0x600, one)
    assert len(built) == 24
    assert list(netlink.messages(built + netlink.message(2, 0, two))) == [(16, one), (2, two)]


@pytest.mark.parametrize("cut", range(24))
def test_what_is_cut_short_is_left_out(cut: int) -> None:
    assert list(netlink.messages(netlink.message(16, 0, b"12345678")[:cut])) == []
    assert list(netlink.attributes(netlink.attribute(3, b"x" * 20)[: min(cut, 23)])) == []


def test_what_a_device_has_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: bytes, count: bytes) -> bytes:
        pair = netlink.attribute(17, name + b"\0") + netlink.attribute(18, count)
        return netlink.attribute(16, pair)

    summary = entry(b"mr", (7).to_bytes(8, sys.byteorder)) + entry(b"qp", b"cut")
    answers = [{2: b"mlx5_0\0", 15: summary}, {2: b"rxe0\0"}, {1: b"nameless"}]
    monkeypatch.setattr(netlink, "_dump", lambda _kind: iter(answers))
    assert netlink.rdma_resources() == {"mlx5_0": {"mr": 7}, "rxe0": {}}


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(OSError, match=r"device|not supported") as caught:
        netlink.rdma_index("no-such-device")
    assert caught.value.errno in (errno.ENODEV, errno.EPROTONOSUPPORT)

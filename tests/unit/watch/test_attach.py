"""What of this kernel is followed, and what stands in the way."""

from __future__ import annotations

import os

import pytest
from kernel_fakes import BtfWriter

from regrepro.errors import EnvironmentProblem
from regrepro.kernel.btf import Btf
from regrepro.watch import attach


@pytest.mark.parametrize(
    ("user", "mode", "why"), [(1000, None, "needs root"), (0, "confidentiality", "locked down")]
)
def test_who_may_not_watch_is_told_why(
    user: int, mode: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(attach, "lockdown", lambda: mode)
    with pytest.raises(EnvironmentProblem, match=why):
        attach.require_rights()


def test_where_a_request_lies_is_read_of_a_kernel_that_has_it_as_it_is_read() -> None:
    def bundle(data_at: int, *names: str) -> Btf:
        writer = BtfWriter()
        long = writer.integer("unsigned long", 8)
        udata = writer.record("ib_udata", 32, [("inbuf", long, 0), ("outbuf", long, 8)])
        pointer = writer.record("uverbs_ptr_attr", 24, [("data", long, data_at)])
        attribute = writer.record("uverbs_attr", 24, [("ptr_attr", pointer, 0)])
        members = {
            "ucore": (udata, 32),
            "attr_present": (long, 96),
            "attrs": (writer.array(attribute, 0), 104),
        }
        writer.record("uverbs_attr_bundle", 104, [(name, *members[name]) for name in names])
        return Btf(writer.blob())

    found = attach.request_offsets(bundle(0, "ucore", "attr_present", "attrs"))
    assert found is not None and (found.command, found.present, found.attributes, found.size) == (
        32,
        96,
        104,
        24,
    )
    assert attach.request_offsets(bundle(0, "attr_present", "attrs")) is None
    assert attach.request_offsets(bundle(8, "ucore", "attr_present", "attrs")) is None

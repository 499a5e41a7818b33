"""What of this kernel is followed, and what stands in the way."""

from __future__ import annotations

import os
from pathlib import Path

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


def test_what_is_read_of_the_kernels_types_and_of_the_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writer = BtfWriter()
    writer.integer("unsigned long", 8)
    writer.enum("migrate_reason", {"MR_COMPACTION": 0, "MR_CONTIG_RANGE": 5, "MR_LONGTERM_PIN": 7})
    (tmp_path / "vmlinux").write_bytes(writer.blob())
    marks = writer.marks()
    long = 1
    udata = writer.record("ib_udata", 8, [("inbuf", long, 0)])
    pointer = writer.record("uverbs_ptr_attr", 24, [("data", long, 0)])
    attribute = writer.record("uverbs_attr", 24, [("ptr_attr", pointer, 0)])
    members = [("ucore", udata, 32), ("attr_present", long, 96), ("attrs", writer.array(attribute, 0), 104)]
    writer.record("uverbs_attr_bundle", 104, members)
    whole = writer.blob(*marks)
    monkeypatch.setattr(attach, "BTF_DIRECTORY", tmp_path)
    monkeypatch.setattr(attach, "loaded_modules", lambda: frozenset({"ib_uverbs"}))
    symbols = tmp_path / "kallsyms"
    symbols.write_bytes(b"0 t ib_uverbs_reg_mr\t[ib_uverbs]\n")
    monkeypatch.setattr(attach, "KALLSYMS", symbols)
    reasons = {5: "contig_range", 7: "longterm_pin"}
    for types, expected in ((None, None), (b"none", None), (whole, attach.RequestOffsets(32, 96, 104, 24))):
        if types is not None:
            (tmp_path / "ib_uverbs").write_bytes(types)
        kernel = attach.FollowedKernel.read()
        assert (kernel.request, kernel.functions.reasons) == (expected, reasons)
    (tmp_path / "vmlinux").unlink()
    kernel = attach.FollowedKernel.read()
    assert (kernel.request, kernel.functions.reasons) == (None, {})
    symbols.write_bytes(b"0 T pin_user_pages\n")
    with pytest.raises(EnvironmentProblem, match="no function of ib_uverbs"):
        attach.FollowedKernel.read()


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

"""The verbs registrar against a library that notes what it is called with: no device, no kernel."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from c_programs import C_TESTS, CSRC, compiler, library
from regrepro._core import ffi, lib

from regrepro.core import memory, verbs
from regrepro.errors import EnvironmentProblem, UsageError
from regrepro.record import FILE_NAME, RecordWriter, read_record


def any_compiler() -> str:
    return compiler(os.environ.get("CC", "cc"), "gcc", "clang")


class Fake(ctypes.Structure):
    """`struct fake` of tests/c/fake_verbs.c."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("address", "length", "iova", "offset")),
        ("fd", ctypes.c_int64),
        ("access", ctypes.c_uint64),
        *(
            (name, ctypes.c_int64)
            for name in (
                "error",
                "dereg_error",
                "status",
                "regions",
                "pds",
                "contexts",
                "queues",
                "dest_qp_num",
                "sgid_index",
                "good",
            )
        ),
    )


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fake") / "libfake_verbs.so"
    return library(any_compiler(), target, str(C_TESTS / "fake_verbs.c"))


@pytest.fixture
def fake(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(verbs, "LIBRARY", str(fake_library))
    state = Fake.in_dll(ctypes.CDLL(str(fake_library)), "fake_verbs")
    ctypes.memset(ctypes.byref(state), 0, ctypes.sizeof(state))
    yield state
    assert (state.regions, state.pds, state.contexts, state.queues) == (0, 0, 0, 0), "something was left open"


def test_the_layouts_are_those_of_the_installed_header(tmp_path: Path) -> None:
    cc = any_compiler()
    probe = subprocess.run(
        [cc, "-E", "-x", "c", "-"],
        input="#include <infiniband/verbs.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip("infiniband/verbs.h (libibverbs-dev, rdma-core-devel) is not installed")
    source = str(C_TESTS / "verbs_layout.c")
    command = [cc, "-std=gnu11", f"-I{CSRC}", "-c", source, "-o", str(tmp_path / "layout.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "LIBRARY", "libno-such-verbs.so.1")
    sentence = verbs.available()
    assert sentence is not None
    assert "libno-such-verbs.so.1" in sentence
    assert "libibverbs1" in sentence
    for use in (verbs.devices, lambda: verbs.Device("mlx5_0")):
        with pytest.raises(EnvironmentProblem, match="libibverbs cannot be opened"):
            use()


def test_a_library_that_is_none_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "LIBRARY", "libm.so.6")
    sentence = verbs.available()
    assert sentence is not None
    assert "ibv_" in sentence


def test_the_real_library_can_be_listed() -> None:
    missing = verbs.available()
    if missing:
        pytest.skip(missing)
    assert isinstance(verbs.devices(), list)


def test_devices_and_query(fake: Fake) -> None:
    assert verbs.available() is None
    assert verbs.devices() == ["fake0"]
    with verbs.Device("fake0") as device:
        answer = device.query()
        assert answer["fw_ver"] == "1.2.3"
        assert answer["max_mr"] == 42
        assert answer["max_mr_size"] == (1 << 64) - 1
        assert answer["port_state"] == "active"
        assert answer["link_layer"] == "ethernet"
        assert answer["active_mtu"] == 1024
        for port in (0, 2, 256, -1):
            with pytest.raises(OSError) as caught:
                device.query_port(port)
            assert caught.value.errno == errno.EINVAL
    device.close()
    with pytest.raises(EnvironmentProblem, match=r"no RDMA device 'fake1'.*devices: fake0"):
        verbs.Device("fake1")


ABSURD = [(0, 0), (0x1003, 17), (0, (1 << 64) - 1), ((1 << 64) - 1, 1 << 46), (1 << 47, 1)]


@pytest.mark.parametrize(("address", "length"), ABSURD)
@pytest.mark.parametrize("access", [0, 2, verbs.ACCESS["RELAXED_ORDERING"] | 1, 0x7FFFFFFF])
def test_arguments_reach_the_library_unchanged(fake: Fake, address: int, length: int, access: int) -> None:
    with verbs.Device("fake0") as device, device.pd() as pd:
        region = pd.reg_mr(address, length, access)
        assert (fake.address, fake.length, fake.access) == (address, length, access)
        assert (region.lkey, region.rkey) == (0x1234, 0x5678)
        region.dereg()
        region.dereg()
        assert fake.regions == 0
        iova = (1 << 64) - 8
        with pd.reg_mr_iova2(address, length, iova, access):
            assert (fake.address, fake.length, fake.iova, fake.access) == (address, length, iova, access)
        with pd.reg_dmabuf_mr(-1, 4096, length, iova, access):
            assert (fake.fd, fake.offset, fake.length, fake.iova) == (-1, 4096, length, iova)
            assert fake.access == access


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
def test_the_errno_is_the_one_that_the_library_left(fake: Fake, number: int) -> None:
    with verbs.Device("fake0") as device, device.pd() as pd:
        fake.error = number
        for register in (
            lambda: pd.reg_mr(0, 1, 1),
            lambda: pd.reg_mr_iova2(0, 1, 0, 1),
            lambda: pd.reg_dmabuf_mr(3, 0, 1, 0, 1),
            lambda: pd.register_loop(0, 1, 1, 1),
        ):
            with pytest.raises(OSError) as caught:
                register()
            assert caught.value.errno == number
        fake.error = -1  # NULL without an errno must not look like success, nor like an older errno
        with pytest.raises(OSError) as caught:
            pd.reg_mr(0, 1, 1)
        assert caught.value.errno == errno.EIO


def test_a_deregistration_that_failed_can_be_tried_again(fake: Fake) -> None:
    with verbs.Device("fake0") as device, device.pd() as pd:
        region = pd.reg_mr(0, 1, 1)
        fake.dereg_error = errno.EIO
        with pytest.raises(OSError) as caught:
            region.dereg()
        assert caught.value.errno == errno.EIO
        fake.dereg_error = 0
        region.dereg()
        assert fake.regions == 0


def test_closing_the_device_closes_what_is_on_it(fake: Fake) -> None:
    device = verbs.Device("fake0")
    pd = device.pd()
    pd.reg_mr(0, 1, 1)
    pd.reg_mr_iova2(0, 1, 0, 1)
    device.pd()
    assert (fake.regions, fake.pds, fake.contexts) == (2, 2, 1)
    device.close()
    assert (fake.regions, fake.pds, fake.contexts) == (0, 0, 0)
    pd.close()


@contextmanager
def recorded(directory: Path) -> Iterator[tuple[RecordWriter, verbs.ProtectionDomain]]:
    with (
        RecordWriter(directory / FILE_NAME, {}) as writer,
        verbs.Device("fake0") as device,
        device.pd() as pd,
    ):
        yield writer, pd


def run_series(
    pd: verbs.ProtectionDomain, writer: RecordWriter, count: int, *, first: int = 0, keep: bool = False
) -> tuple[verbs.SeriesEnd, verbs.KeptSeries | None]:
    kept = verbs.KeptSeries(pd, count) if keep else None
    with writer.handle() as record:
        end = pd.register_series(
            1 << 20,
            4096,
            ranges=3,
            access=1,
            first=first,
            count=count,
            labels='"scenario":"s","series":1',
            record=record,
            kept=kept,
        )
    return end, kept


def test_a_series_writes_a_line_for_each(fake: Fake, tmp_path: Path) -> None:
    with recorded(tmp_path) as (writer, pd):
        writer.event("note", text="before", stand_in=None)
        end, _ = run_series(pd, writer, 5)
        assert end == (5, "done", 0, 0)
        assert fake.regions == 0
        writer.event("run-end", outcome="finished")
    record = read_record(tmp_path)
    assert record.problems == []
    lines = list(record.of("registered"))
    assert [(line["number"], line["address"] - (1 << 20)) for line in lines] == [
        (0, 0),
        (1, 4096),
        (2, 8192),
        (3, 0),
        (4, 4096),
    ]
    assert {(line["scenario"], line["series"], line["length"], line["errno"]) for line in lines} == {
        ("s", 1, 4096, None)
    }
    times = [event["t"] for event in record.events]
    assert times == sorted(times)


def test_a_series_ends_at_the_first_refusal_and_goes_on_where_told(fake: Fake, tmp_path: Path) -> None:
    with recorded(tmp_path) as (writer, pd):
        fake.good, fake.error = 2, errno.ENOMEM
        end, _ = run_series(pd, writer, 4)
        assert (end.number, end.where, end.errno) == (2, "register", errno.ENOMEM)
        fake.error = 0
        end, kept = run_series(pd, writer, 4, first=3, keep=True)
        assert (end.number, end.where) == (4, "done")
        assert fake.regions == 1
        assert kept is not None
        kept.dereg()
        kept.dereg()
        assert fake.regions == 0
        fake.dereg_error = errno.EBUSY
        end, _ = run_series(pd, writer, 4)
        assert (end.number, end.where, end.errno) == (0, "deregister", errno.EBUSY)
        assert fake.regions == 1
        fake.dereg_error = 0
        run_series(pd, writer, 2, keep=True)
        assert fake.regions == 3  # closing takes all of them back
    assert [line["number"] for line in read_record(tmp_path).of("registered")] == [0, 1, 3, 0, 0, 1]


def test_a_series_with_a_full_disk_takes_its_registration_back(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with recorded(tmp_path) as (writer, pd):
        run_series(pd, writer, 1)
        size = writer.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, limits[1]))
        try:
            end, _ = run_series(pd, writer, 4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, kept_handler)
        assert (end.number, end.where, end.errno) == (0, "record", errno.EFBIG)
        assert fake.regions == 0
        assert writer.path.stat().st_size == size
        run_series(pd, writer, 2)
        writer.event("run-end", outcome="finished")
    record = read_record(tmp_path)
    assert record.problems == []
    assert len(list(record.of("registered"))) == 3


def test_a_series_leaves_a_record_that_needs_repair_alone(fake: Fake, tmp_path: Path) -> None:
    with recorded(tmp_path) as (writer, pd):
        writer._cells[0] |= 2
        os.write(writer._fd, b'{"seq":1,"t":0')
        end, _ = run_series(pd, writer, 1)
        assert (end.where, fake.regions) == ("repair", 0)
        writer.event("note", text="puts it right", stand_in=None)
        assert run_series(pd, writer, 1)[0].where == "done"
        writer.event("run-end", outcome="finished")
    assert read_record(tmp_path).problems == []


@pytest.mark.parametrize("opcode", verbs.OPCODES)
@pytest.mark.parametrize("length", [1, 65536, 65537, 200_000])
def test_a_transfer_moves_the_bytes_from_source_to_target(fake: Fake, opcode: str, length: int) -> None:
    with (
        memory.Range.anonymous(length) as source,
        memory.Range.anonymous(length) as target,
        verbs.Device("fake0") as device,
        device.pd() as pd,
        pd.reg_mr(source.address, length, 7) as left,
        pd.reg_mr(target.address, length, 7) as right,
    ):
        source.fill(1)
        before = source.checksum()
        verbs.loopback_transfer(device, 1, 3, left, right, length, opcode)
        assert source.checksum() == before
        assert source.read(0, length) == target.read(0, length)
        assert fake.sgid_index == 3


def test_a_transfer_that_fails_says_what_the_device_said(fake: Fake) -> None:
    with verbs.Device("fake0") as device, device.pd() as pd, pd.reg_mr(0, 1, 7) as region:
        fake.status = 10
        with pytest.raises(OSError, match="remote access error") as caught:
            verbs.loopback_transfer(device, 1, 0, region, region, 1, "RDMA_WRITE")
        assert caught.value.errno == errno.EREMOTEIO
        fake.status = -1
        with pytest.raises(OSError, match="no work completion in time") as caught:
            verbs.loopback_transfer(device, 1, 0, region, region, 1, "RDMA_READ", timeout=0.05)
        assert caught.value.errno == errno.ETIMEDOUT
        with pytest.raises(OSError, match="no GID with index 9"):
            verbs.loopback_transfer(device, 1, 9, region, region, 1, "RDMA_READ")
        with pytest.raises(OSError, match="has no GID"):
            verbs.loopback_transfer(device, 1, None, region, region, 1, "RDMA_READ")
        with pytest.raises(UsageError, match="no opcode"):
            verbs.loopback_transfer(device, 1, 0, region, region, 1, "SEND")
        with device.pd() as other, other.reg_mr(0, 1, 7) as foreign, pytest.raises(UsageError, match="PD"):
            verbs.loopback_transfer(device, 1, 0, region, foreign, 1, "RDMA_READ")


def port_with(tmp_path: Path, entries: list[tuple[str, str]]) -> Path:
    table = tmp_path / "mlx5_9" / "ports" / "1"
    (table / "gids").mkdir(parents=True)
    (table / "gid_attrs" / "types").mkdir(parents=True)
    for index, (address, kind) in enumerate(entries):
        (table / "gids" / str(index)).write_text(f"{address}\n")
        if kind:
            (table / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
    return tmp_path


IPV4 = "0000:0000:0000:0000:0000:ffff:0a63:0001"
LINK = "fe80:0000:0000:0000:104f:1fff:fea9:486d"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


@pytest.mark.parametrize(
    ("entries", "best"),
    [
        ([(LINK, "IB/RoCE v1"), (LINK, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")], 3),
        ([(LINK, "RoCE v2"), (IPV4, "IB/RoCE v1")], 1),
        ([(LINK, "IB/RoCE v1"), (LINK, "RoCE v2")], 1),
        ([(NONE, ""), (LINK, "")], 1),
        ([(NONE, "")], None),
        ([], None),
    ],
)
def test_the_ipv4_roce_v2_gid_is_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: list[tuple[str, str]], best: int | None
) -> None:
    monkeypatch.setattr(verbs, "_INFINIBAND", port_with(tmp_path, entries))
    assert verbs.loopback_gid_index("mlx5_9") == best
    assert verbs.loopback_gid_index("mlx5_9", port=2) is None


def test_gids_know_their_ipv4_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "_INFINIBAND", port_with(tmp_path, [(LINK, "RoCE v2"), (IPV4, "RoCE v2")]))
    assert [gid.ipv4 for gid in verbs.gids("mlx5_9")] == [None, ipaddress.IPv4Address("10.99.0.1")]


def test_access_flags_by_name() -> None:
    assert verbs.access_bits(["LOCAL_WRITE", "ibv_access_remote_read", "RELAXED_ORDERING"]) == 1 | 4 | 1 << 20
    assert verbs.access_names(1 | 4 | 1 << 20) == ["LOCAL_WRITE", "REMOTE_READ", "RELAXED_ORDERING"]
    assert verbs.access_names(1 << 18) == ["0x40000"]
    assert verbs.access_bits([]) == 0
    with pytest.raises(UsageError, match="'WRITE'"):
        verbs.access_bits(["WRITE"])


def test_a_library_without_the_newer_functions_says_enosys(tmp_path: Path) -> None:
    source = (C_TESTS / "fake_verbs.c").read_text()
    old = tmp_path / "old.c"
    source = source.replace("ibv_reg_mr_iova2", "not_there_1").replace("ibv_reg_dmabuf_mr", "not_there_2")
    old.write_text(source)
    built = library(any_compiler(), tmp_path / "libold.so", str(old))
    cell, why = ffi.new("struct rr_verbs **"), ffi.new("char[256]")
    assert lib.rr_verbs_load(str(built).encode(), cell, why, 256) == 0
    device, pd, region = (
        ffi.new("struct rr_device **"),
        ffi.new("struct rr_pd **"),
        ffi.new("struct rr_mr **"),
    )
    assert lib.rr_device_open(cell[0], b"fake0", device) == 0
    assert lib.rr_pd_alloc(device[0], pd) == 0
    assert lib.rr_reg_mr_iova2(pd[0], 0, 1, 0, 1, region) == -errno.ENOSYS
    assert lib.rr_reg_dmabuf_mr(pd[0], 0, 1, 0, 0, 1, region) == -errno.ENOSYS
    assert lib.rr_pd_dealloc(pd[0]) == 0
    assert lib.rr_device_close(device[0]) == 0
    lib.rr_verbs_unload(cell[0])

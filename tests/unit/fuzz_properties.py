"""Properties of every parser of foreign text, for the tests (thousands of inputs) and scripts/fuzz (a
million).

Each property takes what hypothesis makes and returns; it raises where a parser raises, and hypothesis'
deadline is where it hangs. The inputs are pieces of real shapes, broken at random, and plain noise.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from audit_nodes import Node
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from regrepro.audit import archive, driversource, parse, places, subjects
from regrepro.audit.driver import of_verdicts, resolve
from regrepro.audit.reader import FolderReader, TextReader
from regrepro.errors import RegreproError
from regrepro.explain import formats, text, traces
from regrepro.explain.explain import Explainer
from regrepro.explain.report import plain
from regrepro.explain.scan import Needles, read
from regrepro.kernel import netlink, zones
from regrepro.kernel.pageblocks import parse_pagetypeinfo
from regrepro.kernel.release import kernel_series, stock_series

HERE = Path(__file__).parent
CORPUS = [path.read_bytes() for path in sorted((HERE / "explain/corpus").glob("*.log"))]
NODE = Node().hugetlb_cma(3 << 30).driver("535.104.05", peermem=True).files

_LINES = sorted({line for fragment in CORPUS[:] for line in fragment.split(b"\n") if 0 < len(line) < 400})
_KERNEL_LINES = sorted({line for file in NODE.values() for line in file.split("\n")})


def pieces(parts: list[str]) -> SearchStrategy[str]:
    """Text of known pieces, cut and mixed with noise."""
    cut = st.builds(
        lambda part, a, b: part[min(a, b) : max(a, b)], st.sampled_from(parts), *[st.integers(0, 120)] * 2
    )
    one = st.one_of(st.sampled_from(parts), cut, st.text(max_size=12), st.integers().map(str))
    return st.lists(one, max_size=12).flatmap(
        lambda found: st.sampled_from(["\n", " ", "", "\r\n", "\n\n"]).map(lambda glue: glue.join(found))
    )


LOG_LINE = st.one_of(
    st.sampled_from(_LINES),
    st.builds(lambda line, at: line[:at], st.sampled_from(_LINES), st.integers(0, 200)),
    st.builds(
        lambda line, at, noise: line[:at] + noise + line[at:],
        st.sampled_from(_LINES),
        st.integers(0, 200),
        st.binary(max_size=8),
    ),
    st.binary(max_size=60),
)
LOG = st.lists(LOG_LINE, max_size=14).flatmap(
    lambda lines: st.sampled_from([b"\n", b"\r\n", b"\n\n", b""]).map(lambda glue: glue.join(lines))
)
KERNEL_TEXT = pieces(_KERNEL_LINES)
C_TEXT = pieces(
    [
        "os_lock_user_pages(void *a)\n{\n", "gup_flags |= FOLL_LONGTERM;", "#if "
        "defined(NVCPU_FAMILY_X86)", "#endif",
        "#else", "#elif 1", "NV_PIN_USER_PAGES(a, b, "
        "c)", "}", "{", "(", ")", "/*", "*/", "//", '"', "'", "\\\n", "&& ",
        "||", "!", "defined(", "NV_FOLL_LONGTERM_PRESENT", "#define X FOLL_LONGTERM", ";",
        "nvidia_p2p_get_pages(",
    ]
)  # fmt: skip
VERSION = st.one_of(
    st.from_regex(r"\A[0-9]{3}\.[0-9]{1,3}(\.[0-9]{1,2})?\Z"),
    st.text(max_size=12),
    st.sampled_from(["535.104.05"]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            ["schema", "node", "event", "zones", "blocks", "verdicts", "evidence", "pin_contract", "value",
             "contract", "pin_owner", "kernel", "limits", "vm", "kernel_lines", "ok", "zone", "managed",
             "page_size", "facts",
             "findings", "exposure", "conditions", "processes", "name", "group", "memlock", "id"]
        ),
        inner | st.sampled_from(["cuda", "longterm", "plain", "memory-map", "reservation"]),
        max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip
TREE = st.dictionaries(
    st.one_of(
        st.sampled_from(sorted(NODE)), st.from_regex(r"\A(sys|proc|commands)(/[a-z0-9_.]{1,8}){1,5}\Z")
    ),
    st.one_of(KERNEL_TEXT, st.sampled_from(sorted(set(NODE.values())))),
    max_size=8,
)


def kernel_files(value: str) -> None:
    """Every parser of a kernel file takes any text."""
    zones.memparse(value)
    parse.boot_arguments(value)
    zones.parse_meminfo(value)
    zones.parse_zoneinfo(value)
    with suppress(ValueError):
        parse_pagetypeinfo(value)
    parse.limits(value)
    parse.status(value)
    parse.choice(value)
    kernel_series(value)
    stock_series(value, value, value)
    parse.pci_resources(value)
    parse.boot_log(value)


def tool_outputs(value: str) -> None:
    """Every parser of a tool's output takes any text."""
    parse.nvidia_version(value)
    parse.smi(value)
    parse.rdma_resource(value)
    parse.devinfo(value)


def binaries(value: bytes) -> None:
    """Parsers of binary data take any bytes."""
    parse.pci_capabilities(value)
    parse.pci_acs(value)
    for _, body in netlink.messages(value):
        dict(netlink.attributes(body))
    archive.kind(value)
    driversource.payload(b"#!/bin/sh\nskip=3\n" + value)
    driversource.payload(value)


def driver_source(value: str) -> None:
    """The C reader never guesses and never fails."""
    found = driversource.read_host_pin(value)
    assert set(found.by_arch.values()) <= {"always", "if-present", "never", "unknown"}
    driversource.read_peermem(value)
    driversource.evaluate(value, {"NVCPU_FAMILY_X86": True})


def bug_report(value: str) -> None:
    """A report of any text is a reader or one line."""
    try:
        reader = places.bug_report("_" * 44 + "\n\n*** /proc/meminfo\n" + value, "report")
    except RegreproError:
        return
    subjects.collect(reader)


def node(files: dict[str, str]) -> None:
    """Any set of captured files gives facts and findings."""
    outputs = {Path(name).stem: value for name, value in files.items()}
    reader = TextReader(files, "x", outputs=outputs)
    sheet = subjects.collect(reader)
    answer = resolve(reader, sheet)
    found, exposures = subjects.find(sheet, answer.contract, answer.peermem, driver=answer.version)
    json.dumps([one.as_dict() for one in found])
    assert {one.name for one in exposures} == {"A", "B"}


def versions(value: str) -> None:
    """Any driver version is placed, or refused in one line."""
    from regrepro.audit.catalogue import contract

    try:
        contract(value, "x86_64", (6, 8))
    except RegreproError as error:
        assert "\n" not in str(error)


def archives(value: bytes) -> None:
    """Any bytes given as an archive unpack inside their folder or are refused in one line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(value)
        try:
            archive.unpack(path, Path(folder) / "out")
        except RegreproError as error:
            assert "\n" not in str(error)
        assert {entry.name for entry in Path(folder).iterdir()} <= {"a", "out"}


def runs(values: list[Any]) -> None:
    """Any lines of JSON as a record are a reader or one line; any JSON as verdicts is a contract or
    none.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        head = {"schema": "regrepro.record/2", "node": values[0] if values else None}
        record.write_text("\n".join(json.dumps(value) for value in (head, *values)), encoding="utf-8")
        try:
            reader = places.run_reader(Path(folder), record)
        except RegreproError:
            return
        sheet = subjects.collect(reader)
        subjects.find(sheet, None, None, driver=None)
    of_verdicts(json.dumps({"verdicts": values}), "x")


def paths(value: str) -> None:
    """No path leads a folder's reader outside of it."""
    reader = FolderReader(HERE, links={"a": "..", "b": "/", "c": "c", "d/e": "../../.."})
    for prefix in ("", "a/", "b/", "c/", "d/e/"):
        reader.read(prefix + value, 64)
        reader.names(prefix + value)


def lines(value: bytes) -> None:
    """Every parser of a line takes any line."""
    plain_text = text.decode(value)
    peeled = text.peel(plain_text)
    text.where(plain_text)
    text.errno_of(plain_text)
    formats.parse_line(peeled)
    formats.is_open(peeled)
    traces.parse_line(plain_text)


def logs(value: bytes) -> None:
    """Any log is explained, with the C core and without it alike."""
    results = []
    for use_core in (True, False):
        explainer = Explainer(use_core=use_core)
        explainer.read_file("log", io.BytesIO(value))
        results.append(explainer.result())
    assert plain(results[0])
    assert json.dumps(results[0]) == json.dumps(results[1])


def audits(value: Any) -> None:
    """Any JSON as an audit narrows without a crash."""
    from regrepro.explain.causes import weigh

    audit = {"facts": [], "findings": [], "exposure": []}
    if isinstance(value, dict):
        audit.update({key: one for key, one in value.items() if key in audit and isinstance(one, list)})
    decision = formats.Failure("verbs", "ibv_reg_mr", "ENOMEM", "").decide()
    assert weigh(decision, "ENOMEM", None, audit=audit)


def scanning(value: tuple[bytes, int]) -> None:
    """The scan finds exactly the lines that hold a needle, wherever the chunks are cut."""
    from regrepro.explain import scan

    data, chunk = value
    needles = (b"ab", b"bca", b"abcabc")
    expected = [
        (number, line)
        for number, line in enumerate(data.split(b"\n"), 1)
        if any(one in line for one in needles)
    ]
    before = scan.CHUNK
    scan.CHUNK = chunk
    try:
        for use_core in (True, False):
            search = Needles(needles, use_core=use_core)
            found = [(one.number, one.line) for one in read(io.BytesIO(data), search)]
            assert found == expected
    finally:
        scan.CHUNK = before


PROPERTIES: dict[str, tuple[SearchStrategy[Any], Callable[[Any], None], int]] = {
    # name: what it takes, the property, inputs in a test run
    "kernel-files": (KERNEL_TEXT, kernel_files, 400),
    "tool-outputs": (KERNEL_TEXT, tool_outputs, 300),
    "binaries": (st.binary(max_size=600), binaries, 400),
    "driver-source": (C_TEXT, driver_source, 400),
    "bug-report": (KERNEL_TEXT, bug_report, 100),
    "node": (TREE, node, 100),
    "versions": (VERSION, versions, 200),
    "archives": (
        st.one_of(
            st.binary(max_size=300),
            st.builds(
                lambda magic, rest: magic + rest,
                st.sampled_from(
                    [b"\x1f\x8b\x08", b"PK\x03\x04", b"BZh9", b"\xfd7zXZ\x00", bytes(257) + b"ustar"]
                ),
                st.binary(max_size=300),
            ),
        ),
        archives,
        150,
    ),
    "runs": (st.lists(JSON, max_size=4), runs, 100),
    "paths": (st.text(alphabet="./ab\0\n-", max_size=20), paths, 150),
    "lines": (LOG_LINE, lines, 1000),
    "logs": (LOG, logs, 200),
    "audits": (JSON, audits, 200),
    "scanning": (
        st.tuples(
            st.lists(
                st.sampled_from([b"a", b"b", b"c", b"\n", b"abc", b"xxxxxxxxxxxx", b"\n\n"]), max_size=60
            ).map(b"".join),
            st.integers(1, 40),
        ),
        scanning,
        400,
    ),
}

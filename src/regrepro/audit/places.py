"""What `audit --from` is given, made into a reader.

A `regrepro` run or bundle, a folder of `scripts/collect.sh`, an sosreport, an
`nvidia-bug-report.log(.gz)`, a folder in the shape of `/proc` and `/sys`, a folder of loose files
(`meminfo`, `dmesg.txt`, …), or an archive of any of them.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from regrepro.audit import archive
from regrepro.audit.reader import FirstOf, FolderReader, Reader, TextReader
from regrepro.errors import UsageError

COLLECT_OUTPUTS = {
    name: (f"commands/{name}.txt",)
    for name in (
        "dmesg",
        "uname",
        "getconf",
        "ulimit",
        "nvidia-smi",
        "rdma-resource",
        "rdma-link",
        "ibv_devinfo",
        "ofed_info",
        "systemctl-memlock",
        "kallsyms",
        "driver-folders",
        "libcuda",
        "lspci",
        "sys-module",
    )
}
SOS_OUTPUTS = {
    "dmesg": ("sos_commands/kernel/dmesg", "sos_commands/kernel/dmesg*", "var/log/dmesg"),
    "uname": ("sos_commands/kernel/uname_-a", "sos_commands/host/uname*"),
    "nvidia-smi": ("sos_commands/nvidia/nvidia-smi_-q", "sos_commands/nvidia/nvidia-smi_-q*"),
    "rdma-resource": ("sos_commands/infiniband/rdma_resource*", "sos_commands/rdma/rdma_resource*"),
    "rdma-link": ("sos_commands/infiniband/rdma_link*",),
    "ibv_devinfo": ("sos_commands/infiniband/ibv_devinfo_-v", "sos_commands/infiniband/ibv_devinfo*"),
    "ofed_info": ("sos_commands/infiniband/ofed_info*",),
    "ulimit": ("sos_commands/process/ulimit*", "sos_commands/systemd/ulimit*"),
    "lspci": ("sos_commands/pci/lspci_-nn*",),
}
LOOSE_FILES = {
    "cmdline": "proc/cmdline",
    "meminfo": "proc/meminfo",
    "zoneinfo": "proc/zoneinfo",
    "pagetypeinfo": "proc/pagetypeinfo",
    "modules": "proc/modules",
    "lsmod": "proc/modules",
    "limits": "proc/self/limits",
    "osrelease": "proc/sys/kernel/osrelease",
    "cpuinfo": "proc/cpuinfo",
    "vmstat": "proc/vmstat",
    "lockdown": "sys/kernel/security/lockdown",
}
LOOSE_OUTPUTS = {
    "dmesg": "dmesg",
    "kern": "dmesg",
    "uname": "uname",
    "uname-a": "uname",
    "nvidia-smi": "nvidia-smi",
    "nvidia-smi-q": "nvidia-smi",
    "rdma-resource": "rdma-resource",
    "rdma_resource": "rdma-resource",
    "ibv_devinfo": "ibv_devinfo",
    "ofed_info": "ofed_info",
    "ulimit": "ulimit",
    "kallsyms": "kallsyms",
}
BUG_REPORT_MARK = b"Start of NVIDIA bug report log file"
BUG_REPORT_NAMES = ("nvidia-bug-report.log", "nvidia-bug-report.log.gz")
TEXT_LIMIT = 256 << 20
_RULE = re.compile(r"^_{40,}\s*$")


@contextlib.contextmanager
def open_place(path: Path) -> Iterator[Reader]:
    """Give a reader of what lies at `path`; an archive is unpacked into a private folder for the time
    being.

    Raises UsageError, in one line, where there is nothing that the audit can read.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist", hint="give a folder, an archive, a log or a run directory")
    if path.is_dir():
        reader = detect(path)
        if reader is None:
            raise _nothing(path)
        yield reader
        return
    if not path.is_file():
        raise UsageError(f"{path} is neither a folder nor a file")
    try:
        if path.stat().st_size == 0:
            raise UsageError(f"{path} is empty", hint="have it sent again")
        reader = _from_file(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=str(error.strerror or error)) from None
    if reader is not None:
        yield reader
        return
    with tempfile.TemporaryDirectory(prefix="regrepro-audit-") as folder:
        archive.unpack(path, Path(folder))
        reader = detect(Path(folder), str(path))
        if reader is None:
            raise _nothing(path)
        yield reader


def _nothing(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds nothing that the audit reads",
        why="no record.jsonl, no captured proc/ or sys/, no sosreport, no nvidia-bug-report.log",
        hint="capture the node with scripts/collect.sh",
    )


def _from_file(path: Path, where: str = "") -> Reader | None:
    """Return a reader of a single file that is no archive of several, or None.

    `where` is how a person knows the file, if not by its path.
    """
    where = where or str(path)
    with path.open("rb") as file:
        head = file.read(512)
        file.seek(0)
        packing = archive.kind(head)
        if path.suffix == ".jsonl" or head.lstrip().startswith(b'{"schema"'):
            return run_reader(path.parent, path, str(Path(where).parent))
        if packing in ("zip", "tar"):
            return None
        try:
            stream = archive.decompressed(file, packing, path.stat().st_size, path.name)
            start = _start(stream)
            if BUG_REPORT_MARK in start:
                return bug_report(_rest(start, stream), where)
        except UsageError:
            raise
        except archive.BROKEN as error:
            raise UsageError(
                f"{path.name} cannot be read",
                why=f"it is broken or cut ({str(error) or type(error).__name__})",
                hint="have it sent again",
            ) from None
        if packing == "" and archive.kind(start) == "":
            raise UsageError(
                f"{path.name} is no archive, no nvidia-bug-report.log and no record",
                hint="for a log of a failing job use `regrepro explain`",
            )
    return None


def _start(stream: BinaryIO) -> bytes:
    """Read the first 64 KiB, or as much as there is before a cut; nothing at all raises what is wrong."""
    parts: list[bytes] = []
    size = 0
    try:
        while size < 1 << 16 and (part := stream.read1(1 << 14)):  # type: ignore[attr-defined]
            parts.append(part)
            size += len(part)
    except archive.BROKEN:
        if not parts:
            raise
    return b"".join(parts)


def _rest(start: bytes, stream: BinaryIO) -> str:
    """Read the whole text; a report that is cut in the middle still tells what it holds."""
    parts = [start]
    size = len(start)
    try:
        while size < TEXT_LIMIT and (part := stream.read1(1 << 16)):  # type: ignore[attr-defined]
            parts.append(part)
            size += len(part)
    except UsageError:
        raise
    except archive.BROKEN:
        pass
    return b"".join(parts).decode("utf-8", "replace")


def detect(folder: Path, where: str = "", depth: int = 0) -> Reader | None:
    """Tell what a folder is, by what lies in it; a folder that holds one folder only is looked into."""
    where = where or str(folder)
    readers: list[Reader] = []
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise UsageError(f"{where} cannot be read", why=str(error.strerror or error)) from None
    if "record.jsonl" in names:
        readers.append(run_reader(folder, folder / "record.jsonl", where))
    if "collect.txt" in names:
        readers.append(collected(folder, where))
    elif "sos_commands" in names:
        readers.append(FolderReader(folder, f"{where} (sosreport)", outputs=SOS_OUTPUTS))
    elif "proc" in names or "sys" in names:
        readers.append(FolderReader(folder, where, links=_link_list(folder), outputs=COLLECT_OUTPUTS))
    for name in BUG_REPORT_NAMES:
        if name in names and not (folder / name).is_symlink():
            found = _from_file(folder / name, f"{where}/{name}")
            if found is not None:
                readers.append(found)
                break
    if not readers and (loose := _loose(folder, where, names)) is not None:
        readers.append(loose)
    if readers:
        return readers[0] if len(readers) == 1 else FirstOf(readers, where)
    if depth < 4:
        folders = [name for name in names if (folder / name).is_dir() and not (folder / name).is_symlink()]
        for name in folders[:50]:
            found = detect(folder / name, f"{where}/{name}", depth + 1)
            if found is not None:
                return found
    return None


def _link_list(folder: Path) -> dict[str, str]:
    """Read links.txt of scripts/collect.sh: "<path><TAB><target>" lines."""
    links: dict[str, str] = {}
    text = FolderReader(folder).read("links.txt")
    for line in text.lines[:100_000]:
        name, tab, target = line.partition("\t")
        if tab and name.startswith("/") and target:
            links[name.lstrip("/")] = target
    return links


def collected(folder: Path, where: str) -> FolderReader:
    """Return the reader of a folder of scripts/collect.sh."""
    denied = frozenset(FolderReader(folder).read("denied.txt").lines)
    return FolderReader(
        folder,
        f"{where} (collect.sh)",
        links=_link_list(folder),
        outputs=COLLECT_OUTPUTS,
        denied=denied,
    )


def _loose(folder: Path, where: str, names: list[str]) -> TextReader | None:
    """Return a reader of files that lie loose under their own names, with or without .txt or .log."""
    reader = FolderReader(folder)
    files: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"\.(txt|log|out)$", "", name)
        if stem in LOOSE_FILES and (text := reader.read(name).text) is not None:
            files[LOOSE_FILES[stem]] = text
        elif stem in LOOSE_OUTPUTS and (text := reader.read(name).text) is not None:
            outputs[LOOSE_OUTPUTS[stem]] = text
    if not files and not outputs:
        return None
    return TextReader(files, where, outputs=outputs)


def bug_report(text: str, where: str) -> TextReader:
    """Take an nvidia-bug-report.log apart.

    Its sections are parted by a line of underscores; a section is a file ("*** /path", "*** ls: …",
    content) or a command ("the command", empty line, output).
    """
    files: dict[str, str] = {}
    outputs: dict[str, str] = {}
    section: list[str] = []

    def close() -> None:
        body = section[:]
        section.clear()
        while body and not body[0].strip():
            body.pop(0)
        if not body:
            return
        first = body[0].strip()
        if first.startswith("*** /"):
            path = first[4:]
            if path.endswith((" does not exist", " is not readable")):
                return
            content = body[1:]
            if content and content[0].startswith("*** ls:"):
                content = content[1:]
            files.setdefault(path.lstrip("/"), "\n".join(content).rstrip("\n") + "\n")
            return
        if first.startswith("Start of NVIDIA bug report"):
            for line in body:
                if line.startswith("uname: "):
                    outputs.setdefault("uname", line[len("uname: ") :])
            return
        output = "\n".join(body[1:]).strip("\n")
        words = first.split()
        tool = words[0].rsplit("/", 1)[-1] if words else ""
        if tool == "nvidia-smi" and ("-q" in words or "--query" in words):
            outputs.setdefault("nvidia-smi", output)
        elif tool in ("dmesg", "dmesg:") or (tool == "journalctl" and ("-k" in words or "--dmesg" in words)):
            outputs.setdefault("dmesg", output)
        elif tool == "lspci" and "-nn" in words:
            outputs.setdefault("lspci", output)

    for line in text.splitlines():
        if _RULE.match(line):
            close()
        else:
            section.append(line)
    close()
    if not files and not outputs:
        raise UsageError(f"{where} holds no section of an nvidia-bug-report.log", why="it is cut or empty")
    return TextReader(files, f"{where} (nvidia-bug-report.log)", outputs=outputs)


_HEADER_FILES = {
    "kernel": "proc/sys/kernel/osrelease",
    "kernel_version": "proc/sys/kernel/version",
    "hostname": "proc/sys/kernel/hostname",
    "cmdline": "proc/cmdline",
}
RECORD_LINES = 1_000_000
LINE_LIMIT = 32 << 20


def run_reader(folder: Path, record: Path, where: str = "") -> TextReader:
    """Return what a run's record states of its node: the header, the memory map, the boot reservations.

    `where` is how a person knows the folder, if not by its path: that of an archive is soon gone.

    The record's lines are read one by one and only the first of each kind is kept, so that a long run is
    no burden.
    """
    where = where or str(folder)
    shown = f"{where}/{record.name}"
    header: dict[str, object] = {}
    memory_map: dict[str, object] | None = None
    reservations: list[object] = []
    try:
        with record.open("rb") as file:
            for number in range(RECORD_LINES):
                line = file.readline(LINE_LIMIT)
                if not line:
                    break
                if number and not any(key in line for key in (b'"memory-map"', b'"reservation"')):
                    continue
                try:
                    item = json.loads(line)
                except (ValueError, RecursionError):
                    continue  # a killed run may leave half a line
                if not isinstance(item, dict):
                    continue
                if number == 0:
                    header = item
                elif item.get("event") == "memory-map" and memory_map is None:
                    memory_map = item
                elif item.get("event") == "reservation":
                    reservations.append(item)
    except OSError as error:
        raise UsageError(f"{shown} cannot be read", why=str(error.strerror or error)) from None
    if not str(header.get("schema", "")).startswith("regrepro.record/"):
        raise UsageError(f"{shown} is no record of regrepro", why="its first line is no header")
    node = header.get("node")
    facts: dict[str, object] = node if isinstance(node, dict) else {}
    source = f"{record.name}, header"
    files = {
        path: str(facts[key]) + "\n" for key, path in _HEADER_FILES.items() if isinstance(facts.get(key), str)
    }
    vm = facts.get("vm")
    if isinstance(vm, dict):
        files.update(
            {f"proc/sys/vm/{name}": f"{value}\n" for name, value in vm.items() if "/" not in str(name)}
        )
    stated: dict[str, tuple[str, str]] = {}
    for key in ("arch", "page_size", "lockdown", "nvidia_driver", "euid", "memory_total"):
        value = facts.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            stated[key] = (str(value), source)
    driver = facts.get("nvidia_driver")
    if isinstance(driver, dict) and isinstance(driver.get("version"), str):
        stated["nvidia_driver"] = (str(driver["version"]), source)
    limits = facts.get("limits")
    if isinstance(limits, dict):
        for key in ("memlock_soft", "memlock_hard"):
            if isinstance(limits.get(key), (str, int)):
                stated[key] = (str(limits[key]), source)
    if reservations:
        stated["reservations"] = (json.dumps(reservations), f"{record.name}, events reservation")
    verdicts = FolderReader(folder).read("verdicts.json")
    if verdicts.text is not None:
        stated["verdicts"] = (verdicts.text, "verdicts.json")
    return TextReader(files, f"{where} (run of regrepro)", stated=stated, map=memory_map)

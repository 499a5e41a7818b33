"""Lines as people's tools leave them: colours, carriage returns, prefixes of launchers, wrapped lines."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
_RANK = re.compile(
    r"\[(?:rank|Rank |default|RANK )(\d{1,6})\]"
    r"|^\s*(\d{1,6}): "
    r"|(?:\[|@)\d{1,6},(\d{1,6})\]\s*<std"
    r"|\b[Rr]ank[ =:]{1,2}(\d{1,6})\b"
    r"|\bworker-(\d{1,6})\b"
)
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)"
    r"|\[((?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4})\]"
    r"|^(\w{3} [ \d]\d \d\d:\d\d:\d\d)\b"
    r"|\[\s{0,12}(\d{1,10}\.\d{1,9})\]"
    r"|\s(\d{1,10}\.\d{6}):\s"
)
# Prefixes that a launcher repeats before each line, also before the rest of a wrapped one.
_PREFIX = re.compile(
    r"^(?:\s*\d{1,6}: |\[[\w.@-]{1,64},\d{1,6}\]\s*<std(?:out|err)>:\s?|\[(?:rank|default)\d{1,6}\]:\s?"
    r"|\([A-Za-z_]\w{0,60} pid=\d{1,10}(?:, ip=[\d.]{7,15})?\) |[\w.-]{1,60}\s{1,10}\| "
    r"|\d{4}-\d\d-\d\dT[\d:.]{8,20}Z (?:std(?:out|err) [FP] )?)"
)


def decode(line: bytes) -> str:
    """Make a raw line plain: UTF-8 where it is, no colour, no carriage return (what follows the last one
    stands).
    """
    text = line.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    if "\r" in text:
        text = text.rsplit("\r", 1)[1]
    return _CONTROL.sub(" ", text) if _CONTROL.search(text) else text


def peel(text: str) -> str:
    """Take the launchers' prefixes off the start of a line."""
    for _ in range(4):
        shorter = _PREFIX.sub("", text, count=1)
        if shorter == text:
            break
        text = shorter
    return text


@dataclass(frozen=True)
class Where:
    """What a line says of its place: rank, host, process and time, each where it is told."""

    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    time: str | None = None


_HOST_PID = (
    re.compile(r"(?:^|[\s\]])([\w][\w.-]{0,80}):(\d{1,10}):\d{1,10} \[-?\d{1,4}\] "),  # NCCL
    re.compile(r"\[([\w][\w.-]{0,80}):(\d{1,10}):\d{1,6}(?::\d{1,6})?\]"),  # UCX
    re.compile(r"libfabric:(\d{1,10}):"),
    re.compile(
        r"^\w{3} [ \d]\d \d\d:\d\d:\d\d ([\w][\w.-]{0,80}) "
        r"(?:\w[\w./-]{0,60})(?:\[(\d{1,10})\])?:"
    ),  # syslog
)


def where(text: str) -> Where:
    """Read rank, host, process and time from a line, whatever tool wrote it."""
    head = text[:300]
    rank = _RANK.search(head)
    stamp = _STAMP.search(head)
    host: str | None = None
    pid: int | None = None
    for pattern in _HOST_PID:
        match = pattern.search(head)
        if match is None:
            continue
        if match.re.groups == 1:
            pid = int(match[1])
        else:
            host = match[1]
            pid = int(match[2]) if match[2] else None
        break
    number = next((int(group) for group in rank.groups() if group), None) if rank else None
    time = next((group for group in stamp.groups() if group), None) if stamp else None
    return Where(number, host, pid, time)


ERRNO_TEXTS = {
    "Operation not permitted": "EPERM",
    "No such file or directory": "ENOENT",
    "Interrupted system call": "EINTR",
    "Input/output error": "EIO",
    "No such device or address": "ENXIO",
    "Bad file descriptor": "EBADF",
    "Resource temporarily unavailable": "EAGAIN",
    "Cannot allocate memory": "ENOMEM",
    "Out of memory": "ENOMEM",
    "Permission denied": "EACCES",
    "Bad address": "EFAULT",
    "Device or resource busy": "EBUSY",
    "No such device": "ENODEV",
    "Invalid argument": "EINVAL",
    "Too many open files": "EMFILE",
    "No space left on device": "ENOSPC",
    "Function not implemented": "ENOSYS",
    "Value too large for defined data type": "EOVERFLOW",
    "Protocol not supported": "EPROTONOSUPPORT",
    "Operation not supported": "EOPNOTSUPP",
    "Numerical result out of range": "ERANGE",
    "Connection timed out": "ETIMEDOUT",
    "Remote I/O error": "EREMOTEIO",
}
ERRNO_NUMBERS: dict[int, str] = {getattr(errno, name): name for name in ERRNO_TEXTS.values()}
"""As on x86-64 and arm64 (asm-generic/errno.h), where logs are read and written."""
_TEXTS = re.compile(
    "|".join(re.escape(text) for text in sorted(ERRNO_TEXTS, key=len, reverse=True)), re.IGNORECASE
)
_FOLDED = {text.lower(): name for text, name in ERRNO_TEXTS.items()}
_NAMES = frozenset(ERRNO_NUMBERS.values())


def errno_of(text: str) -> str | None:
    """Return the errno that a text tells: by its message, its name, or a number that is called errno or
    error.
    """
    match = _TEXTS.search(text)
    if match:
        return _FOLDED[match[0].lower()]
    for name in re.findall(r"\bE[A-Z]{3,15}\b", text):
        if name in _NAMES:
            return str(name)
    match = re.search(
        r"(?:errno|error(?: code)?|err|status|ret(?:urned| is)?|RC|rc)\s?[:=(]?\s?\(?(-?\d{1,3})\b"
        r"|\((-?\d{1,3})\)|:\s?(-\d{1,3})\b|failed:? (-?\d{1,3})\b|\[(-?\d{1,3})\]\s*$",
        text,
    )
    if match:
        number = abs(int(next(group for group in match.groups() if group)))
        return ERRNO_NUMBERS.get(number)
    return None


def signed(text: str) -> int | None:
    """Read a return value as a C int or long: -12, 0xfffffff4, 0xfffffffffffffff4 and 4294967284 are the
    same.
    """
    try:
        value = int(text, 16) if text.lower().startswith(("0x", "-0x")) else int(text)
    except ValueError:
        try:
            value = int(text, 16)
        except ValueError:
            return None
    for bits in (32, 64):
        if (1 << bits) - 4096 < value < 1 << bits:
            return value - (1 << bits)
    return value

"""What a driver's own source says of its host pin and of its peer-memory API, before it is ever loaded.

Reads `os_lock_user_pages()` in `nvidia/os-mlock.c`, which both flavours ship as source: in a source
tree, in the DKMS folder (`/usr/src/nvidia-VERSION`), or inside the `.run` package. It decides which
`#if` conditions FOLL_LONGTERM stands under, for each architecture, and says unknown where the source is
of another shape: it never guesses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.audit import archive
from regrepro.errors import UsageError

ALWAYS = "always"
IF_PRESENT = "if-present"
NEVER = "never"
UNKNOWN = "unknown"

ARCHES = {
    "x86_64": {"NVCPU_FAMILY_X86", "NVCPU_X86_64", "NV_LINUX"},
    "aarch64": {"NVCPU_FAMILY_ARM", "NVCPU_AARCH64", "NV_LINUX"},
}
_ARCH_NAMES = re.compile(r"NVCPU_\w+")
BUILD_TEST = "NV_FOLL_LONGTERM_PRESENT"
MLOCK = "nvidia/os-mlock.c"
PEERMEM = "nvidia-peermem/nvidia-peermem.c"
KBUILD = "nvidia/nvidia.Kbuild"
MAX_SOURCE = 4 << 20


def evaluate(condition: str, defined: dict[str, bool | None]) -> bool | None:
    """Evaluate a preprocessor condition in three values: None is unknown.

    `defined` maps macros to whether they are defined; any other macro is unknown. Only `defined`, `!`,
    `&&`, `||`, parentheses and numbers are understood, everything else is unknown.
    """
    tokens = re.findall(r"[A-Za-z_]\w*|\d+[uUlL]*|&&|\|\||[!()]|\S", condition)
    position = 0
    depth = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def take() -> str:
        nonlocal position
        position += 1
        return tokens[position - 1] if position <= len(tokens) else ""

    def primary() -> bool | None:
        nonlocal depth
        token = take()
        if token == "!":
            depth += 1
            if depth > 60:
                raise ValueError
            value = primary()
            depth -= 1
            return None if value is None else not value
        if token == "(":
            depth += 1
            if depth > 60:
                raise ValueError
            value = either()
            depth -= 1
            if take() != ")":
                raise ValueError
            return value
        if token == "defined":
            name = take()
            if name == "(":
                name = take()
                if take() != ")":
                    raise ValueError
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError
            return defined.get(name)
        if token[:1].isdigit():
            return token.rstrip("uUlL") not in ("0", "00")
        raise ValueError

    def both() -> bool | None:
        value = primary()
        while peek() == "&&":
            take()
            other = primary()
            value = False if value is False or other is False else None if None in (value, other) else True
        return value

    def either() -> bool | None:
        value = both()
        while peek() == "||":
            take()
            other = both()
            value = True if value is True or other is True else None if None in (value, other) else False
        return value

    try:
        result = either()
        return result if position == len(tokens) else None
    except ValueError:
        return None


def strip_comments(text: str) -> str:
    """Return C without comments, lines kept, and continued lines joined."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return found if found[0] in "\"'" else " " + "\n" * found.count("\n")

    plain = re.sub(
        r"/\*.*?(?:\*/|\Z)|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", blank, text, flags=re.DOTALL
    )
    return re.sub(r"\\\r?\n", " ", plain)


@dataclass(frozen=True)
class HostPin:
    """What the source asks for: for each architecture `always`, `if-present`, `never` or `unknown`.

    `if-present` is "where the kernel it is built for has FOLL_LONGTERM". `call` is `pin`, `get` or
    `unknown`.
    """

    by_arch: dict[str, str]
    call: str
    why: str

    @property
    def variant(self) -> str:
        """Return the shape in one word: none, x86-only, all, unknown."""
        values = set(self.by_arch.values())
        if UNKNOWN in values or not values:
            return UNKNOWN
        if values == {NEVER}:
            return "none"
        if NEVER not in values:
            return "all"
        return "x86-only" if self.by_arch["aarch64"] == NEVER else "other-than-x86-only"


def _unknown(why: str) -> HostPin:
    return HostPin(dict.fromkeys(ARCHES, UNKNOWN), UNKNOWN, why)


# What a file of the driver never comes near; it may be a stranger's.
_TEXT_LIMIT, _PARAMETERS_LIMIT, _LINE_LIMIT, _BRANCHES_LIMIT = 1 << 20, 4096, 4096, 64


def function_body(text: str, name: str) -> str | None:
    """Return the body of a function's definition, without the braces, or None."""

    def closed(start: int, end: int, pair: str) -> int | None:
        """Return where what was opened before `start` is closed."""
        depth = 1
        for sign in re.finditer(f"[{re.escape(pair)}]", text[start:end]):
            depth += 1 if sign[0] == pair[0] else -1
            if not depth:
                return start + sign.end()
        return None

    for match in re.finditer(rf"\b{re.escape(name)}\s*\(", text):
        index = closed(match.end(), match.end() + _PARAMETERS_LIMIT, "()")
        opening = re.compile(r"\s{0,999}\{").match(text, index) if index is not None else None
        if opening:
            end = closed(opening.end(), len(text), "{}")
            return None if end is None else text[opening.end() : end - 1]
    return None


_SETS_FLAG = re.compile(r"(?:\|=|=|\||,|\()\s*[^;=]*\bFOLL_LONGTERM\b")
_CLEARS_FLAG = re.compile(r"(?:&=|&)\s*\(?\s*~")


def read_host_pin(text: str, tested: bool | None = None) -> HostPin:
    """Decide from os-mlock.c; `tested` says whether the build runs the test of FOLL_LONGTERM (None: not
    known).
    """
    if len(text) > _TEXT_LIMIT:
        return _unknown(f"it has {len(text)} bytes, which the driver's os-mlock.c never has")
    plain = strip_comments(text)
    body = function_body(plain, "os_lock_user_pages")
    if body is None:
        return _unknown("there is no definition of os_lock_user_pages() in it")
    calls = set(
        re.findall(r"\b((?:NV_)?(?:PIN|GET|pin|get)_[Uu][Ss][Ee][Rr]_[Pp][Aa][Gg][Ee][Ss]\w*)\s*\(", body)
    )
    kinds = {"pin" if "pin" in call.lower().split("_user")[0] else "get" for call in calls}
    if len(kinds) != 1:
        return _unknown("os_lock_user_pages() pins by something else than get_user_pages or pin_user_pages")
    call = kinds.pop()
    outside = plain.replace(body, "", 1)
    for line in outside.splitlines():
        if re.search(r"longterm", line, re.IGNORECASE) and not line.lstrip().startswith(("#if", "#elif")):
            return _unknown(
                "FOLL_LONGTERM also stands outside os_lock_user_pages(), which this reader cannot follow"
            )
    uses: list[list[str]] = []
    stack: list[str] = []
    seen: list[list[str]] = []
    for line in body.splitlines():
        if len(line) > _LINE_LIMIT or len(stack) > _BRANCHES_LIMIT or len(uses) > _BRANCHES_LIMIT:
            return _unknown("os_lock_user_pages() is larger than any that this reader knows")
        directive = re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif|define|undef)\b(.*)", line)
        if directive:
            word, rest = directive[1], directive[2].strip()
            if word in ("if", "ifdef", "ifndef"):
                condition = {"if": rest, "ifdef": f"defined({rest})", "ifndef": f"!defined({rest})"}[word]
                stack.append(f"({condition})")
                seen.append([condition])
            elif word in ("elif", "else"):
                if not stack:
                    return _unknown("its #if and #endif do not match")
                before = " && ".join(f"!({one})" for one in seen[-1])
                stack[-1] = f"({before})" + (f" && ({rest})" if word == "elif" else "")
                seen[-1].append(rest)
                if len(seen[-1]) > _BRANCHES_LIMIT:
                    return _unknown("os_lock_user_pages() is larger than any that this reader knows")
            elif word == "endif":
                if not stack:
                    return _unknown("its #if and #endif do not match")
                stack.pop()
                seen.pop()
            elif "LONGTERM" in rest:
                return _unknown("FOLL_LONGTERM stands in a macro, which this reader cannot follow")
            continue
        if "LONGTERM" not in line.upper():
            continue
        if (
            not re.search(r"\bFOLL_LONGTERM\b", line)
            or _CLEARS_FLAG.search(line)
            or not _SETS_FLAG.search(line)
        ):
            return _unknown(f"this line is of another shape: {line.strip()[:80]}")
        if re.search(r"\bif\s*\(|\?|\bwhile\s*\(", line):
            return _unknown("FOLL_LONGTERM depends on something at run time")
        uses.append(list(stack))
    if stack:
        return _unknown("its #if and #endif do not match")
    by_arch = {}
    for arch, macros in ARCHES.items():
        names: dict[str, bool | None] = {name: name in macros for name in _ARCH_NAMES.findall(body)}
        names["NV_LINUX"] = True
        answers = []
        for present in (True, False):
            names[BUILD_TEST] = present if tested is not False else False
            values = [evaluate(" && ".join(f"({one})" for one in use) or "1", names) for use in uses]
            answers.append(True if True in values else None if None in values else False)
        shapes: dict[tuple[bool | None, bool | None], str] = {
            (True, True): ALWAYS,
            (True, False): IF_PRESENT,
            (False, False): NEVER,
        }
        by_arch[arch] = shapes.get((answers[0], answers[1]), UNKNOWN)
    why = "read in os_lock_user_pages()"
    if UNKNOWN in by_arch.values():
        why = "FOLL_LONGTERM stands under a condition that this reader does not know"
    elif tested is False and uses:
        why = "FOLL_LONGTERM is there, but the build never runs the test that its condition needs"
    return HostPin(by_arch, call, why)


def read_peermem(text: str) -> str | None:
    """Decide from nvidia-peermem.c, in the catalogue's words: legacy, both, persistent; None where it is
    neither.
    """
    plain = strip_comments(text)
    if re.search(r"\bnvidia_p2p_get_pages_persistent\s*\(", plain):
        return "persistent" if re.search(r"\bpersistent_api_support\b", plain) else "both"
    if re.search(r"\bnvidia_p2p_get_pages\s*\(", plain):
        return "legacy"
    return None


@dataclass
class DriverSource:
    """A driver's source as found: `version` or None, `pins` by flavour's folder, `peermem` or None."""

    path: str
    version: str | None
    pins: dict[str, HostPin]
    peermem: str | None
    notes: list[str] = field(default_factory=list)

    @property
    def pin(self) -> HostPin:
        """Return the one answer, or unknown where the flavours differ."""
        answers = list(self.pins.values())
        if all(one.by_arch == answers[0].by_arch and one.call == answers[0].call for one in answers):
            return answers[0]
        return _unknown(f"the flavours differ ({', '.join(self.pins)})")

    def contract(self, arch: str | None, longterm_in_kernel: bool | None) -> tuple[str | None, str]:
        """Return (contract, why) for one architecture and a kernel that has FOLL_LONGTERM or not."""
        pin = self.pin
        if arch not in pin.by_arch:
            return None, "the architecture is not known" if arch is None else f"no rule for {arch}"
        answer = pin.by_arch[arch]
        plain = pin.call if pin.call in ("pin", "get") else None
        if answer == ALWAYS or (answer == IF_PRESENT and longterm_in_kernel is True):
            return "longterm", pin.why
        if answer == NEVER:
            return plain, pin.why
        if answer == IF_PRESENT and longterm_in_kernel is False:
            return plain, f"{pin.why}; the kernel it is built for has no FOLL_LONGTERM"
        if answer == IF_PRESENT:
            return None, f"{pin.why}; it depends on the kernel it is built for: give --kernel-headers"
        return None, pin.why

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of the schema audit-1."""
        return {
            "path": self.path,
            "version": self.version,
            "variant": self.pin.variant,
            "by_arch": self.pin.by_arch,
            "call": self.pin.call,
            "peermem": self.peermem,
            "why": self.pin.why,
            "notes": self.notes,
        }


def _version(texts: dict[str, str], path: Path) -> str | None:
    for name, text in sorted(texts.items()):
        base = name.rsplit("/", 1)[-1]
        if base in ("version.mk", "dkms.conf", "Kbuild", ".manifest"):
            match = re.search(
                r"(?:NVIDIA_VERSION\s*=\s*|PACKAGE_VERSION=\"?|NV_VERSION_STRING=\\*\"?\\*\"?)(\d{3,4}\.[\d.]+\d)",
                text,
            )
            if match is None and base == ".manifest":
                match = re.search(r"^(\d{3,4}\.[\d.]+\d)$", text, re.MULTILINE)
            if match:
                return match[1]
    match = re.search(r"(\d{3,4}\.\d{1,3}(?:\.\d{1,3})?)", path.name)
    return match[1] if match else None


_WANTED = (MLOCK, PEERMEM, KBUILD, "version.mk", "dkms.conf", "/Kbuild", ".manifest")


def _is_wanted(name: str) -> bool:
    return any(f"/{name}".endswith(f"/{end.lstrip('/')}") for end in _WANTED)


def read_driver_source(path: Path) -> DriverSource:
    """Read a source tree, a DKMS folder, an archive of either, or a `.run` package.

    Raises UsageError where there is no `nvidia/os-mlock.c` to be found.
    """
    if not path.exists():
        raise UsageError(
            f"{path} does not exist", hint="give a source tree, /usr/src/nvidia-VERSION, or a .run"
        )
    try:
        texts = _texts_of_folder(path) if path.is_dir() else _texts_of_package(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=str(error.strerror or error)) from None
    pins: dict[str, HostPin] = {}
    peermem: str | None = None
    notes: list[str] = []
    for name, text in sorted(texts.items()):
        if not f"/{name}".endswith(f"/{MLOCK}"):
            if f"/{name}".endswith(f"/{PEERMEM}"):
                peermem = read_peermem(text) or peermem
            continue
        flavour = name[: -len(MLOCK)].strip("/") or "."
        kbuild = texts.get(name[: -len(MLOCK)] + KBUILD)
        tested = None if kbuild is None else "foll_longterm_present" in kbuild
        pins[flavour] = read_host_pin(text, tested)
        if tested is False and pins[flavour].call != UNKNOWN and "FOLL_LONGTERM" in text:
            notes.append(f"{flavour}: nvidia.Kbuild does not run the test foll_longterm_present")
    if not pins:
        raise UsageError(
            f"{path} holds no nvidia/os-mlock.c",
            why="that file has the driver's host pin, in both flavours",
            hint="a .run can also be unpacked by `sh NAME.run --extract-only`",
        )
    return DriverSource(str(path), _version(texts, path), pins, peermem, notes)


def _texts_of_folder(folder: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    heads = ("", "kernel", "kernel-open", "source", "build")
    tails = (MLOCK, PEERMEM, KBUILD, "Kbuild", "dkms.conf", "version.mk", ".manifest")
    for head in heads:
        for tail in tails:
            name = f"{head}/{tail}".strip("/")
            file = folder / name
            if file.is_file():
                with file.open("rb") as handle:
                    texts[name] = handle.read(MAX_SOURCE).decode("utf-8", "replace")
    if "os-mlock.c" in {entry.name for entry in folder.iterdir()} and MLOCK not in texts:
        with (folder / "os-mlock.c").open("rb") as handle:  # the nvidia/ folder itself
            texts[MLOCK] = handle.read(MAX_SOURCE).decode("utf-8", "replace")
    return texts


def payload(head: bytes) -> int | None:
    """Return where the packed part of a `.run` package begins, or None.

    Such a package is a shell script that ends in an archive; the script says by `skip=LINES` (or `tail
    -n +LINES`) at which line that begins.
    """
    if not head.startswith(b"#!"):
        return None
    for pattern in (rb"^\s*skip=\"?(\d{1,6})", rb"tail -n \+(\d{1,6})", rb"^\s*SKIP=\"?(\d{1,6})"):
        match = re.search(pattern, head, re.MULTILINE)
        if match is None:
            continue
        lines = int(match[1])
        for skipped in (lines - 1, lines):
            offset = -1
            found = True
            for _ in range(skipped):
                offset = head.find(b"\n", offset + 1)
                if offset < 0:
                    found = False
                    break
            if found and archive.kind(head[offset + 1 : offset + 513]):
                return offset + 1
    return None


def _texts_of_package(path: Path) -> dict[str, str]:
    name = path.name
    try:
        with path.open("rb") as file:
            head = file.read(4 << 20)
            start = 0
            packing = archive.kind(head)
            if not packing:
                begins = payload(head)
                if begins is None:
                    raise UsageError(
                        f"{name} is neither a .run package nor an archive",
                        hint="unpack it by `sh NAME.run --extract-only` and give the folder",
                    )
                start = begins
                packing = archive.kind(head[start : start + 512])
            if packing == "zip":
                raise UsageError(f"{name} is a zip", hint="unpack it and give the folder")
            file.seek(start)
            size = max(path.stat().st_size - start, 1)
            stream = archive.decompressed(file, packing, size, name)
            found = archive.members(stream, name, _is_wanted)
    except UsageError:
        raise
    except MemoryError:
        raise UsageError(f"{name} is refused", why="unpacking it takes too much memory") from None
    except archive.BROKEN as error:
        raise UsageError(
            f"{name} cannot be read", why=f"it is broken or cut ({str(error) or type(error).__name__})"
        ) from None
    return {member: data[:MAX_SOURCE].decode("utf-8", "replace") for member, data in found.items()}


def kernel_has_longterm(headers: Path) -> tuple[bool | None, str]:
    """Answer the driver's build-time test from kernel headers: (whether FOLL_LONGTERM is defined,
    where).
    """
    for folder in (headers, headers / "build", headers / "source"):
        for name in ("include/linux/mm_types.h", "include/linux/mm.h"):
            file = folder / name
            try:
                with file.open("rb") as handle:
                    text = handle.read(MAX_SOURCE).decode("utf-8", "replace")
            except OSError:
                continue
            if re.search(r"^\s*(?:#\s*define\s+FOLL_LONGTERM\b|FOLL_LONGTERM\s*=)", text, re.MULTILINE):
                return True, str(file)
            if name.endswith("/mm.h"):
                return False, str(file)
    return None, f"no include/linux/mm.h below {headers}"

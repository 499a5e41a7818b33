"""The initramfs of a lab guest: virtme-ng's own, with an init of ours laid over it.

virtme-ng's init brings up what an interactive guest wants: udev with a coldplug of every device, tmpfiles,
the root read over 9p without a cache. Under emulation that is most of the time from boot to verdict, and
nothing here needs it. Ours mounts what is needed, reads the root through the page cache (it is read-only, and
nothing on it changes for the guest while it runs), and starts one command.

The kernel unpacks archives that follow each other one after the other, the later over the earlier, so ours is
appended. Where virtme-ng's is not as we know it, it stays as it is, and its own init runs the same command.
"""

from __future__ import annotations

import lzma
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"070701"  # newc, Documentation/driver-api/early-userspace/buffer-format.rst
_HEADER = 110
_TRAILER = b"TRAILER!!!"
_NINE_P = "version=9p2000.L,trans=virtio,access=any,msize=524288"


@dataclass(frozen=True)
class Mount:
    """A directory of the host that the guest gets under the same path, by 9p and without a cache."""

    tag: str
    path: str
    writable: bool


@dataclass(frozen=True)
class Plan:
    """What the guest's init makes. Paths are the host's, which are the guest's too.

    `modules` is the directory of the kernel's modules (None: it has none), `overlays` are directories that
    the guest may change for itself alone, `script` the shell script that it runs as its only purpose.
    """

    release: str
    modules: str | None
    overlays: tuple[str, ...]
    mounts: tuple[Mount, ...]
    script: str


def mounts_in(kernel_arguments: str) -> tuple[Mount, ...]:
    """Return the mounts that virtme-run announces to its init: `virtme_initmountN=PATH`."""
    found = {}
    for number, path in re.findall(r"\bvirtme_initmount(\d+)=(\"[^\"]*\"|\S+)", kernel_arguments):
        access = re.search(rf"\bvirtme_initmount{number}_access=(\w+)", kernel_arguments)
        path = "/" + path.strip('"').lstrip("/")  # noqa: PLW2901
        found[int(number)] = Mount(f"virtme.initmount{number}", path, access is None or access[1] == "rw")
    return tuple(found[number] for number in sorted(found))


def entries(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a cpio archive. Raises ValueError for what is none."""
    position = 0
    while archive[position : position + 6] == _MAGIC:
        size = int(archive[position + 54 : position + 62], 16)
        name_size = int(archive[position + 94 : position + 102], 16)
        name = archive[position + _HEADER : position + _HEADER + name_size - 1]
        start = -(-(position + _HEADER + name_size) // 4) * 4
        if name == _TRAILER:
            return
        yield name.decode("utf-8", "surrogateescape"), archive[start : start + size]
        position = -(-(start + size) // 4) * 4
    raise ValueError("no cpio archive")


def entry(name: str, content: bytes, mode: int) -> bytes:
    """Return one file of a cpio archive, padded."""
    encoded = name.encode()
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded) + 1, 0]
    head = _MAGIC + b"".join(b"%08X" % field for field in fields) + encoded + b"\0"
    return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)


def adapt(path: Path, plan: Plan) -> bool:
    """Append our init to an initramfs that virtme-ng made. Return whether that could be done."""
    archive = path.read_bytes()
    try:
        files = dict(entries(archive))
    except (ValueError, UnicodeError):
        return False
    loader = files.get("modules/load_all.sh")
    if loader is None or "bin/busybox" not in files or "init" not in files:
        return False
    names = re.findall(r"insmod '?([^'\s]+)'?", loader.decode("utf-8", "replace"))
    ours = []
    modules = []
    for name in names:
        content = files.get(name)
        if content is None:
            return False
        if name.endswith(".xz"):
            # busybox can do this too, a hundred times slower.
            content, name = lzma.decompress(content), name.removesuffix(".xz")  # noqa: PLW2901
            ours.append(entry(name, content, 0o100644))
        modules.append(name)
    ours.append(entry("init", init_script(plan, modules).encode(), 0o100755))
    ours.append(entry(_TRAILER.decode(), b"", 0))
    with path.open("ab") as file:
        file.write(b"\0" * (-len(archive) % 4) + b"".join(ours))
    return True


def init_script(plan: Plan, modules: Sequence[str]) -> str:
    """Return the init: busybox' shell, whose applets cost next to nothing here."""
    lines = ["#!/bin/sh", "b=/bin/busybox", "mount -t proc proc /proc", "mount -t devtmpfs dev /dev"]
    lines += [f"insmod /{shlex.quote(module)}" for module in modules]
    lines += [
        f"mount -n -t 9p -o ro,{_NINE_P},cache=loose /dev/root /newroot || {_give_up('the root')}",
        "umount /proc",
        "umount /dev",
        *_kernel_filesystems(),
        *_overlays(plan.overlays),
        *_modules(plan),
    ]
    for mount in plan.mounts:
        target = shlex.quote(f"/newroot{os.path.realpath(mount.path)}")
        access = "rw" if mount.writable else "ro"
        lines.append(f"mkdir -p {target} 2>/dev/null")
        options, tag = f"{access},{_NINE_P}", shlex.quote(mount.tag)
        lines.append(f"mount -n -t 9p -o {options} {tag} {target} || {_give_up(mount.path)}")
    lines += _ports()
    command = f". {shlex.quote(plan.script)}"
    lines += [
        "export HOME=/root",
        f'exec /bin/switch_root /newroot /bin/sh -c {shlex.quote(command)} </dev/null >"$out" 2>"$err"',
    ]
    return "\n".join(lines) + "\n"


def _give_up(what: str) -> str:
    text = shlex.quote(f"regrepro: {what} cannot be mounted in the guest")
    return f"{{ echo {text}; exit 1; }}"


def _kernel_filesystems() -> Iterable[str]:
    for kind, options, place in (
        ("proc", "nosuid,noexec,nodev", "/proc"),
        ("sysfs", "nosuid,noexec,nodev", "/sys"),
        ("devtmpfs", "mode=0755,nosuid", "/dev"),
        ("tmpfs", "mode=0755", "/run"),
    ):
        yield f"mount -t {kind} -o {options} {kind} /newroot{place} || {_give_up(place)}"
    yield "mkdir -p /newroot/dev/shm /newroot/dev/pts"
    for kind, options, place in (
        ("tmpfs", "mode=1777,nosuid,nodev", "/dev/shm"),
        ("devpts", "gid=5,mode=620,noexec,nosuid", "/dev/pts"),
        ("debugfs", "rw", "/sys/kernel/debug"),
        ("tracefs", "rw", "/sys/kernel/tracing"),
        ("securityfs", "rw", "/sys/kernel/security"),
        ("cgroup2", "rw", "/sys/fs/cgroup"),
    ):
        yield f"mount -t {kind} -o {options} {kind} /newroot{place} 2>/dev/null"
    yield "$b ln -sf /proc/self/fd /newroot/dev/fd"
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        yield f"$b ln -sf /proc/self/fd/{number} /newroot/dev/{name}"
    yield "echo regrepro-lab > /newroot/proc/sys/kernel/hostname"
    yield "$b ip link set lo up"


def _overlays(overlays: Iterable[str]) -> Iterable[str]:
    for number, overlay in enumerate(overlays):
        target = shlex.quote(f"/newroot{os.path.realpath(overlay)}")
        base = f"/newroot/run/regrepro-lab/{number}"
        yield f"mkdir -p {base}/upper {base}/work"
        options = f"lowerdir={target},upperdir={base}/upper,workdir={base}/work"
        yield (
            f"mount -t overlay -o {options} overlay {target} "
            f"|| echo {shlex.quote(f'regrepro: {overlay} stays read-only in the guest')}"
        )


def _modules(plan: Plan) -> Iterable[str]:
    if plan.modules is None:
        return
    place = shlex.quote(f"/newroot{os.path.realpath('/lib/modules')}")
    modules = os.path.realpath(plan.modules)
    if Path(modules).parent == Path(os.path.realpath("/lib/modules")):
        return  # the host's own, where they belong already
    yield f"mkdir -p {place}"
    yield f"mount -t tmpfs modules {place} || {_give_up('/lib/modules')}"
    yield f'$b ln -s {shlex.quote(modules)} {place}/"$($b uname -r)"'


def _ports() -> Iterable[str]:
    """Find the virtio ports by name: without udev there are no links to them. They come up by and by."""
    yield "out= err= n=0"
    yield 'while [ -z "$out" ] || [ -z "$err" ]; do'
    yield "  for p in /newroot/sys/class/virtio-ports/*; do"
    yield '    name=; read -r name 2>/dev/null < "$p/name"'
    yield '    case "$name" in'
    yield "    virtme.stdout) out=/newroot/dev/${p##*/} ;;"
    yield "    virtme.stderr) err=/newroot/dev/${p##*/} ;;"
    yield "    esac"
    yield "  done"
    yield '  [ $((n += 1)) -gt 300 ] && { echo "regrepro: the guest has no virtio ports"; exit 1; }'
    yield '  [ -n "$out" ] && [ -n "$err" ] || $b usleep 50000'
    yield "done"

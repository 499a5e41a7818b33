"""Kernels for the lab: from Debian's archive, kept in a cache directory; the host's own; or by path.

A kept kernel lies at `CACHE/kernels/RELEASE/lib/modules/RELEASE/` with `vmlinuz`, `config`, `System.map` and
its modules, whatever layout its package had: that is where virtme-ng looks for the modules of an image.
Nothing is ever installed on the host.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from regrepro.errors import EnvironmentProblem, UsageError
from regrepro.lab.archive import (
    Archive,
    Index,
    Offer,
    debian_architecture,
    locked,
    version_key,
    write_atomically,
)
from regrepro.lab.progress import LabProgress, Silent
from regrepro.options import format_size

_SERIES = re.compile(r"\d+\.\d+")
_KEPT_FILE = "kernel.json"
_PACKAGE_OF = {"dpkg": "dpkg", "bsdtar": "libarchive-tools"}
HOW_TO_NAME = "a series such as 6.12, `latest`, `host`, or the path of an image; see `regrepro lab kernels`"


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be booted.

    `image` is what QEMU loads (or, where `build_tree`, the tree that virtme-ng takes it from), `modules` the
    directory of its modules (None: it has none), `config` its build configuration (None: unknown). `version`
    is the package's, empty where there is no package; `origin` is a sentence for people.
    """

    release: str
    image: Path
    modules: Path | None
    config: Path | None
    version: str = ""
    origin: str = ""
    build_tree: bool = False

    def has_option(self, option: str) -> bool | None:
        """Whether the config sets an option to y or m; None when there is no config to look at."""
        if self.config is None:
            return None
        try:
            text = self.config.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        return re.search(rf"^{re.escape(option)}=[ym]$", text, re.M) is not None


def cache_directory() -> Path:
    """Return regrepro's cache directory, by XDG_CACHE_HOME; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            raise EnvironmentProblem(
                "there is no cache directory", why="neither XDG_CACHE_HOME nor a home is known"
            ) from None
    return Path(base) / "regrepro"


class Kernels:
    """The kernels that this machine has or can get. `directory` is the cache."""

    def __init__(self, directory: Path | None = None, watcher: LabProgress | None = None) -> None:
        self.directory = directory if directory is not None else cache_directory()
        self.archive = Archive(self.directory / "apt")
        self.watcher: LabProgress = watcher if watcher is not None else Silent()
        self._kept = self.directory / "kernels"

    # What there is

    def cached(self) -> list[Kernel]:
        """Return the kept kernels that came from the archive, newest first."""
        kernels = []
        for path in self._kept.glob(f"[0-9]*/{_KEPT_FILE}"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                kernels.append(_read_kept(path.parent))
        return sorted(kernels, key=lambda kernel: version_key(kernel.version), reverse=True)

    def on_offer(self, *, max_age: float | None = None) -> Index:
        """Return what the archive offers; see `Archive.index`."""
        if max_age is None:
            return self.archive.index(say=self.watcher.say)
        return self.archive.index(max_age=max_age, say=self.watcher.say)

    # From a name to a kernel

    def get(self, name: str) -> Kernel:
        """Return the kernel that a name stands for; download it if need be.

        `name` is `latest`, a series (`6.12`), a release or version on offer, `host`, or a path: an image
        beside its modules, a build tree, an unpacked package, a .deb or an .rpm. Raises `UsageError` for a
        name that means nothing, `EnvironmentProblem` when the kernel cannot be had.
        """
        if name == "host":
            return self._host()
        if (
            "/" in name
            or name.endswith((".deb", ".rpm"))
            or name[:1] == "."
            or (name[:1].isalpha() and Path(name).exists())
        ):
            return self._from_path(Path(name))
        if name == "latest":
            return self._latest()
        if _SERIES.fullmatch(name):
            return self._newest_of(name)
        if re.match(r"\d+\.\d+", name):
            return self._exact(name)
        raise UsageError(f"unknown kernel {name!r}", hint=HOW_TO_NAME)

    def _newest_of(self, series: str) -> Kernel:
        index = self._index_or_cached(lambda kernel: _series_of(kernel) == series, series)
        if isinstance(index, Kernel):
            return index
        offers = [offer for offer in _ordinary(index) if offer.series == series]
        if offers:
            return self._fetch_or_cached(offers[0], index, lambda kernel: _series_of(kernel) == series)
        kept = [kernel for kernel in self.cached() if _series_of(kernel) == series]
        known = list(dict.fromkeys(offer.series for offer in _ordinary(index)))
        if kept:
            self.watcher.say(f"series {series} has left Debian's archive; using the kept {kept[0].release}")
            return kept[0]
        lost = f" (suites that could not be read: {', '.join(index.missing)})" if index.missing else ""
        raise EnvironmentProblem(
            f"Debian's archive has no kernel of series {series} any more"
            if _is_older(series, known)
            else f"Debian's archive has no kernel of series {series}",
            why=f"it offers {', '.join(known)}{lost}",
            hint="take one of these, or give a path",
        )

    def _exact(self, name: str) -> Kernel:
        def is_it(kernel: Kernel) -> bool:
            return name in {kernel.release, kernel.version, kernel.version.partition("-")[0]}

        for kernel in self.cached():
            if is_it(kernel):
                return kernel
        index = self.on_offer()
        offers = [offer for offer in index.offers if name in {offer.release, offer.version, offer.upstream}]
        architecture = debian_architecture()
        offers.sort(key=lambda offer: not offer.is_ordinary(architecture))
        if offers:
            return self._fetch(offers[0])
        series = ".".join(name.split(".")[:2])
        same = [offer.release for offer in _ordinary(index) if offer.series == re.split(r"[-+~]", series)[0]]
        raise EnvironmentProblem(
            f"Debian's archive has no kernel {name}",
            why=f"of its series it offers {', '.join(same[:6])}" if same else "nor any of its series",
            hint="see `regrepro lab kernels`",
        )

    def _latest(self) -> Kernel:
        index = self._index_or_cached(lambda kernel: kernel.has_option("CONFIG_CMA") is True, "with CMA")
        if isinstance(index, Kernel):
            return index
        for offer in _ordinary(index):
            if self._has_cma(offer):
                return self._fetch_or_cached(
                    offer, index, lambda kernel: kernel.has_option("CONFIG_CMA") is True
                )
        raise EnvironmentProblem(
            "no kernel on offer has CMA (CONFIG_CMA)", hint="name a series and use --boot movablecore=512M"
        )

    def _index_or_cached(self, fits: Callable[[Kernel], bool], what: str) -> Index | Kernel:
        """Return the archive's index, or without one the newest kept kernel that fits, and say so."""
        try:
            return self.on_offer()
        except EnvironmentProblem as problem:
            kept = [kernel for kernel in self.cached() if fits(kernel)]
            if not kept:
                raise EnvironmentProblem(
                    f"no kernel {what} is kept here, and none can be downloaded",
                    why=f"{problem.what}: {problem.why}" if problem.why else problem.what,
                    hint=problem.hint,
                ) from problem
            reason = problem.why or problem.what
            self.watcher.say(
                f"Debian's archive could not be asked ({reason}); using the kept {kept[0].release}"
            )
            return kept[0]

    def _fetch_or_cached(self, offer: Offer, index: Index, fits: Callable[[Kernel], bool]) -> Kernel:
        """Return the offer's kernel; if it cannot be downloaded, the newest kept one that fits."""
        if index.stale:
            self.watcher.say(index.stale)
        try:
            return self._fetch(offer)
        except EnvironmentProblem as problem:
            kept = [kernel for kernel in self.cached() if fits(kernel)]
            if not kept:
                raise
            self.watcher.say(f"{problem.what} ({problem.why}); using the kept {kept[0].release}")
            return kept[0]

    # The cache

    def _fetch(self, offer: Offer) -> Kernel:
        place = self._kept / offer.release
        kernel = _kept_as(place, offer.version)
        if kernel is not None:
            return kernel
        with self._lock(offer.release):
            kernel = _kept_as(place, offer.version)
            if kernel is not None:
                return kernel
            # Unpacked files are linked into place, not copied; depmod's come on top.
            with self._scratch(offer.size + offer.installed_size * 5 // 4) as scratch:
                files = self.archive.download(
                    offer.packages,
                    _made(scratch / "deb"),
                    lambda done, total: self.watcher.download(f"kernel {offer.release}", done, total),
                )
                self.watcher.say(f"unpacking kernel {offer.release}")
                tree = _unpack(files, scratch / "tree")
                kept = _normalise(tree, _made(scratch / "kept"), offer.release)
                about = {
                    "release": offer.release,
                    "version": offer.version,
                    "origin": f"Debian {', '.join(offer.suites)}, package version {offer.version}",
                }
                (kept / _KEPT_FILE).write_text(json.dumps(about), encoding="utf-8")
                _exchange(kept, place, scratch)
        return _read_kept(place)

    def _has_cma(self, offer: Offer) -> bool:
        """Whether the offered kernel has CONFIG_CMA; the answer is kept for each package version."""
        answers_file = self.directory / "has-cma.json"
        key = f"{offer.release} {offer.version}"
        answers: dict[str, bool] = {}
        with contextlib.suppress(OSError, ValueError):
            answers = json.loads(answers_file.read_text(encoding="utf-8"))
        if key in answers:
            return answers[key]
        kept = _kept_as(self._kept / offer.release, offer.version)
        if kept is None and len(offer.packages) == 1:
            kept = self._fetch(offer)  # the config lies in the one large package
        if kept is not None:
            answer = kept.has_option("CONFIG_CMA") is True
        else:
            package = offer.config_package
            with self._scratch(4 * package.size + 4 * package.installed_size) as scratch:
                files = self.archive.download([package], _made(scratch / "deb"))
                tree = _unpack(files, scratch / "tree")
                texts = [path.read_text(errors="replace") for path in _configs(tree, offer.release)]
                answer = any(re.search(r"^CONFIG_CMA=y$", text, re.M) for text in texts)
        answers[key] = answer
        with contextlib.suppress(OSError):
            write_atomically(answers_file, json.dumps(answers))
        return answer

    def prune(self) -> list[str]:
        """Remove kept kernels but the newest of each series, and what aborted runs left. Return what went."""
        gone = []
        seen = set()
        for kernel in self.cached():
            series = _series_of(kernel)
            if series not in seen:
                seen.add(series)
                continue
            with self._lock(kernel.release):
                shutil.rmtree(self._kept / kernel.release, ignore_errors=True)
            gone.append(kernel.release)
        for path in self._kept.glob("path-*"):
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
        gone += self.remove_scratch()
        return gone

    def remove_scratch(self) -> list[str]:
        """Remove the temporary directories of runs that are no more. Return their names."""
        gone = []
        for path in self._kept.glob(".new-*"):
            pid = path.name.split("-")[1]
            if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
                shutil.rmtree(path, ignore_errors=True)
                gone.append(path.name)
        return gone

    def _lock(self, name: str) -> contextlib.AbstractContextManager[None]:
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot make the cache directory {self._kept}",
                why=error.strerror or str(error),
                hint="set XDG_CACHE_HOME to a directory that you can write to",
            ) from error
        return locked(self._kept / f".lock-{name}")

    @contextlib.contextmanager
    def _scratch(self, need: int) -> Iterator[Path]:
        """Make a temporary directory beside the kept kernels, with room for `need` bytes, for a while."""
        scratch = self._kept / f".new-{os.getpid()}-{time.monotonic_ns()}"
        try:
            scratch.mkdir(parents=True)
            self.remove_scratch()
            free = shutil.disk_usage(scratch).free
            if free < need:
                raise EnvironmentProblem(
                    f"no room for the kernel in {self._kept}",
                    why=f"it needs {format_size(need)} while it is unpacked, {format_size(free)} are free",
                    hint="make room, `regrepro lab kernels --prune`, or set XDG_CACHE_HOME",
                )
            yield scratch
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            raise EnvironmentProblem(
                f"the disk is full: {self._kept}" if full else f"cannot keep the kernel in {self._kept}",
                why="" if full else str(error),
                hint="make room, or set XDG_CACHE_HOME to a directory elsewhere",
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    # Not from the archive

    @staticmethod
    def _host() -> Kernel:
        release = platform.release()
        for image in (Path(f"/lib/modules/{release}/vmlinuz"), Path(f"/boot/vmlinuz-{release}")):
            if os.access(image, os.R_OK):
                break
        else:
            image = Path(f"/boot/vmlinuz-{release}")
            if image.exists():
                raise EnvironmentProblem(
                    f"{image} cannot be read",
                    why="it is for root only",
                    hint="run as root, or copy it and give the path",
                )
            raise EnvironmentProblem(
                "the running kernel cannot be booted in the lab",
                why=f"there is no {image}",
                hint=f"name another: {HOW_TO_NAME}",
            )
        modules = Path(f"/lib/modules/{release}")
        config = _first(Path(f"/boot/config-{release}"), modules / "config")
        return Kernel(
            release, image, modules if modules.is_dir() else None, config, origin="the kernel of this host"
        )

    def _from_path(self, path: Path) -> Kernel:
        path = path.absolute()
        if not path.exists():
            raise UsageError(f"there is no kernel at {path}", hint=HOW_TO_NAME)
        if path.suffix == ".deb":
            return self._import_deb(path)
        if path.suffix == ".rpm":
            return self._import_rpm(path)
        if path.is_dir():
            return self._from_directory(path)
        if not os.access(path, os.R_OK):
            raise EnvironmentProblem(f"{path} cannot be read", hint="give read permission, or copy it")
        for tree in path.parents:
            if (tree / "Kconfig").is_file() and (tree / ".config").is_file():
                return _build_tree(tree)
        release = image_release(path)
        if release is None:
            raise UsageError(f"{path} is no kernel image", hint="give a vmlinuz (x86-64) or Image (arm64)")
        modules = path.parent
        if modules.name == release and modules.parent.name == "modules":
            return Kernel(release, path, modules, _first(modules / "config"), origin=f"image {path}")
        # An image that is installed in /boot of some root.
        root = path.parent.parent if path.parent.name == "boot" else path.parent
        for modules in (root / "usr/lib/modules" / release, root / "lib/modules" / release):
            if (modules / "kernel").is_dir():
                return self._import(root, release, f"image {path}", str(path))
        self.watcher.say(f"{path} has no modules beside it: it will boot only with virtio and 9p built in")
        return Kernel(release, path, None, _first(path.parent / f"config-{release}"), origin=f"image {path}")

    def _from_directory(self, path: Path) -> Kernel:
        if (path / ".config").is_file():
            return _build_tree(path)
        debs = sorted(path.glob("linux-binary-*.deb")) or sorted(path.glob("linux-image-*.deb"))
        if debs:
            return self._import_deb(debs[-1])
        rpms = sorted(path.glob("kernel*-core-*.rpm")) or sorted(path.glob("kernel-[0-9]*.rpm"))
        if rpms:
            return self._import_rpm(max(rpms, key=lambda rpm: version_key(rpm.name)))
        releases = sorted(_releases_in(path), key=version_key)
        if not releases:
            raise UsageError(
                f"{path} holds no kernel",
                why="there is no lib/modules/RELEASE with a vmlinuz, no built tree with .config, and no "
                ".deb or .rpm",
                hint=HOW_TO_NAME,
            )
        release = releases[-1]
        modules = path / "lib/modules" / release
        if (modules / "vmlinuz").is_file() and (modules / "modules.dep").is_file():
            return Kernel(release, modules / "vmlinuz", modules, _first(modules / "config"), origin=f"{path}")
        return self._import(path, release, f"{path}", str(path))

    def _import_deb(self, deb: Path) -> Kernel:
        """Unpack a .deb, with the other parts of a split image where they lie beside it."""
        match = re.fullmatch(r"linux-(image|binary|modules|base)-(.+?)_(.+)\.deb", deb.name)
        files = [deb]
        if match:
            files = [
                other
                for part in ("base", "binary", "modules", "image")
                for other in [deb.with_name(f"linux-{part}-{match[2]}_{match[3]}.deb")]
                if other.exists()
            ]
        return self._import_package(
            deb,
            files,
            tool="dpkg",
            hint="give the linux-image, or the linux-binary with linux-modules beside it",
        )

    def _import_rpm(self, rpm: Path) -> Kernel:
        """Unpack an .rpm, with the other parts of a split kernel where they lie beside it.

        Fedora and RHEL split it into kernel-core, kernel-modules-core and kernel-modules (also as
        kernel-rt-core, kernel-64k-core, …); `make rpm-pkg` and SUSE make one package.
        """
        match = re.fullmatch(
            r"(kernel(?:-[a-z0-9]+)*?)-(core|modules-core|modules|modules-extra|modules-internal)-(\d.*)\.rpm",
            rpm.name,
        )
        files = [rpm]
        if match:
            files = [
                other
                for part in ("core", "modules-core", "modules", "modules-extra", "modules-internal")
                for other in [rpm.with_name(f"{match[1]}-{part}-{match[3]}.rpm")]
                if other.exists()
            ]
        return self._import_package(
            rpm,
            files,
            tool="bsdtar",
            hint="give kernel-core with kernel-modules-core and kernel-modules beside it",
        )

    def _import_package(self, package: Path, files: list[Path], *, tool: str, hint: str) -> Kernel:
        if shutil.which(tool) is None:
            raise EnvironmentProblem(
                f"{package.name} cannot be unpacked",
                why=f"{tool} is not installed",
                hint=f"install the package {_PACKAGE_OF[tool]}, or unpack it and give the directory",
            )
        place = self._place_of_import([str(file) for file in files], files)
        with self._lock(place.name):
            if not (place / _KEPT_FILE).exists():
                need = 8 * sum(file.stat().st_size for file in files)
                with self._scratch(need) as scratch:
                    tree = _unpack(files, scratch / "tree")
                    releases = _releases_in(tree)
                    if not releases:
                        raise UsageError(f"{package} holds no kernel image", hint=hint)
                    self._keep(tree, releases[0], place, scratch, f"package {package}")
        return _read_kept(place)

    def _import(self, root: Path, release: str, origin: str, source: str) -> Kernel:
        place = self._place_of_import([source, release], [root])
        with self._lock(place.name):
            if not (place / _KEPT_FILE).exists():
                with self._scratch(0) as scratch:
                    self._keep(root, release, place, scratch, origin)
        return _read_kept(place)

    def _place_of_import(self, names: list[str], files: list[Path]) -> Path:
        stamps = [f"{file.stat().st_mtime_ns}" for file in files]
        digest = hashlib.sha256("\0".join(names + stamps).encode()).hexdigest()[:16]
        return self._kept / f"path-{digest}"

    @staticmethod
    def _keep(tree: Path, release: str, place: Path, scratch: Path, origin: str) -> None:
        kept = _normalise(tree, _made(scratch / "kept"), release)
        about = {"release": release, "version": "", "origin": origin}
        (kept / _KEPT_FILE).write_text(json.dumps(about), encoding="utf-8")
        _exchange(kept, place, scratch)


def _ordinary(index: Index) -> list[Offer]:
    return [offer for offer in index.offers if offer.is_ordinary(index.architecture)]


def _series_of(kernel: Kernel) -> str:
    match = _SERIES.match(kernel.version or kernel.release)
    return match[0] if match else ""


def _is_older(series: str, known: list[str]) -> bool:
    """Whether a series lies before the newest on offer, so that it may have been there once."""
    return bool(known) and version_key(series) < max(version_key(other) for other in known)


def _read_kept(place: Path) -> Kernel:
    about = json.loads((place / _KEPT_FILE).read_text(encoding="utf-8"))
    release = about["release"]
    modules = place / "lib/modules" / release
    if not (modules / "vmlinuz").is_file():
        raise KeyError(f"{place} is not whole")
    return Kernel(
        release,
        modules / "vmlinuz",
        modules,
        _first(modules / "config"),
        version=about["version"],
        origin=about["origin"],
    )


def _kept_as(place: Path, version: str) -> Kernel | None:
    try:
        kernel = _read_kept(place)
    except (OSError, ValueError, KeyError):
        return None
    return kernel if kernel.version == version else None


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if os.access(path, os.R_OK)), None)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        text = " ".join(said[-2:]) or f"exit code {done.returncode}"
        if "No space left" in text or "Disk quota" in text:
            raise OSError(errno.ENOSPC, text)
        raise EnvironmentProblem(what, why=text)


def _unpack(files: list[Path], tree: Path) -> Path:
    _made(tree)
    for file in files:
        # bsdtar reads an .rpm's payload, however it is packed, and writes only below the tree, as dpkg does.
        command = ["dpkg", "-x", str(file), str(tree)]
        if file.suffix == ".rpm":
            command = ["bsdtar", "-x", "--no-same-owner", "-f", str(file), "-C", str(tree)]
        _run(command, f"{file.name} cannot be unpacked")
        if file.parent.parent == tree.parent:
            file.unlink()  # our own download: makes room for the next
    return tree


def _configs(tree: Path, release: str) -> list[Path]:
    return [
        path
        for path in (
            tree / f"boot/config-{release}",
            tree / f"usr/lib/modules/{release}/config",
            tree / f"lib/modules/{release}/config",
        )
        if path.is_file()
    ]


def _releases_in(tree: Path) -> list[str]:
    """Return the releases whose image lies in an unpacked tree."""
    found = {
        path.parent.name for base in ("lib", "usr/lib") for path in tree.glob(f"{base}/modules/*/vmlinuz")
    }
    for path in tree.glob("boot/vmlinuz-*"):
        found.add(path.name.removeprefix("vmlinuz-"))
    return sorted(found)


def _normalise(tree: Path, kept: Path, release: str) -> Path:
    """Bring an unpacked kernel into the layout of the cache, run depmod, and return `kept`.

    Files are linked where that can be, so the tree may lie on the same file system or anywhere else.
    """
    modules = kept / "lib/modules" / release
    modules.parent.mkdir(parents=True)
    for base in ("usr/lib/modules", "lib/modules"):
        source = tree / base / release
        if source.is_dir() and not (tree / base).parent.is_symlink():
            shutil.copytree(
                source,
                modules,
                copy_function=_link_or_copy,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("build", "source"),
            )
    modules.mkdir(exist_ok=True)
    for name, places in {
        "vmlinuz": [modules / "vmlinuz", tree / f"boot/vmlinuz-{release}"],
        "config": [modules / "config", tree / f"boot/config-{release}"],
        "System.map": [modules / "System.map", tree / f"boot/System.map-{release}"],
    }.items():
        found = next((place for place in places if place.is_file()), None)
        if found is not None and found != modules / name:
            _link_or_copy(str(found), str(modules / name))
    if not (modules / "vmlinuz").is_file():
        raise EnvironmentProblem(f"the package of kernel {release} holds no vmlinuz")
    depmod = shutil.which("depmod", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if depmod is None:
        raise EnvironmentProblem("depmod is missing", hint="install the package kmod")
    for stale in modules.glob("modules.*.bin"):
        stale.unlink()  # links to the package's own: depmod must not write through them
    (modules / "modules.dep").unlink(missing_ok=True)
    _run([depmod, "-b", str(kept), release], f"the modules of kernel {release} cannot be listed")
    return kept


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def _exchange(kept: Path, place: Path, scratch: Path) -> None:
    """Put `kept` in its place in one step; what was there before goes with the scratch directory."""
    if place.exists():
        place.rename(scratch / "replaced")
    kept.rename(place)


def _build_tree(tree: Path) -> Kernel:
    machine = {"x86_64": "arch/x86/boot/bzImage", "aarch64": "arch/arm64/boot/Image"}
    image = tree / machine.get(platform.machine(), "vmlinux")
    if not image.is_file():
        raise UsageError(f"{tree} is not built", why=f"there is no {image}", hint="build it first")
    release_file = tree / "include/config/kernel.release"
    release = release_file.read_text().strip() if release_file.is_file() else image_release(image) or ""
    return Kernel(release, tree, None, _first(tree / ".config"), origin=f"build tree {tree}", build_tree=True)


def image_release(image: Path) -> str | None:
    """Return the release that a kernel image says it is, or None for what is no image.

    x86: the pointer `kernel_version` of the setup header at 0x20e (Documentation/arch/x86/boot.rst). arm64:
    an `Image` holds the banner as plain text after its magic at 0x38 (Documentation/arch/arm64/booting.rst).
    """
    with image.open("rb") as file:
        head = file.read(0x10000)
        if head[0x202:0x206] == b"HdrS":
            (pointer,) = struct.unpack_from("<H", head, 0x20E)
            text = head[pointer + 0x200 :].split(b"\0", 1)[0].decode("ascii", "replace")
            return text.split(" ")[0] or None
        if head[0x38:0x3C] == b"ARM\x64":
            match = re.search(rb"Linux version (\S+) ", head + file.read())
            return match[1].decode("ascii", "replace") if match else None
    if image.name.startswith("vmlinuz-"):
        # A compressed arm64 image says nothing in plain text; its name does.
        return image.name.removeprefix("vmlinuz-")
    if image.parent.parent.name == "modules":
        return image.parent.name
    return None

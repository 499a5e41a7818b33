"""From a kernel's name to an image, with an archive of our own making: no network, no QEMU."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from regrepro.errors import EnvironmentProblem, UsageError
from regrepro.lab import kernels as module
from regrepro.lab.archive import Index, Offer, Package
from regrepro.lab.kernels import Kernel, Kernels


def bzimage(release: str) -> bytes:
    """As much of a bzImage as names its release (Documentation/arch/x86/boot.rst)."""
    image = bytearray(0x1000)
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x20E, 0x300)
    text = f"{release} (builder@host) #1 SMP".encode() + b"\0"
    image[0x500 : 0x500 + len(text)] = text
    return bytes(image)


def offer(release: str, version: str, *suites: str) -> Offer:
    package = Package(f"linux-image-{release}", f"http://m/{release}.deb", 1000, 4000, "00")
    return Offer(release, version, suites or ("bookworm",), (package,))


OFFERS = (
    offer("7.3.4+deb13-amd64", "7.3.4-1~bpo13+1", "trixie-backports"),
    offer("7.3.3+deb13-amd64", "7.3.3-1~bpo13+1", "trixie-backports"),
    offer("6.12.118+deb13-amd64", "6.12.118-1", "trixie-security"),
    offer("6.1.0-57-amd64", "6.1.192-3", "bookworm-security"),
    offer("6.1.0-57-rt-amd64", "6.1.192-3", "bookworm-security"),
    offer("6.1.0-56-amd64", "6.1.192-2", "bookworm-security"),
)


class FakeArchive:
    """Offers OFFERS; a download makes the .deb's name, and unpacking makes the tree of it."""

    def __init__(self) -> None:
        self.offers: tuple[Offer, ...] = OFFERS
        self.problem: EnvironmentProblem | None = None
        self.download_problem: BaseException | None = None
        self.downloads: list[str] = []

    def index(self, **_: object) -> Index:
        if self.problem is not None:
            raise self.problem
        return Index(time.time(), "amd64", self.offers, {"sid": "404"})

    def download(
        self, packages: Sequence[Package], directory: Path, progress: Callable[[int, int], None] | None = None
    ) -> list[Path]:
        if self.download_problem is not None:
            raise self.download_problem
        paths = []
        for package in packages:
            self.downloads.append(package.name)
            path = directory / f"{package.name}.deb"
            path.write_bytes(b"deb")
            paths.append(path)
        return paths


class Notes:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def download(self, what: str, done: int, total: int) -> None: ...


def make_tree(
    tree: Path, release: str, *, merged: bool = False, cma: bool = True, beside: bool = False
) -> None:
    """An unpacked kernel, in the layout of Debian 12 (`boot`, `lib`) or 13 (`usr/lib`)."""
    modules = tree / ("usr/lib" if merged else "lib") / "modules" / release
    (modules / "kernel").mkdir(parents=True)
    (modules / "kernel/a.ko").write_bytes(b"module")
    (modules / "modules.order").write_text("kernel/a.ko\n")
    image = modules / "vmlinuz" if beside else tree / f"boot/vmlinuz-{release}"
    image.parent.mkdir(exist_ok=True)
    image.write_bytes(bzimage(release))
    config = modules / "config" if beside else tree / f"boot/config-{release}"
    config.write_text("CONFIG_X86=y\n" + ("CONFIG_CMA=y\n" if cma else "# CONFIG_CMA is not set\n"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeArchive:
    def unpack(files: list[Path], tree: Path) -> Path:
        tree.mkdir(parents=True)
        for file in files:
            release = file.stem.removeprefix("linux-image-")
            if release.startswith("linux-base-"):
                release = release.removeprefix("linux-base-")
            make_tree(tree, release, cma=release.startswith("7."), merged="deb13" in release)
        return tree

    def depmod(command: list[str], what: str) -> None:
        assert command[0].endswith("depmod"), what
        (Path(command[2]) / "lib/modules" / command[3] / "modules.dep").write_text("")

    monkeypatch.setattr(module, "_unpack", unpack)
    monkeypatch.setattr(module, "_run", depmod)
    monkeypatch.setattr(module.shutil, "which", lambda name, **_: f"/sbin/{name}")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("regrepro.lab.archive.platform.machine", lambda: "x86_64")
    return FakeArchive()


@pytest.fixture
def kernels(tmp_path: Path, fake: FakeArchive) -> Kernels:
    found = Kernels(tmp_path / "cache", Notes())
    found.archive = fake  # type: ignore[assignment]
    return found


def said(kernels: Kernels) -> str:
    return " ".join(kernels.watcher.said)  # type: ignore[attr-defined]


def test_a_series_is_its_newest_patch_release(kernels: Kernels, fake: FakeArchive) -> None:
    kernel = kernels.get("6.1")
    assert kernel.release == "6.1.0-57-amd64"
    assert kernel.version == "6.1.192-3"
    assert kernel.image == kernel.modules / "vmlinuz"  # type: ignore[operator]
    assert kernel.modules is not None
    assert kernel.modules.parts[-3:] == ("lib", "modules", "6.1.0-57-amd64")
    assert (kernel.modules / "kernel/a.ko").exists()
    assert kernel.has_option("CONFIG_CMA") is False
    assert kernel.has_option("CONFIG_X86") is True
    assert fake.downloads == ["linux-image-6.1.0-57-amd64"]


def test_a_kept_kernel_is_not_downloaded_again(kernels: Kernels, fake: FakeArchive) -> None:
    kernels.get("6.1")
    kernels.get("6.1")
    kernels.get("6.1.0-57-amd64")
    kernels.get("6.1.192")
    assert len(fake.downloads) == 1


def test_latest_is_the_newest_with_cma(kernels: Kernels, fake: FakeArchive) -> None:
    assert kernels.get("latest").release == "7.3.4+deb13-amd64"
    fake.offers = (offer("9.0.1-amd64", "9.0.1-1", "sid"), *OFFERS)  # its config has no CMA
    assert kernels.get("latest").release == "7.3.4+deb13-amd64"
    downloads = len(fake.downloads)
    assert kernels.get("latest").release == "7.3.4+deb13-amd64"
    assert len(fake.downloads) == downloads, "the answer for 9.0.1 was not kept"


def test_a_new_patch_release_takes_over(kernels: Kernels, fake: FakeArchive) -> None:
    kernels.get("6.1")
    fake.offers = (offer("6.1.0-58-amd64", "6.1.193-1"), *OFFERS)
    assert kernels.get("6.1").release == "6.1.0-58-amd64"
    assert kernels.get("6.1.0-57-amd64").release == "6.1.0-57-amd64"
    assert kernels.prune() == ["6.1.0-57-amd64"]
    assert [kernel.release for kernel in kernels.cached()] == ["6.1.0-58-amd64"]


def test_a_rebuilt_package_of_the_same_release_replaces_the_kept_one(
    kernels: Kernels, fake: FakeArchive
) -> None:
    kernels.get("6.1")
    fake.offers = (offer("6.1.0-57-amd64", "6.1.192-4"),)
    assert kernels.get("6.1").version == "6.1.192-4"
    assert len(kernels.cached()) == 1


def test_a_series_that_left_names_what_is_there(kernels: Kernels) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        kernels.get("5.4")
    text = str(caught.value)
    assert "no kernel of series 5.4 any more" in text
    assert "7.3, 6.12, 6.1" in text
    assert "sid" in text, "a suite that could not be read may have had it"
    assert "\n" not in text


def test_a_series_that_left_is_served_from_the_cache(kernels: Kernels, fake: FakeArchive) -> None:
    kernels.get("6.12")
    fake.offers = tuple(item for item in OFFERS if item.series != "6.12")
    assert kernels.get("6.12").release == "6.12.118+deb13-amd64"
    assert "left Debian's archive" in said(kernels)


@pytest.mark.parametrize("name", ["foo", "v6.1", "", "latests"])
def test_a_name_that_means_nothing(kernels: Kernels, name: str) -> None:
    with pytest.raises(UsageError, match="unknown kernel"):
        kernels.get(name)


def test_a_release_that_is_not_there_names_its_sisters(kernels: Kernels) -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"6\.1\.0-99-amd64: of its series it offers 6\.1\.0-57-amd64"
    ):
        kernels.get("6.1.0-99-amd64")


def test_offline_with_a_warm_cache(kernels: Kernels, fake: FakeArchive) -> None:
    kernels.get("6.1")
    kernels.get("7.3")
    fake.problem = EnvironmentProblem("the archive could not be asked", why="no network")
    assert kernels.get("6.1").release == "6.1.0-57-amd64"
    assert "no network" in said(kernels)
    assert "6.1.0-57-amd64" in said(kernels)
    assert kernels.get("latest").release == "7.3.4+deb13-amd64"


def test_offline_with_a_cold_cache(kernels: Kernels, fake: FakeArchive) -> None:
    fake.problem = EnvironmentProblem("the archive could not be asked", why="no network", hint="plug it in")
    for name in ("6.1", "latest"):
        with pytest.raises(EnvironmentProblem, match="no network") as caught:
            kernels.get(name)
        assert caught.value.exit_code == 2


def test_a_download_that_fails_leaves_nothing(kernels: Kernels, fake: FakeArchive) -> None:
    fake.download_problem = EnvironmentProblem("could not be downloaded", why="404")
    with pytest.raises(EnvironmentProblem, match="404"):
        kernels.get("6.1")
    assert left(kernels) == []


def test_a_full_disk_leaves_nothing(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_normalise", full)
    with pytest.raises(EnvironmentProblem, match="the disk is full"):
        kernels.get("6.1")
    assert left(kernels) == []


def test_too_small_a_disk_is_said_before_the_download(
    kernels: Kernels, fake: FakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EnvironmentProblem, match="no room for the kernel"):
        kernels.get("6.1")
    assert fake.downloads == []
    assert left(kernels) == []


def left(kernels: Kernels) -> list[str]:
    return [
        path.name for path in (kernels.directory / "kernels").iterdir() if not path.name.startswith(".lock")
    ]


def test_what_a_killed_run_left_goes_at_the_next(kernels: Kernels) -> None:
    dead = kernels.directory / "kernels/.new-999999999-1"
    alive = kernels.directory / f"kernels/.new-{os.getpid()}-1"
    dead.mkdir(parents=True)
    alive.mkdir()
    kernels.get("6.1")
    assert not dead.exists()
    assert alive.exists(), "it belongs to a process that runs"


def test_a_half_kept_kernel_is_fetched_again(kernels: Kernels, fake: FakeArchive) -> None:
    kernel = kernels.get("6.1")
    kernel.image.unlink()
    assert kernels.cached() == []
    assert kernels.get("6.1").image.exists()
    assert len(fake.downloads) == 2


# Paths


@pytest.mark.parametrize(("merged", "beside"), [(False, False), (True, False), (True, True)])
def test_an_unpacked_package(kernels: Kernels, tmp_path: Path, merged: bool, beside: bool) -> None:
    make_tree(tmp_path / "deb", "6.9.1-x", merged=merged, beside=beside)
    kernel = kernels.get(str(tmp_path / "deb"))
    assert kernel.release == "6.9.1-x"
    assert kernel.modules is not None
    assert kernel.image == kernel.modules / "vmlinuz"
    assert (kernel.modules / "kernel/a.ko").exists()
    assert (tmp_path / "deb" / ("usr/lib" if merged else "lib") / "modules/6.9.1-x/kernel/a.ko").exists()
    assert not list((tmp_path / "deb").rglob("modules.dep")), "the user's tree was written to"


def make_rpm(path: Path, files: dict[str, bytes]) -> None:
    """Write an .rpm: lead, empty signature and header, and a gzipped cpio archive (rpm's file format 3)."""
    empty = bytes.fromhex("8eade801000000000000000000000000")
    lead = bytes.fromhex("edabeedb0300000000ff") + path.stem.encode()[:65].ljust(66, b"\0")
    lead += bytes.fromhex("00010005") + bytes(16)
    payload = b""
    for number, (name, content) in enumerate([*files.items(), ("TRAILER!!!", b"")], start=1):
        named = f"./{name}".encode() + b"\0" if name != "TRAILER!!!" else b"TRAILER!!!\0"
        fields = (number, 0o100644, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(named), 0)
        entry = b"070701" + b"".join(b"%08x" % field for field in fields) + named
        payload += entry.ljust(-(-len(entry) // 4) * 4, b"\0")
        payload += content.ljust(-(-len(content) // 4) * 4, b"\0")
    path.write_bytes(lead + empty + empty + gzip.compress(payload))


@pytest.mark.parametrize("folder", [False, True])
def test_a_split_rpm(tmp_path: Path, folder: bool) -> None:
    for tool in ("bsdtar", "depmod"):
        if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
            pytest.skip(f"{tool} is not installed")
    release = "6.12.0-124.el10.x86_64"
    where = tmp_path / "rpms"
    where.mkdir()
    make_rpm(
        where / f"kernel-core-{release}.rpm",
        {
            f"lib/modules/{release}/vmlinuz": bzimage(release),
            f"lib/modules/{release}/config": b"CONFIG_X86=y\nCONFIG_CMA=y\n",
            f"lib/modules/{release}/modules.order": b"kernel/a.ko\n",
        },
    )
    make_rpm(
        where / f"kernel-modules-core-{release}.rpm", {f"lib/modules/{release}/kernel/a.ko": b"no module"}
    )
    make_rpm(where / "kernel-modules-core-6.12.0-1.el10.x86_64.rpm", {"lib/modules/older/kernel/b.ko": b""})
    given = where if folder else where / f"kernel-core-{release}.rpm"
    kernel = Kernels(tmp_path / "cache", Notes()).get(str(given))
    assert (kernel.release, kernel.has_option("CONFIG_CMA")) == (release, True)
    assert kernel.modules is not None
    assert (kernel.modules / "kernel/a.ko").read_bytes() == b"no module"
    assert (kernel.modules / "modules.dep").exists()


def test_an_rpm_that_is_none(tmp_path: Path) -> None:
    if shutil.which("bsdtar") is None:
        pytest.skip("bsdtar is not installed")
    rpm = tmp_path / "kernel-core-6.12.rpm"
    rpm.write_bytes(b"nothing")
    with pytest.raises(EnvironmentProblem, match=r"kernel-core-6\.12\.rpm cannot be unpacked"):
        Kernels(tmp_path / "cache", Notes()).get(str(rpm))
    make_rpm(rpm, {"usr/share/doc/a": b""})
    with pytest.raises(UsageError, match="holds no kernel image"):
        Kernels(tmp_path / "cache", Notes()).get(str(rpm))


def test_without_bsdtar_an_rpm_is_refused_in_words(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name, **_: None)
    (tmp_path / "kernel-core-6.12.rpm").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match=r"bsdtar is not installed.*libarchive-tools"):
        kernels.get(str(tmp_path / "kernel-core-6.12.rpm"))


def test_an_image_in_boot_of_a_root(kernels: Kernels, tmp_path: Path) -> None:
    make_tree(tmp_path / "root", "6.9.1-x")
    kernel = kernels.get(str(tmp_path / "root/boot/vmlinuz-6.9.1-x"))
    assert kernel.modules is not None
    assert kernel.has_option("CONFIG_CMA") is True


def test_an_image_beside_its_modules(kernels: Kernels, tmp_path: Path) -> None:
    make_tree(tmp_path / "r", "6.9.1-x", beside=True)
    image = tmp_path / "r/lib/modules/6.9.1-x/vmlinuz"
    assert kernels.get(str(image)) == Kernel(
        "6.9.1-x", image, image.parent, image.parent / "config", origin=f"image {image}"
    )


def test_an_image_alone_is_booted_with_a_word(kernels: Kernels, tmp_path: Path) -> None:
    (tmp_path / "bzImage").write_bytes(bzimage("6.9.2"))
    kernel = kernels.get(str(tmp_path / "bzImage"))
    assert (kernel.release, kernel.modules) == ("6.9.2", None)
    assert "no modules beside it" in said(kernels)


def test_a_build_tree(kernels: Kernels, tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("CONFIG_CMA=y\n")
    (tmp_path / "Kconfig").write_text("")
    with pytest.raises(UsageError, match="is not built"):
        kernels.get(str(tmp_path))
    image = tmp_path / "arch/x86/boot/bzImage"
    image.parent.mkdir(parents=True)
    image.write_bytes(bzimage("6.9.3+"))
    for path in (tmp_path, image):
        kernel = kernels.get(str(path))
        assert kernel.build_tree
        assert (kernel.release, kernel.image) == ("6.9.3+", tmp_path)
        assert kernel.has_option("CONFIG_CMA") is True


@pytest.mark.parametrize("kind", ["missing", "empty directory", "text file"])
def test_a_path_that_is_no_kernel(kernels: Kernels, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "empty directory":
        path.mkdir()
    elif kind == "text file":
        path.write_text("hello\n")
    with pytest.raises(UsageError) as caught:
        kernels.get(str(path))
    assert str(path) in str(caught.value)


def test_the_release_of_an_image(tmp_path: Path) -> None:
    image = tmp_path / "Image"
    image.write_bytes(b"\0" * 0x38 + b"ARM\x64" + b"\0" * 100 + b"Linux version 6.1.0-9-arm64 (x@y)\n")
    assert module.image_release(image) == "6.1.0-9-arm64"
    image.write_bytes(bzimage("7.3.4+deb13-amd64"))
    assert module.image_release(image) == "7.3.4+deb13-amd64"
    image.write_bytes(b"")
    assert module.image_release(image) is None


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_directory() == tmp_path / "regrepro"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, by the specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert module.cache_directory() == tmp_path / "home/.cache/regrepro"


def test_a_cache_that_cannot_be_made(fake: FakeArchive, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kernels = Kernels(tmp_path / "file/cache", Notes())
    kernels.archive = fake  # type: ignore[assignment]
    with pytest.raises(EnvironmentProblem, match="XDG_CACHE_HOME"):
        kernels.get("6.1")


def test_what_is_kept_can_be_read_by_others(kernels: Kernels) -> None:
    kernel = kernels.get("6.1")
    about = json.loads((kernels.directory / "kernels/6.1.0-57-amd64/kernel.json").read_text())
    assert about == {
        "release": "6.1.0-57-amd64",
        "version": "6.1.192-3",
        "origin": "Debian bookworm-security, package version 6.1.192-3",
    }
    assert kernel.origin == about["origin"]

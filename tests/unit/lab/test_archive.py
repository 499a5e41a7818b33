"""Debian's archive without a network: what is read out of apt's indexes and messages."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from regrepro.errors import EnvironmentProblem
from regrepro.lab import archive
from regrepro.lab.archive import Archive, Index, Offer, Package

SITE = "http://mirror.example/debian"
SPLIT = "7.3.4-1~bpo13+1"


def stanza(name: str, version: str, *, depends: str = "", size: int = 60_000_000) -> str:
    return (
        f"Package: {name}\nVersion: {version}\nInstalled-Size: {size >> 10}\nArchitecture: amd64\n"
        + (f"Depends: {depends}\n" if depends else "")
        + f"Description: Linux\n more text\nFilename: pool/main/l/linux/{name}_{version}_amd64.deb\n"
        f"Size: {size}\nSHA256: {'ab' * 32}\n\n"
    )


def split_depends(release: str, version: str) -> str:
    parts = ", ".join(f"linux-{part}-{release} (= {version})" for part in ("base", "binary", "modules"))
    return f"dracut | initramfs-tools (>= 0.120), {parts}"


def packages() -> bytes:
    release = "7.3.4+deb13-amd64"
    older = "7.1.13+deb13-amd64"
    return "".join(
        [
            stanza("linux-image-6.1.0-57-amd64", "6.1.192-3", depends="kmod, linux-base (>= 4.3~)"),
            stanza("linux-image-6.1.0-57-amd64-dbg", "6.1.192-3"),
            stanza("linux-image-6.1.0-57-amd64-unsigned", "6.1.192-3"),
            stanza("linux-image-6.1.0-57-cloud-amd64", "6.1.192-3"),
            stanza("linux-image-6.1.0-57-rt-amd64", "6.1.192-3"),
            stanza("linux-image-6.1-amd64", "6.1.192-3", depends="linux-image-6.1.0-57-amd64 (= 6.1.192-3)"),
            stanza(f"linux-image-{release}", SPLIT, depends=split_depends(release, SPLIT), size=1900),
            stanza(f"linux-base-{release}", SPLIT, size=1_000_000),
            stanza(f"linux-binary-{release}", SPLIT, size=14_000_000),
            stanza(f"linux-modules-{release}", SPLIT, size=100_000_000),
            # The archive has dropped the modules of this one: it cannot be had whole.
            stanza(f"linux-image-{older}", "7.1.13-1", depends=split_depends(older, "7.1.13-1"), size=1900),
            stanza(f"linux-binary-{older}", "7.1.13-1", size=14_000_000),
            stanza("zlib1g", "1:1.2.13"),
        ]
    ).encode()


def test_an_index_gives_the_images_and_nothing_else() -> None:
    offers = {offer.release: offer for offer in archive.offers_in(packages(), "bookworm", SITE)}
    assert sorted(offers) == [
        "6.1.0-57-amd64",
        "6.1.0-57-cloud-amd64",
        "6.1.0-57-rt-amd64",
        "7.3.4+deb13-amd64",
    ]
    plain = offers["6.1.0-57-amd64"]
    assert (plain.series, plain.upstream, plain.version) == ("6.1", "6.1.192", "6.1.192-3")
    assert plain.packages[0].uri == f"{SITE}/pool/main/l/linux/linux-image-6.1.0-57-amd64_6.1.192-3_amd64.deb"
    assert plain.is_ordinary("amd64")
    assert not plain.is_ordinary("arm64")
    assert not offers["6.1.0-57-rt-amd64"].is_ordinary("amd64")
    assert not offers["6.1.0-57-cloud-amd64"].is_ordinary("amd64")


def test_a_split_image_is_its_three_parts() -> None:
    offers = {offer.release: offer for offer in archive.offers_in(packages(), "trixie-backports", SITE)}
    split = offers["7.3.4+deb13-amd64"]
    assert [package.name.split("-")[1] for package in split.packages] == ["base", "binary", "modules"]
    assert split.size == 115_000_000
    assert split.series == "7.3"
    assert split.config_package.name == "linux-base-7.3.4+deb13-amd64"


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("6.1.9-1", "6.1.10-1"),
        ("6.1.192-3~deb11u1", "6.1.192-3"),
        ("7.3.4-1~bpo13+1", "7.3.4-1"),
        ("7.3.4~rc1-1", "7.3.4-1"),
        ("7.3-1", "7.3.1-1"),
        ("9.9.9-9", "1:0.1-1"),
        ("6.12.115-1", "6.12.115-2~deb12u1"),
    ],
)
def test_versions_sort_as_in_debian(lower: str, higher: str) -> None:
    assert archive.version_key(lower) < archive.version_key(higher)


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="dpkg is not installed: nothing to compare with")
def test_versions_sort_as_dpkg_sorts_them() -> None:
    chance = random.Random(4)
    for _ in range(60):
        one, other = (
            f"{chance.randint(0, 2)}.{chance.choice(['', '1', '10', 'a', '~', '+b', '1a'])}"
            f"{chance.choice(['', '~rc1', '.2', '+deb13'])}-{chance.choice(['1', '1~bpo13+1', '10', '2a'])}"
            for _ in range(2)
        )
        ours = archive.version_key(one) < archive.version_key(other)
        theirs = subprocess.run(["dpkg", "--compare-versions", one, "lt", other], check=False).returncode == 0
        assert ours == theirs, (one, other)


def test_the_mirror_is_the_one_that_apt_is_configured_for() -> None:
    targets = "\n".join(
        [
            "https://deb.nodesource.com/node_20.x/|nodistro|. nodistro|main",
            "http://mirror.example/debian/|bookworm|Debian|main",
            "http://mirror.example/debian/|bookworm-updates|Debian|main",
            "http://sec.example/debian-security/|bookworm-security|Debian|main",
            "http://other.example/debian/|bookworm|Debian|main",
        ]
    )
    found = archive.sources_in(targets)
    assert found.site == "http://mirror.example/debian"
    assert found.security_site == "http://sec.example/debian-security"
    assert found.suites == ("bookworm", "bookworm-updates", "bookworm-security")


def test_a_mirror_without_lists_is_known_by_its_path() -> None:
    found = archive.sources_in(
        "http://mirror.example/debian/|trixie|$(ORIGIN)|main\n"
        "https://download.example/linux/ubuntu/|noble|$(ORIGIN)|main\n"
        "cdrom://disc/debian/|trixie|Debian|main\n"
    )
    assert found.site == "http://mirror.example/debian"
    assert found.security_site == "http://mirror.example/debian-security"


def test_another_distribution_names_no_mirror_of_debian() -> None:
    found = archive.sources_in("http://archive.example/ubuntu/|noble|Ubuntu|main\n")
    assert found == archive.HostSources("", "", ())
    with pytest.raises(EnvironmentProblem, match="names no mirror of Debian"):
        archive.Archive._suites(found)


def test_a_suite_that_is_gone_is_named_with_the_reason() -> None:
    output = (
        "Get:1 http://m/debian trixie InRelease [140 kB]\n"
        "Ign:9 http://m/debian bullseye InRelease\n"
        "Err:11 http://m/debian bullseye Release\n"
        "  404  Not Found [IP: 203.0.113.80 80]\n"
        "E: The repository 'http://m/debian bullseye Release' does not have a Release file.\n"
    )
    failures = archive._failures(output)
    assert list(failures) == ["bullseye"]
    assert "404" in failures["bullseye"]


def test_an_update_that_fails_as_a_whole_fails_for_every_suite() -> None:
    failures = archive._failures("E: Could not get lock /x/lists/lock. It is held by process 1\n")
    assert set(failures) == set(archive.SUITES)


def test_credentials_are_not_told() -> None:
    text = "Err:1 https://user:secret@m.example/debian trixie InRelease"
    assert archive.without_credentials(text) == "Err:1 https://m.example/debian trixie InRelease"


# The kept index


def an_index(fetched: float, architecture: str) -> Index:
    package = Package("linux-image-6.1.0-57-amd64", f"{SITE}/x.deb", 1, 2, "ab")
    return Index(fetched, architecture, (Offer("6.1.0-57-amd64", "6.1.192-3", ("bookworm",), (package,)),))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    monkeypatch.setattr(archive.platform, "machine", lambda: "x86_64")
    place = Archive(tmp_path)
    place.directory.mkdir(exist_ok=True)
    return place


def keep(place: Archive, index: Index) -> None:
    (place.directory / "index.json").write_text(json.dumps(archive._index_as_json(index)))


def refuse(*_: object, **__: object) -> Index:
    raise EnvironmentProblem("no archive", why="no route to host")


def test_a_fresh_index_costs_no_apt(kept: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(kept, an_index(time.time() - 60, "amd64"))
    monkeypatch.setattr(Archive, "_refresh", refuse)
    index = kept.index()
    assert [offer.release for offer in index.offers] == ["6.1.0-57-amd64"]
    assert not index.stale


def test_an_old_index_serves_where_the_archive_does_not_answer(
    kept: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(kept, an_index(time.time() - 86400, "amd64"))
    monkeypatch.setattr(Archive, "_refresh", refuse)
    index = kept.index()
    assert index.offers
    assert "no route to host" in index.stale
    # And the next run does not wait for the network again.
    monkeypatch.setattr(Archive, "_refresh", lambda *_: pytest.fail("asked again at once"))
    assert kept.index().stale


def test_without_any_index_the_reason_is_told(kept: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Archive, "_refresh", refuse)
    with pytest.raises(EnvironmentProblem, match="no route to host"):
        kept.index()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}'])
def test_a_damaged_index_is_as_none(kept: Archive, text: str) -> None:
    (kept.directory / "index.json").write_text(text)
    assert kept.kept_index() is None


def test_an_index_of_another_architecture_is_as_none(kept: Archive) -> None:
    keep(kept, an_index(time.time(), "arm64"))
    assert kept.kept_index() is None


def test_without_apt_a_path_is_offered(kept: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive.shutil, "which", lambda *_: None)
    with pytest.raises(EnvironmentProblem, match=r"apt-get and dpkg are not installed.*--kernel PATH"):
        kept.index()


def test_without_a_keyring_nothing_is_fetched(
    kept: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive.shutil, "which", lambda *_: "/usr/bin/apt-get")
    monkeypatch.setattr(archive, "_APT_HELPER", tmp_path)
    monkeypatch.setattr(archive, "KEYRINGS", (tmp_path / "none.gpg",))
    with pytest.raises(EnvironmentProblem, match="debian-archive-keyring"):
        kept.index()


def test_a_full_disk_is_said_before_apt_hangs_on_it(kept: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Archive, "_require_apt", lambda _: Path("/k.gpg"))
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1 << 20}))
    monkeypatch.setattr(Archive, "_run_apt", lambda *_, **__: pytest.fail("apt was started"))
    with pytest.raises(EnvironmentProblem, match="no room for Debian's package index"):
        kept.index()


def test_the_configuration_is_private(kept: Archive, tmp_path: Path) -> None:
    kept._make_directories()
    kept._write_configuration("amd64", Path("/k.gpg"), {"trixie": "https://u:p@m.example/debian"})
    text = (tmp_path / "apt.conf").read_text()
    assert f'Dir::State::lists "{tmp_path}/lists"' in text
    assert 'Dir::Etc::sourceparts "-"' in text
    assert "#clear APT::Update::Post-Invoke;" in text
    off = ("AllowInsecureRepositories", "AllowWeakRepositories", "AllowDowngradeToInsecureRepositories")
    for name in (*(f"Acquire::{name}" for name in off), "APT::Get::AllowUnauthenticated"):
        assert f'{name} "false";' in text
        assert f"{name}=false" in (Path(__file__).parents[3] / "scripts/lib.sh").read_text()
    sources = tmp_path / "sources.list"
    assert "signed-by=/k.gpg" in sources.read_text()
    assert sources.stat().st_mode & 0o077 == 0, "it may hold a mirror's password"

"""Kernel images in Debian's archive, through apt and without touching the host's package state.

apt gets a configuration of its own: sources, lists and cache lie in our cache directory, everything that says
how to reach a mirror (proxy, credentials, certificates) stays as the host has it. What comes in is verified
as apt verifies it: a suite's InRelease by the archive's keyring, the package index by InRelease, each package
by the index.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from regrepro.errors import EnvironmentProblem
from regrepro.options import format_size

# The suites that carry kernels, besides the host's own. `bullseye-security` still has 5.10.
SUITES = (
    "trixie-backports",
    "trixie",
    "trixie-security",
    "bookworm",
    "bookworm-security",
    "bullseye",
    "bullseye-security",
    "sid",
)

KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
)

# An index younger than this is as good as new: seconds.
INDEX_MAX_AGE = 6 * 3600
# After a refresh that failed, do not try again before: seconds.
INDEX_RETRY_AFTER = 15 * 60
UPDATE_LIMIT = 600
# The lists of all suites take 85 MB, and while they come in about half of it again: bytes.
INDEX_ROOM = 150 << 20
DOWNLOAD_LIMIT = 3600

_APT_HELPER = Path("/usr/lib/apt/apt-helper")
_MACHINE_TO_DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
_INDEX_SCHEMA = 1


@dataclass(frozen=True)
class Package:
    """One .deb: `size` and `installed_size` in bytes, `sha256` from the signed index."""

    name: str
    uri: str
    size: int
    installed_size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.uri.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Offer:
    """A kernel that the archive offers.

    `release` is what `uname -r` will say, `version` the package's, `suites` all that carry exactly this. The
    packages are one `linux-image-*`, or split `linux-base-*`, `linux-binary-*` and `linux-modules-*`.
    """

    release: str
    version: str
    suites: tuple[str, ...]
    packages: tuple[Package, ...]

    @property
    def upstream(self) -> str:
        """The kernel's own version: `6.1.192`."""
        return re.split(r"[-~+]", self.version.split(":")[-1], maxsplit=1)[0]

    @property
    def series(self) -> str:
        """`6.1`."""
        return ".".join(self.upstream.split(".")[:2])

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(package.size for package in self.packages)

    @property
    def installed_size(self) -> int:
        """Bytes on disk once unpacked, as the packages say."""
        return sum(package.installed_size for package in self.packages)

    @property
    def config_package(self) -> Package:
        """The package with the kernel's config: small for a split image."""
        for package in self.packages:
            if package.name.startswith("linux-base-"):
                return package
        return self.packages[0]

    def is_ordinary(self, architecture: str) -> bool:
        """Whether this is the plain flavour: not rt, not cloud, no other page size."""
        return self.release.endswith(f"-{architecture}") and not re.search(r"-(rt|cloud)-", self.release)


@dataclass(frozen=True)
class Index:
    """What the archive offered at `fetched` (seconds since the epoch).

    `missing` maps a suite that could not be read to the reason. `stale` is empty, or says why this index is
    older than it should be.
    """

    fetched: float
    architecture: str
    offers: tuple[Offer, ...]
    missing: dict[str, str] = field(default_factory=dict)
    stale: str = ""


def version_key(version: str) -> tuple[Any, ...]:
    """Return a key that sorts package versions as dpkg does (deb-version(7))."""
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "0")
    return (int(epoch or 0), _part_key(upstream), _part_key(revision))


def _part_key(part: str) -> tuple[Any, ...]:
    key: list[Any] = []
    for text, digits in re.findall(r"([^0-9]*)([0-9]*)", part):
        # A tilde sorts before the end of the part, the end before letters, letters before all else. Each
        # text ends in 0, the weight of "end".
        key.append(tuple([_weight(character) for character in text] + [0]))
        key.append(int(digits or 0))
    return tuple(key)


def _weight(character: str) -> int:
    if character == "~":
        return -1
    return ord(character) if character.isalpha() else ord(character) + 256


def without_credentials(text: str) -> str:
    """Return text with `user:password@` taken out of every URI in it."""
    return re.sub(r"(\w+://)[^/\s@]+@", r"\1", text)


def debian_architecture() -> str:
    """Return `amd64` or `arm64`. Raises `EnvironmentProblem` on another machine."""
    machine = platform.machine()
    try:
        return _MACHINE_TO_DEBIAN[machine]
    except KeyError:
        raise EnvironmentProblem(
            f"the lab knows no Debian kernels for {machine}", hint="give a kernel: --kernel PATH"
        ) from None


def apt_configuration(directory: Path, source_file: Path, architecture: str) -> str:
    """Return a configuration for apt with a state of its own below `directory`.

    `#clear` drops what the host hooks into an update: it would act on the host's own state.
    """
    return (
        f'Dir::State::lists "{directory}/lists";\n'
        f'Dir::Cache "{directory}";\n'
        f'Dir::Cache::archives "{directory}/archives";\n'
        'Dir::Cache::pkgcache "";\n'
        'Dir::Cache::srcpkgcache "";\n'
        f'Dir::Etc::sourcelist "{source_file}";\n'
        'Dir::Etc::sourceparts "-";\n'
        'Dir::Etc::preferences "-";\n'
        'Dir::Etc::preferencesparts "-";\n'
        "#clear APT::Update::Pre-Invoke;\n"
        "#clear APT::Update::Post-Invoke;\n"
        "#clear APT::Update::Post-Invoke-Success;\n"
        "#clear APT::Architectures;\n"
        f'APT::Architectures:: "{architecture}";\n'
        'Acquire::Languages "none";\n'
        'Acquire::Retries "2";\n'
        'Acquire::http::Timeout "20";\n'
        'Acquire::https::Timeout "20";\n'
        # What it brings is run as root in guests, and built on: never unsigned, whatever the host allows.
        'Acquire::AllowInsecureRepositories "false";\n'
        'Acquire::AllowWeakRepositories "false";\n'
        'Acquire::AllowDowngradeToInsecureRepositories "false";\n'
        'APT::Get::AllowUnauthenticated "false";\n'
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which stays; it goes with the process whatever happens to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Archive:
    """Debian's archive, seen through a private apt state in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._index_file = directory / "index.json"

    # Reading the index

    def index(
        self,
        *,
        max_age: float = INDEX_MAX_AGE,
        say: Callable[[str], None] | None = None,
    ) -> Index:
        """Return what is on offer, from the kept index while that is younger than `max_age` seconds.

        A refresh that fails falls back to the kept index and says so in `Index.stale`. Raises
        `EnvironmentProblem` when there is none to fall back to.
        """
        kept = self._read_index()
        if kept is not None and self._is_fresh(kept, max_age):
            return kept
        say = say or (lambda text: None)
        with locked(self.directory / "lock"):
            # Another run may have done it while this one waited.
            kept = self._read_index()
            if kept is not None and self._is_fresh(kept, max_age):
                return kept
            failed = self._recent_failure() if kept is not None and max_age > 0 else ""
            if kept is not None and failed:
                return self._stale(kept, failed)
            try:
                index = self._refresh(say)
            except EnvironmentProblem as problem:
                if kept is None:
                    raise
                reason = problem.why or problem.what
                self._remember_failure(reason)
                return self._stale(kept, reason)
            write_atomically(self._index_file, json.dumps(_index_as_json(index)))
            self._failure_file.unlink(missing_ok=True)
            return index

    def kept_index(self) -> Index | None:
        """Return the index as kept, of whatever age; no network, no apt. None when there is none."""
        return self._read_index()

    @property
    def _failure_file(self) -> Path:
        return self.directory / "refresh-failed"

    def _is_fresh(self, index: Index, max_age: float) -> bool:
        return 0 <= time.time() - index.fetched < max_age

    @staticmethod
    def _stale(index: Index, reason: str) -> Index:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(index.fetched))
        stale = f"the archive could not be asked ({reason}); this is what it offered on {when}"
        return replace(index, stale=stale)

    def _recent_failure(self) -> str:
        try:
            if 0 <= time.time() - self._failure_file.stat().st_mtime < INDEX_RETRY_AFTER:
                return self._failure_file.read_text(encoding="utf-8")
        except OSError:
            pass
        return ""

    def _remember_failure(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._failure_file.write_text(reason, encoding="utf-8")

    def _read_index(self) -> Index | None:
        try:
            value = json.loads(self._index_file.read_text(encoding="utf-8"))
            index = _index_from_json(value)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return index if index.architecture == _MACHINE_TO_DEBIAN.get(platform.machine()) else None

    # Asking apt

    def _refresh(self, say: Callable[[str], None]) -> Index:
        architecture = debian_architecture()
        keyring = self._require_apt()
        self._make_directories()
        self._require_room()
        sources = mirrors_of_host()
        suites = self._suites(sources)
        self._write_configuration(architecture, keyring, suites)
        say(f"asking Debian's archive for kernels ({len(suites)} suites)")
        output = self._run_apt(["apt-get", "-c", str(self._configuration), "update"], limit=UPDATE_LIMIT)
        failures = _failures(output)
        offers: dict[str, Offer] = {}
        missing: dict[str, str] = {}
        for suite, site in suites.items():
            lists = sorted(
                (self.directory / "lists").glob(f"*_dists_{suite}_main_binary-{architecture}_Packages*")
            )
            if suite in failures or not lists:
                missing[suite] = failures.get(suite, "apt brought no index of it")
                continue
            for offer in self._offers_of(lists[0], suite, site):
                _merge(offers, offer)
        if not offers:
            reason = next(iter(missing.values()), "no suite carries a kernel")
            raise EnvironmentProblem(
                "Debian's archive could not be asked for kernels",
                why=reason,
                hint="check the network and apt's proxy, or give a kernel: --kernel host, --kernel PATH",
            )
        ordered = sorted(offers.values(), key=lambda offer: version_key(offer.version), reverse=True)
        return Index(time.time(), architecture, tuple(ordered), missing)

    def _require_apt(self) -> Path:
        hint = "give a kernel: --kernel host, or --kernel PATH to a vmlinuz beside its modules"
        if shutil.which("apt-get") is None or not _APT_HELPER.exists() or shutil.which("dpkg") is None:
            raise EnvironmentProblem(
                "kernels from Debian's archive cannot be had here",
                why="apt-get and dpkg are not installed",
                hint=hint,
            )
        for keyring in KEYRINGS:
            if os.access(keyring, os.R_OK):
                return keyring
        raise EnvironmentProblem(
            "kernels from Debian's archive cannot be verified here",
            why=f"there is no {KEYRINGS[-1]}",
            hint=f"install the package debian-archive-keyring, or {hint}",
        )

    @property
    def _configuration(self) -> Path:
        return self.directory / "apt.conf"

    def _make_directories(self) -> None:
        try:
            for name in ("lists/partial", "archives/partial"):
                (self.directory / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot make the cache directory {self.directory}",
                why=error.strerror or str(error),
                hint="set XDG_CACHE_HOME to a directory that you can write to",
            ) from error

    def _require_room(self) -> None:
        """apt does not end when the disk fills up under it: look before. Raises `EnvironmentProblem`."""
        lists = _bytes_below(self.directory / "lists")
        need = max(INDEX_ROOM - lists, INDEX_ROOM // 3)
        free = shutil.disk_usage(self.directory).free
        if free < need:
            raise EnvironmentProblem(
                f"no room for Debian's package index in {self.directory}",
                why=f"it needs {format_size(need)}, {format_size(free)} are free",
                hint="make room, or set XDG_CACHE_HOME to a directory elsewhere",
            )

    @staticmethod
    def _suites(sources: HostSources) -> dict[str, str]:
        """Return suite → site, the host's own suites first. Raises `EnvironmentProblem` with none."""
        suites: dict[str, str] = {}
        for suite in (*sources.suites, *SUITES):
            site = sources.security_site if suite.endswith("-security") else sources.site
            if site:
                suites.setdefault(suite, site)
        if not suites:
            raise EnvironmentProblem(
                "Debian's archive cannot be asked for kernels",
                why="apt on this machine names no mirror of Debian",
                hint="add one to apt's sources, or give a kernel: --kernel host, --kernel PATH",
            )
        return suites

    def _write_configuration(self, architecture: str, keyring: Path, suites: dict[str, str]) -> None:
        directory = self.directory
        options = f"arch={architecture} target=Packages signed-by={keyring}"
        sources = "".join(f"deb [{options}] {site} {suite} main\n" for suite, site in suites.items())
        source_file = directory / "sources.list"
        # A mirror's address may carry credentials.
        source_file.touch(mode=0o600)
        source_file.write_text(sources, encoding="utf-8")
        self._configuration.write_text(
            apt_configuration(directory, source_file, architecture), encoding="utf-8"
        )

    def _run_apt(self, command: Sequence[str], *, limit: float) -> str:
        """Return what apt said. Its exit code is not looked at: one lost suite makes it 100."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(
                "Debian's archive did not answer", why=f"apt was not done after {limit:.0f} s"
            ) from None
        except OSError as error:
            raise EnvironmentProblem("apt cannot be run", why=error.strerror or str(error)) from error
        return without_credentials(done.stdout.decode("utf-8", "replace"))

    def _offers_of(self, index_file: Path, suite: str, site: str) -> Iterable[Offer]:
        done = subprocess.run(
            [str(_APT_HELPER), "-c", str(self._configuration), "cat-file", str(index_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return offers_in(done.stdout, suite, site)

    # Downloading

    def download(
        self,
        packages: Sequence[Package],
        directory: Path,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Path]:
        """Download packages into `directory` and return the files, each with the index's SHA256.

        `progress(done, total)` is called with bytes a few times a second. Raises `EnvironmentProblem`.
        """
        self._require_apt()
        paths = [directory / package.file_name for package in packages]
        command = [str(_APT_HELPER), "-c", str(self._configuration), "download-file"]
        for package, path in zip(packages, paths, strict=True):
            command += [package.uri, str(path), f"SHA256:{package.sha256}"]
        total = sum(package.size for package in packages)
        log = directory / "apt.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
            )
            try:
                started = time.monotonic()
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.25)
                        break
                    if progress is not None:
                        progress(min(total, _bytes_below(directory)), total)
                    if time.monotonic() - started > DOWNLOAD_LIMIT:
                        raise EnvironmentProblem(
                            "the kernel's download is too slow", why=f"not done after {DOWNLOAD_LIMIT} s"
                        )
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        said = without_credentials(log.read_text(encoding="utf-8", errors="replace"))
        log.unlink()
        if process.returncode != 0 or not all(path.exists() for path in paths):
            errors = [line[2:].strip() for line in said.splitlines() if line.startswith("E:")]
            raise EnvironmentProblem(
                f"{packages[0].name} could not be downloaded",
                why=errors[0] if errors else "apt did not say why",
                hint="check the network, and that the disk has room",
            )
        if progress is not None:
            progress(total, total)
        return paths


@dataclass(frozen=True)
class HostSources:
    """Where this machine's apt gets Debian from: two sites, empty if unknown, and the suites it names."""

    site: str = ""
    security_site: str = ""
    suites: tuple[str, ...] = ()


def mirrors_of_host() -> HostSources:
    """Return the mirrors of Debian that apt on this machine is configured for."""
    form = "$(REPO_URI)|$(RELEASE)|$(ORIGIN)|$(COMPONENT)"
    try:
        done = subprocess.run(
            ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return HostSources()
    return sources_in(done.stdout.decode("utf-8", "replace"))


def sources_in(targets: str) -> HostSources:
    """Return the Debian mirrors in lines of `REPO_URI|RELEASE|ORIGIN|COMPONENT` of `apt-get indextargets`."""
    site = security_site = ""
    suites: list[str] = []
    for line in targets.splitlines():
        uri, _, rest = line.partition("|")
        suite, _, rest = rest.partition("|")
        origin, _, component = rest.partition("|")
        if component != "main" or urlsplit(uri).scheme not in {"http", "https", "ftp", "file", "mirror"}:
            continue
        # The origin stands in the downloaded InRelease: unknown where an image was stripped of its lists.
        unknown = not origin or origin.startswith("$")
        last = urlsplit(uri).path.rstrip("/").rpartition("/")[2]
        if not (origin.startswith("Debian") or (unknown and last in {"debian", "debian-security"})):
            continue
        uri = urlunsplit(urlsplit(uri)._replace(path=urlsplit(uri).path.rstrip("/")))
        if suite.endswith("-security"):
            security_site = security_site or uri
        elif not suite.endswith("/updates"):
            site = site or uri
        else:
            continue
        suites.append(suite)
    if site.endswith("/debian"):
        # Mirrors of both keep them side by side.
        security_site = security_site or f"{site}-security"
    return HostSources(site, security_site, tuple(dict.fromkeys(suites)))


def _failures(output: str) -> dict[str, str]:
    """Return suite → reason, from what `apt-get update` said."""
    failures: dict[str, str] = {}
    lines = output.splitlines()
    for number, line in enumerate(lines):
        match = re.match(r"Err:\d+ (\S+) (\S+) ", line)
        if match:
            reason = lines[number + 1].strip() if number + 1 < len(lines) else "apt gave no reason"
            suite = match[2].partition("/")[0]
            failures.setdefault(suite, f"{match[1]} {suite}: {reason}")
            continue
        match = re.match(
            r"E: (The repository '\S+ (\S+) \S+' .*|Release file for \S*?/dists/([^/ ]+)/.*)", line
        )
        if match:
            failures.setdefault(match[2] or match[3], match[1])
    general = [line[2:].strip() for line in lines if line.startswith("E:")]
    if general and not failures and not any(line.startswith(("Get:", "Hit:")) for line in lines):
        # Nothing came at all, and no line names a suite: a lock, a bad configuration.
        failures = dict.fromkeys(SUITES, general[0])
    return failures


def offers_in(packages: bytes, suite: str, site: str) -> list[Offer]:
    """Return the kernels in the text of a Packages index."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for match in re.finditer(rb"^Package: (linux-(?:image|binary|modules|base)-[0-9]\S*)$", packages, re.M):
        end = packages.find(b"\n\n", match.start())
        stanza = packages[match.start() : end if end >= 0 else len(packages)].decode("utf-8", "replace")
        fields = dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", stanza, re.M))
        found[match[1].decode(), fields.get("Version", "")] = fields
    offers = []
    for (name, version), fields in found.items():
        release = name.removeprefix("linux-image-")
        depends = fields.get("Depends", "")
        if release == name or re.search(r"-(dbg|unsigned|signed-template)$", release):
            continue
        if re.search(r"linux-image-[0-9]", depends):
            continue  # a package that only pulls in the newest of its series
        parts = re.findall(r"\b(linux-(?:base|binary|modules)-[0-9]\S*) \(= ", depends)
        names = sorted(parts) if any(part.startswith("linux-binary-") for part in parts) else [name]
        # A KeyError below: the archive has dropped a part, as it does with the modules of older images.
        try:
            members = tuple(_package(each, found[each, version], site) for each in names)
        except (KeyError, ValueError):
            continue
        if sum(member.size for member in members) < 1 << 20:
            continue  # no image inside
        offers.append(Offer(release, version, (suite,), members))
    return offers


def _package(name: str, fields: dict[str, str], site: str) -> Package:
    return Package(
        name,
        f"{site}/{fields['Filename']}",
        int(fields["Size"]),
        int(fields.get("Installed-Size", "0")) << 10,
        fields["SHA256"],
    )


def _merge(offers: dict[str, Offer], offer: Offer) -> None:
    """Keep, for each release, the newest package version, and name all suites that have it."""
    other = offers.get(offer.release)
    if other is None or version_key(offer.version) > version_key(other.version):
        offers[offer.release] = offer
    elif offer.version == other.version:
        suites = tuple(dict.fromkeys((*other.suites, *offer.suites)))
        offers[offer.release] = replace(other, suites=suites)


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _index_as_json(index: Index) -> dict[str, Any]:
    return {
        "schema": _INDEX_SCHEMA,
        "fetched": index.fetched,
        "architecture": index.architecture,
        "missing": index.missing,
        "offers": [asdict(offer) for offer in index.offers],
    }


def _index_from_json(value: dict[str, Any]) -> Index:
    if value["schema"] != _INDEX_SCHEMA:
        raise ValueError("an index of another version")
    offers = tuple(
        Offer(
            offer["release"],
            offer["version"],
            tuple(offer["suites"]),
            tuple(Package(**package) for package in offer["packages"]),
        )
        for offer in value["offers"]
    )
    return Index(value["fetched"], value["architecture"], offers, value["missing"])

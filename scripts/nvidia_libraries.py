"""NVIDIA's own libraries, for the tests of CUDA's error paths on a machine without a GPU.

    python scripts/nvidia_libraries.py FOLDER

Fetches what PyPI and Debian's non-free archive carry, and unpacks each under FOLDER, in a folder of its own;
nothing is installed, and what is there already is left alone. scripts/test calls it. Exits 1, with a line for
each, where something could not be had that there is for this platform.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regrepro.lab.archive import KEYRINGS, apt_configuration, debian_architecture, mirrors_of_host

# The oldest and the newest of each major version that has wheels; 11.7 is the oldest that is supported.
RUNTIMES = (
    ("nvidia-cuda-runtime-cu11", "11.7.99"),
    ("nvidia-cuda-runtime-cu11", "11.8.89"),
    ("nvidia-cuda-runtime-cu12", "12.0.107"),
    ("nvidia-cuda-runtime-cu12", "12.9.79"),
    ("nvidia-cuda-runtime", "13.5.37"),
)
# cuda-python as it was (`cuda.cuda`), and as `cuda.bindings`, which are a package of their own since 12.8.
CUDA_PYTHON = (("cuda-python", "12.1.0"), ("cuda-bindings", "12.9.10"), ("cuda-bindings", "13.5.0"))
NEEDED_BY_BINDINGS = ("cuda-pathfinder", "1.9.1")
DRIVER = "libcuda1"


class NotForThisPlatform(Exception):
    """The index has other versions for this platform, and not this one."""


def folder_of(base: Path, name: str, version: str) -> Path:
    """Where a wheel is unpacked."""
    return base / f"{name}-{version}"


def main(base: Path) -> int:
    base.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, version in (*RUNTIMES, *CUDA_PYTHON):
        target = folder_of(base, name, version)
        try:
            if not target.exists():
                wheels = [(name, version)] + ([NEEDED_BY_BINDINGS] if name == "cuda-bindings" else [])
                with _made_whole(target) as new:
                    for wheel in wheels:
                        _unpack_wheel(*wheel, new)
        except NotForThisPlatform as reason:
            print(f"{name} {version}: not for this platform ({reason})")
        except (OSError, RuntimeError, zipfile.BadZipFile) as reason:
            failed += 1
            print(f"{name} {version} could not be had: {reason}", file=sys.stderr)
    try:
        if not (base / DRIVER).exists():
            with _made_whole(base / DRIVER) as new:
                _unpack_driver(new)
    except (OSError, RuntimeError) as reason:
        failed += 1
        print(f"{DRIVER} could not be had: {reason}", file=sys.stderr)
    return min(failed, 1)


@contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """Yield a new folder that gets its name once it is complete."""
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        yield new
        new.chmod(0o755)
        new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _unpack_wheel(name: str, version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        said = _run([*pip, "--only-binary=:all:", "-d", wheels, f"{name}=={version}"])
        if said:
            # "none" is what pip says of an index that it could not reach, too.
            others = re.search(r"\(from versions: (?!none\))([^)]*)\)", said)
            if others:
                raise NotForThisPlatform(f"it has {others[1]}")
            raise RuntimeError(said.splitlines()[-1])
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)


def _unpack_driver(target: Path) -> None:
    """The driver's user-space library, out of the suites that this machine's apt names; apt verifies it."""
    host = mirrors_of_host()
    suites = [suite for suite in host.suites if not re.search(r"-(security|updates|backports)$", suite)]
    keyring = next((path for path in KEYRINGS if os.access(path, os.R_OK)), None)
    if not host.site or not suites or keyring is None or not shutil.which("apt-get"):
        raise RuntimeError("apt on this machine names no mirror of Debian, or there is no keyring of it")
    with tempfile.TemporaryDirectory() as name:
        own = Path(name)
        for folder in ("lists/partial", "archives/partial"):
            (own / folder).mkdir(parents=True)
        architecture = debian_architecture()
        options = f"arch={architecture} target=Packages signed-by={keyring}"
        source_file = own / "sources.list"
        source_file.write_text("".join(f"deb [{options}] {host.site} {suite} non-free\n" for suite in suites))
        configuration = apt_configuration(own, source_file, architecture)
        # This folder is root's alone: apt's own user could not download into it.
        (own / "apt.conf").write_text(f'{configuration}APT::Sandbox::User "root";\n')
        for command in (["update", "-q"], ["download", "-q", DRIVER]):
            said = _run(["apt-get", "-c", str(own / "apt.conf"), *command], cwd=own)
            if said:
                raise RuntimeError(next((line for line in said.splitlines() if line.startswith("E:")), said))
        [package] = own.glob(f"{DRIVER}_*.deb")
        said = _run(["dpkg", "-x", str(package), str(target)])
        if said:
            raise RuntimeError(said)


def _run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command; return nothing where it went well, else what it said."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            cwd=cwd,
            timeout=600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} was not done after 10 minutes"
    return "" if done.returncode == 0 else done.stdout.strip() or f"exit code {done.returncode}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))

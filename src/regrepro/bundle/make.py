"""Make a bundle: gather the parts of a run, take private details out, pack them so that bytes repeat."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from regrepro import __version__, judge
from regrepro.audit.archive import decompressed, tar_members
from regrepro.bundle.redact import Redactor
from regrepro.bundle.repeat import how_to_repeat
from regrepro.errors import EnvironmentProblem, RegreproError, UsageError
from regrepro.record import FILE_NAME, read_record, record_path
from regrepro.report import cprogram, html, markdown, text
from regrepro.report.load import load
from regrepro.report.model import build

MANIFEST = "MANIFEST.json"
SCHEMA = "regrepro.bundle/1"
SUMS = "SHA256SUMS"
BUG_REPORT = "nvidia-bug-report.log.gz"
_LIMIT = 256 << 20
# Bytes of a bundle that is checked: it may be a stranger's, and all of it is in memory.
_CHECK_LIMIT = 64 << 20

# Files of a run directory that are looked at, and what they are.
_LOGS = ("console.log", "dmesg.txt", "dmesg.log", "dmesg", "kern.log", "kernel.log")
_ATTACHED_JSON = ("explain.json", "comparison.json")
_OWN = {FILE_NAME, "verdicts.json", "audit.json", BUG_REPORT, *_LOGS, *_ATTACHED_JSON}
_SCHEMAS = ("record-2.json", "verdicts-1.json", "audit-1.json")

_OF_INTEREST = re.compile(
    r"(?i)\bcma\b|cma:|hugetlb|movable|memory block|\bkho\b|kexec handover|nvidia|nvrm|mlx[45]|rxe|uverbs|"
    r"infiniband|rdma|migrat|pin_user|longterm|out of memory|oom|page allocation failure|warning:|\bbug:|"
    r"call trace|lockdown|command line|linux version|zone ranges|reserved \d|tainted|iommu"
)


@dataclass
class Bundle:
    """What was made: the files by name, and what became of private details. `left_out` maps names to "
    "reasons."""

    name: str
    files: dict[str, bytes]
    redactor: Redactor
    left_out: dict[str, str] = field(default_factory=dict)
    wheel: str = ""

    def archive(self) -> bytes:
        """Return the archive (tar, gzip): the same bytes for the same files."""
        packed = io.BytesIO()
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=9) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for name in sorted(self.files):
                # Everything that TarInfo is not told stays 0 or empty: time, owner, group.
                member = tarfile.TarInfo(f"{self.name}/{name}")
                member.size = len(self.files[name])
                member.mode = 0o644
                tar.addfile(member, io.BytesIO(self.files[name]))
        return packed.getvalue()


def make_bundle(
    run_dir: Path, *, redact: bool = True, audit_file: Path | None = None, wheel: Path | None = None
) -> Bundle:
    """Make the bundle of a run directory. Raises `UsageError` for what is no run that can be judged.

    `wheel`: regrepro's own, to be sent along.
    """
    file = record_path(run_dir)
    directory = file.parent
    record = read_record(file)
    verdicts = judge.judge_record(record)
    redactor = Redactor(enabled=redact)
    bundle = Bundle(_name(record.header), {}, redactor)
    lines = _json_lines(file)
    logs = {name: _text(directory / name, bundle) for name in _LOGS if (directory / name).is_file()}
    attached = {
        name: _json(directory / name, bundle) for name in _ATTACHED_JSON if (directory / name).is_file()
    }
    audit = audit_file or (directory / "audit.json" if (directory / "audit.json").is_file() else None)
    if audit is not None:
        attached["audit.json"] = _json(audit, bundle)
    bug_report = _bug_report(directory / BUG_REPORT, bundle, redact)
    _note_unknown(directory, bundle)

    # Learn from everything before anything is replaced: a name may have its label in the last file only.
    for line in lines:
        redactor.learn_json(line)
    for value in attached.values():
        redactor.learn_json(value)
    for log in (*logs.values(), bug_report):
        if log is not None:
            redactor.learn_text(log)

    clean = [redactor.json(line, FILE_NAME) for line in lines]
    bundle.files[FILE_NAME] = "".join(_compact(line) + "\n" for line in clean).encode()
    _require_same_verdicts(bundle, verdicts, _asked(directory / "verdicts.json", verdicts))
    _reports(bundle)
    for name, value in attached.items():
        if value is not None:
            bundle.files[name] = _pretty(redactor.json(value, name))
    if "audit.json" not in bundle.files:
        bundle.files["audit.json"] = _pretty(_audit(bundle))
    matter = _log_lines({name: log for name, log in logs.items() if log is not None})
    if matter:
        bundle.files["kernel-log.txt"] = redactor.text(matter, "kernel-log.txt").encode()
    if bug_report is not None:
        bundle.files[BUG_REPORT] = _zip(
            redactor.text(bug_report, BUG_REPORT).encode("utf-8", "surrogateescape")
        )
    for name in _SCHEMAS:
        schema = resources.files("regrepro").joinpath(f"schema/{name}")
        bundle.files[f"schema/{name}"] = schema.read_bytes()
    if wheel is not None:
        bundle.wheel = wheel.name
        bundle.files[wheel.name] = _wheel(wheel)
    bundle.files["REDACTED.txt"] = _listing(bundle).encode()
    bundle.files["README.txt"] = _readme(bundle).encode()
    _seal(bundle)
    return bundle


def _name(header: dict[str, Any]) -> str:
    """A name without the host's: when the run began."""
    started = re.sub(r"[^0-9]", "", str(header.get("started") or ""))[:14]
    return f"regrepro-{started}" if started else "regrepro-bundle"


# Parts


def _json_lines(file: Path) -> list[Any]:
    """Return the lines of a record that are JSON. What is cut or malformed cannot be looked into: left "
    "out."""
    lines = []
    for line in file.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return lines


def _text(file: Path, bundle: Bundle) -> str | None:
    try:
        if file.stat().st_size > _LIMIT:
            raise ValueError("too large")
        return file.read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        bundle.left_out[file.name] = f"could not be read: {error}"
        return None


def _json(file: Path, bundle: Bundle) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        bundle.left_out[file.name] = f"could not be read as JSON: {type(error).__name__}"
        return None


def _bug_report(file: Path, bundle: Bundle, redact: bool) -> str | None:
    if not file.is_file():
        return None
    try:
        with gzip.open(file) as opened:
            data = opened.read(_LIMIT + 1)
    except (OSError, EOFError, zlib.error) as error:
        bundle.left_out[file.name] = f"could not be looked into: {error}"
        return None
    if len(data) > _LIMIT:
        bundle.left_out[file.name] = (
            f"could not be looked into: unpacked it is larger than {_LIMIT >> 20} MiB"
        )
        return None
    if redact and b"\0" in data:
        # Text with binary inserts: what is hidden in them nobody can read, so they go.
        data = data.replace(b"\0", b"")
    return data.decode("utf-8", "replace" if redact else "surrogateescape")


def _wheel(file: Path) -> bytes:
    """Return a wheel of this version of regrepro. Raises `UsageError` for anything else."""
    wanted = f"regrepro-{__version__}-"
    if not (file.name.startswith(wanted) and re.fullmatch(r"[\w.-]+\.whl", file.name)):
        raise UsageError(f"{file} is no wheel of this regrepro", hint=f"name a file {wanted}….whl")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}", why=error.strerror or str(error)) from None
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise UsageError(f"{file} is no wheel", why="it is no zip archive")
    return data


def _note_unknown(directory: Path, bundle: Bundle) -> None:
    """Files that are no part of a run are left out, and named by their kind only."""
    for file in sorted(directory.iterdir()):
        if file.name not in _OWN and not file.name.startswith("."):
            bundle.left_out.setdefault(file.name, "no part of a run; attach it yourself if it matters")


def _asked(file: Path, verdicts: dict[str, Any]) -> dict[str, Any]:
    """Return the question of the run and its answer, if they are of these verdicts; no record holds them."""
    try:
        kept = json.loads(file.read_bytes())
        same = _short(kept) == _short(verdicts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return {key: kept[key] for key in ("question", "answer", "exit_code") if same and key in kept}


def _require_same_verdicts(bundle: Bundle, verdicts: dict[str, Any], asked: dict[str, Any]) -> None:
    """Judge what goes into the bundle. Raises `RegreproError` if replacing changed a verdict."""
    with tempfile.TemporaryDirectory() as place:
        record_file = Path(place) / FILE_NAME
        record_file.write_bytes(bundle.files[FILE_NAME])
        again = judge.judge_record(read_record(record_file))
    if _short(again) != _short(bundle.redactor.json(verdicts, "verdicts.json")):
        raise RegreproError(
            "the record without its private details is judged otherwise than with them",
            why="a name of this node is also a word of the record",
            hint="--no-redact keeps everything",
        )
    bundle.files["verdicts.json"] = _pretty({**again, **bundle.redactor.json(asked, "verdicts.json")})


def _short(verdicts: dict[str, Any]) -> list[tuple[Any, ...]]:
    labels = ("scenario", "variant", "failure")
    keys = (*labels, "verdict", "pin_owner", "basis", "errno", "layer", "as_declared")
    return [tuple(item.get(key) for key in keys) for item in verdicts["verdicts"]]


def _reports(bundle: Bundle) -> None:
    """Make reports and C programs of the record as it goes into the bundle."""
    with tempfile.TemporaryDirectory() as place:
        for name in (FILE_NAME, "verdicts.json"):
            (Path(place) / name).write_bytes(bundle.files[name])
        run = load(place)
        content = build(run)
        for name, render in (
            ("report.html", html.render),
            ("report.md", markdown.render),
            ("report.txt", text.render),
        ):
            bundle.files[name] = render(content).encode()
        for scenario in cprogram.exportable(run.record):
            name = re.sub(r"[^A-Za-z0-9_-]", "_", scenario)
            bundle.files[f"c/{name}.c"] = cprogram.render(run.record, scenario).encode()


def _audit(bundle: Bundle) -> dict[str, Any]:
    """Audit what the record says of the node; no file of this machine is looked at."""
    from regrepro.audit.audit import audit
    from regrepro.audit.places import open_place

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / FILE_NAME).write_bytes(bundle.files[FILE_NAME])
        with open_place(Path(place)) as reader:
            result: dict[str, Any] = audit(reader, runs=[])
    result["where"] = f"{FILE_NAME} of this bundle"
    return result


def _log_lines(logs: dict[str, str]) -> str:
    """Return the lines of the kernel's logs that matter, each log under its name."""
    parts = []
    for name, log in sorted(logs.items()):
        lines = [line.rstrip("\r") for line in log.split("\n") if _OF_INTEREST.search(line)]
        if lines:
            parts.append(
                f"==> {name}: {len(lines)} of {log.count(chr(10))} lines\n" + "\n".join(lines) + "\n"
            )
    return "\n".join(parts)


def _listing(bundle: Bundle) -> str:
    lines = []
    if bundle.redactor.enabled:
        lines += [
            "Private details in this bundle were replaced, one detail by one placeholder in every file:",
            "",
        ]
        for item in bundle.redactor.listing():
            lines.append(
                f"  {item['placeholder']:<12} {item['times']:>6} times in {', '.join(item['files'])}"
            )
        if not bundle.redactor.replaced:
            lines.append("  nothing was found")
        lines += [
            "",
            "Looked for, by form or by label: host names, user names, serial numbers, GUIDs, UUIDs, MAC, "
            "IP and mail",
            "addresses, paths below home directories, command lines; of a process that watch followed also "
            "its program,",
            "job, control group, container and mapped files. A private name that has neither form nor label "
            "cannot be",
            "found: look through the files before you pass them on.",
        ]
    else:
        lines.append("Nothing was replaced: this bundle was made with --no-redact.")
    lines += ["", "Left out:" if bundle.left_out else "Nothing that lay in the run directory was left out."]
    for name, why in sorted(bundle.left_out.items()):
        shown = bundle.redactor.file_name(name, "REDACTED.txt")
        lines.append(f"  {shown}: {bundle.redactor.text(why, 'REDACTED.txt')}")
    return "\n".join(lines) + "\n"


_PARTS = {
    "report.html": "the report; open it first",
    "report.md": "the same, for an issue tracker",
    "report.txt": "the same, for a mail",
    FILE_NAME: "everything that was observed, one event a line",
    "verdicts.json": "the verdicts, each with the evidence that it rests on",
    "audit.json": "whether the node is exposed, by what the record says of it or by an audit that lay "
    "beside it",
    "kernel-log.txt": "the lines of the kernel's log that matter",
    BUG_REPORT: "NVIDIA's own report of the node",
    "REDACTED.txt": "which private details were replaced, and what was left out",
    MANIFEST: "every file with its SHA-256",
    SUMS: "the same for sha256sum -c",
}


def source_digest() -> str:
    """Return one SHA-256 for the package's Python sources, as the command in the bundle's README gives it."""
    package = Path(str(resources.files("regrepro")))
    files = {f"./{file.relative_to(package).as_posix()}": file for file in package.rglob("*.py")}
    lines = (
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {name}\n"
        for name, file in sorted(files.items())
        if not name.startswith("./_scenarios/")
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


_WITHOUT_REGREPRO = (
    "Without regrepro: sha256sum -c SHA256SUMS, and the programs below c/, which find out by themselves",
    "where unpinnable memory lies, and say where they cannot:",
    "",
    "    cc -Wall -Wextra -O2 -o program c/NAME.c -libverbs -lpthread && sudo ./program",
)


def _readme(bundle: Bundle) -> str:
    header = json.loads(bundle.files[FILE_NAME].partition(b"\n")[0])
    programs = sorted(name[2:-2] for name in bundle.files if name.startswith("c/"))
    lines = [
        "A run of regrepro: an RDMA memory registration under a pin without FOLL_LONGTERM.",
        "",
        f"Made by regrepro {__version__}; SHA-256 of its sources: {source_digest()}",
        "(in the package's folder: find . -name '*.py' ! -path './_scenarios/*' | LC_ALL=C sort | xargs "
        "sha256sum | sha256sum).",
        "It is on no package index: whatever has its name there is something else. Install it from a file,",
        f"{bundle.wheel or 'a wheel or a source tree, which whoever sent this bundle has'}:",
        "",
        f"    pip install ./{bundle.wheel or f'regrepro-{__version__}-….whl'}",
        "",
        "Judge the run again, on any machine, from the record alone (no GPU, no RDMA card, no root):",
        "",
        "    regrepro bundle --check .       (checksums, and the same verdicts from the record)",
        "    regrepro judge .                (the verdicts, with their proofs)",
        "",
        *(_WITHOUT_REGREPRO if programs else ("Without regrepro: sha256sum -c SHA256SUMS",)),
        "",
        *how_to_repeat(header, programs),
    ]
    lines += ["Files:", ""]
    names = [name for name in _PARTS if name in bundle.files or name in (MANIFEST, SUMS)]
    lines += [f"{name:<28} {_PARTS[name]}" for name in names]
    if programs:
        lines += [f"{'c/*.c':<28} the recorded steps of one scenario as a C program each"]
    lines += [f"{'schema/*.json':<28} JSON Schemas of the record, the verdicts and the audit"]
    return "\n".join(lines) + "\n"


def _seal(bundle: Bundle) -> None:
    files = dict(sorted(bundle.files.items()))
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    manifest = {
        "schema": SCHEMA,
        "version": __version__,
        "redacted": bundle.redactor.enabled,
        "files": [{"name": name, "bytes": len(data), "sha256": sums[name]} for name, data in files.items()],
        "replaced": bundle.redactor.listing(),
    }
    bundle.files[MANIFEST] = _pretty(manifest)
    sums[MANIFEST] = hashlib.sha256(bundle.files[MANIFEST]).hexdigest()
    bundle.files[SUMS] = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()


def _zip(data: bytes) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=9) as zipped:
        zipped.write(data)
    return packed.getvalue()


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


# Checking


def check_bundle(path: Path) -> list[str]:
    """Return what is wrong with a bundle, packed or unpacked: nothing if it is whole and judged as it says.

    Raises `UsageError` for what is no bundle.
    """
    files = _open(path)
    if MANIFEST not in files or FILE_NAME not in files:
        raise UsageError(f"{path} is no bundle", why=f"it holds no {MANIFEST} or no {FILE_NAME}")
    try:
        manifest = json.loads(files[MANIFEST])
        listed = {str(item["name"]): str(item["sha256"]) for item in manifest["files"]}
        schema = manifest["schema"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UsageError(f"{path} is no bundle", why=f"its {MANIFEST} cannot be read") from None
    if schema != SCHEMA:
        raise UsageError(f"{path} has schema {schema!r}", why=f"this version reads {SCHEMA}")
    wrong = []
    for name, digest in sorted(listed.items()):
        if name not in files:
            wrong.append(f"{name} is missing")
        elif hashlib.sha256(files[name]).hexdigest() != digest:
            wrong.append(f"{name} is not what the manifest says")
    wrong += [
        f"{name} is not in the manifest" for name in sorted(set(files) - set(listed) - {MANIFEST, SUMS})
    ]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / FILE_NAME).write_bytes(files[FILE_NAME])
        again = judge.judge_record(read_record(place))
    try:
        kept = json.loads(files.get("verdicts.json", b"{}"))
        same = _short(kept) == _short(again)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        same = False
    if not same:
        wrong.append("judged again by this version, the record gives other verdicts than verdicts.json")
    return wrong


def _open(path: Path) -> dict[str, bytes]:
    """Return the files of a bundle by their names within it. Nothing is unpacked to disk."""
    try:
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink()]
            return {file.relative_to(path).as_posix(): file.read_bytes() for file in found}
        files: dict[str, bytes] = {}
        total = 0
        with path.open("rb") as file:
            packed = decompressed(file, "gzip", path.stat().st_size, path.name)
            for tar, member in tar_members(packed):
                total += member.size
                if not member.isfile() or total > _CHECK_LIMIT:
                    raise UsageError(
                        f"{path} is no bundle", why=f"{member.name[:80]} is no plain file or too large"
                    )
                opened = tar.extractfile(member)
                files[member.name.partition("/")[2]] = opened.read() if opened else b""
        return files
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {path}", why=why, hint="name a bundle, packed or unpacked") from None


def run_nvidia_bug_report(directory: Path, seconds: float = 900) -> None:
    """Run NVIDIA's own collector, so that its report lies in the run directory. Raises "
    "`EnvironmentProblem`."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-bug-report.sh")
    if tool is None:
        raise EnvironmentProblem(
            "cannot run nvidia-bug-report.sh", why="it is not on PATH", hint="it comes with NVIDIA's driver"
        )
    target = directory / BUG_REPORT.removesuffix(".gz")
    try:
        done = subprocess.run(
            [tool, "--output-file", str(target)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem("nvidia-bug-report.sh did not end well", why=str(error)) from None
    if not (directory / BUG_REPORT).is_file():
        said = " ".join((done.stderr or done.stdout).split())[-200:]
        raise EnvironmentProblem(
            f"nvidia-bug-report.sh left no {BUG_REPORT}", why=said or f"exit status {done.returncode}"
        )

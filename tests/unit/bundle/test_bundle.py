"""Bundles: nothing private in any file, the same bytes each time, the same verdicts when judged again."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import record_builder as build
from click.testing import CliRunner

import regrepro
from regrepro import judge
from regrepro.audit.audit import audit
from regrepro.audit.reader import LiveReader
from regrepro.bundle.commands import bundle as command
from regrepro.bundle.make import check_bundle, make_bundle
from regrepro.bundle.redact import Redactor
from regrepro.errors import EnvironmentProblem, RegreproError, UsageError
from regrepro.record import read_record

SECRETS = {
    "host": "fairlead-0417.cluster.example.net",
    "short-host": "fairlead-0417",
    "user": "mzelazny",
    "home": "/home/mzelazny/projects/orca-next/train",
    "serial": "1560321004711",
    "board-serial": "MT2231X0QQ7Z",
    "pci-serial": "50-6b-4b-ff-ff-cb-12-34",
    "guid": "506b:4b03:00cb:1234",
    "hex-guid": "0x506b4b0300cb1234",
    "gid": "fe80:0000:0000:0000:526b:4bff:fecb:1234",
    "ipv6": "2001:db8:77::4:9",
    "ipv4": "10.83.201.17",
    "mac": "b8:3f:d2:1a:9c:07",
    "ib-mac": "00:00:10:29:fe:80:00:00:00:00:00:00:b8:3f:d2:03:00:1a:9c:06",
    "uuid": "7c1e27b4-9d0a-4b55-8d1e-2f0f1b1d6a90",
    "mail": "m.zelazny@example.net",
    "argument": "ip=10.83.201.17::10.83.201.1:255.255.255.0:fairlead-0417:eth0",
    "command": "train_orca.py --secret-flag",
}

BUG_REPORT = f"""Start of NVIDIA bug report log file.
Date: Sun Nov 29 22:25:10 UTC 2026
uname: Linux {SECRETS["short-host"]} 6.8.0-51-generic #52-Ubuntu SMP x86_64 GNU/Linux
    GPU UUID                              : GPU-{SECRETS["uuid"]}
    Serial Number                         : {SECRETS["serial"]}
    Processes
        Process ID                        : 4711
            Type                          : C
            Name                          : /usr/bin/python3 {SECRETS["command"]}
\t\t[SN] Serial number: {SECRETS["board-serial"]}
\tCapabilities: [150 v1] Device Serial Number {SECRETS["pci-serial"]}
    link/ether {SECRETS["mac"]} brd ff:ff:ff:ff:ff:ff
    link/infiniband {SECRETS["ib-mac"]}
    inet {SECRETS["ipv4"]}/24 scope global eth0
    inet6 {SECRETS["ipv6"]}/64 scope global
GID[0]: {SECRETS["gid"]}
node_guid: {SECRETS["guid"]}
sys_image_guid: {SECRETS["hex-guid"]}
LOGNAME={SECRETS["user"]}
contact {SECRETS["mail"]}
"""

DMESG = f"""[    0.000000] Linux version 6.8.0-51-generic (buildd@lcy02)
[    0.000000] Command line: root=UUID={SECRETS["uuid"]} {SECRETS["argument"]} cma=512M quiet
[    0.000000] cma: Reserved 512 MiB at 0x000000005bc00000
[   12.000000] mlx5_core 0000:3b:00.0: {SECRETS["mac"]}
[   13.000000] oom-kill: task=python3 {SECRETS["home"]}/run.py on {SECRETS["short-host"]}
[   14.000000] something that does not matter, on {SECRETS["short-host"]}
"""


def secret_run(directory: Path) -> Path:
    """A run directory of a node that is full of private details."""
    record = build.reproduced_record(
        hostname=SECRETS["host"],
        cmdline=f"root=UUID={SECRETS['uuid']} cma=512M {SECRETS['argument']}",
        rdma={"device": "mlx5_0", "node_guid": SECRETS["guid"], "firmware": "28.39.1002"},
    )
    record.header["run"]["names"] = [f"{SECRETS['home']}/pin.py"]
    for event in record.events:
        if event["event"] == "scenario-begin":
            event["file"] = f"{SECRETS['home']}/pin.py"
    text = f"mapped for {SECRETS['user']} at {SECRETS['ipv4']} on {SECRETS['short-host'].upper()}"
    record.events.insert(1, {"seq": 0, "t": 0.0, "event": "note", "text": text, "stand_in": None})
    for number, event in enumerate(record.events, start=1):
        event["seq"] = number
    directory.mkdir(parents=True, exist_ok=True)
    lines = [record.header, *record.events]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "verdicts.json").write_text(json.dumps(judge.judge_record(record)))
    (directory / "dmesg.txt").write_text(DMESG)
    (directory / "nvidia-bug-report.log.gz").write_bytes(gzip.compress(BUG_REPORT.encode()))
    (directory / "explain.json").write_text(json.dumps({"where": SECRETS["home"], "host": SECRETS["host"]}))
    return directory


def unpacked(archive: bytes) -> dict[str, bytes]:
    """Every file of an archive; what is compressed within it is there twice, as it is and opened."""
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            opened = tar.extractfile(member)
            assert opened is not None
            files[member.name] = data = opened.read()
            if data[:2] == b"\x1f\x8b":
                files[member.name + " (opened)"] = gzip.decompress(data)
    return files


def found(secret: str, files: dict[str, bytes]) -> list[str]:
    return [name for name, data in files.items() if secret.lower().encode() in (name.encode() + data).lower()]


def test_no_planted_secret_is_in_any_file(tmp_path: Path) -> None:
    files = unpacked(make_bundle(secret_run(tmp_path)).archive())
    left = {name: found(secret, files) for name, secret in SECRETS.items() if found(secret, files)}
    assert left == {}
    # The search itself finds them where they are kept.
    kept = unpacked(make_bundle(tmp_path, redact=False).archive())
    assert [name for name, secret in SECRETS.items() if not found(secret, kept)] == []


def test_what_matters_for_the_bug_is_kept(tmp_path: Path) -> None:
    files = make_bundle(secret_run(tmp_path)).files
    log = files["kernel-log.txt"].decode()
    assert "cma: Reserved 512 MiB at 0x000000005bc00000" in log
    assert "cma=512M quiet" in log
    assert "something that does not matter" not in log
    assert json.loads(files["record.jsonl"].splitlines()[0])["node"]["cmdline"].startswith("cma=512M ")
    assert "28.39.1002" in files["record.jsonl"].decode()
    assert "0000:3b:00.0" in log


def test_one_detail_has_one_placeholder_in_every_file(tmp_path: Path) -> None:
    bundle = make_bundle(secret_run(tmp_path))
    by_original = {original: placeholder for placeholder, original in bundle.redactor.originals()}
    address = by_original[SECRETS["ipv4"]]
    assert address in bundle.files["record.jsonl"].decode()
    assert address in gzip.decompress(bundle.files["nvidia-bug-report.log.gz"]).decode()
    listing = bundle.files["REDACTED.txt"].decode()
    assert address in listing
    manifest = json.loads(bundle.files["MANIFEST.json"])
    [entry] = [item for item in manifest["replaced"] if item["placeholder"] == address]
    assert entry["files"] == ["nvidia-bug-report.log.gz", "record.jsonl"]


def test_two_bundles_of_one_run_are_the_same_bytes(tmp_path: Path) -> None:
    run = secret_run(tmp_path / "run")
    first = make_bundle(run).archive()
    copy = tmp_path / "elsewhere" / "with-another-name"
    copy.mkdir(parents=True)
    for file in run.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert make_bundle(copy).archive() == first
    assert make_bundle(run).archive() == first


def test_the_record_of_a_bundle_gives_the_same_verdicts(tmp_path: Path) -> None:
    run = secret_run(tmp_path / "run")
    archive = tmp_path / "b.tar.gz"
    archive.write_bytes(make_bundle(run).archive())
    assert check_bundle(archive) == []
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "xzf", str(archive), "-C", str(tmp_path / "out")], check=True)
    [folder] = (tmp_path / "out").iterdir()
    assert check_bundle(folder) == []
    again = judge.judge_record(read_record(folder))
    assert again == json.loads((folder / "verdicts.json").read_text())
    assert [item["verdict"] for item in again["verdicts"]] == ["reproduced"]
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, check=False)
    assert sums.returncode == 0, sums.stdout


def test_a_changed_bundle_is_found_out(tmp_path: Path) -> None:
    made = make_bundle(secret_run(tmp_path / "run"))
    folder = tmp_path / "b"
    for name, data in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    record = folder / "record.jsonl"
    record.write_bytes(record.read_bytes().replace(b'"errno":"ENOMEM"', b'"errno":"EFAULT"'))
    (folder / "extra.txt").write_text("x")
    (folder / "report.txt").unlink()
    wrong = check_bundle(folder)
    assert "record.jsonl is not what the manifest says" in wrong
    assert "extra.txt is not in the manifest" in wrong
    assert "report.txt is missing" in wrong
    assert any("other verdicts" in text for text in wrong)
    result = CliRunner().invoke(command, ["--check", str(folder)])
    assert result.exit_code == 10


@pytest.mark.parametrize("what", ["nothing", "text", "empty", "manifest", "link"])
def test_what_is_no_bundle_is_said_in_words(what: str, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.gz"
    if what == "text":
        path.write_text("not an archive")
    elif what == "empty":
        path.mkdir()
    elif what == "manifest":
        path.mkdir()
        (path / "record.jsonl").write_text("{}\n")
        (path / "MANIFEST.json").write_text("[1")
    elif what == "link":
        with tarfile.open(path, "w:gz") as tar:
            link = tarfile.TarInfo("b/record.jsonl")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    with pytest.raises(UsageError):
        check_bundle(path)


def test_a_full_run_stays_small(tmp_path: Path) -> None:
    builder = build.Builder()
    builder.memory_map()
    many = [n * 2 + 1 for n in range(499)]
    for number in range(40):
        name = f"scenario_{number}"
        builder.begin(name)
        builder.buffer(build.state(many))
        builder.register(build.state(many), build.state([n + 5000 for n in many], 1025))
        builder.end()
    record = builder.done()
    lines = [record.header, *record.events]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(make_bundle(tmp_path).archive()) < 5 << 20


def test_what_cannot_be_looked_into_is_left_out_and_listed(tmp_path: Path) -> None:
    run = secret_run(tmp_path)
    (run / "nvidia-bug-report.log.gz").write_bytes(b"\x1f\x8b broken")
    (run / "core.4711").write_bytes(b"\0" * 100)
    (run / "audit.json").write_text("{")
    bundle = make_bundle(run)
    assert "nvidia-bug-report.log.gz" not in bundle.files
    listing = bundle.files["REDACTED.txt"].decode()
    assert "nvidia-bug-report.log.gz: could not be looked into" in listing
    assert "core.4711: no part of a run" in listing
    assert "audit.json: could not be read as JSON" in listing
    assert json.loads(bundle.files["audit.json"])["where"] == "record.jsonl of this bundle"


def test_a_cut_record_can_be_bundled(tmp_path: Path) -> None:
    run = secret_run(tmp_path)
    file = run / "record.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    bundle = make_bundle(run)
    assert "run was killed" in bundle.files["report.txt"].decode()
    assert found(SECRETS["host"], bundle.files) == []


def test_a_host_named_like_a_word_of_the_record_changes_no_verdict(tmp_path: Path) -> None:
    for name in ("pin", "anonymous", "cma", "ENOMEM", "ordinary", "rxe0"):
        run = tmp_path / name
        run.mkdir()
        record = build.reproduced_record(hostname=name)
        lines = [record.header, *record.events]
        (run / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            bundle = make_bundle(run)
        except RegreproError as error:
            assert "--no-redact" in str(error)  # refused, never wrong
            continue
        assert json.loads(bundle.files["verdicts.json"])["verdicts"][0]["verdict"] == "reproduced"
        assert json.loads(bundle.files["record.jsonl"].splitlines()[0])["node"]["hostname"] != name


@pytest.mark.parametrize(
    "text",
    [
        "kernel 6.1.0-57-amd64, driver 535.171.04, firmware 28.39.1002",
        "0000:3b:00.0 and ffff888012345678",
        "at 12:30:45 std::vector ::1 127.0.0.1 0.0.0.0",
        "cma: Reserved 512 MiB at 0x000000005bc00000",
        "7f3d28608000-7f3d28610000 rw-p 00000000 00:00 0",
        "printk: console [ttyS0] enabled, earlyprintk=serial,ttyS0,115200",
        "/usr/lib/modules /proc/self/pagemap",
    ],
)
def test_what_is_not_private_stays(text: str) -> None:
    redactor = Redactor()
    redactor.learn_text(text)
    assert redactor.text(text, "x") == text


def test_nvidia_bug_report_is_run_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = secret_run(tmp_path / "run")
    (run / "nvidia-bug-report.log.gz").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(command, [str(run), "--nvidia-bug-report"])
    assert isinstance(result.exception, EnvironmentProblem)
    tool = tmp_path / "nvidia-bug-report.sh"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --output-file ] && echo "Serial Number : 998877" | /bin/gzip -c > "$2.gz"\n'
    )
    tool.chmod(0o755)
    out = tmp_path / "b.tar.gz"
    result = CliRunner().invoke(command, [str(run), "--nvidia-bug-report", "-o", str(out)])
    assert result.exit_code == 0, result.output
    opened = unpacked(out.read_bytes())
    [report] = [data for name, data in opened.items() if name.endswith("(opened)")]
    assert report == b"Serial Number : serial-1\n"
    assert "serial-1     in the place of 998877" in result.output


def test_the_manifest_names_every_file_with_its_sum(tmp_path: Path) -> None:
    files: dict[str, Any] = make_bundle(secret_run(tmp_path)).files
    manifest = json.loads(files["MANIFEST.json"])
    listed = {item["name"]: item for item in manifest["files"]}
    assert set(listed) == set(files) - {"MANIFEST.json", "SHA256SUMS"}
    for name, item in listed.items():
        assert item["sha256"] == hashlib.sha256(files[name]).hexdigest()
        assert item["bytes"] == len(files[name])
    assert {"report.html", "record.jsonl", "verdicts.json", "audit.json", "c/pin_then_register.c"} <= set(
        listed
    )


def test_no_run_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no record"):
        make_bundle(tmp_path)


# What stands in a record because the judge reads it: planted words there make another record of it.
READ_BY_THE_JUDGE = frozenset(
    {
        "schema",
        "device",
        "event",
        "scenario",
        "variant",
        "kind",
        "owner",
        "verb",
        "errno",
        "backing",
        "contract",
        "outcome",
        "how",
    }
    | {
        "status",
        "fn",
        "pin",
        "place",
        "unpinnable_ranges",
        "body",
        "change",
        "control",
        "access",
        "expects",
        "tracepoint",
        "reason",
    }
    | {
        "mode",
        "version",
        "api",
        "placed",
        "stand_in",
        "stand_ins",
        "declared",
        "name",
        "replaces",
        "selfcheck",
    }
)
FORMS = (
    "{}.corp.example",
    "/srv/{}/data",
    "quiet rd.iscsi.password={} ro",
    "{}",
    "it failed for {}: see there",
    "user@{}.example",
)


class Planter:
    """Puts a secret of its own into each string and under an unknown key of each object."""

    def __init__(self, spared: frozenset[str] = frozenset()) -> None:
        self.spared = spared
        self.secrets: list[str] = []

    def secret(self) -> str:
        self.secrets.append(f"zq{len(self.secrets):05d}xv")
        return FORMS[len(self.secrets) % len(FORMS)].format(self.secrets[-1])

    def plant(self, value: Any, key: str = "") -> Any:
        if key in self.spared:
            return value
        if isinstance(value, dict):
            planted = {name: self.plant(item, name) for name, item in value.items()}
            return planted | {"unknown_key": {"deeper": [self.secret()]}, self.secret(): 1}
        if isinstance(value, list):
            return [self.plant(item, key) for item in value]
        return self.secret() if isinstance(value, str) else value

    def left(self, files: dict[str, bytes]) -> dict[str, list[str]]:
        return {secret: found(secret, files) for secret in self.secrets if found(secret, files)}


def keys_of(schema: Any) -> set[str]:
    """Every property that a JSON Schema names, at any depth."""
    if isinstance(schema, list):
        return set().union(*(keys_of(item) for item in schema))
    if not isinstance(schema, dict):
        return set()
    own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return own.union(*(keys_of(item) for item in schema.values()))


@pytest.mark.parametrize("name", ["record-2", "audit-1", "explain-1", "comparison-1", "verdicts-1"])
def test_a_secret_under_any_key_is_replaced(name: str) -> None:
    """Key by key, alone, in a list, within another object, and as a fact of the audit with this name."""
    schema = json.loads((Path(regrepro.__file__).parent / f"schema/{name}.json").read_text())
    keys = sorted(keys_of(schema) | {"MASTER_ADDR", "boot-arguments", "hostname", "an unknown key"})
    assert len(keys) > 10
    for key in keys:
        for form in FORMS:
            secret = form.format("zq00000xv")
            for value in ({key: secret}, {key: [secret, {key: secret}]}, {"name": key, "value": secret}):
                redactor = Redactor()
                redactor.learn_json(value)
                assert "zq00000xv" not in json.dumps(redactor.json(value, "x")), (key, form)


def test_nothing_that_is_planted_anywhere_is_in_the_archive(tmp_path: Path) -> None:
    """The record, an audit of its own (with all kinds of facts), attached JSON, and lab's boot arguments."""
    planter = Planter(READ_BY_THE_JUDGE)
    record = build.reproduced_record()
    record.header["lab"] = {"kernel": "7.3", "kernel_image": "/boot/x", "boot": ["cma=512M"], "memory": 1}
    record.header["run"]["boot"] = ["cma=512M", "quiet"]
    lines = [planter.plant(line) for line in (record.header, *record.events)]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = judge.judge_record(read_record(tmp_path))
    everything = Planter()
    everything.secrets = planter.secrets
    audited = audit(LiveReader(), runs=[])
    (tmp_path / "audit.json").write_text(json.dumps(everything.plant(audited)))
    for name in ("explain.json", "comparison.json"):
        (tmp_path / name).write_text(
            json.dumps(everything.plant({"groups": [{"lines": ["x"]}], "text": "x"}))
        )
    assert len(planter.secrets) > 500
    bundle = make_bundle(tmp_path)
    assert planter.left(unpacked(bundle.archive())) == {}
    after = json.loads(bundle.files["verdicts.json"])
    assert [item["verdict"] for item in after["verdicts"]] == ["reproduced"]
    for key in ("verdict", "pin_owner", "basis", "errno", "layer"):
        assert [item[key] for item in after["verdicts"]] == [item[key] for item in before["verdicts"]]
    # The search itself finds them where they are kept.
    kept = unpacked(make_bundle(tmp_path, redact=False).archive())
    assert len(planter.left(kept)) == len(planter.secrets)


def test_an_audit_given_by_hand_is_redacted_and_keeps_what_matters(tmp_path: Path) -> None:
    run = secret_run(tmp_path / "run")
    cmdline = "BOOT_IMAGE=/vmlinuz cma=512M rd.iscsi.password=hunter2 systemd.hostname=fairlead-0417 ro"
    facts = [
        {"group": "system", "name": "hostname", "value": "berth-0001.corp.example", "how": "observed",
         "source": "/proc/sys/kernel/hostname", "why": ""},
        {"group": "system", "name": "boot-arguments", "value": cmdline, "how": "observed",
         "source": "/proc/cmdline", "why": ""},
        {"group": "system", "name": "kernel", "value": "5.14.0-427.13.1.el9_4.x86_64", "how": "observed",
         "source": "/proc/sys/kernel/osrelease", "why": ""},
        {"group": "limits", "name": "processes", "value": [{"pid": 1, "comm": "orca-trainer"}],
         "how": "observed", "source": "/proc/*/limits", "why": "on berth-0002.corp.example"},
    ]  # fmt: skip
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"schema": "regrepro.audit/1", "facts": facts}))
    bundle = make_bundle(run, audit_file=file)
    said = bundle.files["audit.json"].decode()
    for private in ("berth", "corp", "hunter2", "password=", "fairlead", "orca", "BOOT_IMAGE"):
        assert private not in said, private
    for kept in ("cma=512M", "5.14.0-427.13.1.el9_4.x86_64", "/proc/sys/kernel/hostname", "regrepro.audit/1"):
        assert kept in said, kept


def test_a_hosts_domain_goes_with_it_and_so_do_programs_in_logs() -> None:
    log = (
        "Oct  3 10:00:00 gpu17 kernel: x\nfrom gpu17.corp.example and gpu18.lab.corp.example\n"
        "Hostname: a.corp.example\n"
        "CPU: 3 PID: 4711 Comm: orcatrain Not tainted\nKilled process 4711 (orcatrain) total-vm:1kB\n"
        "oom-kill:constraint=CONSTRAINT_NONE,task=orcatrain,pid=4711,uid=1000\norcatrain invoked oom-killer\n"
        "Comm: python3 Not tainted\n"
        "Kernel command line: ro rd.iscsi.password=hunter2 rd.luks.name=Zanzibar quiet\n"
        'Unknown kernel command line parameters "splash chap=hunter3", will be passed to user space.\n'
        "    rd.luks.name said Zanzibar, and TOKEN=hunter4\n"
    )
    redactor = Redactor()
    redactor.learn_text(log)
    clean = redactor.text(log, "x")
    for private in ("gpu17", "gpu18", "corp", "example", "orcatrain", "hunter", "Zanzibar"):
        assert private not in clean, clean
    assert "Comm: python3 " in clean
    assert "command line: ro quiet" in clean


def test_what_the_kernel_and_regrepro_say_stays_word_for_word() -> None:
    """A record's texts hold no placeholder where they hold nothing of the node's."""
    record = build.reproduced_record()
    redactor = Redactor()
    for line in (record.header, *record.events):
        redactor.learn_json(line)
    for event in record.events:
        assert redactor.json(event, "x") == event
    texts = (
        "migrate_pages() left 8 where they were, in mlx5_ib_reg_user_mr+0x1f/0x40 [mlx5_ib]",
        "cudaHostRegister failed: cudaErrorMemoryAllocation, firmware 28.39.1002 at 0000:3b:00.0",
        "reads /sys/class/infiniband/mlx5_0/ports/1/state, /proc/self/pagemap: Permission denied",
        "cma: Reserved 512 MiB at 0x000000005bc00000",
    )
    redactor.learn_json({"fn": ["mlx5_ib_reg_user_mr"], "modules": ["mlx5_ib"]})
    for text in texts:
        assert redactor.json({"text": text}, "x") == {"text": text}


def test_the_readme_says_where_regrepro_comes_from_and_how_to_repeat_the_run(tmp_path: Path) -> None:
    run = secret_run(tmp_path / "run")
    said = make_bundle(run).files["README.txt"].decode()
    assert "pip install regrepro==" not in said
    package = Path(regrepro.__file__).parent
    command = "find . -name '*.py' ! -path './_scenarios/*' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    assert command in " ".join(said.split())
    done = subprocess.run(["sh", "-c", command], cwd=package, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] in said
    assert "regrepro lab run pin.py --kernel 7.3 --boot cma=512M\n" in said
    assert "c/pin_then_register.c" in said
    assert '-append "console=ttyS0 panic=-1 cma=512M"' in said


def test_the_wheel_is_sent_along_on_request(tmp_path: Path) -> None:
    run = secret_run(tmp_path / "run")
    wheel = tmp_path / f"regrepro-{regrepro.__version__}-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("regrepro/__init__.py", "")
    bundle = make_bundle(run, wheel=wheel)
    assert bundle.files[wheel.name] == wheel.read_bytes()
    assert f"pip install ./{wheel.name}" in bundle.files["README.txt"].decode()
    with pytest.raises(UsageError, match="no wheel of this regrepro"):
        make_bundle(run, wheel=tmp_path / "other-1.0-py3-none-any.whl")
    wheel.write_text("no archive")
    with pytest.raises(UsageError, match="no wheel"):
        make_bundle(run, wheel=wheel)


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer qzplant",
        '{"password": "qzplant"}',
        'password: "first qzplant last"',
        "mysql://qzplant:other@db.corp.example/x",
        "--token qzplant",
        "curl -u qzplant:other https://x",
        "wget --user=other:qzplant",
        "Host: qzplant",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEqzplant\n-----END RSA PRIVATE KEY-----",
        "ssh-rsa AAAAB3qzplant someone@qzplant",
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=qzplant, Ch 00000008",
    ],
)
def test_a_secret_in_a_log_is_found_by_its_form(line: str) -> None:
    redactor = Redactor()
    redactor.learn_text(line)
    assert "qzplant" not in redactor.text(line, "log")


def test_what_was_left_out_is_not_named_by_private_words(tmp_path: Path) -> None:
    run = secret_run(tmp_path)
    for name in ("qzplant-customer.pcap", "notes of qzplant.txt", "qzplant\nline"):
        (run / name).write_text("x")
    bundle = make_bundle(run)
    assert found("qzplant", unpacked(bundle.archive())) == []
    assert bundle.files["REDACTED.txt"].decode().count("no part of a run") == 3


def test_a_bundle_without_a_program_does_not_speak_of_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(secret_run(tmp_path / "first"), run)
    with_program = make_bundle(run).files
    assert any(name.startswith("c/") for name in with_program)
    assert "c/NAME.c" in with_program["README.txt"].decode()
    record = run / "record.jsonl"
    record.write_text(
        record.read_text()
        .replace('"backing":"anonymous"', '"backing":"hugetlb"')
        .replace('"backing": "anonymous"', '"backing": "hugetlb"')
    )
    without = make_bundle(run).files
    assert not any(name.startswith("c/") for name in without)
    assert "c/" not in without["README.txt"].decode()


def test_the_question_of_the_run_and_its_answer_go_along(tmp_path: Path) -> None:
    run = secret_run(tmp_path)
    again = judge.judge_record(read_record(run))
    asked = {"question": "driver", "answer": "undecided, qzplant", "exit_code": 125}
    (run / "verdicts.json").write_text(json.dumps({**again, **asked}))
    kept = json.loads(make_bundle(run).files["verdicts.json"])
    assert (kept["question"], kept["exit_code"]) == ("driver", 125)
    assert kept["answer"].startswith("undecided, word-")
    # An answer that is not of these verdicts does not.
    (run / "verdicts.json").write_text(json.dumps({**again, **asked, "verdicts": []}))
    assert "question" not in json.loads(make_bundle(run).files["verdicts.json"])


@pytest.mark.parametrize(
    "argument",
    [
        "numa_cma=0:1G,1:1G", "cma_pernuma=64M", "hugetlb_cma_only=on", "iommu.passthrough=1", "iommu=nopt",
        "intel_iommu=on,sm_on", "amd_iommu=pgtbl_v2", "pci=realloc=off", "swiotlb=force", "memmap=2G$4G",
        "numa=fake=4", "memhp_default_state=online_movable", "memory_hotplug.online_policy=auto-movable",
        "memory_hotplug.memmap_on_memory=1", "kho_scratch=128M,16M,16M",
    ],
)  # fmt: skip
def test_boot_arguments_that_place_memory_stay_and_what_else_they_say_goes(argument: str) -> None:
    redactor = Redactor()
    assert redactor.json({"cmdline": argument}, "x")["cmdline"] == argument
    name = argument.partition("=")[0]
    assert "qzplant" not in redactor.json({"cmdline": f"{name}=qzplant"}, "x")["cmdline"]

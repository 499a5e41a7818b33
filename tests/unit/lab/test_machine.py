"""The lab's machine without QEMU: its settings, its initramfs, and how it watches a process."""

from __future__ import annotations

import json
import lzma
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from regrepro.errors import EnvironmentProblem, UsageError
from regrepro.kernel import procfs
from regrepro.lab import accel, guest, initramfs, machine, token
from regrepro.lab.kernels import Kernel
from regrepro.lab.machine import Limits, Machine
from regrepro.lab.settings import default_memory, make_settings, parse_boot, parse_nodes

GIB = 1 << 30
MIB = 1 << 20

# Boot arguments


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ([], ()),
        (["hugetlb_cma=2G"], ("hugetlb_cma=2G",)),
        (["cma=512M nokaslr", "kho=off"], ("cma=512M", "nokaslr", "kho=off")),
        (["hugetlb_cma=0:1G,1:2G"], ("hugetlb_cma=0:1G,1:2G",)),
        (["movablecore=25%"], ("movablecore=25%",)),
        (["cma=64M@0x40000000-0x80000000"], ("cma=64M@0x40000000-0x80000000",)),
        (["hugetlb_cma=0"], ("hugetlb_cma=0",)),
        (["  "], ()),
    ],
)
def test_good_boot_arguments(given: list[str], arguments: tuple[str, ...]) -> None:
    assert parse_boot(given) == arguments


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("cma=512X", "bad value"),
        ("cma", "bad value"),
        ("hugetlb_cma=", "bad value"),
        ("hugetlb-cma=lots", "bad value"),
        ("movablecore=-1", "bad value"),
        ('a="b c"', "cannot be a kernel argument"),
        ("a=`reboot`", "cannot be a kernel argument"),
        ("a=$(x)", "cannot be a kernel argument"),
        ("a\nb", "cannot be a kernel argument"),
        ("a\tb", "cannot be a kernel argument"),
        ("caf\u00e9=1", "cannot be a kernel argument"),
        ("--", "is no kernel argument"),
        ("=1", "is no kernel argument"),
        ("init=/bin/sh", "sets init itself"),
        ("panic=5", "sets panic itself"),
        ("console=tty0", "sets console itself"),
        ("loglevel=7", "sets loglevel itself"),
        ("virtme.exec=x", "sets virtme.exec itself"),
        ("virtme_user=x", "itself"),
        ("regrepro.lab=0123", "itself"),
        ("a" * 1500, "too long"),
    ],
)
def test_bad_boot_arguments_are_one_clear_line(given: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_boot([given])
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_nodes_share_memory_and_cpus() -> None:
    settings = make_settings(boot=["cma=512M"], memory=4 * GIB, numa=2, cpus=3)
    assert settings.virtme_arguments() == [
        "--memory", "4096M", "--cpus", "3",
        "--numa", "2048M,cpus=0-1", "--numa", "2048M,cpus=2",
        "--kopt", "cma=512M",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("boot", "random"), [("hugetlb_cma=2G", False), ("hugetlb-cma=0:1G", False), ("cma=2G", True)]
)
def test_the_kernel_does_not_lie_where_a_gigantic_page_must(boot: str, random: bool) -> None:
    assert ("nokaslr" not in make_settings(boot=[boot], numa=2).virtme_arguments()) == random


def test_nodes_may_have_a_size_each() -> None:
    settings = make_settings(numa=(1001 * MIB, 999 * MIB + 7), cpus=2)
    assert settings.virtme_arguments() == [
        "--memory", "2000M", "--cpus", "2", "--numa", "1001M,cpus=0", "--numa", "999M,cpus=1",
    ]  # fmt: skip
    assert (parse_nodes("2"), parse_nodes("1001M,2G")) == (2, (1001 * MIB, 2 * GIB))
    with pytest.raises(UsageError, match="is no size"):
        parse_nodes("1001M,,2G")


def test_memory_is_a_whole_number_of_mib_for_each_node() -> None:
    settings = make_settings(memory=4 * GIB + 12345, numa=3, cpus=4)
    sizes = settings.virtme_arguments()
    assert sizes[1] == f"{3 * 1365}M"


def test_there_is_a_cpu_for_each_node() -> None:
    assert make_settings(numa=4, memory=4 * GIB, cpus=1).cpus == 4


@pytest.mark.parametrize(
    ("boot", "numa", "least"),
    [
        ([], 1, 2 * GIB),
        # 3 GiB nodes had no room for an aligned gigantic page; 4 GiB nodes have.
        (["hugetlb_cma=2G"], 2, 8 * GIB),
        (["hugetlb_cma=2G"], 1, 5 * GIB),
        (["hugetlb_cma=0:1G,1:2G"], 2, 10 * GIB),
        (["cma=512M"], 1, 2 * GIB),
        (["movablecore=2G"], 1, 5 * GIB),
        (["hugetlb_cma=0"], 1, 2 * GIB),
    ],
)
def test_memory_suits_the_reservation(boot: list[str], numa: int, least: int) -> None:
    assert default_memory(boot, numa) >= least


@pytest.mark.parametrize(
    "options",
    [
        {"memory": 1 << 20},
        {"memory": 1 << 50},
        {"numa": 0},
        {"numa": 99},
        {"numa": (2 * GIB, MIB)},
        {"numa": (2 * GIB,), "memory": 2 * GIB},
        {"cpus": 0},
        {"accel": "hvf"},
    ],
)
def test_impossible_machines(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_settings(**options)


# Token


def test_only_the_labs_own_argument_is_a_token() -> None:
    made = token.new_token()
    assert token.token_in(f"quiet {token.ARGUMENT}={made} ro") == made
    for line in (
        "",
        "regrepro.lab",
        "regrepro.lab=",
        "regrepro.lab=x",
        f"xregrepro.lab={made}",
        f"a=regrepro.lab={made}",
    ):
        assert token.token_in(line) is None


def test_a_host_is_no_guest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(procfs, "CMDLINE", tmp_path / "cmdline")
    assert not token.in_lab_guest()
    made = token.new_token()
    (tmp_path / "cmdline").write_text(f"ro {token.ARGUMENT}={made}\n")
    assert token.in_lab_guest()
    assert token.is_guest_of(made)
    assert not token.is_guest_of(token.new_token())


# Initramfs


def archive(**files: bytes) -> bytes:
    names = {name.replace("__", "/"): content for name, content in files.items()}
    body = b"".join(initramfs.entry(name, content, 0o100644) for name, content in names.items())
    return body + initramfs.entry("TRAILER!!!", b"", 0)


def virtmes() -> bytes:
    compressed = lzma.compress(b"\x7fELF module b")
    return archive(
        bin__busybox=b"busybox",
        init=b"#!/bin/sh\nvirtme's own\n",
        **{
            "modules__a.ko": b"\x7fELF module a",
            "modules__b.ko.xz": compressed,
            "modules__load_all.sh": b"log() { :; }\nlog 'loading a.ko...'; insmod modules/a.ko\n"
            b"log 'loading b.ko.xz...'; insmod 'modules/b.ko.xz'",
        },
    )


def plan(**changes: Any) -> initramfs.Plan:
    values: dict[str, Any] = {
        "release": "7.3.4",
        "modules": "/cache/kernels/7.3.4/lib/modules/7.3.4",
        "overlays": ("/etc", "/tmp"),
        "mounts": (initramfs.Mount("virtme.initmount0", "/home/u/run dir", True),),
        "script": "/tmp/regrepro-lab-1/start.sh",
    }
    return initramfs.Plan(**{**values, **changes})


def test_cpio_as_cpio_sees_it(tmp_path: Path) -> None:
    found = dict(initramfs.entries(archive(a=b"1", d__bc=b"22222", e=b"")))
    assert found == {"a": b"1", "d/bc": b"22222", "e": b""}


def test_our_init_is_laid_over_virtmes(tmp_path: Path) -> None:
    path = tmp_path / "initramfs"
    before = virtmes() + b"\0"  # archives are padded to any length
    path.write_bytes(before)
    assert initramfs.adapt(path, plan())
    after = path.read_bytes()
    assert after.startswith(before)
    position = -(-len(before) // 4) * 4
    ours = dict(initramfs.entries(after[position:]))
    assert ours["modules/b.ko"] == b"\x7fELF module b", "the module is unpacked on the host"
    init = ours["init"].decode()
    assert "insmod /modules/a.ko\ninsmod /modules/b.ko\n" in init
    assert "'/newroot/home/u/run dir'" in init
    done = subprocess.run(["sh", "-n"], input=init, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "content",
    [b"", b"\x1f\x8b gzip", archive(init=b"x"), archive(bin__busybox=b"", init=b"", modules__x=b"")],
)
def test_an_initramfs_of_another_make_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "initramfs"
    path.write_bytes(content)
    assert not initramfs.adapt(path, plan())
    assert path.read_bytes() == content


def test_the_init_quotes_what_it_is_given() -> None:
    odd = "/home/o'brien/a b"
    text = initramfs.init_script(
        plan(
            script=f"{odd}/start.sh", modules=odd, overlays=(odd,), mounts=(initramfs.Mount("t", odd, False),)
        ),
        [],
    )
    done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_hosts_own_modules_stay_where_they_are() -> None:
    own = initramfs.init_script(plan(modules=f"{os.path.realpath('/lib/modules')}/6.1"), [])
    assert "uname -r" not in own
    assert "uname -r" in initramfs.init_script(plan(), [])
    assert "uname -r" not in initramfs.init_script(plan(modules=None), [])


def test_mounts_are_those_that_virtme_announces() -> None:
    line = (
        "root=x virtme_initmount0=tmp/run virtme_initmount0_fstype=9p virtme_initmount0_access=rw "
        "virtme_initmount1=/var/cache/k virtme_initmount1_access=ro "
        '"virtme_initmount2=a b" virtme_initmount10=z'
    )
    found = initramfs.mounts_in(line.replace('"virtme_initmount2=a b"', 'virtme_initmount2="a b"'))
    assert found == (
        initramfs.Mount("virtme.initmount0", "/tmp/run", True),
        initramfs.Mount("virtme.initmount1", "/var/cache/k", False),
        initramfs.Mount("virtme.initmount2", "/a b", True),
        initramfs.Mount("virtme.initmount10", "/z", True),
    )


# The machine: a shell script in QEMU's place


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Machine:
    """A machine whose QEMU is a shell script; it says what guests say, and on stderr what consoles say."""
    script = tmp_path / "qemu"
    script.write_text(f'#!/bin/sh\ntell() {{ echo "{guest.MARK}$1"; }}\n{body}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(Machine, "_prepare", lambda *_: [str(script)])
    return Machine(Kernel("7.3", tmp_path, None, None), make_settings(), tmp_path, script="")


STARTED = 'tell \'{"what": "started"}\''
ENDED = 'tell \'{"what": "ended"}\''
QUICK = Limits(boot=3, silence=1.0, total=20, ending=1.0)


def test_a_guest_that_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    qemu = stand_in(tmp_path, monkeypatch, f"echo '[1.0] warning' >&2\n{STARTED}\ntell 'no json'\n{ENDED}")
    log = tmp_path / "console.log"
    ending = qemu.run(QUICK, on_message=told.append, console_log=log)
    assert ending.what == "finished"
    assert ending.boot_seconds is not None
    assert [item["what"] for item in told] == ["started", "ended"]
    assert ending.console[0] == "[1.0] warning"
    assert log.read_text() == "[1.0] warning\n"


def test_a_guest_that_does_not_power_off_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\n{ENDED}\nsleep 60").run(QUICK)
    assert ending.what == "finished"
    assert ending.seconds < 10


def test_a_panic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"{STARTED}\necho '[9.1] Kernel panic - not syncing: sysrq triggered crash' >&2"
    ending = stand_in(tmp_path, monkeypatch, body).run(QUICK)
    assert (ending.what, ending.why) == ("panic", "kernel panic: sysrq triggered crash")
    assert "sysrq triggered crash" in ending.console[-1]


def test_a_panic_that_hangs_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"{STARTED}\necho 'Kernel panic - not syncing: Fatal exception' >&2\nsleep 60"
    ending = stand_in(tmp_path, monkeypatch, body).run(QUICK)
    assert ending.what == "panic"
    assert ending.seconds < 10


def test_a_panic_before_anything_of_ours_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "echo '[2.0] Kernel panic - not syncing: VFS: Unable to mount root fs' >&2"
    ending = stand_in(tmp_path, monkeypatch, body).run(QUICK)
    assert ending.what == "panic"
    assert ending.boot_seconds is None


def test_a_guest_without_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\nsleep 60").run(QUICK)
    assert ending.what == "hang"
    assert "no sign of life" in ending.why


def test_a_heartbeat_keeps_a_slow_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = 'tell \'{"what": "beat"}\'; sleep 0.4;' * 6
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\n{beat}\n{ENDED}").run(QUICK)
    assert ending.what == "finished"


def test_a_guest_that_never_comes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qemu = stand_in(tmp_path, monkeypatch, "echo '[0.1] something' >&2\nsleep 60")
    ending = qemu.run(Limits(boot=1, silence=1, total=5, ending=1))
    assert (ending.what, ending.boot_seconds) == ("hang", None)
    assert "not up after 1 s" in ending.why


def test_a_guest_that_ran_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "echo '[9.9] Out of memory: Killed process 77 (python)' >&2"
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\n{line}").run(QUICK)
    assert ending.what == "out-of-memory"
    # Where the run got over it, that is no bad end, but it is not kept silent.
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\n{line}\n{ENDED}").run(QUICK)
    assert (ending.what, ending.killed_for_memory) == ("finished", True)
    # One control group out of its memory is not the machine out of its.
    line = line.replace("Out of memory", "Memory cgroup out of memory")
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\n{line}\n{ENDED}").run(QUICK)
    assert (ending.what, ending.killed_for_memory) == ("finished", False)


def test_a_guest_that_just_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\necho 'Traceback' >&2").run(QUICK)
    assert ending.what == "guest-ended"
    assert ending.console == ["Traceback"]


def test_qemu_killed_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = stand_in(tmp_path, monkeypatch, f"{STARTED}\nkill -9 $$").run(QUICK)
    assert ending.what == "guest-ended"
    assert "SIGKILL" in ending.why


def test_an_error_that_guest_code_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = STARTED + '\ntell \'{"what": "error", "text": "no such scenario", "code": 2}\''
    ending = stand_in(tmp_path, monkeypatch, body).run(QUICK)
    assert ending.error == ("no such scenario", 2)


def test_qemu_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qemu = stand_in(tmp_path, monkeypatch, "echo 'qemu: cannot set up guest memory' >&2\nexit 1")
    with pytest.raises(EnvironmentProblem, match="cannot set up guest memory"):
        qemu.run(QUICK)


def test_an_exception_ends_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def poll() -> None:
        raise KeyboardInterrupt

    qemu = stand_in(tmp_path, monkeypatch, f"{STARTED}\nsleep 60")
    with pytest.raises(KeyboardInterrupt):
        qemu.run(QUICK, on_start=pids.append, poll=poll)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_host_process_that_is_killed_takes_its_machine_along(tmp_path: Path) -> None:
    script = tmp_path / "qemu"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o755)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from regrepro.lab.machine import Machine, Limits\nfrom regrepro.lab.settings import make_settings\n"
        "from regrepro.lab.kernels import Kernel\n"
        "place = Path(sys.argv[1])\n"
        "Machine._prepare = lambda *_: [str(place / 'qemu')]\n"
        "machine = Machine(Kernel('7', place, None, None), make_settings(), place, script='')\n"
        "machine.run(Limits(), on_start=lambda pid: print(pid, flush=True))\n"
    )
    host = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    pid = int(host.stdout.readline())
    host.send_signal(signal.SIGKILL)
    host.wait()
    deadline = time.monotonic() + 5
    while running(pid):
        assert time.monotonic() < deadline, "the machine outlived its host process"
        time.sleep(0.02)
    host.stdout.close()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_hidden_places(tmp_path: Path) -> None:
    assert machine.is_hidden(Path("/run/user/0/x"))
    assert machine.is_hidden(Path("/dev/shm/x"))
    assert not machine.is_hidden(Path("/running"))
    link = tmp_path / "link"
    link.symlink_to("/run/x")
    assert machine.is_hidden(link)


def test_a_path_that_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qemu = stand_in(tmp_path, monkeypatch, "")
    assert qemu._share(Path("/home/u/a b+1")) == "/home/u/a b+1"
    with pytest.raises(EnvironmentProblem, match="--out"):
        qemu._share(Path("/home/u/a,b=c"))


# KVM


def test_the_probe_boots_the_same_machine_without_a_root() -> None:
    machine_type = ["qemu", "-m", "2G", "-cpu", "host", "-append"]
    given = [
        *machine_type,
        "root=x console=ttyS0 earlyprintk=serial init=y",
        "-initrd",
        "/i",
        "-kernel",
        "/k",
    ]
    probe = [*machine_type, "console=ttyS0 earlyprintk=serial panic=-1", "-kernel", "/k"]
    assert accel.probe_command(given) == probe


def script_of(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "qemu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return [str(path)]


def test_kvm_that_works(tmp_path: Path) -> None:
    works = "echo 'Kernel panic - not syncing: VFS: Unable to mount root fs on (0,0)' >&2; sleep 9"
    assert accel.probe(script_of(tmp_path, works), 5) == (True, "")


def test_kvm_that_aborts(tmp_path: Path) -> None:
    command = script_of(tmp_path, "echo 'error: failed to set MSR 0x10a' >&2; exit 134")
    assert accel.probe(command, 5) == (False, "error: failed to set MSR 0x10a")


def test_kvm_that_hangs(tmp_path: Path) -> None:
    started = time.monotonic()
    works, why = accel.probe(script_of(tmp_path, "echo '[0.0] Linux' >&2; sleep 60"), 1)
    assert not works
    assert "within 1 s" in why
    assert time.monotonic() - started < 5


def test_the_answer_holds_for_one_boot_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache/kvm.json"
    assert accel.remembered(file) is None
    accel.remember(file, False, "hangs")
    assert accel.remembered(file) is False
    monkeypatch.setattr(accel, "boot_id", lambda: "another boot")
    assert accel.remembered(file) is None
    file.write_text("{")
    assert accel.remembered(file) is None


# Netlink


def test_messages_of_the_guest_are_lines(capfd: pytest.CaptureFixture[str]) -> None:
    guest.tell("note", text="two\nlines")
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out.removeprefix(guest.MARK)) == {"what": "note", "text": "two\nlines"}


@pytest.mark.parametrize(
    ("kvm", "command", "told"),
    [
        (False, ["qemu", "-smp", "2"], ["qemu", "-accel", "tcg,thread=single", "-smp", "2"]),
        (False, ["qemu", "-machine", "virt,accel=tcg"], ["qemu", "-machine", "virt,accel=tcg"]),
        (True, ["qemu", "-machine", "accel=kvm:tcg"], ["qemu", "-machine", "accel=kvm"]),
        (
            False,
            ["/bin/qemu-system-x86_64", "-cpu", "max", "max"],
            ["/bin/qemu-system-x86_64", "-accel", "tcg,thread=single", "-cpu", "max,-erms", "max"],
        ),
        (
            False,
            ["/bin/qemu-system-aarch64", "-cpu", "max"],
            ["/bin/qemu-system-aarch64", "-accel", "tcg,thread=single", "-cpu", "max"],
        ),
        (True, ["/bin/qemu-system-x86_64", "-cpu", "max"], ["/bin/qemu-system-x86_64", "-cpu", "max"]),
    ],
)
def test_emulated_cpus_share_a_thread(tmp_path: Path, kvm: bool, command: list[str], told: list[str]) -> None:
    """With a thread each they died of breakpoints in code that another one had just changed."""
    made = object.__new__(Machine)
    made._kvm, made._private, made.settings = kvm, tmp_path, make_settings()
    assert made._adapted(command) == told


def test_what_a_guest_writes_is_plain_files_on_this_host(tmp_path: Path) -> None:
    made = object.__new__(Machine)
    made._kvm, made._private, made.settings = True, tmp_path, make_settings()
    root = "local,id=a,path=/,security_model=none,readonly=on,multidevs=remap"
    out = f"local,id=b,path={tmp_path},security_model=none,multidevs=remap"
    told = made._adapted(["qemu", "-fsdev", root, "-fsdev", out])
    assert told[2] == root
    assert told[4].startswith(f"local,id=b,path={tmp_path},security_model=mapped-")


def test_a_guest_counts_instructions_where_that_is_asked_for(tmp_path: Path) -> None:
    made = object.__new__(Machine)
    made._kvm, made._private, made.settings = False, tmp_path, make_settings(accel="icount")
    counting = ["-icount", "shift=0,sleep=off", "-accel", "tcg,thread=single"]
    assert made._adapted(["qemu", "-smp", "1"]) == ["qemu", *counting, "-smp", "1"]

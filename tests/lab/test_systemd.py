"""What starts `watch` on a fleet, run by a real systemd: the guest's first process is the host's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from regrepro.lab.kernels import Kernels
from regrepro.lab.machine import Limits, Machine
from regrepro.lab.run import LabOptions, guest_script, workplace

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
UNIT = HERE.parents[1] / "packaging" / "regrepro-watch.service"
SYSTEMD = Path("/lib/systemd/systemd")
KERNEL = "6.12"
# These would take away what the guest was given, or wait for devices that nothing here needs.
MASKED = (
    "tmp.mount",
    "systemd-tmpfiles-setup.service",
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
)
TEST_UNIT = """[Unit]
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
Environment=HOME=/root
ExecStart={python} {program}
StandardOutput=file:{out}/tap
StandardError=file:{out}/errors
TimeoutStartSec=1200
"""


def test_the_unit_and_the_prolog(lab: Lab, tmp_path: Path) -> None:
    from conftest import failures

    if not SYSTEMD.exists():
        pytest.skip("needs systemd (package systemd)")
    lab.require(KERNEL)
    units = tmp_path / "units"
    (units / f"{UNIT.name}.d").mkdir(parents=True)
    shutil.copy(UNIT, units)
    # Where this checkout's command lies; and half of an emulated CPU is too little to be ready in time.
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    (units / f"{UNIT.name}.d" / "here.conf").write_text(f"[Service]\nEnvironment=PATH={path}\nCPUQuota=\n")
    program = HERE / "guest_systemd.py"
    (units / "here.service").write_text(
        TEST_UNIT.format(python=sys.executable, program=program, out=tmp_path)
    )
    masks = " ".join(f"/run/systemd/system/{name}" for name in MASKED)
    script = (
        f"mkdir -p /run/systemd/system; cp -r {units}/* /run/systemd/system/\n"
        f"for unit in {masks}; do ln -s /dev/null $unit; done\n"
        f"exec {SYSTEMD} --unit=here.service --log-target=console\n"
    )
    kernel = Kernels().get(KERNEL)
    settings = LabOptions(KERNEL, cpus=1).settings()
    with workplace() as place:
        readable = guest_script(place.directory / "unused")[1]
        machine = Machine(
            kernel, settings, place.directory, script=script, shared=[tmp_path], readable=readable
        )
        # It tells nothing on the lab's own channel: only the whole has a limit.
        limits = Limits(boot=1500.0, silence=1500.0, total=1500.0)
        ending = machine.run(limits, on_start=place.started, console_log=tmp_path / "console.log")
        place.ended()
    tap = (tmp_path / "tap").read_text() if (tmp_path / "tap").exists() else ""
    errors = (tmp_path / "errors").read_text() if (tmp_path / "errors").exists() else ""
    assert "1.." in tap, f"{ending.why}\n{errors}\n" + "\n".join(ending.console)
    assert failures(tap) == [], tap

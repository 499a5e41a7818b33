"""Tests of a process that ends together with its parent."""

from __future__ import annotations

import os
import subprocess
import sys

from regrepro.kernel.parent import die_with_parent

PARENT = """
import os, time
from regrepro.kernel.parent import die_with_parent
us = os.getpid()
if not os.fork():
    print(die_with_parent(us), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_child_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"True\n"
        parent.kill()
        assert parent.communicate(timeout=30)[0] == b""  # ends when the child, too, has closed it


def test_a_parent_that_has_ended_is_told() -> None:
    pid = os.fork()
    if not pid:
        os._exit(die_with_parent(1 << 30))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

"""NCCL between processes: a child pins shared memory, the parent registers it."""

import os
import signal
import time
from collections.abc import Callable

from regrepro import Stage, change, scenario
from regrepro.core import pins


def in_a_child(address: int, length: int) -> Callable[[], None]:
    """Pin in a forked process; return what ends it."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        held = pins.pin_process_vm(address, length)
        os.write(tell, b"x")
        time.sleep(600)
        held.release()
        os._exit(0)
    os.read(told, 1)

    def end() -> None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    return end


@scenario(
    shows="the references rose with the call that started the child",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def pin_by_a_child(stage: Stage) -> None:
    """The pin goes with the child."""
    buffer = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    pin = stage.pin(buffer, "pin", by=in_a_child)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()

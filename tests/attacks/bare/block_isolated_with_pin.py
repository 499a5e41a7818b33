"""An operator's `echo offline` isolates the block that pinned pages lie in, and cannot end for their sake.

With CONFIG_CMA an isolated page may not be pinned for long (folio_is_longterm_pinnable(),
include/linux/mm.h): the registration fails. Once the pin is let go the block is emptied, so that the same
pages can hardly be registered again.
"""

import subprocess
import time

from regrepro import Stage, change, scenario
from regrepro.kernel.memoryblocks import MemoryBlock, block_size


@scenario(
    shows="pages that became isolated in the middle of the run",
    needs=("root", "registrar", "kernel>=5.13"),
    expects={
        "pin": {
            "kernel>=7.0": {"verdict": ["reproduced", "unmet"]},
            "kernel<7.0": "not-reproduced",
        }
    },
    controls={"no-pin": change(pin="none")},
    timeout=300,  # offlining drains the LRU batches of every CPU without end, and so does the registration
)
def block_isolated_with_pin(stage: Stage) -> None:
    """Look for a page whose block can be isolated, pin it, isolate it, register it."""
    buffer = stage.buffer(pages=4096)
    pages = block_size() // stage.page_size
    for number in sorted({int(pfn) // pages for pfn in stage.look(buffer).pfn}, reverse=True):
        block = MemoryBlock(number)
        index = next(i for i, pfn in enumerate(stage.look(buffer).pfn) if int(pfn) // pages == number)
        pin = stage.pin(buffer, pages=[index])
        offline = ["sh", "-c", f"echo offline > {block.path}/state"]
        with subprocess.Popen(offline, stderr=subprocess.DEVNULL) as writer:
            time.sleep(1)  # one that gives up has done so by now
            isolated = writer.poll() is None and block.state == "going-offline"
            if isolated:
                stage.register(buffer, offset=index * stage.page_size, length=stage.page_size)
            writer.kill()
        pin.release()
        if isolated:
            stage.register(buffer, offset=index * stage.page_size, length=stage.page_size)
            break
        block.restore("online_kernel", limit=20)
    else:
        stage.unmet("block", "none of the buffer's memory blocks can be isolated", "boot with more memory")

"""Pages are registered while ordinary; their block is isolated by `echo offline`; they are registered again.

With CONFIG_CMA the second registration fails, held by the first MR's own pin and by no driver's.
"""

import subprocess
import time

from regrepro import Stage, change, scenario
from regrepro.kernel.memoryblocks import MemoryBlock, block_size


@scenario(
    shows="no pin without FOLL_LONGTERM was ever taken",
    needs=("root", "registrar", "kernel>=5.13"),
    expects={
        "none": {
            "kernel>=7.0": {"verdict": ["other-failure", "unmet"]},
            "kernel<7.0": {"verdict": ["not-reproduced", "unmet"]},
        }
    },
    controls={"no-pin": change(pin="none")},
    timeout=300,  # offlining drains the LRU batches of every CPU without end, and so does the registration
)
def block_isolated_under_mr(stage: Stage) -> None:
    """Look for a page whose block can be isolated, register it before and while it is."""
    buffer = stage.buffer(pages=4096)
    pages = block_size() // stage.page_size
    for number in sorted({int(pfn) // pages for pfn in stage.look(buffer).pfn}, reverse=True):
        block = MemoryBlock(number)
        index = next(i for i, pfn in enumerate(stage.look(buffer).pfn) if int(pfn) // pages == number)
        where = {"offset": index * stage.page_size, "length": stage.page_size}
        first = stage.register(buffer, **where)
        offline = ["sh", "-c", f"echo offline > {block.path}/state"]
        with subprocess.Popen(offline, stderr=subprocess.DEVNULL) as writer:
            time.sleep(1)  # one that gives up has done so by now
            isolated = writer.poll() is None and block.state == "going-offline"
            if isolated:
                stage.register(buffer, **where)
            first.deregister()  # now the block can be emptied, and the writer ends
            writer.wait(20)
        block.restore("online_kernel", limit=20)
        if isolated:
            break
    else:
        stage.unmet("block", "none of the buffer's memory blocks can be isolated", "boot with more memory")

"""Pressure: hold ordinary memory of one NUMA node until the kernel hands out unpinnable memory by itself.

The kernel gives CMA pages to movable allocations once free CMA is more than half of a zone's free pages
(`__rmqueue`, mm/page_alloc.c), and ZONE_MOVABLE before any other zone. So what has to be held is known from
/proc/zoneinfo; what a process maps afterwards, also by `cudaHostAlloc`, then comes out of CMA.

The memory is held by a child process, which is first in line for the OOM killer, in a control group of its
own where the node has one to give, and never in this process: when it ends, for whatever reason, everything
is given back.
"""

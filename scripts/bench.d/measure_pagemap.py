"""Bulk reading of PFNs beside one bare pread() of the same pagemap entries."""

from __future__ import annotations

import time

from measuring import Row, Work, measurement, ratio

LENGTH = 1 << 30
TIMES = 5


@measurement("bulk PFN reading of 1 GiB over a bare C pread of pagemap", where="guest")
def pagemap(work: Work) -> list[Row]:
    """Both processes hold 1 GiB of small pages and read it by turns."""
    from regrepro.core.memory import PAGE_SIZE, Range
    from regrepro.core.pages import read_pfns

    pages = LENGTH // PAGE_SIZE
    pairs = []
    with Range.anonymous(LENGTH, huge=False) as memory, work.bare("read_pagemap", str(LENGTH)) as bare:
        memory.populate()
        if not read_pfns(memory.address, pages).all():
            raise SystemExit("bench: PFNs are hidden from this user, or pages are missing")
        bare.seconds(1)
        for _ in range(max(work.rounds, 5)):
            bare_seconds = bare.seconds(TIMES)
            started = time.perf_counter()
            for _ in range(TIMES):
                read_pfns(memory.address, pages)
            pairs.append((time.perf_counter() - started, bare_seconds))
    return [ratio("PFNs of 1 GiB, read in bulk / bare C pread of pagemap", pairs, bound=1.3)]

"""What tracing costs: the call that is traced, another process' calls beside it, and those after it."""

from __future__ import annotations

import os
import time

from measuring import Row, Work, least, measurement

LARGE, SMALL = 64 << 20, os.sysconf("SC_PAGE_SIZE")
# Length, how often in one turn (a turn of small ones has the buffer of events emptied once at least), and the
# most that the ratios may be: traced, beside, afterwards.
LENGTHS = (
    ("4 KiB" if SMALL == 4096 else "one page", SMALL, 100, (2.0, 1.5)),
    ("64 MiB", LARGE, 3, (1.3, None)),
)
# Each number is the quickest of so many turns: what another program takes of this machine only adds.
TURNS = 10
# Nothing of ours is left then: what differs from 1.0 is this machine's noise.
AFTERWARDS = 1.1


@measurement(
    "a traced registration over an untraced one; another process' beside and afterwards", where="guest"
)
def trace(work: Work) -> list[Row]:
    """Register by turns without tracing, with it, and when it has ended; so does a process that is not
    followed.
    """
    from regrepro.core import verbs
    from regrepro.core.memory import Range
    from regrepro.kernel.journal import Journal
    from regrepro.kernel.trace import Tracer

    [name, *_] = verbs.devices()
    access = verbs.access_bits(["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"])
    traced: dict[int, list[tuple[float, float]]] = {SMALL: [], LARGE: []}
    beside: dict[int, list[tuple[float, float]]] = {SMALL: [], LARGE: []}
    after: dict[int, list[tuple[float, float]]] = {SMALL: [], LARGE: []}
    with (
        Range.anonymous(LARGE, huge=False) as buffer,
        verbs.Device(name) as device,
        device.pd() as pd,
        # Before tracing begins, or they would be followed as this process' children.
        work.bare("register_loop", str(SMALL)) as small,
        work.bare("register_loop", str(LARGE)) as large,
    ):
        buffer.fill(1)
        loops = {SMALL: small, LARGE: large}

        def own(length: int, count: int, tracer: Tracer | None) -> float:
            start = time.perf_counter()
            for _ in range(count):
                token = tracer.begin() if tracer else None
                region = pd.reg_mr(buffer.address, length, access)
                if tracer:
                    tracer.end(token, succeeded=True)
                region.dereg()
            return time.perf_counter() - start

        def own_quickest(length: int, count: int, tracer: Tracer | None) -> float:
            return min(own(length, count, tracer) for _ in range(TURNS)) / count

        for length in (SMALL, LARGE):
            own(length, 2, None)
            loops[length].seconds(2)
        for _ in range(max(work.rounds, 5)):
            before = {length: own_quickest(length, count, None) for _, length, count, _ in LENGTHS}
            alone = {length: loops[length].quickest(TURNS, count) for _, length, count, _ in LENGTHS}
            tracer = Tracer(Journal())
            if not tracer.arm():
                raise SystemExit(f"bench: {tracer.status()[1]}")
            try:
                for _, length, count, _ in LENGTHS:
                    traced[length].append((own_quickest(length, count, tracer), before[length]))
                    beside[length].append((loops[length].quickest(TURNS, count), alone[length]))
            finally:
                tracer.disarm()
            for _, length, count, _ in LENGTHS:
                after[length].append((loops[length].quickest(TURNS, count), alone[length]))
    rows = []
    for text, length, _, (bound, bound_beside) in LENGTHS:
        rows += [
            least(f"registration of {text}, traced / untraced", traced[length], bound),
            least(f"another process' registrations of {text}, beside / alone", beside[length], bound_beside),
            least(
                f"another process' registrations of {text}, afterwards / before", after[length], AFTERWARDS
            ),
        ]
    return rows

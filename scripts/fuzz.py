"""The loop of scripts/fuzz: rounds of generated inputs to each property until the count is reached."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from fuzz_properties import PROPERTIES
from hypothesis import HealthCheck, Phase, given, seed, settings

ROUND = 10_000


def run(name: str, count: int) -> float:
    """Give `count` inputs to one property; return the seconds it took. Raises what breaks it."""
    strategy, holds, _ = PROPERTIES[name]
    began = time.monotonic()
    done = 0
    while done < count:
        size = min(ROUND, count - done)

        @seed(done)
        @settings(
            max_examples=size,
            deadline=timedelta(seconds=10),
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def check(value: object) -> None:
            holds(value)

        check()
        done += size
        print(f"\r{name}: {done} of {count}", end="", flush=True)
    return time.monotonic() - began


def main() -> int:
    """Run as the command line says."""
    arguments = sys.argv[1:]
    count = 1_000_000
    if arguments and arguments[0].isdigit():
        count = int(arguments.pop(0))
    unknown = [name for name in arguments if name not in PROPERTIES]
    if unknown:
        print(f"fuzz: no property {', '.join(unknown)} (there are {', '.join(PROPERTIES)})", file=sys.stderr)
        return 2
    for name in arguments or PROPERTIES:
        seconds = run(name, count)
        print(f"\r{name}: {count} inputs, no crash, no hang, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

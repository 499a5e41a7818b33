"""The loop of scripts/fuzz: generated inputs to each property until the count is reached.

Of each hundred, hypothesis makes one from scratch; the others are its kin, cut, joined and broken by a
generator of their own, at a hundredth of the time. A failure among the first is made small by hypothesis,
one among the others is shown whole.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

from fuzz_properties import PROPERTIES
from hypothesis import HealthCheck, Phase, given, seed, settings

KIN = 99
ROUND = 100 * (KIN + 1)
# An input that takes so long is a hang: far above the slowest, even on a busy machine.
TOO_LONG = 10.0
STUCK = 120.0
LONGEST = 4096
NUMBERS = (0, 1, -1, 7, 4095, 4096, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**40)
CHARACTERS = "\0\t\n\r \"'(),./:;<=>[]{}\\|*%#@!-+_0179afxzKMG\x1b\x7fé\u2028\U0001f600\ufeff"


class Broken(Exception):
    """An input broke a property."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name}: {why}: {value!r}")


def kin(value: Any, others: list[Any], rng: random.Random) -> Any:
    """Return a relative of `value`: of its shape, with parts changed, lost, doubled or from `others`."""
    other = rng.choice(others)
    if isinstance(value, str):
        return _text(value, other if isinstance(other, str) else "", rng)
    if isinstance(value, bytes):
        return _bytes(value, other if isinstance(other, bytes) else b"", rng)
    if isinstance(value, list):
        return _list(value, other if isinstance(other, list) else [], rng)
    if isinstance(value, dict):
        return _dict(value, other if isinstance(other, dict) else {}, rng)
    if isinstance(
        value, tuple
    ):  # of the same types at each place; numbers keep the range that hypothesis gave
        return tuple(
            theirs if isinstance(mine, int) else kin(mine, [theirs], rng)
            for mine, theirs in zip(value, other, strict=True)
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return rng.choice(
            [rng.choice(NUMBERS), value + rng.randint(-2, 2), value ^ (1 << rng.randrange(70)), other]
        )
    return other


def _cut(length: int, rng: random.Random) -> tuple[int, int]:
    first = rng.randint(0, length)
    return first, min(length, first + rng.choice([1, 2, 4, 16, 64, length]))


def _text(value: str, other: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        a, b = _cut(len(value), rng)
        c, d = _cut(len(other), rng)
        number = str(rng.choice(NUMBERS))
        noise = "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(1, 4)))
        middle = rng.choice(
            ["", value[a:b] * 2, other[c:d], other[c:d], value[a:b] + other[c:d], number, noise]
        )
        value = value[:a] + middle + value[b:]
    return value[:LONGEST]


def _bytes(value: bytes, other: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        a, b = _cut(len(value), rng)
        c, d = _cut(len(other), rng)
        number = str(rng.choice(NUMBERS)).encode()
        noise = rng.randbytes(rng.randint(1, 8))
        middle = rng.choice(
            [b"", value[a:b] * 2, other[c:d], other[c:d], value[a:b] + other[c:d], number, noise]
        )
        value = value[:a] + middle + value[b:]
    return value[:LONGEST]


def _list(value: list[Any], other: list[Any], rng: random.Random) -> list[Any]:
    made = list(value)
    for _ in range(rng.randint(1, 3)):
        what = rng.randrange(4)
        at = rng.randint(0, len(made))
        if what == 0:
            del made[at : at + 1]
        elif what == 1 and other:
            made.insert(at, rng.choice(other))
        elif at < len(made):
            made[at] = kin(made[at], other or made, rng)
    return made[:32]


def _dict(value: dict[str, Any], other: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    made = dict(value)
    for _ in range(rng.randint(1, 3)):
        what = rng.randrange(5)
        key = rng.choice([*made, *other]) if made or other else ""
        if what == 0:
            made.pop(key, None)
        elif what == 1 and other:
            taken = rng.choice(list(other))
            made[taken] = other[taken]
        elif what == 2 and key in made:
            made[_text(key, key, rng)] = made.pop(key)
        elif key in made:
            made[key] = kin(made[key], [*other.values()] or [*made.values()], rng)
    return dict(list(made.items())[:16])


def run(name: str, count: int) -> float:
    """Give `count` inputs to one property; return the seconds it took. Raises what breaks it."""
    strategy, holds, _ = PROPERTIES[name]
    began = time.monotonic()
    made: list[Any] = []
    done = 0
    while done < count:
        size = min(ROUND, count - done)
        made.clear()

        @seed(done)
        @settings(
            max_examples=-(-size // (KIN + 1)),
            deadline=timedelta(seconds=TOO_LONG),
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def check(value: Any) -> None:
            holds(value)
            made.append(value)

        faulthandler.dump_traceback_later(STUCK, exit=True)
        check()
        rng = random.Random(f"{name}/{done}")
        for number in range(size - len(made)):
            if number % 100 == 0:
                faulthandler.dump_traceback_later(STUCK, exit=True)
            value = kin(made[number % len(made)], made, rng)
            before = time.monotonic()
            try:
                holds(value)
            except Exception as error:
                raise Broken(name, value, f"{type(error).__name__}: {error}") from error
            if (took := time.monotonic() - before) > TOO_LONG:
                raise Broken(name, value, f"{took:.0f} s")
        faulthandler.cancel_dump_traceback_later()
        done += size
        print(f"\r{name}: {done} of {count}", end="", flush=True)
    return time.monotonic() - began


def main() -> int:
    """Run as the command line says."""
    faulthandler.enable()
    if "TMPDIR" not in os.environ and os.access("/dev/shm", os.W_OK):
        tempfile.tempdir = "/dev/shm"  # a disk takes ten times as long for a folder that comes and goes
    arguments = sys.argv[1:]
    count = 1_000_000
    if arguments and arguments[0].isdigit():
        count = int(arguments.pop(0))
    unknown = [name for name in arguments if name not in PROPERTIES]
    if unknown:
        print(f"fuzz: no property {', '.join(unknown)} (there are {', '.join(PROPERTIES)})", file=sys.stderr)
        return 2
    for name in arguments or PROPERTIES:
        try:
            seconds = run(name, count)
        except Broken as broken:
            print(f"\n{broken}", file=sys.stderr)
            return 1
        print(f"\r{name}: {count} inputs, no crash, no hang, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What measurements are made of: rows, the bare counterparts in C, and the register of measurements.

A file `measure_NAME.py` beside this one adds a measurement:

    from measuring import Row, Work, measurement

    @measurement("what it measures, in one line", where="guest")
    def name(work: Work) -> list[Row]:
        ...

`where="guest"` runs it as root in the lab's guest, which has a soft-RoCE device; all of them share one boot.
`where="host"` runs it here. A C file beside it is compiled to a program that `work.bare("file", …)` starts.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
WHERES = ("host", "guest")
_Program = TypeVar("_Program", bound="Bare")


@dataclass
class Row:
    """One line of the table. `ours` and `bare` are in seconds, or None; `value` is a ratio or has a `unit`.

    `bound`: the most that `value` may be, None: none is set.
    """

    what: str
    value: float
    unit: str = ""
    bound: float | None = None
    ours: float | None = None
    bare: float | None = None
    spread: tuple[float, float] | None = None

    @property
    def within(self) -> bool:
        """Whether the bound holds."""
        return self.bound is None or self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"within": self.within}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Row:
        """Make a row from `as_json`'s value."""
        value = {key: item for key, item in value.items() if key != "within"}
        spread = value["spread"]
        return cls(**{**value, "spread": tuple(spread) if spread else None})


def ratio(what: str, pairs: Sequence[tuple[float, float]], bound: float | None) -> Row:
    """Return the row of measured pairs (ours, bare): the median of their ratios, with the spread."""
    ratios = [ours / bare for ours, bare in pairs]
    return Row(
        what,
        statistics.median(ratios),
        bound=bound,
        ours=statistics.median(ours for ours, _ in pairs),
        bare=statistics.median(bare for _, bare in pairs),
        spread=(min(ratios), max(ratios)),
    )


def least(what: str, pairs: Sequence[tuple[float, float]], bound: float | None) -> Row:
    """Return the row of measured pairs (ours, bare): the least of the one over the least of the other.

    What else runs on the machine, and below it, only ever adds. The spread is that of the pairs' ratios.
    """
    ours, bare = min(one for one, _ in pairs), min(other for _, other in pairs)
    ratios = [one / other for one, other in pairs]
    return Row(what, ours / bare, bound=bound, ours=ours, bare=bare, spread=(min(ratios), max(ratios)))


class Bare:
    """A bare program in C: for each number that it reads it does its loop that often and prints the seconds.

    So the two sides of a ratio are measured by turns, whatever else the machine does meanwhile.
    """

    def __init__(self, program: Path, *arguments: str) -> None:
        self._program = program
        self._process = subprocess.Popen(
            [program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, count: int) -> float:
        """Do the loop `count` times; return the seconds that it took. Raises SystemExit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(count, file=self._process.stdin, flush=True)
            return float(self._process.stdout.readline())
        except (OSError, ValueError):
            raise SystemExit(f"bench: {self._program.name} failed (exit {self._process.wait()})") from None

    def quickest(self, turns: int, count: int) -> float:
        """Return the seconds of one time round, out of the quickest of `turns` turns of `count` each."""
        return min(self.seconds(count) for _ in range(turns)) / count

    def __enter__(self: _Program) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class Pace(Bare):
    """The program `pace`: how long a system call that does next to nothing takes just now."""

    CALLS = 2000

    def around(self, timed: Callable[[], float]) -> tuple[float, float]:
        """Return the seconds that `timed` says, and the mean of such a call right before and after it."""

        def call() -> float:
            self.seconds(self.CALLS)  # what ran before has left its caches cold
            return self.seconds(self.CALLS) / self.CALLS

        before = call()
        return timed(), (before + call()) / 2


class Paced:
    """Times loops that cannot take turns, by the pace of this machine right before and after each.

    A virtual machine's pace changes twofold within seconds, with what else its host does.
    """

    def __init__(self, work: Work) -> None:
        self._pace = Pace(work.program("pace"))
        self._quickest = float("inf")

    def __enter__(self) -> Paced:
        return self

    def __exit__(self, *_: object) -> None:
        self._pace.__exit__()

    def loop(self, loop: Bare, turns: int, count: int) -> float:
        """Return how many trivial system calls take as long as one time round: the median of the turns."""
        values = []
        for _ in range(turns):
            seconds, call = self._pace.around(lambda: loop.seconds(count))
            self._quickest = min(self._quickest, call)
            values.append(seconds / count / call)
        return statistics.median(values)

    def row(self, what: str, pairs: Sequence[tuple[float, float]], bound: float | None) -> Row:
        """Return the row of pairs of what `loop` gave, in seconds at the best pace that was seen."""
        return ratio(what, [(ours * self._quickest, bare * self._quickest) for ours, bare in pairs], bound)


@dataclass(frozen=True)
class Work:
    """What a measurement works with. `directory`: a place for its files that guest and host share."""

    directory: Path
    rounds: int
    kernel: str
    accel: str

    def bare(self, name: str, *arguments: str) -> Bare:
        """Start the compiled counterpart `NAME.c`."""
        return Bare(self.program(name), *arguments)

    def program(self, name: str) -> Path:
        """Return where the compiled `NAME.c` lies."""
        return self.directory / name

    def compile(self) -> None:
        """Compile every C file. Raises SystemExit."""
        for source in sorted(HERE.glob("*.c")):
            target = str(self.program(source.stem))
            command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-o", target, str(source), "-libverbs"]
            if subprocess.run(command, check=False).returncode:
                raise SystemExit(f"bench: {source} does not compile")


@dataclass(frozen=True)
class Measurement:
    """A registered measurement."""

    name: str
    about: str
    where: str
    measure: Callable[[Work], Iterable[Row]]


_registered: dict[str, Measurement] = {}


def measurement(about: str, *, where: str) -> Callable[[Callable[[Work], Iterable[Row]]], Measurement]:
    """Register a function as a measurement under its own name."""
    assert where in WHERES, where

    def register(function: Callable[[Work], Iterable[Row]]) -> Measurement:
        made = Measurement(function.__name__, about, where, function)
        _registered[made.name] = made
        return made

    return register


def all_measurements() -> dict[str, Measurement]:
    """Load every `measure_*.py` and return the measurements by name."""
    sys.path.insert(0, str(HERE))
    for file in sorted(HERE.glob("measure_*.py")):
        if file.stem not in sys.modules:
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[file.stem] = module
            spec.loader.exec_module(module)
    return _registered

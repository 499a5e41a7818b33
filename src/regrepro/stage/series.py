"""Many registrations in a row: the first as any other, the rest at the speed of C, each with its own line.

A registration with all that the record can hold of it costs more than the call itself. A loop of hundreds is
there for the calls: `registered` lines hold what is different in each, the page states before and after the
series stand once beside them. One that is refused is tried once more with everything looked at.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regrepro.errors import UsageError
from regrepro.record import encode
from regrepro.stage.ports import Device

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer
    from regrepro.stage.registrations import Registration
    from regrepro.stage.stage import Stage


@dataclass(frozen=True)
class Refusal:
    """What ended a series: which of its registrations, where, and why."""

    number: int
    address: int
    length: int
    errno: int
    seconds: float


class Series:
    """A series of registrations: true when all of `count` succeeded.

    `succeeded` is the number of those that did, `refused` the registration that was tried in full after one
    that failed (it may have succeeded: then the refusal was a passing one), `errno` what the first refusal
    said.
    """

    def __init__(self, stage: Stage, number: int, buffer: Buffer, count: int) -> None:
        self._stage = stage
        self._kept: Any = None
        self._regions: list[Any] = []
        self._first: Registration | None = None
        self.id = number
        self.buffer = buffer
        self.count = count
        self.succeeded = 0
        self.errno: str | None = None
        self.refused: Registration | None = None

    def __bool__(self) -> bool:
        return self.succeeded == self.count

    def deregister(self) -> None:
        """Deregister what the series keeps; nothing to do where it keeps nothing."""
        if self._first is not None:
            self._first.deregister()
        if self._kept is None and not self._regions:
            return
        self._stage._end_series(self)


def run(
    stage: Stage, made: Series, *, length: int, access: tuple[str, ...] | None, keep: bool
) -> dict[str, Any]:
    """Run a series; return what the event of its end says of it. Raises `RecordProblem`."""
    buffer, device = made.buffer, stage.backend.device()
    ranges = buffer.length // length
    flags = access if access is not None else device.default_access
    first = stage.register(buffer, access=flags, length=length)
    begun = time.perf_counter()
    facts: dict[str, Any] = {"verb": first.verb, "access": flags}
    if not first:
        made.errno, made.refused = first.errno, first
        return facts | {"seconds": 0.0}
    made.succeeded = 1
    if keep:
        made._first = first
    else:
        first.deregister()
    if made.count > 1:
        run_rest = getattr(device, "register_series", None)
        if run_rest is not None:
            _in_c(stage, made, run_rest, length=length, ranges=ranges, access=flags, keep=keep)
        else:
            _in_python(stage, made, device, length=length, ranges=ranges, access=flags, keep=keep)
    facts["seconds"] = round(time.perf_counter() - begun, 6)
    if not made:
        made.refused = stage.register(
            buffer, access=flags, offset=made.succeeded % ranges * length, length=length
        )
    return facts


def _in_c(
    stage: Stage, made: Series, call: Any, *, length: int, ranges: int, access: tuple[str, ...], keep: bool
) -> None:
    writer = stage._writer
    text = encode({**stage._labels, "series": made.id})[1:-1]
    number = 1
    while number < made.count:
        with writer.handle() as record:
            made._kept, end = call(
                made.buffer.address,
                length,
                ranges=ranges,
                access=access,
                first=number,
                count=made.count,
                labels=text,
                record=record,
                kept=made._kept if keep else None,
                keep=keep,
            )
        number = end.number
        made.succeeded = number
        if end.where == "repair":
            stage.note("another writer of this record was killed in the middle of a line; it was put right")
            continue
        if end.where == "record":
            raise writer.refused(end.errno)
        if end.where in ("register", "deregister"):
            address = made.buffer.address + number % ranges * length
            refusal = Refusal(number, address, length, end.errno, end.seconds)
            made.errno = stage._refused_in_series(made, end.where, refusal)
        return


def _in_python(
    stage: Stage, made: Series, device: Device, *, length: int, ranges: int, access: Any, keep: bool
) -> None:
    for number in range(1, made.count):
        address = made.buffer.address + number % ranges * length
        begun = time.perf_counter()
        try:
            region = device.register(device.verb, address, length, iova=address, access=access, fd=None)
        except OSError as error:
            refusal = Refusal(number, address, length, error.errno or 0, time.perf_counter() - begun)
            made.errno = stage._refused_in_series(made, "register", refusal)
            return
        stage._event(
            "registered",
            series=made.id,
            number=number,
            address=address,
            length=length,
            errno=None,
            lkey=region.lkey,
            rkey=region.rkey,
            seconds=round(time.perf_counter() - begun, 9),
        )
        made.succeeded += 1
        if keep:
            made._regions.append(region)
        else:
            region.deregister()


def check(buffer: Buffer, count: int, length: int | None) -> int:
    """Return the length of each range in bytes. Raises `UsageError`."""
    size = buffer.length if length is None else length
    if count < 1:
        raise UsageError("register_many() registers once at least", hint="write register_many(buffer, 200)")
    if size < 1 or size > buffer.length:
        raise UsageError(
            f"ranges of {size} bytes do not fit into a buffer of {buffer.length}",
            hint="leave length out to register the whole buffer each time",
        )
    return size

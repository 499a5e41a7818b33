"""The stage: what a scenario's body calls. Memory, pins and registrations, each step recorded when it
happens.

A step that the kernel refuses is data: it goes into the record with its errno, the object that it returns is
false, and the body goes on. Only a precondition that is not met (`Unmet`) or a mistake in the body ends a
pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from regrepro.errors import Unmet, UsageError
from regrepro.errors import errno_name as name_of
from regrepro.kernel import own_process
from regrepro.record import RecordWriter
from regrepro.scenario import Change, Value
from regrepro.stage import buffers, own_pin, pins, series
from regrepro.stage.buffers import BACKINGS, Buffer, Place
from regrepro.stage.pages import Look, PageStates
from regrepro.stage.pins import Pin
from regrepro.stage.ports import (
    PAGE_SIZE,
    PIN_OWNERS,
    Backend,
    HeldPin,
    PageState,
    Range,
    Tracer,
    register_whole,
)
from regrepro.stage.registrations import Registration
from regrepro.stage.series import Series

if TYPE_CHECKING:
    from regrepro.stage.cuda_memory import CudaMemory
    from regrepro.stage.faults import Faults

__all__ = ["Buffer", "Pin", "Registration", "Series", "Stage"]

_Result = TypeVar("_Result")

# Above this many pages, reference counts are read only where they can say something: a pin is held, or a
# refusal.
_ALWAYS_COUNT_PAGES = 1024

# Of a pass' first registrations the trace is kept also where they succeed; a loop of many need not pay for
# it.
_TRACED_SUCCESSES = 16

# Lines of /proc/self/maps that an event holds at most.
_MAPPINGS = 64

# A harness' own pin that the kernel does not offer at all: nothing was learnt of the bug.
_NOT_OFFERED = {
    "ENOSYS": "use a kernel with CONFIG_CROSS_MEMORY_ATTACH, CONFIG_USERFAULTFD and CONFIG_IO_URING",
    "EPERM": "run as root, or set vm.unprivileged_userfaultfd=1 and kernel.io_uring_disabled=0",
    "EACCES": "run as root",
}


def errno_name(error: OSError) -> str:
    """Return the name of an error's number, such as `ENOMEM`."""
    return name_of(error.errno or 0)


class Stage:
    """One pass through a scenario's body. Made by the runner, in the process of the pass."""

    def __init__(
        self,
        backend: Backend,
        writer: RecordWriter,
        *,
        scenario: str,
        variant: str = "default",
        control: str | None = None,
        body_variant: str = "",
        change: Change | None = None,
        tracer: Tracer | None = None,
        trace_status: dict[str, Any] | None = None,
        options: Mapping[str, Value] | None = None,
    ) -> None:
        self.backend = backend
        self.page_size = PAGE_SIZE
        self._writer = writer
        self._labels = {"scenario": scenario, "variant": variant, "control": control}
        self._body_variant = body_variant  # another one's, in a control that is another scenario
        self._change = change
        self._options = dict(options or {})
        self._tracer = tracer
        # What stands in the place of a trace where there is no tracer.
        self._no_trace = trace_status or {"status": "off", "why": "no trace was asked for"}
        self._buffers: list[Buffer] = []
        self._pins: list[Pin] = []
        self._registrations: list[Registration] = []
        self._series: list[Series] = []
        self._count = {"buffer": 0, "pin": 0, "registration": 0, "series": 0}
        self._pages = PageStates(backend)
        self._locked = own_process.Locked()

    # What a body calls

    @property
    def faults(self) -> Faults:
        """The faults that can be planted; in the control `change(fault="none")` none is."""
        from regrepro.stage.faults import Faults

        change = self._change
        return Faults(self, planted=change is None or change.variable != "fault")

    @property
    def cuda(self) -> CudaMemory:
        """CUDA's own memory: `cudaHostAlloc`, device memory, dma-buf descriptors."""
        from regrepro.stage.cuda_memory import CudaMemory

        return CudaMemory(self)

    @property
    def control(self) -> str | None:
        """The name of the control that this pass is, None in the scenario itself."""
        return self._labels["control"]

    @property
    def variant(self) -> str:
        """The name of the variant whose body runs; `default` where the scenario has none."""
        return self._body_variant or str(self._labels["variant"])

    def option(self, name: str) -> Any:
        """Return the value of one of the scenario's own options: its default, or what `--option` says."""
        if name not in self._options:
            raise UsageError(f"the scenario has no option {name!r}", hint="declare it: options={…}")
        return self._options[name]

    def buffer(
        self,
        *,
        pages: int | None = None,
        length: int | None = None,
        place: Place = "any",
        backing: str = "anonymous",
        node: int | None = None,
    ) -> Buffer:
        """Make a buffer of `pages` pages or `length` bytes (rounded up to pages), populated and filled.

        `place`: `unpinnable` (or `cma`, `movable-zone`: of that kind only), `ordinary`, `any`, or a pattern:
        `{"unpinnable": [3]}` (page 3, the others ordinary), `{"cma": 5}` (the first five). `backing`:
        anonymous, thp, memfd, shm, hugetlb or file. `node`: on this NUMA node. On a node that provably has no
        unpinnable memory the pages are ordinary ones. Raises `Unmet` where the pages cannot be placed.
        """
        size = buffers.size_of(pages, length)
        if backing not in BACKINGS:
            raise UsageError(f"backing={backing!r} is not known", hint=f"one of {', '.join(BACKINGS)}")
        asked = self._place(place)
        number = self._next("buffer")
        try:
            memory, placed, facts = buffers.make(self.backend, size, asked, backing, number, node)
        except OSError as error:
            raise Unmet(
                "memory",
                f"{size} bytes of {backing} memory: {errno_name(error)}, {error.strerror or error}",
                "free memory on this machine, or see what this backing needs",
            ) from None
        return self._add(Buffer(self, number, memory, backing, placed), asked, facts)

    def adopt(
        self, memory: Range, backing: str, *, place: Place = "any", placed: str = "as-allocated"
    ) -> Buffer:
        """Make a buffer of memory that was mapped elsewhere, as it is. The stage unmaps it."""
        return self._add(Buffer(self, self._next("buffer"), memory, backing, placed), place, {})

    def pin(
        self,
        buffer: Buffer,
        kind: str | None = None,
        *,
        pages: Sequence[int] | None = None,
        by: Callable[[int, int], Any] | None = None,
    ) -> Pin:
        """Pin a buffer, or some of its pages. True while it is held.

        `kind`: `pin` (FOLL_PIN without FOLL_LONGTERM, as NVIDIA's older drivers do), `get` (FOLL_GET),
        `longterm` (FOLL_PIN with FOLL_LONGTERM, as fixed drivers do) or `none`; left out, the pin of this
        run. `by`: code of the scenario's own that pins, called with address and length, which returns what
        lets go: a function, or an object with `release()`; `kind` is then what it is expected to do.
        """
        default, default_owner = self.backend.default_pin()
        owner = default_owner
        wanted = kind or default
        if wanted not in pins.KINDS:
            raise UsageError(f"kind={wanted!r} is not known", hint=f"one of {', '.join(pins.KINDS)}")
        if self._change is not None and self._change.variable == "pin":
            wanted, by = self._change.value, None
        if wanted == "none":
            owner = "none"
        elif by is not None:
            owner = own_pin.OWNER
        elif kind is not None or wanted != default:
            owner = PIN_OWNERS[wanted]
        ranges = pins.ranges_of(pages, buffer)
        made = Pin(self, self._next("pin"), buffer, wanted, owner)
        where: dict[str, Any] = {"offset": ranges[0][0], "length": ranges[0][1]}
        if pages is not None:
            where = {"ranges": [list(item) for item in ranges]}
        before = after = self._pages.look(buffer)
        if wanted == "none":
            self._record_pin(made, before, after, api=None, trace=None, stand_in=None, **where)
            return made
        checksum = buffer.checksum()
        held: list[HeldPin] = []

        def take() -> None:
            for offset, length in ranges:
                start = buffer.address + offset
                if by is not None:
                    held.append(own_pin.OwnPin(by, start, length))
                elif owner == default_owner and kind is None:
                    held.append(self.backend.hold_default(start, length))
                else:
                    held.append(self.backend.hold(wanted, start, length))

        error, trace, seconds = self._call(take, stack=True)
        where["api"] = held[0].api if held else None
        if error is not None:
            pins.abandon(held)
            made.errno = errno_name(error)
        made._held = held
        after = self._pages.look(buffer)
        if held:
            self._pins.append(made)
        self._record_pin(
            made,
            before,
            after,
            **where,
            **pins.refusal_facts(error),
            seconds=seconds,
            checksum=checksum,
            trace=trace,
            stand_in=owner if owner not in ("cuda", own_pin.OWNER) else None,
        )
        if made.errno in _NOT_OFFERED and owner in PIN_OWNERS.values():
            raise Unmet(
                f"a pin by {owner}", str(error.strerror or error) if error else "", _NOT_OFFERED[made.errno]
            )
        return made

    def register(
        self,
        buffer: Buffer,
        verb: str | None = None,
        *,
        access: Sequence[str] | None = None,
        offset: int = 0,
        length: int | None = None,
        iova: int | None = None,
        address: int | None = None,
        fd: int | None = None,
    ) -> Registration:
        """Register a buffer, or `length` bytes of it from `offset` on. Never raises for an errno.

        `verb`: ibv_reg_mr_iova2 (the default with an RDMA device), ibv_reg_mr, ibv_reg_dmabuf_mr (with `fd`),
        pyverbs.MR, or io_uring_register_buffers (where there is no device). `access`: names of verbs' flags
        without IBV_ACCESS_; NCCL's by default. `iova` is the address by default. `address` registers another
        address than the buffer's own.
        """
        device = self.backend.device()
        if verb is None or (device.stand_in == "io-uring" and verb == "ibv_reg_mr_iova2"):
            verb = device.verb
        if verb not in device.verbs:
            raise Unmet(
                "rdma" if device.name == "io_uring" else "verb",
                f"{device.name} does not register by {verb}",
                f"it knows {', '.join(device.verbs)}",
            )
        flags = tuple(access) if access is not None else device.default_access
        start = address if address is not None else buffer.address + offset
        size = length if length is not None else buffer.length - offset
        target = iova if iova is not None else start
        made = Registration(self, self._next("registration"), buffer, verb=verb, address=start, length=size)
        held = [pin for pin in self._pins if pin]
        counts = bool(held) or buffer.pages <= _ALWAYS_COUNT_PAGES
        # What a long loop of large registrations would spend most of its time on.
        may_infer = not counts and buffer.backing == "anonymous"
        look = self._pages.look
        before = self._pages.look_again(buffer) if may_infer else look(buffer, counts=counts)
        alive_before = [pin.alive() for pin in held]
        limits = self._locked.read()

        def call() -> None:
            made._region = device.register(verb, start, size, iova=target, access=flags, fd=fd)

        error, trace, seconds = self._call(call, success_is_plain=made.id > _TRACED_SUCCESSES)
        alive_after = [pin.alive() for pin in held]
        refused: dict[str, Any] = {}
        if error is not None:
            made.errno = errno_name(error)
            refused = self._of_refusal(start, size)
            limits["vmpin_after"] = self._locked.read().get("vmpin", 0)
        else:
            self._registrations.append(made)
        if may_infer and error is None:
            after = self._pages.look_again(buffer)
        else:
            after = look(buffer, counts=counts or error is not None)
        self._event(
            "register",
            registration=made.id,
            buffer=buffer.id,
            verb=verb,
            device=device.name,
            address=start,
            length=size,
            iova=target,
            access=flags,
            errno=made.errno,
            lkey=made.lkey,
            rkey=made.rkey,
            seconds=seconds,
            pins=[
                {"pin": pin.id, "alive_before": was, "alive_after": still}
                for pin, was, still in zip(held, alive_before, alive_after, strict=True)
            ],
            trace=trace,
            stand_in=device.stand_in,
            limits=limits,
            **refused,
            **self._pages.around(buffer, before, after),
        )
        return made

    def register_many(
        self,
        buffer: Buffer,
        count: int,
        *,
        length: int | None = None,
        access: Sequence[str] | None = None,
        keep: bool = False,
    ) -> Series:
        """Register `count` times in a row, whole or by ranges of `length` bytes that are taken by turns.

        The first is a registration as `register` makes it; the others get a short line each, written when it
        happened, and cost little more than the call. The first refusal ends the series, and is tried once
        more by `register`. Each is deregistered before the next one unless `keep`.
        """
        size = series.check(buffer, count, length)
        made = Series(self, self._next("series"), buffer, count)
        flags = tuple(access) if access is not None else None
        before = self._pages.look(buffer, counts=False)
        self._series.append(made)
        facts = series.run(self, made, length=size, access=flags, keep=keep)
        self._event(
            "register-many",
            series=made.id,
            buffer=buffer.id,
            count=count,
            length=size,
            keep=keep,
            succeeded=made.succeeded,
            errno=made.errno,
            **facts,
            **self._pages.around(buffer, before, self._pages.look(buffer, counts=False)),
        )
        return made

    def release(self, pin: Pin) -> None:
        """Release a pin without a byte of the buffer changed. The same as `pin.release()`."""
        if pin not in self._pins:
            return
        self._pins.remove(pin)
        was_alive = pin.alive()
        checksum_before = pin.buffer.checksum()
        error = pins.let_go(pin._held)
        checksum_after = pin.buffer.checksum()
        self._event(
            "release",
            pin=pin.id,
            errno=errno_name(error) if error is not None else None,
            checksum_before=checksum_before,
            checksum_after=checksum_after,
            was_alive=was_alive,
            stand_in=pin.owner if pin.owner != "cuda" else None,
            **self._pages.keys("after", pin.buffer, self._pages.look(pin.buffer)),
        )

    def deregister(self, registration: Registration) -> None:
        """Deregister. The same as `registration.deregister()`."""
        region, registration._region = registration._region, None
        if region is None:
            return
        self._registrations.remove(registration)
        errno = None
        try:
            region.deregister()
        except OSError as error:
            errno = errno_name(error)
        self._event("deregister", registration=registration.id, errno=errno)

    def transfer(self, registration: Registration, opcode: str = "RDMA_WRITE") -> bool:
        """Move the registration's bytes over a queue pair in loopback to other memory, and compare them.

        `opcode`: RDMA_WRITE or RDMA_READ. Returns whether they arrived intact. Raises `Unmet` without an RDMA
        device.
        """
        if opcode not in ("RDMA_WRITE", "RDMA_READ"):
            raise UsageError(f"opcode={opcode!r} is not known", hint="RDMA_WRITE or RDMA_READ")
        if registration._region is None:
            raise UsageError("transfer() needs a registration that succeeded", hint="test it by `if`")
        device = self.backend.device()
        size = -(-registration.length // PAGE_SIZE) * PAGE_SIZE
        scratch = self.backend.allocate(size, "anonymous")
        errno, intact = None, False
        try:
            scratch.populate()
            target = register_whole(device, scratch.address, size)
            try:
                device.transfer(registration._region, target, registration.length, opcode)
                intact = self.backend.view(registration.address, registration.length) == self.backend.view(
                    scratch.address, registration.length
                )
            finally:
                target.deregister()
        except OSError as error:
            errno = errno_name(error)
        finally:
            scratch.close()
        self._event(
            "transfer",
            registration=registration.id,
            opcode=opcode,
            bytes=registration.length,
            errno=errno,
            intact=intact,
        )
        return intact

    def renew(self, buffer: Buffer, place: Place = "any") -> None:
        """Give an anonymous buffer new pages, placed as asked; its addresses stay. Raises `Unmet`."""
        if buffer.backing != "anonymous":
            raise UsageError(
                "renew() is for anonymous buffers", why=f"buffer {buffer.id} is {buffer.backing}"
            )
        for pin in [pin for pin in self._pins if pin.buffer is buffer]:
            self.release(pin)
        asked = self._place(place)
        memory, placed, facts = buffers.make(self.backend, buffer.length, asked, "anonymous", fill=buffer.id)
        try:
            self.backend.move(memory.address, buffer.address, buffer.length)
        finally:
            memory.close()
        self._pages.moved(buffer)
        self._event(
            "step",
            name="renew",
            buffer=buffer.id,
            place=asked,
            placed=placed,
            **({"search": facts} if facts else {}),
            **self._pages.keys("pages", buffer, self._pages.look(buffer)),
        )

    def look(self, buffer: Buffer) -> PageState | None:
        """Read and record where a buffer's pages lie now; None where that cannot be read."""
        seen = self._pages.look(buffer)
        self._event("step", name="look", buffer=buffer.id, **self._pages.keys("pages", buffer, seen))
        return seen.state

    def note(self, text: str) -> None:
        """Record something worth telling a person."""
        self._event("note", text=" ".join(str(text).split()), stand_in=None)

    def step(self, name: str, **keys: Any) -> None:
        """Record anything else that the body does, with what it saw."""
        taken = sorted({"seq", "t", "event", "scenario", "variant", "control"} & set(keys))
        if taken:
            raise UsageError(f"step() cannot take the key {taken[0]!r}", hint="the record has it already")
        self._event("step", name=name, **keys)

    def unmet(self, need: str, why: str, how: str) -> NoReturn:
        """End the pass: a precondition is not met. `how` says how to meet it."""
        raise Unmet(need, why, how)

    # What the runner calls

    def finish(self) -> None:
        """Deregister, release and free what the body left, and record it."""
        for kept in list(self._series):
            kept.deregister()
        for registration in list(self._registrations):
            self.deregister(registration)
        for pin in list(self._pins):
            self.release(pin)
        for buffer in list(self._buffers):
            self._free(buffer)
        self._locked.close()
        self.backend.close()

    # Within

    def _place(self, place: Place) -> Place:
        """Return the place that is asked for in this pass: a control may change it."""
        changed = self._change is not None and self._change.variable == "place" and place != "any"
        return self._change.value if self._change is not None and changed else place

    def _add(self, made: Buffer, asked: Place, search: dict[str, Any], **more: Any) -> Buffer:
        """Take a buffer into the pass and record it, with its pages and facts of the search for them."""
        if not made.freed:
            self._buffers.append(made)
        seen = self._pages.look(made)
        self._event(
            "buffer",
            buffer=made.id,
            address=made.address,
            length=made.length,
            page_size=PAGE_SIZE,
            backing=made.backing,
            owner=made.owner,
            place=buffers.place_as_record(asked, made.pages),
            placed=made.placed,
            vma=made._memory.vma(),
            stand_in=made.stand_in,
            **more,
            **({"search": search} if search else {}),
            **self._pages.keys("pages", made, seen),
        )
        self._note_fresh_pages(made, seen.state)
        return made

    def _record_pin(self, made: Pin, before: Look, after: Look, **keys: Any) -> None:
        self._event(
            "pin",
            pin=made.id,
            buffer=made.buffer.id,
            kind=made.kind,
            owner=made.owner,
            errno=made.errno,
            **(self._pages.around(made.buffer, before, after) | keys),
        )

    def _event(self, event: str, /, **keys: Any) -> int:
        seq = self._writer.event(event, **self._labels, **keys)
        self._pages.recorded(seq)
        return seq

    def _refused_in_series(self, made: Series, what: str, end: series.Refusal) -> str:
        """Record that one of a series was refused, or could not be taken back; return the errno's name."""
        errno = name_of(end.errno)
        self._event(
            {"register": "registered", "deregister": "deregistered"}[what],
            series=made.id,
            number=end.number,
            address=end.address,
            length=end.length,
            errno=errno,
            seconds=round(end.seconds, 9),
        )
        return errno

    def _end_series(self, made: Series) -> None:
        errno = None
        try:
            if made._kept is not None:
                made._kept.dereg()
            for region in made._regions:
                region.deregister()
        except OSError as error:
            errno = errno_name(error)
        made._kept, made._regions = None, []
        self._event("deregister-many", series=made.id, errno=errno)

    def _next(self, what: str) -> int:
        self._count[what] += 1
        return self._count[what]

    def _free(self, buffer: Buffer) -> None:
        if buffer.freed:
            return
        for pin in [pin for pin in self._pins if pin.buffer is buffer]:
            self.release(pin)
        buffer.freed = True
        self._buffers.remove(buffer)
        self._pages.freed(buffer)
        buffer._memory.close()
        self._event("free", buffer=buffer.id, stand_in=buffer.stand_in)

    def _call(
        self, call: Callable[[], None], *, stack: bool = False, success_is_plain: bool = False
    ) -> tuple[OSError | None, Any, float]:
        """Make one call of ours into the kernel: its refusal, the kernel's trace of it, and its seconds.

        `stack`: have kernel stacks in the trace, which name the driver that pins. `success_is_plain`: the
        trace of a success is not wanted.
        """
        token = self._tracer.begin(stack=stack) if self._tracer is not None else None
        refusal: OSError | None = None
        start = time.perf_counter()
        try:
            call()
        except OSError as error:
            refusal = error
        seconds = time.perf_counter() - start
        trace = self._no_trace
        if self._tracer is not None:
            trace = self._tracer.end(token, succeeded=success_is_plain and refusal is None)
        return refusal, trace, round(seconds, 9)

    def _of_refusal(self, address: int, length: int) -> dict[str, Any]:
        """What is mapped where a registration was refused, and whether this kernel refuses such a mapping."""
        lines = self.backend.mappings(address, length)
        facts: dict[str, Any] = {"mappings": lines[:_MAPPINGS] if lines is not None else None}
        if any(line.split(maxsplit=2)[1].startswith(("rw-s", "-w-s", "rwxs")) for line in lines or ()):
            facts["refuses_writable_files"] = own_process.refuses_writable_files()
        return facts

    def _note_fresh_pages(self, buffer: Buffer, state: PageState | None) -> None:
        """Say so where fresh pages bear a reference of the kernel's own: it is nobody's pin."""
        refcount, mapcount = getattr(state, "refcount", None), getattr(state, "mapcount", None)
        if refcount is None or mapcount is None or buffer.backing != "anonymous":
            return
        fresh = int(((refcount == 2) & (mapcount == 1)).sum())
        if fresh:
            self.note(
                f"{fresh} of {buffer.pages} pages of buffer {buffer.id} have a reference count of 2: "
                "freshly touched pages wait in a per-CPU LRU batch, which the kernel drains before it "
                "pins or moves them"
            )

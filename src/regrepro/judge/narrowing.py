"""What a failed call's trace leaves of the layers where none is proven, and what excludes the others.

A trace that is not complete, as one that somebody pasted, excludes nothing by what it does not show, but for
a function that it shows elsewhere. Each conclusion is one of the order in which the kernel works: the request
is looked at, the limit is checked, pages are pinned, then mapped, then the device makes its MR
(`ib_uverbs_reg_mr`, drivers/infiniband/core/uverbs_cmd.c; `__ib_umem_get_va`, core/umem.c).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from regrepro.errors import errno_name
from regrepro.judge.layer_table import ROWS, At, MemoryKind, Release
from regrepro.judge.tracefacts import Trace
from regrepro.kernel_functions import Family, first_release_with, of_family

ENOMEM, EFAULT, EPERM = -12, -14, -1
_PIN = (Family.GUP, Family.TAKES_PINS, Family.GUP_PATH)
_IN_PIN = (*_PIN, Family.LONGTERM, Family.UNPINNABLE)
NEWEST: Release = (99, 0)
_PIN_NAMES = frozenset(of_family(*_PIN))


@dataclass(frozen=True)
class Layer:
    """A layer, why it is this one, how that is known (`observed`, `inferred`), and the kernel source."""

    name: str
    why: str
    how: str = "observed"
    source: str = ""


@dataclass(frozen=True)
class Decision:
    """What failed. `layer`: the one that is named, or None; then `candidates` are left, `why` says why no
    fewer, and `excluded` why it is none of the others.
    """

    layer: Layer | None
    candidates: tuple[str, ...]
    why: str = ""
    excluded: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: Layer) -> Decision:
        """Return the decision that it is this layer."""
        return cls(layer, (layer.name,), layer.why)


def narrow(
    trace: Trace,
    errno: str,
    memory: MemoryKind | None,
    kernel: Release | None = None,
    *,
    io_uring: bool = False,
) -> Decision:
    """Say which layers fit a call that failed with `errno` ("": not told), and what excludes the others; or
    name the one whose own function the trace shows to have failed.

    `kernel`: the release, where it is known; else the functions of this call say which it is at least.
    """
    shown = _shown(trace)
    if shown is not None:
        return Decision.of(Layer(*shown))
    pin, umem = trace.failed(*_IN_PIN), trace.failed(Family.UMEM, Family.IO_PIN)
    if memory is not MemoryKind.DMABUF and (trace.pinned if pin is None else pin != EFAULT):
        memory = MemoryKind.HOST  # of a GPU's address GUP knows no page
    told = _errno(pin) or _errno(umem) or errno
    at, why, gone = _place(trace, pin, umem, io_uring=io_uring)
    since = kernel or first_release_with({name for name, _ in trace.returns})
    candidates, excluded = [], {}
    for row in ROWS[:-1]:
        if not row.gives(told, memory):
            excluded[row.name] = row.why_not(told, memory)
        elif at and not set(at) & set(row.at):
            excluded[row.name] = gone
        elif row.not_on(told, since, kernel or NEWEST):
            excluded[row.name] = f"this kernel does not give {told} for it"
        else:
            candidates.append(row.name)
    if pin is not None:
        few, few_why = _in_pin(trace, pin)
        gone = "the trace shows another place within the pin"
        excluded |= {name: gone for name in candidates if few and name not in few}
        candidates, why = [name for name in candidates if not few or name in few], few_why or why
    excluded.pop("cuda-pin", None)
    return Decision(None, tuple(candidates), why, excluded)


def _errno(value: int | None) -> str:
    return errno_name(-value) if value is not None else ""


def _shown(trace: Trace) -> tuple[str, str] | None:
    """The layer whose own function the trace shows to have failed, and why; most are in no trace of ours."""
    locks = trace.of(Family.GPU_PIN)
    if locks and locks[-1] != 0:
        return "cuda-pin", f"os_lock_user_pages returned {locks[-1]:#x}: the driver's own pin failed"
    pin = trace.failed(*_IN_PIN)
    if pin is not None and trace.failed(Family.CGROUP) is not None:
        return "memory-cgroup", "the page could not be charged to the memory cgroup"
    if pin == ENOMEM and trace.left_behind:
        why = f"migrate_pages left {trace.left_behind} behind: something held these pages, and what it was is"
        return "page-migration", f"{why} not told"
    if pin is not None and not trace.migrations and 0 in trace.of(Family.TARGET):
        return "migration-target", "no page to move to could be allocated"
    if pin is None and trace.failed(Family.UMEM) is not None:
        if trace.failed(Family.SG_TABLE) is not None:
            return "umem-alloc", "the scatter list could not be allocated"
        if trace.failed(Family.UMEM) == EPERM and trace.of(Family.MLOCK)[-1:] == [0]:
            return "memlock-accounting", "can_do_mlock said no: RLIMIT_MEMLOCK is 0 without CAP_IPC_LOCK"
    return None


def _place(
    trace: Trace, pin: int | None, umem: int | None, *, io_uring: bool
) -> tuple[tuple[At, ...], str, str]:
    """Where the call failed, as far as the trace tells: there, why, and what that says of other places."""
    pinned = trace.pinned
    if pin is not None:
        why = "pinning failed; what inside it failed is not told"
        return (At.PIN,), why, "the trace shows that pages were being pinned"
    if pinned and io_uring:
        why = "io_uring pinned the pages, and looked at them and at the limit then"
        return (At.CHECK, At.PIN, At.MAP), why, "the trace shows that the pages were pinned"
    if pinned and umem is not None:
        gone = "the trace shows that pinning succeeded, and that ib_umem_get failed"
        return (At.MAP,), "the pages were pinned; what failed came after", gone
    if umem == EPERM:
        return (At.CHECK,), "ib_umem_get refused before pinning", "the trace shows that ib_umem_get failed"
    if umem is not None and trace.in_sight & _PIN_NAMES:
        gone = "pin_user_pages_fast is traced and was not called"
        return (At.CHECK,), "ib_umem_get failed before it pinned anything", gone
    if umem is not None:
        gone = "the trace shows that ib_umem_get failed, which comes before it"
        return (At.CHECK, At.PIN, At.MAP), "ib_umem_get failed; whether it got to pin is not told", gone
    if pinned or trace.of(Family.UMEM):
        gone = "the trace shows that the memory was pinned"
        return (At.MAP, At.DEVICE), "the memory was pinned; what failed came after", gone
    return (), "", ""


def _in_pin(trace: Trace, pin: int) -> tuple[tuple[str, ...], str]:
    """Which layers within the pin fit what it shows, () for all of them, and why."""
    move = ("page-migration", "migration-target")
    if pin == EFAULT:
        refused = "check_vma_flags refused the mapping: a file that is written, or a mapping of a device"
        seen = trace.failed(Family.MAPPING_CHECK) is not None
        return (), refused if seen else "the pages could not be had at that address"
    last = trace.migrations[-1] if trace.migrations else None
    if pin == ENOMEM and last is not None and last.returned == ENOMEM:
        return move, "migrate_pages returned -ENOMEM on a huge page: held, or nothing to move to"
    if pin == ENOMEM and last is not None and last.failed:
        return move, "pages could not be migrated; what migrate_pages returned would tell why"
    if pin == ENOMEM and trace.failed(Family.LONGTERM, Family.UNPINNABLE) is not None:
        why = "the long-term check failed; what migrate_pages returned would tell why"
        # What moves pages is called once all of them could be had (__gup_longterm_locked).
        left = (*move, "memory-cgroup")
        return left if trace.of(Family.UNPINNABLE) else (*left, "longterm-refused"), why
    return (), ""

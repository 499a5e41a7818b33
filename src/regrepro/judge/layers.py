"""The deepest failing layer of a call that failed.

Each rule looks at the trace, the page state and what was asked for, never at the errno alone, and names a
layer only where these leave no other. What they cannot tell apart is `unknown`, with what is missing. Rules
marked "never exercised" have no planted fault: nothing that runs without the hardware makes the kernel fail
there. A pasted log goes through the same rules, as a call of which only the trace is known, or the errno
alone; where no rule names a layer, judge/narrowing.py says which are left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from regrepro.judge.facts import Buffer, Facts, Pass, Pin, Registration
from regrepro.judge.layer_table import BY_NAME, MemoryKind, Release
from regrepro.judge.narrowing import Decision, Layer, narrow
from regrepro.judge.owners import held_now
from regrepro.judge.pagestate import whole_number
from regrepro.judge.rules import TRANSIENT
from regrepro.judge.spans import Spans, pages_text
from regrepro.judge.tracefacts import Trace
from regrepro.kernel_functions import Family

MOVE_REFUSED = (
    "migrate_pages, mm/migrate.c: a page is isolated for the move, which takes one reference more (1,025 "
    "become 1,026), then unmapped; while it bears any that neither isolation nor a cache explains, it stays"
)
"""Why a page that is held stays. `collect_longterm_unpinnable_folios` (mm/gup.c) has `folio_isolate_lru`
(mm/vmscan.c) take a reference; `__migrate_folio` (mm/migrate.c) holds what is left after unmapping against
`folio_expected_ref_count` (include/linux/mm.h) and answers -EAGAIN. That function is in no trace of ours:
what is observed is the count of pages that `migrate_pages` returns.
"""
UINT_MAX, SIZE_MAX = 2**32 - 1, 2**64 - 1
UNLIMITED = 2**64
DMABUF_VERB = "ibv_reg_dmabuf_mr"
_NOT_RECORDED = object()
ENOMEM, EFAULT, EINVAL, EPERM, EOPNOTSUPP = -12, -14, -22, -1, -95
# Access flags that ib_access_writable (include/rdma/ib_verbs.h) counts.
WRITES = frozenset({"LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_ATOMIC", "MW_BIND"})
# Those that a device must have a capability for (ib_check_mr_access there).
SPECIAL = frozenset({"ON_DEMAND", "HUGETLB", "ZERO_BASED", "FLUSH_GLOBAL", "FLUSH_PERSISTENT"})


# uname -r of kernel.org's and Debian's own kernels; vendors take changes back into older versions.
_KNOWN_KERNEL = re.compile(
    r"(\d+)\.(\d+)(?:\.\d+)?(?:-rc\d+)?(?:(?:\+deb\d+|-\d+)+-(?:cloud-|rt-)?(?:amd64|arm64|686\S*|armmp\S*))?"
)
# Shared mappings of what is never written back to a disk (`vma_needs_dirty_tracking`, mm/vma.c).
_NEVER_WRITTEN_BACK = ("/memfd:", "/dev/", "/SYSV", "/anon_hugepage", "/secretmem", "anon_inode:", "[")


@dataclass(frozen=True)
class Call:
    """A call that failed, as the rules see it."""

    facts: Facts
    run: Pass
    registration: Registration
    buffer: Buffer | None
    log: bool = False
    """It stands in somebody's log: what that does not show may have been there."""
    memory: MemoryKind | None = None
    """What a log says was registered."""

    @classmethod
    def of_log(cls, trace: Trace, verb: str, errno: str, memory: MemoryKind | None) -> Call:
        """Return a call of which a log tells no more than this; `errno` "" where it tells none."""
        if "dmabuf" in verb or trace.of(Family.DMABUF, Family.DMABUF_REQUEST):
            verb, memory = DMABUF_VERB, MemoryKind.DMABUF
        elif trace.of(Family.IO_URING, Family.IO_PIN):
            verb = "io_uring_register_buffers"
        asked = Registration(0, 0, 0, verb, errno=errno, trace=trace)
        facts = Facts({}, [], None, [], None, [], {})
        return cls(facts, Pass("", "", None), asked, None, log=True, memory=memory)

    @property
    def trace(self) -> Trace:
        """What the kernel said during the call."""
        return self.registration.trace

    @property
    def page(self) -> int:
        """The page size in bytes; `classify` gives up before a rule is asked where no one says it."""
        return (self.facts.page_size or (self.buffer.page_size if self.buffer else 0)) or 1

    @property
    def pages(self) -> int | None:
        """How many pages the call asks for."""
        return self.registration.pages_of(self.page)

    @property
    def capable(self) -> bool | None:
        """Whether the process had CAP_IPC_LOCK; None where that is not recorded."""
        given = self._setting("capabilities", self.facts.node.get("capabilities"))
        if not isinstance(given, (list, tuple)):
            return None
        names = {name.lower().removeprefix("cap_") for name in given if isinstance(name, str)}
        return "ipc_lock" in names

    @property
    def memlock(self) -> int | None:
        """The soft RLIMIT_MEMLOCK in bytes; UNLIMITED where there is none; None where not recorded."""
        limits = self.facts.node.get("limits")
        if not isinstance(limits, Mapping):
            limits = {}
        value = self._setting("memlock_soft", limits.get("memlock_soft", _NOT_RECORDED))
        if value is None or value in ("unlimited", "infinity", -1):
            return UNLIMITED
        return whole_number(value)

    @property
    def pinned_before(self) -> int | None:
        """Pages that the kernel counted as pinned by the process (mm->pinned_vm, `VmPin`) when the call
        began; None where that is not recorded, or changed meanwhile. io_uring checks an account of the user.
        """
        limits = self.registration.limits.get("limits")
        if not isinstance(limits, Mapping) or not self.registration.through_umem:
            return None
        counted, later = whole_number(limits.get("vmpin")), limits.get("vmpin_after", limits.get("vmpin"))
        return counted // self.page if counted is not None and later == counted else None

    @property
    def locked_before(self) -> int:
        """Pages of this pass' own registrations that were still there: at least these are counted."""
        return sum(
            Call(self.facts, self.run, other, self.buffer).pages or 0
            for other in self.run.registrations
            if other.seq < self.registration.seq
            and other.succeeded
            and not (other.deregistered is not None and other.deregistered < self.registration.seq)
        )

    @property
    def stopped(self) -> int | None:
        """The address of the page at which pinning stopped, where the trace shows it."""
        stop = self.trace.stop
        return stop.address // self.page * self.page if stop and stop.address is not None else None

    @property
    def writes(self) -> bool | None:
        """Whether the pages were to be pinned for writing: as the trace shows it, else by the access flags
        (`ib_access_writable`, include/rdma/ib_verbs.h; before 6.2 umem.c asked for it in any case).
        """
        if self.trace.stop is not None and self.trace.stop.write is not None:
            return self.trace.stop.write
        if not self.registration.through_umem:
            return True  # io_pin_pages, io_uring/rsrc.c
        return None if self.registration.access is None else bool(set(self.registration.access) & WRITES)

    def page_index(self, address: int) -> int | None:
        """The buffer's page that an address lies in; None where it is in none."""
        buffer = self.buffer
        if buffer is None or not buffer.address <= address < buffer.address + buffer.length:
            return None
        return (address - buffer.address) // self.page

    def _setting(self, name: str, otherwise: Any) -> Any:
        """The latest word on a setting: of the call itself, of a step before it, of the header."""
        own = self.registration.limits
        limits = own.get("limits")
        for source in (own, limits if isinstance(limits, Mapping) else {}):
            if name in source:
                return source[name]
        value = otherwise
        for step in self.run.steps:
            seq = whole_number(step.get("seq"))
            if name in step and seq is not None and seq < self.registration.seq:
                value = step[name]
        return value


def arguments(call: Call) -> Layer | None:
    """What was asked for is refused before a page is looked at.

    `__ib_umem_get_va` (drivers/infiniband/core/umem.c): address + length overflows, or no page, or more
    than UINT_MAX pages → -EINVAL. `ib_uverbs_reg_mr` (core/uverbs_cmd.c): address and iova differ within
    the page → -EINVAL. `ib_check_mr_access` (include/rdma/ib_verbs.h; inline, so that no trace shows it):
    remote write or atomic without local write → -EINVAL, flags that the device has not → -EINVAL or
    -EOPNOTSUPP. `rxe_reg_user_mr` (sw/rxe/rxe_verbs.c): flags outside of RXE_ACCESS_SUPPORTED_MR →
    -EOPNOTSUPP.
    """
    reg, trace = call.registration, call.trace
    if reg.verb == DMABUF_VERB or reg.errno not in ("EINVAL", "EOPNOTSUPP", "EOVERFLOW", "ENOTSUP"):
        return None
    if trace.of(Family.GUP) and not trace.failed(Family.GUP):
        return None
    how = "observed" if trace.absent(Family.GUP) else "inferred"
    access = set(reg.access or ())
    if "ON_DEMAND" in access and (reg.address, reg.length) == (0, SIZE_MAX):
        # Address 0 and all lengths ask for the whole address space.
        why = "implicit on-demand paging is not supported by this device"
        return Layer("arguments", why, how, "rxe_reg_user_mr, drivers/infiniband/sw/rxe; ib_check_mr_access")
    if reg.errno == "EINVAL":
        return _invalid(call, access, how)
    if trace.failed(Family.UMEM) is not None and "ON_DEMAND" not in access:
        return None  # the RDMA core's own refusal, which no flag of the request explains
    if trace.absent(Family.GUP) or "ON_DEMAND" in access:
        source = "rxe_reg_user_mr, drivers/infiniband/sw/rxe/rxe_verbs.c; ib_check_mr_access"
        flags = ", ".join(reg.access or ()) or "none"
        why = f"the device refuses these access flags ({flags}) before a page is pinned"
        return Layer("arguments", why, how, source)
    return None


def _invalid(call: Call, access: set[str], how: str) -> Layer | None:
    """What of a request is invalid (-EINVAL)."""
    reg, trace, source = call.registration, call.trace, "__ib_umem_get_va, drivers/infiniband/core/umem.c"
    address, length, iova = reg.address, reg.length, reg.iova
    if address is not None and length is not None and call.pages is not None:
        if address + length + call.page > 2**64:
            return Layer("arguments", "address and length together overflow", "inferred", source)
        if call.pages == 0:
            return Layer("arguments", "no byte at the begin of a page is no page", how, source)
        if call.pages > UINT_MAX:
            return Layer("arguments", f"{length} bytes are more than UINT_MAX pages", how, source)
        if iova is not None and (address ^ iova) % call.page:
            source = "ib_uverbs_reg_mr, drivers/infiniband/core/uverbs_cmd.c"
            return Layer("arguments", "address and iova differ within the page", "inferred", source)
    source = "ib_check_mr_access, include/rdma/ib_verbs.h"
    if access & {"REMOTE_WRITE", "REMOTE_ATOMIC"} and "LOCAL_WRITE" not in access:
        return Layer("arguments", "remote write without local write is refused", "inferred", source)
    special = access & SPECIAL
    if special and trace.complete and not trace.driver() and trace.absent(Family.GUP):
        names = ", ".join(sorted(special))
        why = f"uverbs refuses the access flags ({names}) before it asks the driver"
        return Layer("arguments", why, "inferred", source)
    return None


def memlock_accounting(call: Call) -> Layer | None:
    """The locked-memory budget is checked before any page is pinned.

    `__ib_umem_get_va` (drivers/infiniband/core/umem.c): `can_do_mlock()` (mm/mlock.c) is false with
    RLIMIT_MEMLOCK 0 and without CAP_IPC_LOCK → -EPERM; mm->pinned_vm and the pages asked for exceed the limit
    without CAP_IPC_LOCK → -ENOMEM. io_uring: `__io_account_mem` (io_uring/rsrc.c) → -ENOMEM. Pages that are
    mapped on demand, and those of a dma-buf, are not counted.

    Where it is not recorded what pinned_vm was, the function's own -ENOMEM before its first call of GUP
    leaves two other causes: a structure and one page of kernel memory, which an ordinary process always gets
    (`should_reclaim_retry`, mm/page_alloc.c: such small orders are tried until there is one).
    """
    reg, trace = call.registration, call.trace
    limit, capable, pages = call.memlock, call.capable, call.pages
    if reg.errno not in ("ENOMEM", "EPERM") or limit is None or capable is not False or pages is None:
        return None
    if reg.verb == DMABUF_VERB or "ON_DEMAND" in (reg.access or ()):
        return None
    # The RDMA core counts before it pins; io_uring pins first and counts then.
    if trace.of(Family.GUP) and (reg.through_umem or trace.failed(Family.GUP) is not None):
        return None
    if reg.through_umem and trace.fine(Family.UMEM):
        return None  # what counts did not fail, or was not even called
    how = "observed" if trace.absent(Family.GUP) else "inferred"
    source = "__ib_umem_get_va, drivers/infiniband/core/umem.c"
    if not reg.through_umem:
        source = "__io_account_mem, io_uring/rsrc.c"
    if reg.errno == "EPERM":
        if limit:
            return None
        return Layer("memlock-accounting", "RLIMIT_MEMLOCK is 0 and CAP_IPC_LOCK is missing", how, source)
    counted = call.pinned_before
    locked, allowed = call.locked_before if counted is None else counted, limit // call.page
    asked = pages_text(pages)
    if locked + pages > allowed:
        added = f" and {locked} pinned before" if locked else ""
        why = f"{asked}{added} exceed the {allowed} that RLIMIT_MEMLOCK allows, and CAP_IPC_LOCK is missing"
        return Layer("memlock-accounting", why, how, source)
    early = reg.through_umem and trace.absent(Family.GUP) and trace.failed(Family.UMEM) == ENOMEM
    if counted is None and early and limit < UNLIMITED:
        why = (
            f"no page was pinned yet, CAP_IPC_LOCK is missing, and RLIMIT_MEMLOCK allows {allowed} pages, of "
            "which it is not recorded how many were pinned before"
        )
        return Layer("memlock-accounting", why, "inferred", source)
    return None


def device(call: Call) -> Layer | None:
    """The device is gone or may not be used: no handler of the registration runs.

    A context of a device that was removed answers -EIO (`ib_uverbs_ioctl`, `ib_uverbs_write` in
    drivers/infiniband/core/uverbs_main.c and uverbs_ioctl.c, after `ib_uverbs_remove_one`). The device
    node's own permissions give -EACCES at open, before there is any registration.
    """
    reg, trace = call.registration, call.trace
    if call.log:
        return None
    if reg.errno in ("EIO", "ENODEV", "ENXIO") and not trace.driver() and not trace.of(Family.GUP):
        how = "observed" if trace.absent(Family.GUP) else "inferred"
        source = "ib_uverbs_write and ib_uverbs_ioctl, drivers/infiniband/core"
        return Layer("device", "the device answered that it is gone before a page was looked at", how, source)
    if reg.errno in ("EACCES", "EPERM") and not trace.driver() and not trace.of(Family.GUP):
        opened = any(step.get("errno") in ("EACCES", "EPERM") for step in call.run.steps)
        if reg.errno == "EACCES" or opened:
            why = "the device's node may not be opened by this user"
            return Layer("device", why, "inferred", "ib_uverbs_open, drivers/infiniband/core/uverbs_main.c")
    return None


def dma_buf(call: Call) -> Layer | None:
    """A dma-buf cannot be had or mapped.

    `UVERBS_METHOD_REG_DMABUF_MR` (drivers/infiniband/core/uverbs_std_types_mr.c): a provider without
    `reg_user_mr_dmabuf` → -EOPNOTSUPP, before the fd is looked at. `ib_umem_dmabuf_get_with_dma_device`
    (core/umem_dmabuf.c): `dma_buf_get` (drivers/dma-buf/dma-buf.c) → -EBADF for no fd, -EINVAL for another
    kind; a range outside → -EINVAL; attach and map pass on the exporter's errno.
    """
    reg, trace = call.registration, call.trace
    if reg.verb != DMABUF_VERB:
        return None
    source = "UVERBS_METHOD_REG_DMABUF_MR, drivers/infiniband/core/uverbs_std_types_mr.c"
    failed = trace.failed(Family.DMABUF)
    if failed is not None:
        source = "ib_umem_dmabuf_get_with_dma_device, drivers/infiniband/core/umem_dmabuf.c"
        return Layer("dma-buf", f"the dma-buf could not be attached or mapped ({failed})", "observed", source)
    if call.log:
        return None
    if reg.errno == "EOPNOTSUPP" and not trace.driver():
        seen = trace.failed(Family.DMABUF_REQUEST) == EOPNOTSUPP or trace.absent(Family.DMABUF)
        how = "observed" if trace.complete and seen else "inferred"
        return Layer("dma-buf", "the provider or the driver has no dma-buf support", how, source)
    if reg.errno == "EBADF":
        return Layer("dma-buf", "the descriptor is no open dma-buf", "inferred", source)
    return None


def migration_target(call: Call) -> Layer | None:
    """There was no page to move to: `migrate_pages` itself returned -ENOMEM, because
    `alloc_migration_target` (mm/migrate.c) gave none (for huge pages: no free huge page outside,
    mm/hugetlb.c).

    For a transparent huge page the target is allocated before the references are looked at
    (`migrate_folio_unmap`), so with references above the baseline both causes fit and the trace does not
    decide.
    """
    if not (call.trace.complete or call.log) or call.trace.last_migration != ENOMEM:
        return None
    large = call.buffer is not None and call.buffer.backing == "thp"
    if large and _held_beyond_baseline(call):
        return None
    if call.log and (call.trace.migrations[-1].large or call.trace.failed(Family.GUP) != ENOMEM):
        return None
    source = "migrate_pages and alloc_migration_target, mm/migrate.c"
    return Layer("migration-target", "migrate_pages returned -ENOMEM: no page to move to", "observed", source)


def page_migration(call: Call) -> Layer | None:
    """Pages would not move because something held them: `migrate_pages` returned a positive count, the
    unmoved pages and no others bore references above their baseline, and the same call succeeded, the pages
    moving, once these were gone. What is seen is the count that `migrate_pages` returns, and the references
    (`MOVE_REFUSED` says why they refuse a move).

    A held pin of the scenario's own is judged by the stricter rules of `reproduced`; this rule names the
    layer for a reference that went by itself.
    """
    reg = call.registration
    if not call.trace.complete or not call.trace.left_behind or reg.before is None or reg.after is None:
        return None
    unmoved = reg.before.unmoved(reg.after) & reg.before.unpinnable & reg.spans
    held = _held_beyond_baseline(call)
    if not unmoved or unmoved - held or (held - unmoved) & reg.before.unpinnable:
        return None
    for later in call.run.registrations:
        if later.seq > reg.seq and later.shape == reg.shape:
            if not later.succeeded or later.before is None or later.after is None:
                return None
            moved = later.before.moved(later.after) & later.after.placed("ordinary")
            if unmoved <= moved:
                why = (
                    f"{unmoved.total} pages bore references beyond what is due and moved once these were gone"
                )
                return Layer("page-migration", why, "observed", MOVE_REFUSED)
            return None
    return None


def bar_map(call: Call) -> Layer | None:
    """A mapping of device registers or a BAR has no pages: VM_IO or VM_PFNMAP → -EFAULT (`check_vma_flags`,
    mm/gup.c). Told by the mapping at which the call stopped: of a device or a PCI resource, or one of frames
    without pages (VmFlags `pf` of smaps).
    """
    if call.registration.errno != "EFAULT" or call.trace.failed(Family.GUP) not in (EFAULT, None):
        return None
    how = "observed" if call.trace.failed(Family.GUP) else "inferred"
    vma = _vma(call)
    path = vma.path if vma else ""
    if re.search(r"/dev/nvidia|/resource\d+(_wc)?$|/dev/mem$|/dev/gdrdrv", path):
        return Layer("bar-map", f"{path} maps a device, not pages", how, "check_vma_flags, mm/gup.c")
    page = call.page_index(call.stopped) if call.stopped is not None else None
    for state in (call.registration.before, call.registration.after):
        if page is not None and state is not None and state.trait("special") & Spans.range(page, page + 1):
            what = f"{path or 'a mapping'} maps frames without pages"
            return Layer("bar-map", what, how, "check_vma_flags, mm/gup.c")
    return None


def peer_memory(call: Call) -> Layer | None:
    """A GPU address without, or refused by, the peer-memory driver (nvidia-peermem's get_pages; without it
    the address falls to `pin_user_pages_fast`, which knows no such page → -EFAULT). Never exercised.
    """
    if call.registration.verb == DMABUF_VERB:
        return None
    failed = call.trace.failed(Family.PEER)
    if failed is not None:
        return Layer("peer-memory", f"the peer-memory driver returned {failed}", "observed", "nvidia-peermem")
    if call.buffer is not None and call.buffer.on_gpu and call.registration.errno in ("EFAULT", "EINVAL"):
        why = "the address is the GPU's, and no peer-memory driver took it"
        return Layer("peer-memory", why, "inferred", "ib_umem_get, drivers/infiniband/core/umem.c")
    return None


def longterm_refused(call: Call) -> Layer | None:
    """The kernel allows no long-term pin for writing of a file that needs dirty tracking: -EFAULT
    (`writable_file_mapping_allowed` in `check_vma_flags`, mm/gup.c, since 6.5); nor of fs-dax, for reading
    either: -EOPNOTSUPP (`vma_is_fsdax` there; `check_dax_vmas` in 5.10).

    A hugetlb page in unpinnable memory is refused with -ENOMEM, and no move is tried, where
    `follow_hugetlb_page` (mm/hugetlb.c, 5.12 to 6.5) takes it by what takes none of these
    (judge/layer_table.py has the commits): seen on 6.1, with a warning of the kernel's own.
    """
    reg, trace = call.registration, call.trace
    if reg.errno == "ENOMEM" and call.buffer is not None and call.buffer.backing == "hugetlb":
        stuck = reg.before.unpinnable & reg.spans if reg.before is not None else Spans()
        untried = trace.absent(Family.MIGRATE) and not trace.migrations
        if stuck and untried and trace.failed(Family.GUP) == ENOMEM:
            why = "the kernel refuses a huge page in unpinnable memory, and does not try to move it"
            return Layer("longterm-refused", why, "observed", "follow_hugetlb_page, mm/hugetlb.c")
        return None
    if reg.errno == "EOPNOTSUPP" and reg.through_umem and trace.failed(Family.GUP) == EOPNOTSUPP:
        why = "the range is of a file in persistent memory (fs-dax), which may not be pinned for long"
        return Layer("longterm-refused", why, "observed", "check_vma_flags, mm/gup.c")
    if reg.errno == "EOPNOTSUPP" and not reg.through_umem and trace.failed(Family.GUP) is None:
        vma = _vma(call)
        if trace.of(Family.GUP) and vma is not None and vma.may_be_written_back:
            why = "io_uring pinned the range and refuses it, since it is of a file"
            return Layer("longterm-refused", why, "inferred", "io_pin_pages, io_uring/rsrc.c, before 6.5")
        return None
    if not _refuses_file(call):
        return None
    how = "observed" if trace.failed(Family.GUP) else "inferred"
    why = "the call stopped at a writable shared mapping of a file, which may not be pinned for long"
    return Layer("longterm-refused", why, how, "check_vma_flags, mm/gup.c")


def _refuses_file(call: Call) -> bool | None:
    """Whether the call stopped because the kernel refuses to pin a file for writing for long; None where the
    record does not decide.

    `check_vma_flags` (mm/gup.c) looks at the mapping before a page of it is looked for, so the refusal comes
    at the mapping's first page, whether or not the file reaches so far. A fault comes at any page, but not at
    one that is there, in a mapping that may be written.
    """
    reg, trace = call.registration, call.trace
    if reg.errno != "EFAULT" or reg.address is None:
        return False
    if trace.complete and trace.failed(Family.GUP) != EFAULT:
        return False
    vma = _vma(call)
    if vma is None or not vma.shared or not vma.writable or call.writes is False:
        return False
    kernel = _kernel_refuses(call)
    if kernel is False:
        return False
    first = max(vma.first, reg.address // call.page * call.page)
    if call.stopped not in (None, first):
        return False
    of_file = call.buffer is not None and call.buffer.backing == "file" and vma.holds(call.buffer.address)
    if not of_file and not vma.may_be_written_back:
        return False
    if call.writes is None:
        return None
    page = call.page_index(first)
    present = reg.before.present if reg.before is not None else Spans()
    there = page is not None and bool(Spans.range(page, page + 1) & present)
    if call.stopped is None and kernel is None:
        there = vma.inside(reg) and reg.spans <= present
    return True if there or (of_file and kernel) else None


def _kernel_refuses(call: Call) -> bool | None:
    """Whether this kernel refuses writable file mappings: by its symbol where that was looked up, else by the
    version of a kernel whose sources are known (kernel.org's, Debian's); None for any other.
    """
    if call.registration.refuses_writable_files is not None:
        return call.registration.refuses_writable_files
    release = known_release(call.facts.kernel)
    return None if release is None else not BY_NAME["longterm-refused"].not_on("EFAULT", release, release)


def known_release(kernel: str) -> Release | None:
    """Return the release of a kernel whose number says what is in it (kernel.org's, Debian's), else None."""
    known = _KNOWN_KERNEL.fullmatch(kernel)
    return (int(known[1]), int(known[2])) if known else None


def page_fault(call: Call) -> Layer | None:
    """The address has no page that may be had: `pin_user_pages_fast` returned -EFAULT.

    No mapping there or a hole in it, protection against writing (`check_vma_flags`, mm/gup.c), an address
    beyond TASK_SIZE (`gup_fast_fallback`), a page beyond the end of the mapped file (VM_FAULT_SIGBUS).
    """
    reg = call.registration
    seen = call.trace.failed(Family.LONGTERM, Family.GUP_PATH, Family.GUP)
    if call.log or reg.errno != "EFAULT" or (call.trace.complete and seen not in (EFAULT, None)):
        return None
    if _refuses_file(call) is None:
        return None
    vma = _vma(call)
    source = "check_vma_flags and __get_user_pages, mm/gup.c"
    how = "observed" if seen == EFAULT else "inferred"
    why = ""
    if vma is not None and vma.holds_start_of(call) and not vma.readable and not vma.writable:
        why = "the mapping allows no access"
    elif vma is not None and vma.holds_start_of(call) and not vma.writable and call.writes is not False:
        why = "the mapping is read-only and the registration wants to write"
    elif vma is None and (call.stopped is not None and reg.mappings is not None):
        why = "nothing is mapped where the call stopped"
    elif vma is not None and not vma.inside(reg) and reg.mappings is None:
        why = "a part of the range is outside of the buffer's mapping"
    elif reg.before is not None and reg.before.placed("absent") & reg.spans:
        why = "a part of the range has no page"
    elif call.buffer is not None and reg.address is not None and reg.length is not None:
        end = call.buffer.address + call.buffer.length
        if not (call.buffer.address <= reg.address and reg.address + reg.length <= end):
            why = "the range goes beyond the buffer"
    if why:
        return Layer("page-fault", why, how, source)
    if seen == EFAULT:
        why = "the kernel found no page that may be pinned at the address"
        return Layer("page-fault", why, "observed", source)
    if call.buffer is None and reg.address is not None:
        return Layer("page-fault", "the range belongs to no buffer", "inferred", source)
    return None


def umem_alloc(call: Call) -> Layer | None:
    """The kernel's own table of pages could not be allocated: GUP succeeded, and
    `sg_alloc_append_table_from_pages` (lib/scatterlist.c) in `__ib_umem_get_va` did not.

    No probe is on that function, which runs in each registration: it follows where the umem failed with
    -ENOMEM after GUP had pinned a part, since only the table comes between two calls of GUP, or all, and the
    mapping for the device, which alone comes after, is in sight and did not fail. Never exercised.
    """
    trace, pages = call.trace, call.pages
    pinned = trace.of(Family.GUP)
    if not trace.complete or trace.failed(Family.UMEM) != ENOMEM or not pinned or min(pinned) <= 0:
        return None
    if pages is None or not (sum(pinned) < pages or trace.fine(Family.DMA_MAP)):
        return None
    source = "__ib_umem_get_va, drivers/infiniband/core/umem.c"
    why = f"{sum(pinned)} of {pages} pages were pinned; what was to hold them could not be allocated"
    return Layer("umem-alloc", why, "inferred", source)


def dma_map(call: Call) -> Layer | None:
    """The pages were pinned, but the device's IOMMU mapping failed (`ib_dma_map_sgtable_attrs`). Never
    exercised: rxe maps virtually. Before 5.15 no function of it can be told from others' use.
    """
    trace = call.trace
    failed = trace.failed(Family.DMA_MAP)
    if failed is None or trace.failed(Family.GUP) is not None:
        return None
    source = "__ib_umem_get_va, drivers/infiniband/core/umem.c"
    return Layer("dma-map", f"mapping the pinned pages for the device failed ({failed})", "observed", source)


def mkey(call: Call) -> Layer | None:
    """The device has no MR left to give: its own allocation failed, before the pages (rxe:
    `rxe_add_to_pool`, sw/rxe/rxe_pool.c, -EINVAL at the limit; `rxe_alloc` → -ENOMEM in 5.10 and 6.1) or
    after them (mlx5: `mlx5_core_create_mkey`, hw/mlx5/mr.c).

    Where that function cannot be seen it follows from the provider's failing with a valid request while
    `ib_umem_get` did not fail: before a page was pinned, or after all were.
    """
    trace = call.trace
    failed = trace.failed(Family.MKEY)
    if failed is not None and trace.failed(Family.GUP) is None:
        why = f"the device could not allocate an MR ({failed})"
        return Layer("mkey", why, "observed", "rxe_add_to_pool, mlx5_core_create_mkey")
    driver = trace.driver()
    if not trace.complete or not driver or driver[-1] >= 0 or driver[-1] == EOPNOTSUPP:
        return None
    if not trace.fine(Family.UMEM):
        return None
    # A valid request: it asks for a number of pages that can be had at all.
    valid = call.pages is not None and 0 < call.pages <= UINT_MAX and (call.registration.length or 0) > 0
    if trace.absent(Family.GUP) and valid:
        why = f"the provider returned {driver[-1]} for a valid request before pinning: it has no MR to give"
        return Layer("mkey", why, "inferred", "rxe_reg_user_mr, drivers/infiniband/sw/rxe/rxe_verbs.c")
    pinned = trace.of(Family.GUP)
    if pinned and pinned[-1] > 0:
        why = f"every page was pinned, and the provider then returned {driver[-1]}"
        return Layer("mkey", why, "inferred", "mlx5_ib_reg_user_mr, drivers/infiniband/hw/mlx5/mr.c")
    return None


RULES: tuple[Callable[[Call], Layer | None], ...] = (
    dma_buf,
    device,
    migration_target,
    page_migration,
    memlock_accounting,
    arguments,
    bar_map,
    peer_memory,
    longterm_refused,
    page_fault,
    umem_alloc,
    dma_map,
    mkey,
)
"""In this order; the first that names a layer has the word. They exclude each other by their conditions: the
order only settles who says it."""


def decide(call: Call) -> Decision:
    """Name the deepest failing layer of a call, or say which are left and what excludes the others."""
    reg, memory = call.registration, call.memory
    if reg.verb == DMABUF_VERB:
        memory = MemoryKind.DMABUF
    elif call.buffer is not None:
        memory = MemoryKind.GPU if call.buffer.on_gpu else MemoryKind.HOST
    kernel = known_release(call.facts.kernel)
    left = narrow(call.trace, reg.errno or "", memory, kernel, io_uring=not reg.through_umem)
    if call.log and left.layer is not None:
        return left
    named = next((layer for rule in RULES if (layer := rule(call)) is not None), None)
    return Decision.of(named) if named is not None else replace(left, layer=None)


def classify(facts: Facts, run: Pass, registration: Registration) -> Layer:
    """Name the deepest failing layer of a registration that failed."""
    call = Call(facts, run, registration, run.buffers.get(registration.buffer))
    if call.page == 1:
        return Layer("unknown", "the record does not say the page size", "missing")
    return decide(call).layer or Layer("unknown", _what_is_missing(call), "missing")


def classify_pin(facts: Facts, run: Pass, pin: Pin) -> Layer:
    """Name the layer of a pin that failed by itself.

    CUDA's own pin, or that of a stand-in for it, is `cuda-pin`: NVIDIA's `os_lock_user_pages` fails when a
    page may not be pinned or cannot be moved. Any other is classified as a registration of its range would
    be.
    """
    if pin.owner == "cuda" or pin.owner.startswith("standin:"):
        said = f"{pin.cuda_error} ({pin.errno})" if pin.cuda_error else pin.errno
        return Layer("cuda-pin", f"the pin of {pin.owner} itself failed with {said}", "observed", pin.api)
    buffer = run.buffers.get(pin.buffer)
    address = length = None
    if buffer is not None and pin.spans:
        address = buffer.address + pin.spans.first * buffer.page_size
        length = (pin.spans.pairs[-1][1] - pin.spans.first) * buffer.page_size
    by_io_uring = pin.owner == "io-uring" or "io_uring" in pin.api  # one that failed has no api
    verb = "io_uring_register_buffers" if by_io_uring else pin.api
    as_call = Registration(
        *(pin.id, pin.seq, pin.buffer, verb, None, address, length, address, None, pin.errno),
        *(pin.before, pin.after, {}, pin.trace, pin.stand_in, pin.spans),
    )
    return classify(facts, run, as_call)


def memory_cgroup(run: Pass) -> Layer | None:
    """The memory cgroup's limit killed the process (`mem_cgroup_out_of_memory`, mm/memcontrol.c): the pass
    ended by SIGKILL and the cgroup's `memory.events` counts an oom_kill.
    """
    end = run.end
    if end is None or end.outcome != "killed" or end.signal not in ("SIGKILL", 9):
        return None
    for source in ({"memory_events": end.memory_events or {}}, *run.steps):
        events = source.get("memory_events", source)
        count = whole_number(events.get("oom_kill")) if isinstance(events, Mapping) else None
        if count:
            why = f"the memory cgroup's limit killed the process (oom_kill {count})"
            return Layer("memory-cgroup", why, "observed", "memory.events of its cgroup")
    return None


def blocked_in_device(run: Pass) -> Layer | None:
    """A wait that nothing ends: removing a device waits for its users (`ib_uverbs_remove_one`,
    drivers/infiniband/core/uverbs_main.c, waits for the last context where the provider cannot disassociate
    it).
    """
    if run.end is None or run.end.outcome != "blocked":
        return None
    stack = run.end.where or ""
    text = " ".join(str(frame) for frame in stack) if isinstance(stack, list) else str(stack)
    waits = r"ib_uverbs_remove_one|ib_unregister_device|disable_device|rxe_dellink|remove_client_context"
    if re.search(waits, text):
        why = (
            "the kernel waits in ib_uverbs_remove_one for a context of the removed device and cannot be freed"
        )
        return Layer("device", why, "observed", "ib_uverbs_remove_one, drivers/infiniband/core/uverbs_main.c")
    return None


@dataclass(frozen=True)
class _Vma:
    first: int
    end: int
    flags: str
    path: str

    @property
    def writable(self) -> bool:
        return "w" in self.flags

    @property
    def readable(self) -> bool:
        return "r" in self.flags

    @property
    def shared(self) -> bool:
        return "s" in self.flags

    @property
    def may_be_written_back(self) -> bool:
        """Whether it may be a mapping of a file on a disk, by its path."""
        return bool(self.path) and not self.path.startswith(_NEVER_WRITTEN_BACK)

    def holds(self, address: int) -> bool:
        return self.first <= address < self.end

    def holds_start_of(self, call: Call) -> bool:
        """Whether the page at which the call stopped, or else the whole range, lies within this mapping."""
        return self.holds(call.stopped) if call.stopped is not None else self.inside(call.registration)

    def inside(self, reg: Registration) -> bool:
        """Whether the registration's range lies within this mapping."""
        if reg.address is None or reg.length is None:
            return False
        return self.first <= reg.address and reg.address + reg.length <= self.end


def _vma(call: Call) -> _Vma | None:
    """The mapping at which the call stopped; where the trace does not show that, the one in which the range
    begins. As it was at the call, else when the buffer was made or a later step told of it.
    """
    at = call.stopped if call.stopped is not None else call.registration.address
    if call.registration.mappings is not None:
        found = (_read_vma(line) for line in call.registration.mappings)
        return next((vma for vma in found if vma is not None and at is not None and vma.holds(at)), None)
    line = call.buffer.vma if call.buffer else ""
    for step in call.run.steps:
        seq, told = whole_number(step.get("seq")), step.get("vma")
        mine = call.buffer is not None and step.get("buffer") == call.buffer.id
        if mine and isinstance(told, str) and seq is not None and seq < call.registration.seq:
            line = told
    return _read_vma(line)


def _read_vma(line: str) -> _Vma | None:
    match = re.match(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([rwxsp-]{4}) \S+ \S+ \S+\s*(.*)", line)
    return _Vma(int(match[1], 16), int(match[2], 16), match[3], match[4]) if match else None


def _held_beyond_baseline(call: Call) -> Spans:
    """Pages of the call that bore more references than what is due and one transient reference explain."""
    reg, buffer = call.registration, call.buffer
    if buffer is None:
        return Spans()
    found = Spans()
    for state in (reg.before, reg.after):
        if state is not None:
            found = found | held_now(state, buffer, reg.spans, TRANSIENT + 1)
    return found


def _what_is_missing(call: Call) -> str:
    trace, reg = call.trace, call.registration
    if trace.status != "complete":
        status = {"absent": "there is no trace", "off": "tracing was off"}.get(
            trace.status, f"the trace is {trace.status}"
        )
        why = f" ({trace.why})" if trace.why and trace.status != "absent" else ""
        return f"{status}{why}, and {reg.errno} alone names no layer"
    if trace.left_behind:
        return f"migrate_pages left {trace.left_behind} behind, but what held them was not seen"
    if trace.last_migration == ENOMEM:
        return "migrate_pages returned -ENOMEM on a huge page that is also held: both causes fit"
    if _refuses_file(call) is None:
        return "the file may end before this page, or the kernel may refuse to pin a file for writing"
    unseen = ", ".join(sorted(trace.missing)) or "none"
    return f"no traced function explains {reg.errno} (functions that this kernel hides: {unseen})"

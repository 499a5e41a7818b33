"""What the kernel and libibverbs tell of a registration that failed, as the engine hands it on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.errors import errno_name

# So long after the kernel's word the library's of the same thread is of the same call, whatever it names.
_SAME_CALL_NS = 100_000_000

# The attributes of requests that are not of struct ib_uverbs_reg_mr: start, length, iova, access, fd; from
# the enums uverbs_attrs_reg_*_cmd_attr_ids in include/uapi/rdma/ib_user_ioctl_cmds.h.
REQUESTS = {
    "ib_uverbs_handler_UVERBS_METHOD_REG_MR": (4, 5, 3, 6, 7),
    "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR": (2, 3, 4, 6, 5),
}


def attribute_index(identifier: int) -> int:
    """Return where an attribute of the core stands in attrs and attr_present: uapi_key_attr() and
    uapi_bkey_attr(), include/rdma/uverbs_ioctl.h; the odd places are of drivers' attributes.
    """
    return identifier << 1


@dataclass
class Inner:
    """One return inside of the kernel during a request. `ns`: boottime clock."""

    ns: int
    function: str
    ret: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class StuckPage:
    """A page that migrate_pages left behind, at that moment. `address`: of its struct page."""

    address: int
    refcount: int
    mapcount: int
    pincount: int
    flags: int


@dataclass
class FailedRegistration:
    """A registration that failed. None where neither the kernel nor the library said it.

    `function`: the kernel's handler, "" where no handler ran. `verb`: the library's, "" where its copy was
    not followed. `pin_calls`, `pinned`: pins inside of the request, and the pages of those that succeeded.
    `process_start`: of its process, ns of boottime, None where unknown; `limits`: at that moment, bytes.
    """

    tid: int
    pid: int
    comm: str
    ns: int
    function: str = ""
    ret: int = 0
    verb: str = ""
    address: int | None = None
    length: int | None = None
    iova: int | None = None
    access: int | None = None
    fd: int | None = None
    uid: int | None = None
    owner: tuple[int | None, str] = (None, "")  # user and container
    process_start: int | None = None
    limits: dict[str, int | None] = field(default_factory=dict)
    pin_calls: int = 0
    pinned: int = 0
    inner: list[Inner] = field(default_factory=list)
    stuck: list[StuckPage] = field(default_factory=list)
    errno_inferred: bool = False
    doubt: str = ""  # why the kernel's part may not be whole
    since: float = 0.0  # time.monotonic() of its arrival
    late: float = 0.0  # seconds that it arrived after it happened
    wait_until: float = 0.0  # for the library's word

    @property
    def dmabuf(self) -> bool:
        """Whether a dma-buf was to be registered."""
        return "DMABUF" in self.function or "dmabuf" in self.verb or self.fd is not None

    @property
    def errno(self) -> str | None:
        """The errno's name; None where nobody said it."""
        return errno_name(-self.ret) if self.ret < 0 else None

    @property
    def errno_how(self) -> str:
        """How the errno is known."""
        if self.errno_inferred:
            return "inferred"
        return "observed" if self.ret < 0 else "missing"

    @property
    def shown_verb(self) -> str:
        """The verb, or what the kernel's handler serves."""
        if self.verb:
            return self.verb
        return "ibv_reg_dmabuf_mr" if self.dmabuf else "ibv_reg_mr"

    def key(self) -> tuple[Any, ...]:
        """What is the same of failures that say the same again."""
        last = self.inner[-1] if self.inner else None
        return self.pid, self.ret, self.function, last.function if last else ""


@dataclass
class Asked:
    """What a failed request had asked for, as the kernel was told. None where it was not."""

    ns: int
    start: int | None
    length: int | None
    iova: int | None
    access: int | None
    fd: int | None
    present: int | None  # bits of attributes; None: those of struct ib_uverbs_reg_mr, which has them all

    def of(self, handler: str) -> Asked:
        """Return it without what the request of this handler did not have."""
        if self.present is None or handler not in REQUESTS:
            return self
        given = (self.start, self.length, self.iova, self.access, self.fd)
        start, length, iova, access, fd = (
            value if self.present >> attribute_index(identifier) & 1 else None
            for value, identifier in zip(given, REQUESTS[handler], strict=True)
        )
        return Asked(self.ns, start, length, iova, access, fd, self.present)


@dataclass
class LibraryWord:
    """libibverbs gave NULL. `given`: the parameters of `verb`, by the names of `FailedRegistration`."""

    tid: int
    pid: int
    ns: int
    verb: str
    given: dict[str, int]

    def is_of(self, failure: FailedRegistration) -> bool:
        """Whether the kernel's failure is of the call that this is the end of."""
        if failure.tid != self.tid or failure.ns > self.ns:
            return False
        pairs = ((failure.address, self.given.get("address")), (failure.length, self.given.get("length")))
        if all(one == other for one, other in pairs if one is not None and other is not None):
            return True
        return self.ns - failure.ns < _SAME_CALL_NS


@dataclass
class Ended:
    """A request that failed, as the kernel says at its end. `since`: when it began, 0 where nobody saw that;
    `pin_calls`, `pinned`, `process_start`, `limits`: as `FailedRegistration` has them.
    """

    tid: int
    pid: int
    comm: str
    ns: int
    since: int
    function: str
    ret: int
    uid: int
    pin_calls: int = 0
    pinned: int = 0
    process_start: int | None = None
    limits: dict[str, int | None] = field(default_factory=dict)


@dataclass
class ShortTermPin:
    """A pin without FOLL_LONGTERM by somebody else's driver. `frames`: PFNs of its pages when it was told, 0
    where there was none; None where they were not read. `ended`: its unpin was seen. `page`: the struct of
    the first that was pinned, 0 where it is not known.
    """

    ns: int
    tid: int
    pid: int
    function: str
    start: int
    pages: int
    flags: int
    stack: list[str]
    frames: NDArray[np.int64] | None = None
    ended: bool = False
    page: int = 0


def limits_of(memlock: int, pinned: int) -> dict[str, int | None]:
    """Return what the kernel told, bytes (-1: unlimited) and pages, as `Process.limits` has it."""
    soft = memlock if memlock >= 0 else None
    return {"memlock_soft": soft, "vmpin": pinned * os.sysconf("SC_PAGE_SIZE")}

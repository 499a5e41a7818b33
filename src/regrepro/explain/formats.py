"""What each tool says when a registration fails, and how to read it.

Messages are those of the tools' public sources: NCCL (src/misc/ibvwrap.cc), aws-ofi-nccl, UCX
(src/uct/ib/base/ib_md.c, src/ucp/core/ucp_mm.c), libfabric (prov/efa, prov/verbs), perftest, PyTorch
(ProcessGroupNCCL), and the kernel's mlx5, ib_core and nvidia-peermem modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from regrepro.explain.text import errno_of
from regrepro.judge.layer_table import LAYERS, MemoryKind
from regrepro.judge.layers import Call, decide
from regrepro.judge.narrowing import Decision, Layer
from regrepro.judge.tracefacts import Trace

HOST = "host"
GPU = "gpu"

REG_CALL = (
    r"(?:ibv_(?:exp_|cmd_)?reg_mr(?:_iova2?|_ex)?|ibv_reg_dmabuf_mr(?:_ex)?|mlx5dv_reg_dmabuf_mr|"
    r"mlx5dv_devx_umem_reg(?:_ex)?|fi_mr_reg(?:v|attr)?)"
)


_KINDS: dict[str | None, MemoryKind] = {HOST: MemoryKind.HOST, GPU: MemoryKind.GPU}


@lru_cache(maxsize=512)
def _decided(call: str, errno: str, buffer: str | None) -> Decision:
    """What the judge says of words without a trace, which thousands of lines may repeat."""
    return decide(Call.of_log(Trace(), call, errno, _KINDS.get(buffer)))


@dataclass
class Failure:
    """One failure as the text tells it; None is "not told". `layer` only where the text itself names the
    place, `left` the layers that it leaves; `trace`: what the kernel returned, as far as it is there.
    """

    tool: str
    call: str
    errno: str | None
    text: str
    device: str | None = None
    buffer: str | None = None
    address: str | None = None
    length: int | None = None
    layer: str | None = None
    layer_why: str = ""
    hints: list[str] = field(default_factory=list)
    left: tuple[str, ...] = ()
    trace: Trace = field(default_factory=Trace)
    consequence: bool = False
    """A second line about a failure that another line told already."""

    def decide(self) -> Decision:
        """Ask the judge which layer it is, or which are left."""
        if self.layer is not None:
            return Decision.of(Layer(self.layer, self.layer_why))
        if self.left:
            gone = [name for name in LAYERS if name not in self.left]
            return Decision(None, self.left, excluded=dict.fromkeys(gone, "the text shows another place"))
        if not self.trace.returns:
            return _decided(self.call, self.errno or "", self.buffer)
        return decide(Call.of_log(self.trace, self.call, self.errno or "", _KINDS.get(self.buffer)))


@dataclass(frozen=True)
class Remark:
    """Something in the text that is no registration failure, but bears on one. `supports` names a cause."""

    kind: str
    text: str
    supports: str | None = None
    why: str = ""


Parsed = Failure | Remark


@dataclass(frozen=True)
class Message:
    """What a tool says: one entry a kind of line. Named groups of `pattern` fill a failure: `call`,
    `number` and `error` (the errno), `device`, `address`, `length`.

    `words`: a line must hold one of them to be looked at, as bytes of it. `remark`: it is no registration
    failure, and of this kind; `why` may name groups. `more` reads what an entry cannot say, and may make it
    something else.
    """

    tool: str
    words: str
    pattern: str
    call: str = ""
    buffer: str | None = None
    layer: str | None = None
    remark: str = ""
    supports: str | None = None
    why: str = ""
    more: Callable[[Failure, re.Match[str], str], Parsed] | None = None
    compiled: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", re.compile(self.pattern))

    def read(self, line: str) -> Parsed | None:
        """Read a line; None where it is no such message."""
        match = self.compiled.search(line)
        if match is None:
            return None
        text, told = line[match.start() :], match.groupdict()
        why = self.why.format(**told)
        if self.remark:
            return Remark(self.remark, text, self.supports, why)
        call, number, length = told.get("call") or self.call, told.get("number"), told.get("length")
        errno = errno_of(f"errno {number}") if number else None
        failure = Failure(
            self.tool,
            call,
            errno or errno_of(told.get("error") or ""),
            text,
            device=told.get("device"),
            buffer=GPU if "dmabuf" in call else self.buffer,
            address=told.get("address"),
            length=int(length) if length else None,
            layer=self.layer,
            layer_why=why,
        )
        return self.more(failure, match, line) if self.more is not None else failure


def _nccl(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    if "NCCL" not in line and "Last error" in line:
        failure.tool = "PyTorch"
    if re.fullmatch(REG_CALL, failure.call):
        return failure
    why = f"{failure.call} is no registration"
    if failure.errno == "ENOMEM" and failure.call in ("ibv_create_cq", "ibv_create_qp", "ibv_create_srq"):
        why = f"{why}; it is charged to the memlock limit, too"
        return Remark("other-verb", failure.text, "memlock-accounting", why)
    return Remark("other-verb", failure.text, None, why)


def _ucx(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    if address := re.search(r"address=(0x[0-9a-f]{1,16})", match["arguments"]):
        failure.address = address[1]
    if length := re.search(r"length=(\d{1,20})", match["arguments"]):
        failure.length = int(length[1])
    devices = r"\b((?:mlx5|mlx4|irdma|bnxt_re|efa|rxe|hns|roce|rocep|ibp|rdmap)\w{1,20})\b[^(]{0,4}$"
    if device := re.search(devices, line[: match.start()]):
        failure.device = device[1]
    limit = re.search(
        r"max locked memory[^(]{0,80}\(?(?:ulimit -l\)[^(]{0,40}\()?\s?current: (\d{1,20}) kbytes", line
    )
    if limit:
        advice = "UCX adds the memlock advice whenever the limit is finite"
        failure.hints += [
            f"{advice} (here {limit[1]} KiB): it is a fact about the limit, not a proof of the cause",
            "memlock-finite",
        ]
    return failure


def _ucx_register(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    """It tells UCX's own status, no errno. Bit 0 of a type is the host (ucs/memory/memory_type.h)."""
    kind = match["kind"] or (match["bits"] and ("host" if int(match["bits"], 16) == 1 else "device"))
    failure.buffer = None if not kind else HOST if kind == "host" else GPU
    failure.consequence = True
    return failure


def _ofi_nccl(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    """NCCL_PTR_HOST 1, NCCL_PTR_CUDA 2, NCCL_PTR_DMABUF 4 (nccl_net.h)."""
    kinds = {"1": HOST, "nccl_ptr_host": HOST, "2": GPU, "4": GPU, "nccl_ptr_cuda": GPU}
    failure.buffer = kinds.get(match["type"].lower().removeprefix("0x"))
    failure.device = f"device {match['device']}"
    failure.errno = failure.errno or errno_of(failure.text)
    return failure


def _efa(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    total = re.search(r"total mr reg size (\d{1,20}), mr reg count (\d{1,20})", line)
    if total:
        failure.hints.append(f"the provider had {total[2]} registrations of {total[1]} bytes in all")
    return failure


def _gdrdrv(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    failure.left = ("bar-map", "peer-memory")
    if failure.errno == "ENOMEM":
        failure.hints.append("the driver answers so where BAR1 has no room left for what is to be mapped")
    return failure


def _follows(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    failure.consequence = True
    return failure


def _verb(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    if "libfabric:" in line:
        failure.tool = "libfabric"
    return failure


def _returned(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    """The kernel tells what one of its functions returned: a trace of one return."""
    failure.trace = Trace("spoiled", "it is a log's", returns=[(failure.call, -abs(int(match["number"])))])
    return failure


def _mooncake(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    if failure.errno == "EFAULT":
        failure.hints.append(
            "memory of CUDA's VMM API (PyTorch's expandable_segments:True) no peer memory registers: try "
            "expandable_segments:False, or DMA-BUF"
        )
    return failure


def _mlx5_command(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    command, status = match["call"].upper(), match["status"].strip()
    number = re.search(r"err\((-?\d{1,4})\)", line)
    failure.call, failure.errno = command, errno_of(f"errno {number[1]}") if number else None
    if command == "CREATE_MKEY":
        failure.layer_why = f"the device answered CREATE_MKEY with {status!r}"
        return failure
    if command in ("MANAGE_PAGES", "QUERY_PAGES"):
        why = f"the device's firmware could not be given pages: {status}"
        return Remark("firmware-pages", failure.text, "mkey", why)
    return Remark("device-command", failure.text, None, f"{command} is no registration")


def _cuda_os(failure: Failure, match: re.Match[str], line: str) -> Parsed:
    failure.left = ("cuda-pin", "unknown")
    failure.hints.append(
        "cudaErrorOperatingSystem says that a call of the system failed inside CUDA; which one is not told"
    )
    return failure


MESSAGES: tuple[Message, ...] = (
    Message(
        "NCCL",
        "_reg_mr|dmabuf_mr|fi_mr_reg|annot allocate memory|locate memory",
        r"[Cc]all to (?P<call>(?:ibv|mlx5dv|ionicdv|fi)_\w{1,40}) failed"
        r"(?: with error (?P<error>[A-Z][\w /.'()-]{2,60}?)(?: errno (?P<number>\d{1,3}))?"
        r"(?=\s*$|\s*[,;\"\\\]\[(]|\s{2}|\.\s|\.$))?",
        more=_nccl,
    ),
    Message(  # mooncake-transfer-engine/src/transport/rdma_transport/rdma_context.cpp
        "Mooncake",
        "to register memory",
        r"rdma_context\.cpp:\d{1,6}\] Failed to register memory (?P<address>0x[0-9a-f]{1,16}): "
        r"(?P<error>[A-Z][\w /]{2,60}?) \[(?P<number>\d{1,3})\]",
        "ibv_reg_mr",
        more=_mooncake,
    ),
    Message(  # vfio_pin_pages_remote() and vfio_lock_acct(), drivers/vfio/vfio_iommu_type1.c
        "kernel",
        "RLIMIT_MEMLOCK",
        r"\b(?P<call>vfio_pin_pages_remote|vfio_pin_page_external|vfio_lock_acct)\b.{0,40}RLIMIT_MEMLOCK "
        r"\((?P<limit>\d{1,20})\) exceeded",
        buffer=HOST,
        layer="memlock-accounting",
        why="VFIO's mapping is charged to the limit of {limit} bytes, which the kernel says is exceeded",
    ),
    Message(
        "VFIO",
        "VFIO_MAP_DMA",
        r"\b(?P<call>VFIO_MAP_DMA)\b.{0,20}failed: (?P<error>[A-Z][\w /]{2,60})",
        buffer=HOST,
        more=_follows,
    ),
    Message(  # gdrdrv's __gdrdrv_pin_buffer()
        "kernel",
        "nvidia_p2p_",
        r"gdrdrv:\w{1,40}:(?P<call>nvidia_p2p_get_pages)\(.{0,200}\) failed \[ret = (?P<number>-\d{1,4})\]",
        buffer=GPU,
        more=_gdrdrv,
    ),
    Message(
        "UCX",
        "_reg_mr|dmabuf_mr|fi_mr_reg|umem_reg",
        rf"(?P<call>{REG_CALL})\((?P<arguments>[^()]{{0,300}})\)\s{{0,4}}failed\s?:\s{{0,4}}"
        rf"(?P<error>[A-Z][\w/ -]{{2,60}})",
        more=_ucx,
    ),
    Message(
        "UCX",
        "to register",
        r"[Ff]ailed to register address (?P<address>0x[0-9a-f]{1,16}) "
        r"(?:\((?P<kind>[\w-]{1,20})\) |mem_type bit (?P<bits>0x[0-9a-f]{1,8}) )?length (?P<length>\d{1,20})"
        r"(?: dmabuf_fd -?\d{1,9})?(?: on md\[\d{1,3}\]=(?P<device>[\w.-]{1,40}))?",
        "uct_md_mem_reg",
        more=_ucx_register,
    ),
    Message(
        "aws-ofi-nccl",
        "to register",
        r"[Uu]nable to register memory \(type = (?P<type>\w{1,20})\) for device (?P<device>\d{1,6})\. RC: "
        r"(?P<number>-?\d{1,4})",
        "fi_mr_regattr",
        more=_ofi_nccl,
    ),
    Message(
        "libfabric",
        "mr_regattr|to register|fi_mr_reg|_reg_mr",
        r":(?P<provider>[\w;]{2,30}):mr:(?P<call>\w{3,50})\(\):\d{1,6}<(?:warn|error|err|alert|crit)\w{0,4}>\s"
        r"(?P<error>(?:[Uu]nable to (?:register|reg)\b|(?:fi|ibv)_\w{1,30}|[Ff]ailed to reg|mr reg).{0,300})",
        more=_efa,
    ),
    Message(
        "perftest",
        "allocate MR|GPU buffer|cuMemAlloc()|ERRNO: ",
        r"Couldn't allocate MR(?! ?s)\b(?: with error=(?P<number>\d{1,3}))?",
        "ibv_reg_mr",
    ),
    Message(
        "kernel",
        "nvidia_p2p_",
        r"(?:nvidia-peermem|nv_peer_mem|nv_mem)\b.{0,120}?[Ee]rror (?P<number>-?\d{1,4}) while calling "
        r"(?P<call>nvidia_p2p_\w{1,40})",
        buffer=GPU,
        more=_returned,
    ),
    Message(
        "kernel",
        "create_mkey|async reg mr",
        r"(?P<device>mlx5_\w{1,20}): (?:create_mkey_callback|reg_mr_callback)\S{0,20}.{0,60}async reg mr "
        r"failed\. status (?P<number>-?\d{1,4})",
        "CREATE_MKEY",
        layer="mkey",
        why="mlx5_ib says that the device refused to create an MKey",
    ),
    Message(
        "kernel",
        "CREATE_MKEY|MANAGE_PAGES|mlx5_cmd_",
        r"(?:mlx5_core (?P<device>[0-9a-f:.]{4,20}|\S{1,30}?):? .{0,80}?"
        r"|mlx5_cmd_\w{1,20}:\d{1,6}:\(pid \d{1,10}\): )(?P<call>[A-Za-z_]{4,40})\(0x[0-9a-f]{1,5}\).{0,40}?"
        r" failed, status (?P<status>[\w /]{2,60})\(0x",
        layer="mkey",
        more=_mlx5_command,
    ),
    Message(
        "kernel",
        "umem get failed",
        r"(?P<device>mlx[45]_\w{1,20}):\s?\w{0,20}mr_umem_get:?.{0,40}umem get failed "
        r"\((?P<number>-?\d{1,4})\)",
        "ib_umem_get",
        more=_returned,
    ),
    Message(
        "CUDA",
        "cudaHost|cudaMallocHost|cuMemHost|cuMemAllocHost",
        r"\b(?P<call>cudaHostRegister|cudaHostAlloc|cudaMallocHost|cuMemHostRegister(?:_v2)?"
        r"|cuMemHostAlloc|cuMemAllocHost(?:_v2)?)\b"
        r"[^;]{0,160}?(?:fail|Fail|error|Error|ERROR|returned (?!0|cudaSuccess|CUDA_SUCCESS)).{0,160}",
        buffer=HOST,
        layer="cuda-pin",  # what CUDA reports is its own error, not an errno
        why="{call} is the driver's own pin, and it is this that failed",
    ),
    Message(
        "CUDA",
        "OS call failed",
        r"(?:Cuda failure|CUDA error).{0,40}?OS call failed or operation not supported on this OS",
        "a host allocation of CUDA (not named)",
        buffer=HOST,
        more=_cuda_os,
    ),
    Message(
        "libfabric",
        "fi_mr_reg",
        r"(?P<call>fi_mr_reg(?:v|attr)?)"
        r"(?P<error>\b.{0,200}?(?:failed|error|Error|: Cannot|: Bad|: Inv|returned -|: -\d).{0,200})",
    ),
    Message(
        "verbs",
        "_reg_mr|dmabuf_mr|fi_mr_reg",
        rf"\b(?P<call>{REG_CALL})\b(?:\(\))?(?P<error>(?:\s|:|,|=|-|\()(?!\w{{0,20}}success).{{0,120}}?"
        r"(?:failed|Failed|FAILED|error|Error|ERROR|returned (?:NULL|null|-)|Cannot allocate|Bad address"
        r"|Invalid argument|not supported|not permitted|temporarily unavailable).{0,120})",
        more=_verb,
    ),
    Message(
        "kernel",
        "Killed process",
        r"Memory cgroup out of memory: Killed process \d{1,10} \([^)]{0,40}\)",
        remark="cgroup-kill",
        supports="memory-cgroup",
        why="the kernel killed a process for its control group's memory limit",
    ),
    Message(
        "kernel",
        "Killed process",
        r"Out of memory: Killed process \d{1,10}",
        remark="oom-kill",
        supports="migration-target",
        why="the node itself was out of memory",
    ),
    Message(
        "kernel",
        "page allocation failure",
        r"page allocation failure: order:\d{1,2}",
        remark="page-allocation",
        supports="umem-alloc",
        why="the kernel could not allocate memory for itself",
    ),
    Message(
        "kernel",
        "swiotlb buffer",
        r"swiotlb buffer is full",
        remark="swiotlb",
        supports="dma-map",
        why="the bounce buffers of DMA mapping are used up",
    ),
    Message(
        "kernel",
        "locate iova|iova alloc|iova space|no iova",
        r"(?:DMAR|iommu|arm-smmu)\b.{0,80}"
        r"(?:[Aa]llocat\w{0,6} (?:iova|domain).{0,20}fail|iova.{0,20}(?:fail|exhaust)|no iova)",
        remark="iova",
        supports="dma-map",
        why="the IOMMU has no addresses left",
    ),
    Message(  # nvidia-peermem.c: the callback of memory that goes meets the release of its pages
        "kernel",
        "p2p_free_callback",
        r"(?P<call>nv_get_p2p_free_callback)\b.{0,20}ERROR detected invalid context",
        buffer=GPU,
        layer="peer-memory",
        why="peer memory's teardown race (class A): the driver's invalidation met the release of the pages; "
        "525.105.17, 535.43.02 and later have an API without it, DMA-BUF does without peer memory",
    ),
    Message(
        "libfabric",
        "Libfabric error",
        r"Libfabric error: \((?P<number>-\d{1,3})\)",
        "an internal call of libfabric (not named)",
        buffer=HOST,
    ),
    Message(  # src/modules/transport/ibrc/ibrc.cpp
        "NVSHMEM",
        "mem registration failed",
        r"ib(?:rc|devx|gda)\.cpp:\d{1,5}: NULL value mem registration failed",
        "ibv_reg_mr",
        buffer=GPU,
    ),
    Message(  # ib_ctx_handler.cpp
        "libvma",
        "mem_reg",
        r"Failure in mem_reg: addr=(?P<address>0x[0-9a-f]{1,16}), length=(?P<length>\d{1,20})"
        r".{0,200}?ibv_dev=(?P<device>\w{1,30})",
        "ibv_reg_mr",
        buffer=HOST,
    ),
    Message(
        "libvma",
        "MTT entries",
        r"might happen due to low MTT entries",
        remark="mtt",
        supports="mkey",
        why="libvma says that the MTT entries may be too few: log_num_mtt and log_mtts_per_seg of mlx4_core",
    ),
    Message(  # help-mpi-btl-openib.txt
        "Open MPI",
        "Registerable memory",
        r"Registerable memory:\s+(?P<able>\d{1,9}) MiB",
        remark="registerable-memory",
        supports="mkey",
        why="only {able} MiB can be registered: log_num_mtt and log_mtts_per_seg of mlx4_core",
    ),
    Message(
        "Open MPI",
        "Memlock limit",
        r"^\s*Memlock limit:\s+(?P<limit>\d{1,20})\s*$",
        "an allocation of locked memory (not named)",
        buffer=HOST,
        layer="memlock-accounting",
        why="the openib BTL could not lock memory under a limit of {limit} bytes",
    ),
    Message(
        "kernel",
        "NV_ERR_NO_MEMORY",
        r"NVRM:.{0,120}NV_ERR_NO_MEMORY",
        remark="nvrm-no-memory",
        why="the GPU driver's own allocation failed: memory of the GPU is short, or the host's; which "
        "of the failures is the first the times tell",
    ),
    Message(
        "kernel",
        "NVRM: failed",
        r"NVRM: failed to allocate page table",
        remark="nvrm-page-table",
        supports="cuda-pin",
        why="the driver could not allocate the page table of a host pin",
    ),
    Message(
        "kernel",
        "of BAR1|BAR1 space|BAR1 exhaust|BAR1 memory",
        r"NVRM:.{0,200}(?:BAR1|bar1).{0,60}(?:exhaust|fail|insufficient|out of)"
        r"|NVRM:.{0,80}(?:out of|no more) BAR1",
        remark="bar1",
        supports="bar-map",
        why="the driver ran out of BAR1",
    ),
    Message(
        "kernel",
        "alloc failed",
        r"cma: (?:cma_alloc|__cma_alloc|__cma_alloc_frozen\w{0,20})\b.{0,60}alloc failed",
        remark="cma-alloc",
        why="an allocation from CMA failed; it is no registration",
    ),
    Message(
        "NCCL",
        "unhandled system error|ncclSystemError",
        r"unhandled system error|ncclSystemError",
        remark="nccl-system-error",
        why="NCCL's name for any failed call of the system; the line of NCCL's own log above it tells which",
    ),
    Message(
        "verbs",
        "annot allocate memory",
        r"\b(?:ibv_create_(?:cq|qp|srq)|ibv_alloc_pd)\b[^;]{0,80}failed: (?:Cannot allocate memory)",
        remark="other-verb",
        supports="memlock-accounting",
        why="no registration; these are charged to the memlock limit on some devices, too",
    ),
    Message(
        "verbs",
        "_reg_mr|dmabuf_mr|fi_mr_reg",
        r"(?:[Ff]ailed|[Ee]rror|ERROR|[Cc]ould ?n[o']t|[Uu]nable)[^;]{0,60}?"
        rf"\b(?P<call>{REG_CALL})\b(?P<error>.{{0,160}})",
    ),
)

_DUMPED = re.compile(r"\brefcount:\s?(\d{1,9}) mapcount:\s?(-?\d{1,9})")
PIN_BIAS = 1024  # GUP_PIN_COUNTING_BIAS, include/linux/mm.h


def page_dump(text: str, before: Iterable[str]) -> Failure | None:
    """Read the kernel's dump of a page that it could not move (dump_page(), mm/debug.c); `before`: the lines
    before the one that says why.
    """
    if "page dumped because: migration failure" not in text:
        return None
    found = next((found for line in before if (found := _DUMPED.search(line))), None)
    why = "the kernel could not move a page out of an area that it wanted"
    if found:
        references, mapped = int(found[1]), max(int(found[2]), 0)
        pins, rest = divmod(max(references - mapped, 0), PIN_BIAS)
        held = (
            f"{pins} FOLL_PIN ({PIN_BIAS} references each)"
            if pins
            else f"{rest} references beyond its mappings"
        )
        why += f": it had {references} references and was mapped {mapped} times, so that {held} held it"
    return Failure("kernel", "migrate_pages", None, text, layer="page-migration", layer_why=why)


NEEDLES = (
    *dict.fromkeys(word.encode() for entry in MESSAGES for word in entry.words.split("|")),
    b"migration failure",
)
"""Words that a line must hold to be looked at."""


# A word of failing that is none: a count of 0, a setting, what came before it went well.
_WENT_WELL = re.compile(
    r"\bsuccess(?:ful(?:ly)?)?\b|\bsucceeded\b|\berrors?\s*[=:]\s*0\b|\bok after\b|error checking",
    re.IGNORECASE,
)


def parse_line(text: str) -> Parsed | None:
    """Read one line; None where it says nothing of a registration, or that it went well."""
    if _WENT_WELL.search(text) and errno_of(text) is None:
        return None
    return next((parsed for entry in MESSAGES if (parsed := entry.read(text)) is not None), None)


_OPEN_END = re.compile(
    rf"(?:[Cc]all to (?:ibv|fi|mlx5dv)?\w{{0,40}}(?: f| fa| fai| fail| faile| failed)?(?: w\w{{0,3}}| "
    rf"with| with e\w{{0,4}}| with error)?\s?[\w /]{{0,40}}"
    rf"|{REG_CALL}\([^()]{{0,300}}|{REG_CALL}\([^()]{{0,300}}\)[^:]{{0,10}}:?[\w ]{{0,40}}"
    r"|register (?:address|memory|MR)\b[^:]{0,120}:?[\w ]{0,30})$"
)


def is_open(text: str) -> bool:
    """Tell whether a line looks as if its end were on the next one."""
    return _OPEN_END.search(text) is not None

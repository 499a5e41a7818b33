"""What each tool says when a registration fails, and how to read it.

Messages are those of the tools' public sources: NCCL (src/misc/ibvwrap.cc), aws-ofi-nccl, UCX
(src/uct/ib/base/ib_md.c, src/ucp/core/ucp_mm.c), libfabric (prov/efa, prov/verbs), perftest, PyTorch
(ProcessGroupNCCL), and the kernel's mlx5, ib_core and nvidia-peermem modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from regrepro.explain.text import errno_of
from regrepro.judge.layer_table import LAYERS, Memory
from regrepro.judge.layers import Call, Decision, Layer, decide
from regrepro.judge.tracefacts import Trace

HOST = "host"
GPU = "gpu"

REG_CALL = (
    r"(?:ibv_(?:exp_|cmd_)?reg_mr(?:_iova2?|_ex)?|ibv_reg_dmabuf_mr(?:_ex)?|mlx5dv_reg_dmabuf_mr|"
    r"fi_mr_reg(?:v|attr)?)"
)


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
            return Decision(Layer(self.layer, self.layer_why), (self.layer,), self.layer_why)
        memory = {HOST: Memory.HOST, GPU: Memory.GPU}.get(self.buffer or "")
        decision = decide(Call.of_log(self.trace, self.call, self.errno or "", memory))
        if not self.left:
            return decision
        gone = {name: "the text shows another place" for name in LAYERS if name not in self.left}
        return Decision(None, self.left, excluded={name: gone[name] for name in gone if name != "cuda-pin"})


@dataclass(frozen=True)
class Remark:
    """Something in the text that is no registration failure, but bears on one. `supports` names a cause."""

    kind: str
    text: str
    supports: str | None = None
    why: str = ""


Parsed = Failure | Remark
_Rule = tuple[re.Pattern[str], Callable[[re.Match[str], str], Parsed | None]]


def _nccl(match: re.Match[str], line: str) -> Parsed | None:
    call, error, number = match["call"], match["error"], match["number"]
    errno = errno_of(f"errno {number}") if number else None
    errno = errno or (errno_of(error) if error else None)
    tool = "NCCL" if "NCCL" in line else "PyTorch" if "Last error" in line else "NCCL"
    text = line[match.start() :]
    if not re.fullmatch(REG_CALL, call):
        supports = (
            "memlock-accounting"
            if errno == "ENOMEM" and call in ("ibv_create_cq", "ibv_create_qp", "ibv_create_srq")
            else None
        )
        return Remark(
            "other-verb",
            text,
            supports,
            f"{call} is no registration; it is charged to the memlock limit, too"
            if supports
            else f"{call} is no registration",
        )
    buffer = GPU if "dmabuf" in call else None
    return Failure(tool, call, errno, text, buffer=buffer)


_NCCL = re.compile(
    r"[Cc]all to (?P<call>(?:ibv|mlx5dv|ionicdv|fi)_\w{1,40}) failed"
    r"(?: with error (?P<error>[A-Z][\w /.'()-]{2,60}?)(?: errno (?P<number>\d{1,3}))?"
    r"(?=\s*$|\s*[,;\"\\\]\[(]|\s{2}|\.\s|\.$))?"
)


def _ucx(match: re.Match[str], line: str) -> Parsed:
    call, arguments, error = match["call"], match["arguments"], match["error"]
    found = re.search(r"address=(0x[0-9a-f]{1,16})", arguments)
    length = re.search(r"length=(\d{1,20})", arguments)
    device = re.search(
        r"\b((?:mlx5|mlx4|irdma|bnxt_re|efa|rxe|hns|roce|rocep|ibp|rdmap)\w{1,20})\b[^(]{0,4}$",
        line[: match.start()],
    )
    failure = Failure(
        "UCX",
        call,
        errno_of(error),
        line[match.start() :],
        device=device[1] if device else None,
        buffer=GPU if "dmabuf" in call else None,
        address=found[1] if found else None,
        length=int(length[1]) if length else None,
    )
    limit = re.search(
        r"max locked memory[^(]{0,80}\(?(?:ulimit -l\)[^(]{0,40}\()?\s?current: (\d{1,20}) "
        r"kbytes",
        line,
    )
    if limit:
        failure.hints.append(
            f"UCX adds the memlock advice whenever the limit is finite (here {limit[1]} KiB): it is a "
            f"fact about the "
            "limit, not a proof of the cause"
        )
        failure.hints.append("memlock-finite")
    return failure


_UCX = re.compile(
    rf"(?P<call>{REG_CALL})\((?P<arguments>[^()]{{0,300}})\)\s{{0,4}}failed\s?:\s{{0,4}}"
    rf"(?P<error>[A-Z][\w/ -]{{2,60}})"
)


def _ucx_register(match: re.Match[str], line: str) -> Parsed:
    kind = match["kind"]
    bits = match["bits"]
    buffer = None
    if kind:
        buffer = HOST if kind == "host" else GPU
    elif bits:
        # ucs_memory_type_t: bit 0 is the host, the others are devices (ucs/memory/memory_type.h).
        buffer = HOST if int(bits, 16) == 1 else GPU
    return Failure(
        "UCX",
        "uct_md_mem_reg",
        None,  # the text is UCX's own status, not an errno
        line[match.start() :],
        device=match["device"],
        buffer=buffer,
        address=match["address"],
        length=int(match["length"]) if match["length"] else None,
        consequence=True,
    )


_UCX_REGISTER = re.compile(
    r"[Ff]ailed to register address (?P<address>0x[0-9a-f]{1,16}) (?:\((?P<kind>[\w-]{1,20})\) |mem_type "
    r"bit (?P<bits>0x[0-9a-f]{1,8}) )?"
    r"length (?P<length>\d{1,20})(?: dmabuf_fd -?\d{1,9})?(?: on md\[\d{1,3}\]=(?P<device>[\w.-]{1,40}))?"
)


def _ofi_nccl(match: re.Match[str], line: str) -> Parsed:
    kind = match["type"].lower()
    # NCCL_PTR_HOST 1, NCCL_PTR_CUDA 2, NCCL_PTR_DMABUF 4 (nccl_net.h)
    buffer = (
        HOST
        if kind in ("1", "0x1", "nccl_ptr_host")
        else GPU
        if kind in ("2", "4", "0x2", "0x4", "nccl_ptr_cuda")
        else None
    )
    return Failure(
        "aws-ofi-nccl",
        "fi_mr_regattr",
        errno_of(f"errno {match['rc']}") or errno_of(line[match.start() :]),
        line[match.start() :],
        device=f"device {match['device']}",
        buffer=buffer,
    )


_OFI_NCCL = re.compile(
    r"[Uu]nable to register memory \(type = (?P<type>\w{1,20})\) for device (?P<device>\d{1,6})\. RC: "
    r"(?P<rc>-?\d{1,4})"
)


def _libfabric(match: re.Match[str], line: str) -> Parsed:
    return Failure(
        "libfabric", match["function"], errno_of(match["rest"]), line[match.start() :], hints=_efa_hint(line)
    )


def _efa_hint(line: str) -> list[str]:
    total = re.search(r"total mr reg size (\d{1,20}), mr reg count (\d{1,20})", line)
    return [f"the provider had {total[2]} registrations of {total[1]} bytes in all"] if total else []


_LIBFABRIC = re.compile(
    r":(?P<provider>[\w;]{2,30}):mr:(?P<function>\w{3,50})\(\):\d{1,6}<(?:warn|error|err|alert|crit)\w{0,4}>\s"
    r"(?P<rest>(?:[Uu]nable to "
    r"(?:register|reg)\b|(?:fi|ibv)_\w{1,30}|[Ff]ailed to reg|mr reg).{0,300})"
)


def _fi_call(match: re.Match[str], line: str) -> Parsed:
    rest = match["rest"]
    errno = errno_of(rest)
    return Failure("libfabric", match["call"], errno, line[match.start() :])


_FI_CALL = re.compile(
    r"(?P<call>fi_mr_reg(?:v|attr)?)(?P<rest>\b.{0,200}?(?:failed|error|Error|: "
    r"Cannot|: Bad|: Inv|returned -|: -\d).{0,200})"
)


def _plain_verb(match: re.Match[str], line: str) -> Parsed:
    rest = match["rest"]
    tool = "libfabric" if "libfabric:" in line else "verbs"
    call = match["call"]
    return Failure(
        tool, call, errno_of(rest), line[match.start() :], buffer=GPU if "dmabuf" in call else None
    )


_PLAIN_VERB = re.compile(
    rf"\b(?P<call>{REG_CALL})\b(?:\(\))?(?P<rest>(?:\s|:|,|=|-|\()(?!\w{{0,20}}success).{{0,120}}?"
    r"(?:failed|Failed|FAILED|error|Error|ERROR|returned (?:NULL|null|-)|Cannot allocate|Bad "
    "address|Invalid "
    r"argument|not supported|not permitted|temporarily unavailable).{0,120})"
)
_VERB_AFTER = re.compile(
    rf"(?P<rest>(?:[Ff]ailed|[Ee]rror|ERROR|[Cc]ould "
    rf"?n[o']t|[Uu]nable)[^;]{{0,60}}?)\b(?P<call>{REG_CALL})\b(?P<tail>.{{0,160}})"
)


def _verb_after(match: re.Match[str], line: str) -> Parsed:
    call = match["call"]
    return Failure(
        "verbs",
        call,
        errno_of(match["tail"]),
        line[match.start() :],
        buffer=GPU if "dmabuf" in call else None,
    )


def _perftest(match: re.Match[str], line: str) -> Parsed:
    return Failure(
        "perftest",
        "ibv_reg_mr",
        errno_of(f"errno {match['number']}") if match["number"] else None,
        line[match.start() :],
    )


_PERFTEST = re.compile(r"Couldn't allocate MR(?! ?s)\b(?: with error=(?P<number>\d{1,3}))?")


def _returned(function: str, number: str) -> Trace:
    """A trace of the one return that a line of the kernel's own tells of."""
    return Trace("spoiled", "it is a log's", returns=[(function, -abs(int(number)))])


def _peermem(match: re.Match[str], line: str) -> Parsed:
    errno = errno_of(f"errno {match['number']}")
    return Failure(
        "kernel",
        match["call"],
        errno,
        line[match.start() :],
        buffer=GPU,
        trace=_returned(match["call"], match["number"]),
    )


_PEERMEM = re.compile(
    r"(?:nvidia-peermem|nv_peer_mem|nv_mem)\b.{0,120}?[Ee]rror (?P<number>-?\d{1,4}) while calling "
    r"(?P<call>nvidia_p2p_\w{1,40})"
)


def _mkey_callback(match: re.Match[str], line: str) -> Parsed:
    return Failure(
        "kernel",
        "CREATE_MKEY",
        errno_of(f"errno {match['number']}"),
        line[match.start() :],
        device=match["device"],
        layer="mkey",
        layer_why="mlx5_ib says that the device refused to create an MKey",
    )


_MKEY_CALLBACK = re.compile(
    r"(?P<device>mlx5_\w{1,20}): (?:create_mkey_callback|reg_mr_callback)\S{0,20}.{0,60}async reg mr "
    r"failed\. status (?P<number>-?\d{1,4})"
)


def _mlx5_command(match: re.Match[str], line: str) -> Parsed:
    command, status = match["command"].upper(), match["status"].strip()
    number = re.search(r"err\((-?\d{1,4})\)", line)
    errno = errno_of(f"errno {number[1]}") if number else None
    text = line[match.start() :]
    if command == "CREATE_MKEY":
        return Failure(
            "kernel",
            "CREATE_MKEY",
            errno,
            text,
            device=match["device"],
            layer="mkey",
            layer_why=f"the device answered CREATE_MKEY with {status!r}",
        )
    if command in ("MANAGE_PAGES", "QUERY_PAGES"):
        return Remark(
            "firmware-pages", text, "mkey", f"the device's firmware could not be given pages: {status}"
        )
    return Remark("device-command", text, None, f"{command} is no registration")


_MLX5_COMMAND = re.compile(
    r"(?:mlx5_core (?P<device>[0-9a-f:.]{4,20}|\S{1,30}?):? .{0,80}?|mlx5_cmd_\w{1,20}:\d{1,6}:\(pid "
    r"\d{1,10}\): )"
    r"(?P<command>[A-Za-z_]{4,40})\(0x[0-9a-f]{1,5}\).{0,40}? failed, status (?P<status>[\w /]{2,60})\(0x"
)


def _umem(match: re.Match[str], line: str) -> Parsed:
    return Failure(
        "kernel",
        "ib_umem_get",
        errno_of(f"errno {match['number']}"),
        line[match.start() :],
        device=match["device"],
        trace=_returned("ib_umem_get", match["number"]),
    )


_UMEM = re.compile(
    r"(?P<device>mlx[45]_\w{1,20}): \w{0,20}mr_umem_get:?.{0,40}umem get failed "
    r"\((?P<number>-?\d{1,4})\)"
)


def _cuda_pin(match: re.Match[str], line: str) -> Parsed:
    return Failure(
        "CUDA",
        match["call"],
        None,  # what CUDA reports is its own error, not an errno
        line[match.start() :],
        buffer=HOST,
        layer="cuda-pin",
        layer_why=f"{match['call']} is the driver's own pin, and it is this that failed",
    )


_CUDA_PIN = re.compile(
    r"\b(?P<call>cudaHostRegister|cudaHostAlloc|cudaMallocHost|cuMemHostRegister(?:_v2)?"
    r"|cuMemHostAlloc|cuMemAllocHost(?:_v2)?)\b"
    r"(?P<rest>[^;]{0,160}?(?:fail|Fail|error|Error|ERROR|returned (?!0|cudaSuccess|CUDA_SUCCESS)).{0,160})"
)


def _cuda_os(match: re.Match[str], line: str) -> Parsed:
    return Failure(
        "CUDA",
        "a host allocation of CUDA (not named)",
        None,
        line[match.start() :],
        buffer=HOST,
        left=("cuda-pin", "unknown"),
        hints=[
            "cudaErrorOperatingSystem says that a call of the system failed inside CUDA; which one is "
            "not told"
        ],
    )


_CUDA_OS = re.compile(
    r"(?:Cuda failure|CUDA error).{0,40}?OS call failed or operation not supported on "
    r"this OS"
)


def _remark(kind: str, supports: str | None, why: str) -> Callable[[re.Match[str], str], Parsed]:
    def make(match: re.Match[str], line: str) -> Parsed:
        return Remark(kind, line[match.start() :], supports, why)

    return make


_REMARKS: tuple[_Rule, ...] = (
    (
        re.compile(r"Memory cgroup out of memory: Killed process \d{1,10} \([^)]{0,40}\)"),
        _remark(
            "cgroup-kill", "memory-cgroup", "the kernel killed a process for its control group's memory limit"
        ),
    ),
    (
        re.compile(r"Out of memory: Killed process \d{1,10}"),
        _remark("oom-kill", "migration-target", "the node itself was out of memory"),
    ),
    (
        re.compile(r"page allocation failure: order:\d{1,2}"),
        _remark("page-allocation", "umem-alloc", "the kernel could not allocate memory for itself"),
    ),
    (
        re.compile(r"swiotlb buffer is full"),
        _remark("swiotlb", "dma-map", "the bounce buffers of DMA mapping are used up"),
    ),
    (
        re.compile(
            r"(?:DMAR|iommu|arm-smmu)\b.{0,80}(?:[Aa]llocat\w{0,6} "
            r"(?:iova|domain).{0,20}fail|iova.{0,20}(?:fail|exhaust)|no iova)"
        ),
        _remark("iova", "dma-map", "the IOMMU has no addresses left"),
    ),
    (
        re.compile(r"NVRM: failed to allocate page table"),
        _remark("nvrm-page-table", "cuda-pin", "the driver could not allocate the page table of a host pin"),
    ),
    (
        re.compile(
            r"NVRM:.{0,200}(?:BAR1|bar1).{0,60}(?:exhaust|fail|insufficient|out "
            r"of)|NVRM:.{0,80}(?:out of|no more) BAR1"
        ),
        _remark("bar1", "bar-map", "the driver ran out of BAR1"),
    ),
    (
        re.compile(r"cma: (?:cma_alloc|__cma_alloc|__cma_alloc_frozen\w{0,20})\b.{0,60}alloc failed"),
        _remark("cma-alloc", None, "an allocation from CMA failed; it is no registration"),
    ),
    (
        re.compile(r"unhandled system error|ncclSystemError"),
        _remark(
            "nccl-system-error",
            None,
            "NCCL's name for any failed call of the system; the line of NCCL's own log above it tells which",
        ),
    ),
    (
        re.compile(
            r"\b(?:ibv_create_(?:cq|qp|srq)|ibv_alloc_pd)\b[^;]{0,80}failed: (?:Cannot allocate "
            r"memory)"
        ),
        _remark(
            "other-verb",
            "memlock-accounting",
            "no registration; these are charged to the memlock limit on some devices, too",
        ),
    ),
)

RULES: tuple[_Rule, ...] = (
    (_NCCL, _nccl),
    (_UCX, _ucx),
    (_UCX_REGISTER, _ucx_register),
    (_OFI_NCCL, _ofi_nccl),
    (_LIBFABRIC, _libfabric),
    (_PERFTEST, _perftest),
    (_PEERMEM, _peermem),
    (_MKEY_CALLBACK, _mkey_callback),
    (_MLX5_COMMAND, _mlx5_command),
    (_UMEM, _umem),
    (_CUDA_PIN, _cuda_pin),
    (_CUDA_OS, _cuda_os),
    (_FI_CALL, _fi_call),
    (_PLAIN_VERB, _plain_verb),
    *_REMARKS,
    (_VERB_AFTER, _verb_after),
)

NEEDLES: tuple[bytes, ...] = tuple(
    word.encode()
    for word in (
        "_reg_mr",
        "dmabuf_mr",
        "fi_mr_reg",
        "mr_regattr",
        "to register",
        "allocate MR",
        "unhandled system error",
        "ncclSystemError",
        "annot allocate memory",
        "locate memory",
        "CREATE_MKEY",
        "create_mkey",
        "async reg mr",
        "MANAGE_PAGES",
        "mlx5_cmd_",
        "umem get failed",
        "nvidia_p2p_",
        "cudaHost",
        "cudaMallocHost",
        "cuMemHost",
        "cuMemAllocHost",
        "OS call failed",
        "Killed process",
        "page allocation failure",
        "swiotlb buffer",
        "locate iova",
        "iova alloc",
        "iova space",
        "no iova",
        "NVRM: failed",
        "of BAR1",
        "BAR1 space",
        "BAR1 exhaust",
        "BAR1 memory",
        "alloc failed",
        "GPU buffer",
        "cuMemAlloc()",
        "ERRNO: ",
    )
)
"""Words that a line must hold to be looked at. Each rule above needs one of them."""


def parse_line(text: str) -> Parsed | None:
    """Read one line; None where it says nothing of a registration."""
    for pattern, make in RULES:
        match = pattern.search(text)
        if match is not None:
            parsed = make(match, text)
            if parsed is not None:
                return parsed
    return None


_OPEN_END = re.compile(
    rf"(?:[Cc]all to (?:ibv|fi|mlx5dv)?\w{{0,40}}(?: f| fa| fai| fail| faile| failed)?(?: w\w{{0,3}}| "
    rf"with| with e\w{{0,4}}| with error)?\s?[\w /]{{0,40}}"
    rf"|{REG_CALL}\([^()]{{0,300}}|{REG_CALL}\([^()]{{0,300}}\)[^:]{{0,10}}:?[\w ]{{0,40}}"
    r"|register (?:address|memory|MR)\b[^:]{0,120}:?[\w ]{0,30})$"
)


def is_open(text: str) -> bool:
    """Tell whether a line looks as if its end were on the next one."""
    return _OPEN_END.search(text) is not None

"""What of this kernel is followed, and the engine that follows it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from regrepro.errors import EnvironmentProblem
from regrepro.kernel import trace_flags
from regrepro.kernel.btf import Btf, BtfError
from regrepro.kernel.procfs import BTF_PATH, INITIAL_PID_NAMESPACE, KALLSYMS, lockdown, pid_namespace
from regrepro.kernel.trace_flags import FlagNames
from regrepro.kernel_functions import REASONS
from regrepro.watch.bpf.engine import BpfEngine, RequestOffsets
from regrepro.watch.correlate import Correlator
from regrepro.watch.functions import (
    MODULES,
    Functions,
    find_functions,
    loaded_modules,
    without_coming,
)
from regrepro.watch.registrations import Account
from regrepro.watch.watch_settings import PINS, WatchSettings

ENGINE = "bpf"  # the name of what follows the kernel, in records
BTF_DIRECTORY = BTF_PATH.parent
_HERE = Path(__file__).parents[1] / "_bpf"
FILES = _HERE / "follow", _HERE / "registrations.bpf.o"


def require_rights() -> None:
    """Raise EnvironmentProblem, with what would help, where this user or kernel cannot be watched."""
    if os.geteuid() != 0:
        raise EnvironmentProblem(
            "watch follows the kernel and other users' processes, which needs root", hint="run it with sudo"
        )
    if lockdown() == "confidentiality":
        raise EnvironmentProblem(
            "this kernel is locked down (confidentiality)",
            why="it lets nobody follow it, root neither",
            hint="boot it with lockdown=integrity or without",
        )
    if pid_namespace() not in (INITIAL_PID_NAMESPACE, 0):
        raise EnvironmentProblem(
            "watch runs in a PID namespace of its own and would not find the node's processes",
            hint="run it on the node itself, or in a container with the node's PIDs (hostPID: true)",
        )


@dataclass
class FollowedKernel:
    """The functions that are followed, and where this kernel has what is told of a failure."""

    functions: Functions
    flags: FlagNames
    request: RequestOffsets | None = None
    modules: frozenset[str] = frozenset()  # that are loaded

    @classmethod
    def read(cls) -> FollowedKernel:
        """Read what this kernel has. Raises EnvironmentProblem where there is nothing to follow."""
        modules = loaded_modules()
        found = find_functions(KALLSYMS.read_bytes(), dict.fromkeys(modules, True))
        functions = without_coming(found, modules)
        if not functions.entries:
            raise EnvironmentProblem(
                "this kernel has no function of ib_uverbs to be followed",
                why="the module is not loaded, or its symbols are hidden",
                hint="modprobe ib_uverbs; sysctl kernel.kptr_restrict must not be 2",
            )
        request = None
        with suppress(OSError, BtfError):
            kernel = (BTF_DIRECTORY / "vmlinux").read_bytes()
            functions.reasons = pin_reasons(Btf(kernel))
            module = functions.entries[0].module
            of_module = (BTF_DIRECTORY / module).read_bytes() if module else b""
            request = request_offsets(Btf.joined(kernel, of_module) if of_module else Btf(kernel))
        return cls(functions, trace_flags.of_running_kernel(), request, modules)

    def start_engine(
        self, correlator: Correlator, settings: WatchSettings, account: Account | None
    ) -> BpfEngine:
        """Start to follow the functions. Raises EnvironmentProblem where the kernel does not let it."""
        if not all(path.exists() for path in FILES):
            raise EnvironmentProblem(
                "this installation has no BPF programs for watch",
                why=f"there is no {FILES[1]}",
                hint="install the wheel; in a checkout, scripts/test builds them",
            )
        if not (BTF_DIRECTORY / "vmlinux").exists():
            raise EnvironmentProblem(
                "this kernel does not describe its types, which watch's BPF programs need",
                why=f"there is no {BTF_DIRECTORY}/vmlinux (CONFIG_DEBUG_INFO_BTF)",
                hint="`regrepro run` and `regrepro explain` do without",
            )
        try:
            return BpfEngine(
                self.functions,
                correlator,
                self.request,
                files=FILES,
                short_term_pins=PINS[settings.pins],
                longterm=self.flags.values.get("FOLL_LONGTERM", 0),
                unpins=settings.pins == "unpins",
                account=account,
            )
        except OSError as error:
            raise EnvironmentProblem(
                "this kernel does not take watch's BPF programs",
                why=": ".join(str(part) for part in (error.filename, error.strerror) if part),
                hint="they are tried on Linux 6.1 and later; `regrepro run` and `explain` do without",
            ) from None

    def follow_modules(self, engine: BpfEngine) -> tuple[list[str], list[str]]:
        """Follow drivers, too, that were loaded since; return these modules, and functions of them."""
        loaded = loaded_modules()
        new, gone = (loaded - self.modules) & MODULES, self.modules - loaded
        self.modules = loaded
        if gone:
            engine.forget_modules(self.functions, gone)
        if not new:
            return [], []
        found = find_functions(KALLSYMS.read_bytes(), dict.fromkeys(loaded, True))
        without_coming(found, loaded)
        return sorted(new), engine.follow_new(self.functions, found)


def pin_reasons(btf: Btf) -> dict[int, str]:
    """Return the numbers of the reasons for which pages are moved out of a pin's way, and their names."""
    values = btf.enum("migrate_reason") or {}
    return {values[key]: name for key, name in REASONS.items() if key in values}


def request_offsets(btf: Btf) -> RequestOffsets | None:
    """Return where the kernel has what a request asked for; None where BTF does not describe it as it is
    read here: of an attribute the first eight bytes.
    """
    bundle = "uverbs_attr_bundle"
    ucore, present, attributes = (btf.offset(bundle, name) for name in ("ucore", "attr_present", "attrs"))
    inbuf, size = btf.offset("ib_udata", "inbuf"), btf.size("uverbs_attr")
    if ucore is None or present is None or attributes is None or inbuf is None or size is None:
        return None
    if btf.offset("uverbs_attr", "ptr_attr") != 0 or btf.offset("uverbs_ptr_attr", "data") != 0:
        return None
    return RequestOffsets(ucore + inbuf, present, attributes, size)

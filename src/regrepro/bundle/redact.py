"""Private details out of texts and records, replaced consistently.

Of JSON, whatever the key, only words stay that are regrepro's own, the kernel's, or numbers: what is no such
word came from the node. Logs are other people's prose: there private details are found by their form or
label. A name that is found once, by its label (`Hostname: …`, `/home/NAME`), is replaced wherever it stands
as a word, in every file. What has neither form nor label in a log cannot be found; the listing says so.
"""

from __future__ import annotations

import calendar
import errno
import ipaddress
import os
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from regrepro.scenario import shipped_files

KINDS = (
    "host",
    "user",
    "serial",
    "guid",
    "uuid",
    "mac",
    "ip",
    "mail",
    "path",
    "command",
    "program",
    "job",
    "cgroup",
    "container",
    "value",
    "word",
)

# Names that say nothing of anybody, and words that a record is full of: never replaced as words.
_COMMON = frozenset(
    [
        "localhost",
        "none",
        "guest",
        "host",
        "node",
        "linux",
        "debian",
        "ubuntu",
        "redhat",
        "centos",
        "rocky",
        "fedora",
        "root",
        "user",
        "users",
        "admin",
        "nobody",
        "daemon",
        "cuda",
        "nvidia",
        "gpu",
        "kernel",
        "default",
        "test",
        "lab",
        "pin",
        "get",
        "longterm",
        "unknown",
        "unnamed",
        "null",
        "true",
        "false",
        "memory",
        "register",
        "release",
        "buffer",
        "reproduced",
        "observed",
        "ordinary",
        "anonymous",
        "regrepro",
    ]
)
# Boot arguments that matter for this bug or are the same everywhere; all others are replaced.
_BOOT = re.compile(
    r"(?:cma|numa_cma|cma_pernuma|hugetlb_cma|hugetlb_cma_only|swiotlb|mem_encrypt|coherent_pool|"
    r"page_alloc\.shuffle|amd_iommu_dump|arm-smmu-v3\.disable_bypass|movablecore|kernelcore|movable_node|kho|kho_scratch|hugepages|hugepagesz|"
    r"default_hugepagesz|hugetlb_free_vmemmap|transparent_hugepage|memhp_default_state|memory_hotplug\.[a-z_]+|"
    r"mem|memmap|numa|numa_balancing|iommu|intel_iommu|amd_iommu|iommu\.[a-z_]+|pci|mitigations|nokaslr|"
    r"page_owner|page_poison|init_on_alloc|init_on_free|lockdown|lsm|crashkernel|quiet|splash|ro|rw|console|"
    r"loglevel|panic|nopti|cgroup_disable|systemd\.(?:unit|show_status|unified_cgroup_hierarchy)|maxcpus|nr_cpus|isolcpus|nohz_full|preempt|"
    r"debug_pagealloc|regrepro\.lab)"
    r"(?:=[A-Za-z0-9_,.:;%@/+=$!#-]*)?"
)
# What these arguments are told (kernel-parameters.txt); it stands in a source, so it is in `vocabulary`.
_BOOT_VALUES = """
    passthrough strict forcedac nopt soft force noforce fullflush
    force_isolation pgtbl_v1 pgtbl_v2 sm_on sm_off
    igfx_off tboot_noforce realloc noats nommconf noacs pcie_bus_perf pcie_bus_safe assign fake mirror
    online_movable online_kernel memmap_on_memory online_policy auto_movable_ratio contig auto-movable
"""

_HEX = "[0-9A-Fa-f]"
_UUID = re.compile(rf"(?<![\w-]){_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}(?![\w-])|"
                   rf"(?<=GPU-){_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}")  # fmt: skip
_OCTETS = re.compile(rf"(?<![\w:-])(?:{_HEX}{{2}}([:-]))(?:{_HEX}{{2}}\1){{4,18}}{_HEX}{{2}}(?![\w:-])")
_GUID = re.compile(rf"(?<![\w:]){_HEX}{{4}}(?::{_HEX}{{4}}){{3}}(?![\w:])")
_LABELLED_GUID = re.compile(rf"(?i)(guid\W{{0,12}})(0x{_HEX}{{8,16}}|{_HEX}{{16}})(?!\w)")
_IPV6 = re.compile(
    rf"(?<![\w:.])(?:{_HEX}{{0,4}}:){{2,7}}(?:{_HEX}{{1,4}}|(?:\d{{1,3}}\.){{3}}\d{{1,3}})?(?![\w:])"
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_HOME = re.compile(r"(?<![\w.~-])/(?:home|Users|users)/([A-Za-z0-9_][\w.-]*)((?:/[^\s\"'`:;,<>|)\]}]*)?)|"
                   r"(?<![\w.~-])(/root)(/[^\s\"'`:;,<>|)\]}]*)")  # fmt: skip

_SERIAL = re.compile(
    r"(?i)(?:\bserial[ _-]?(?:number|num|no)?|\bs/n|\bboard[ _]serial|\basset[ _]tag|\bservice[ _]tag)[\"']?"
    r"(?:\s*\([^)\n]*\))?[ \t]*[:=][ \t]*[\"']?([A-Za-z0-9][A-Za-z0-9._/-]{3,})"
)
_PCI_SERIAL = re.compile(rf"(?i)device serial number ({_HEX}{{2}}(?:-{_HEX}{{2}}){{7}})")
_HOST = (
    re.compile(r"(?im)\bhost[ _-]?name[\"']?[ \t]*[:=][ \t]*[\"']?([A-Za-z0-9][A-Za-z0-9.-]+)"),
    re.compile(r"(?m)(?:^|[\"'> ])Linux ([A-Za-z0-9][A-Za-z0-9.-]+) \d+\.\d+[\w.+-]* #"),
    re.compile(
        r"(?m)^(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,+Z-]+) ([A-Za-z0-9][\w.-]+) \S"
    ),
    re.compile(r"(?i)\bnode(?:name|_desc)[\"']?[ \t]*[:=][ \t]*[\"']?([A-Za-z0-9][A-Za-z0-9.-]+)"),
)
_USER = (
    re.compile(r"(?<![\w.~-])/(?:home|Users|users)/([A-Za-z0-9_][\w.-]*)"),
    re.compile(r"\b(?:USER|LOGNAME|USERNAME|SUDO_USER)[\"']?[ \t]*[:=][ \t]*[\"']?([A-Za-z_][\w.-]*)"),
    re.compile(
        r"(?im)^[ \t]*[\"']?(?:user|username|user name|login)[\"']?[ \t]*[:=][ \t]*[\"']?([A-Za-z_][\w.-]*)"
        r"[\"',]*[ \t]*$"
    ),
)
# A program in the kernel's own words: lib/dump_stack.c, mm/oom_kill.c.
_PROGRAMS = (
    re.compile(r"\bComm: (\S+)"),
    re.compile(r"\btask=([^\s,]+),pid="),
    re.compile(r"\bKilled process \d+ \(([^)\n]+)\)"),
    re.compile(r"(?m)(\S+) invoked oom-killer"),
    re.compile(r"\bXid \([^)\n]*\): \d+, pid=[^,\n]*, name=([^,\n]+)"),  # NVIDIA's driver
)
_COMMANDS = (
    re.compile(r"(?m)((?:[Kk]ernel )?[Cc]ommand line: )(\S.*)$"),
    re.compile(r"(?m)^([ \t]*)(BOOT_IMAGE=\S.*)$"),
    re.compile(r"([Cc]ommand line parameters \")([^\"\n]+)"),
    re.compile(r"(?m)(Process ID\s*:\s*\d+\s*\n\s*Type\s*:\s*\S+\s*\n\s*Name\s*:\s*)(\S.*)$"),
    re.compile(r"(?m)^(\|\s+\d+\s+\S+\s+\S+\s+\d+\s+[CGM+]+\s+)(\S.*?)(?=\s+\d+MiB \|)"),
)

_HOST_KEYS = frozenset({"hostname", "nodename", "node_desc"})
_COMMAND_KEYS = frozenset({"cmdline", "command_line", "argv", "boot-arguments", "boot"})
_PATH_KEYS = frozenset({"file", "kernel_image", "out"})
_MAPPING_KEYS = frozenset(
    {"vma", "mappings", "copies", "copy"}
)  # lines of /proc/PID/maps; files that are mapped

# Where names of the kernel's functions and modules stand; they are kept wherever else they stand, too.
_SYMBOL_KEYS = frozenset(
    {"fn", "caller", "stack", "functions", "missing", "probed", "probed_failures", "by_kprobe", "modules",
     "symbols", "deepest"}
)  # fmt: skip
_SYMBOL = re.compile(r"_*[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?:\.(?:isra|constprop|part|cold|llvm)(?:\.\d+)?)*")
_KERNEL = re.compile(r"\d+\.\d+[\w.+~-]*")  # uname -r
_KERNEL_WORDS = ("debian", "preempt_dynamic", "reclaimable", "highatomic", "entry_syscall_64_after_hwframe")
_TIME = re.compile(r"\d{4}-\d\d-\d\d(?:T[\d:.]+(?:Z|[+-][\d:]+)?)?")
_WORD = re.compile(r"\w+")
# What is no name of anybody's: numbers and sizes, addresses, flags and errors by their prefix, RDMA devices
# by their driver's or udev's rule, chips.
_HARMLESS = re.compile(
    r"\w{1,2}|\d+|\d+(?:[KMGTkmgt]?i?[Bb]?|[KMGT]|ms|us|ns|[smhx]|th|st|nd|rd)|0x[0-9a-f]+|(?=\D*\d)[0-9a-f]{1,16}|"
    r"(?:FOLL|GFP|__GFP|MIGRATE|MR|CAP|CONFIG|CUDA|CU|NV|NVRM|IBV|IB|VM|PG|NCCL|RDMA)_[A-Z0-9_]+|cu(?:da)?[A-Z]\w{1,60}|"
    r"bpo\d+|deb\d+u?\d*|tty[A-Z]*\d+|lib(?:ibverbs|cuda|cudart|nccl|rdmacm|mlx[45]|rxe|c|m|dl)|rdmav\d+|SIG[A-Z]{2,5}|"
    r"(?:mlx[45]|rxe|siw|bnxt_re|efa|irdma|hfi1|qedr|hns|erdma|mana)_?\d*|(?:roce|ib)[opsx][0-9a-fopsvdnx]*|"
    r"(?:A|B|H|L|P|T|V|GA|GB|GH|GTX|RTX|MT|CX)\d{1,4}[A-Z]?|v\d+"
)
_ASSIGNED = re.compile(r"(?<![\w.-])([\w.-]+)=([^\s,;\"')\]]+)")

_SECRET = r"(?:passw|passphrase|secret|token|credential|api[_-]?key)"
# After a label, in quotes or not; `--token VALUE`; headers; user and password of a command or in a URL; keys.
_SECRETS = (
    re.compile(rf"(?i)([\w.-]*{_SECRET}[\w.-]*[\"']?[ \t]*[=:][ \t]*[\"'])([^\"'\n]+)"),
    re.compile(rf"(?i)([\w.-]*{_SECRET}[\w.-]*[\"']?[ \t]*[=:][ \t]*)([^\s,;\"']+)"),
    re.compile(rf"(?i)(--[\w-]*{_SECRET}[\w-]*[ \t]+)([^\s,;\"'-][^\s,;\"']*)"),
    re.compile(r"(?i)(\bauthorization:[ \t]*\w+[ \t]+|\bbearer[ \t]+)([^\s,;\"']+)"),
    re.compile(r"((?:^|\s)(?:-u|--user)[ \t=]+)([^\s:\"']+:[^\s\"']+)"),
    re.compile(r"(?i)(\bhost(?:name)?:[ \t]*)([^\s,;\"']+)"),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://)([^\s/@\"']+)(?=@)"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----\s*)([^-]+)(?=-----END )"),
    re.compile(r"(\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\w+)[ \t]+)(AAAA\S*(?:[ \t]+\S+)?)"),
)

_PLACEHOLDER = re.compile(rf"(?:{'|'.join(KINDS)})-\d+")

# Of a process that `watch` followed (docs/record.md). Names of programs that many have are not private.
_PROGRAM = re.compile(
    r"python[\d.]*|pt_main_thread|pt_[a-z_]+|java|julia|mpirun|mpiexec|orted|prted|ib_[a-z_]+|ibv_[a-z_]+|"
    r"rping|NCCL[\w ]*|cuda[\w-]*|ucx_perftest|[a-z_]+_perf|nvidia-[a-z-]+|regrepro"
)
_JOB = re.compile(r"JOB|ARRAY_TASK|STEP")
_NUMBERS = re.compile(r"[\d,.-]*")
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "NCCL_IB_HCA", "NCCL_DMABUF_ENABLE", "NCCL_NET_GDR_LEVEL"})
_MAPPED = re.compile(r"(?<![\w.~\]])/\S.*$")  # the path at the end of a line
# Where what every node has lies; below, only the file's own name can be private.
_PUBLIC = re.compile(
    r"/(?:usr/(?:lib|lib32|lib64|bin|libexec)|lib|lib64|lib32|bin|dev/infiniband|proc/\d+/fd)/[^\n]*|/dev/nvidia[^/\n]*|"
    r"/dev/zero[^/\n]*|/SYSV[^/\n]*|/anon_hugepage[^/\n]*"
)
_SHARED = re.compile(r"(/memfd:|/dev/shm/|/dev/hugepages/|/dev/)(.*?)((?: \(deleted\))?)")


@dataclass
class Redactor:
    """Learns the private names of all texts first, then replaces them in each.

    `enabled` False leaves everything as it is. `replaced` maps (kind, placeholder) to the original; `counts`
    says how often each placeholder was put, by file.
    """

    enabled: bool = True
    replaced: dict[tuple[str, str], str] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    _known: dict[tuple[str, str], str] = field(default_factory=dict)
    _numbers: Counter[str] = field(default_factory=Counter)
    _words: dict[str, str] = field(default_factory=dict)
    _symbols: set[str] = field(default_factory=set)
    _pattern: re.Pattern[str] | None = None
    _file: str = ""

    # Learning

    def learn_text(self, text: str) -> None:
        """Note the names that a text gives a label."""
        for pattern in _HOST:
            for found in pattern.finditer(text):
                self._learn_host(found[1])
        for pattern in _USER:
            for found in pattern.finditer(text):
                self._learn("user", found[1])
        for pattern in _COMMANDS:
            for found in pattern.finditer(text):
                self._learn_command(found[2])
        for pattern in _PROGRAMS:
            for found in pattern.finditer(text):
                if not _PROGRAM.fullmatch(found[1]):
                    self._learn("program", found[1])
        for pattern in (_SERIAL, _PCI_SERIAL):
            for found in pattern.finditer(text):
                if any(char.isdigit() for char in found[1]):
                    self._learn("serial", found[1])

    def learn_json(self, value: Any, key: str = "") -> None:
        """Note the names in a JSON value: those under a key that is a label, and those within its texts."""
        if isinstance(value, Mapping):
            for name, item in value.items():
                if (key in _SYMBOL_KEYS or key == "fields") and _SYMBOL.fullmatch(str(name)):
                    self._symbols.add(str(name))
                self.learn_json(item, _label(value, str(name)))
        elif isinstance(value, list):
            for item in value:
                self.learn_json(item, key)
        elif isinstance(value, str):
            if key in _SYMBOL_KEYS:
                names = (name for name in re.split(r"[\s+\[\]]+", value) if _SYMBOL.fullmatch(name))
                self._symbols.update(name.partition(".")[0] for name in names)
            if key in _COMMAND_KEYS:
                self._learn_command(value)
            if key in _HOST_KEYS or (key == "MASTER_ADDR" and value.strip("[]") not in ("127.0.0.1", "::1")):
                self._learn_host(value)
            elif key == "SLURM_JOB_NAME" and not _PROGRAM.fullmatch(value):
                self._learn("job", value)
            else:
                self.learn_text(f"{key}: {value}")

    def _learn_command(self, line: str) -> None:
        """What a private argument says may stand elsewhere, too."""
        for word in line.split():
            value = word.partition("=")[2]
            if value and not _BOOT.fullmatch(word) and value.lower() not in vocabulary():
                self._learn("value", value)

    def _learn_host(self, name: str) -> None:
        name = name.strip(".")
        self._learn("host", name)
        short, _, domain = name.partition(".")
        if domain and not short.isdigit():
            self._learn("host", short)
        if "." in domain and not domain.replace(".", "").isdigit():
            self._learn("host", domain)

    def _learn(self, kind: str, name: str) -> None:
        name = name.rstrip(".,;")
        if len(name) < 3 or name.lower() in _COMMON or (name.isdigit() and kind != "serial"):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            self._words.setdefault(name.lower(), kind)
            self._pattern = None

    # Replacing

    def text(self, text: str, file: str) -> str:
        """Return a text without private details; `file` is its name in the listing."""
        if not self.enabled:
            return text
        self._file = file
        return self._all(text)

    def json(self, value: Any, file: str) -> Any:
        """Return a JSON value without private details, of keys that nobody knows as of all others.

        Of its texts only words of regrepro's own stay, those of the kernel, and numbers: whatever else there
        is somebody's.
        """
        if not self.enabled:
            return value
        self._file = file
        return self._value(value, "")

    def _value(self, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            if key == "watched":
                return self._watched(value)
            if key == "not_followed":  # copies of libibverbs by their paths
                return {
                    self._all(self._mapped(name)): self._own_words(self._all(str(item)))
                    for name, item in value.items()
                }
            return {
                self._own_words(self._all(str(name))): self._value(item, _label(value, str(name)))
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._value(item, key) for item in value]
        if not isinstance(value, str):
            return value
        if key in ("kernel", "release") and _KERNEL.fullmatch(value):
            return self._names(value)
        if key in _HOST_KEYS and value and not value.startswith("("):
            return self._put("host", value)
        if key in _COMMAND_KEYS:
            return self._own_words(self._command(value))
        if key in _PATH_KEYS and "/" in value:
            return self._own_words(self._path(value))
        if key in _MAPPING_KEYS:
            return self._own_words(self._all(self._mapped(value)))
        if key == "comm":
            return self._program(value)
        return self._own_words(self._assignments(self._all(value)))

    def _own_words(self, text: str) -> str:
        """Replace each word that is neither regrepro's nor the kernel's, a number nor a placeholder."""
        if _TIME.fullmatch(text):
            return text
        own = vocabulary()

        def one(found: re.Match[str]) -> str:
            word = found[0]
            if word.lower() in own or word in KINDS or word in self._symbols or _HARMLESS.fullmatch(word):
                return word
            return self._put("word", word)

        return _WORD.sub(one, text)

    def _assignments(self, text: str) -> str:
        """Of `name=value` only what a boot argument that matters, or a number, says stays."""

        def one(found: re.Match[str]) -> str:
            if _BOOT.fullmatch(found[0]) or found[1] in vocabulary() or re.fullmatch(r"[\d.x]+", found[2]):
                return found[0]
            return f"{found[1]}={self._put('value', found[2])}"

        return _ASSIGNED.sub(one, text)

    def _watched(self, facts: dict[str, Any]) -> dict[str, Any]:
        """A process of somebody's: what it was for is nobody's business, what it was allowed stays."""
        clean: dict[str, Any] = {}
        for name, item in facts.items():
            if name == "cmdline" and isinstance(item, str) and item:
                clean[name] = f"[{self._put('command', item)}: {len(item.split())} words]"
            elif name == "cgroup" and isinstance(item, str) and item.strip("/"):
                clean[name] = f"/{self._put('cgroup', item)}"
            elif name == "container" and isinstance(item, dict) and isinstance(item.get("id"), str):
                clean[name] = {**item, "id": self._put("container", item["id"])}
            elif name == "rank" and isinstance(item, dict):
                clean[name] = {variable: self._variable(variable, value) for variable, value in item.items()}
            else:
                clean[name] = self._value(item, name)
        return clean

    def _variable(self, name: str, value: Any) -> Any:
        """A variable of a parallel job: ranks, sizes and devices matter, a job's name and number do not."""
        if not isinstance(value, str) or not value:
            return value
        if _JOB.search(name):
            return self._put("job", value)
        if name in _DEVICES or (name != "MASTER_ADDR" and _NUMBERS.fullmatch(value)):
            return self._all(value)
        shown = self._all(value)
        return shown if shown != value else self._put("host" if name == "MASTER_ADDR" else "value", value)

    def _program(self, name: str) -> str:
        return name if not name or _PROGRAM.fullmatch(name) else self._put("program", name)

    def _mapped(self, line: str) -> str:
        """Hide the path in a line of /proc/PID/maps, or a path alone, unless every node has it."""
        found = _MAPPED.search(line)
        if found is None or _PUBLIC.fullmatch(found[0]):
            return line
        shared = _SHARED.fullmatch(found[0])
        if shared:
            return f"{line[: found.start()]}{shared[1]}{self._put('path', shared[2])}{shared[3]}"
        path, deleted, of = re.fullmatch(r"(.*?)( \(deleted\))?( of \d+)?", found[0]).groups()  # type: ignore[union-attr]
        head, _, last = path.rpartition("/")
        shown = last if re.match(r"lib\w+\.so", last) else self._put("path", last)
        return f"{line[: found.start()]}/{self._put('path', head)}/{shown}{deleted or ''}{of or ''}"

    def _all(self, text: str) -> str:
        for pattern in _COMMANDS:
            text = pattern.sub(lambda found: found[1] + self._command(found[2]), text)
        for pattern in _SECRETS:
            text = pattern.sub(self._secret, text)
        text = _HOME.sub(self._home, text)
        text = self._sub(_MAIL, "mail", text)
        text = self._sub(_UUID, "uuid", text)
        text = _PCI_SERIAL.sub(lambda found: found[0].replace(found[1], self._put("serial", found[1])), text)
        text = _OCTETS.sub(lambda found: self._put("mac" if len(found[0]) == 17 else "guid", found[0]), text)
        text = _LABELLED_GUID.sub(lambda found: found[1] + self._put("guid", found[2]), text)
        text = self._sub(_GUID, "guid", text)
        text = _IPV6.sub(self._address, text)
        text = _IPV4.sub(self._address, text)
        return self._names(text)

    def _secret(self, found: re.Match[str]) -> str:
        """What is a placeholder already stays."""
        return found[0] if _PLACEHOLDER.fullmatch(found[2]) else found[1] + self._put("value", found[2])

    def file_name(self, name: str, file: str) -> str:
        """Return the name of a file that is no part of a run: all but its known words are somebody's."""
        if not self.enabled:
            return name
        self._file = file
        return self._own_words(self._all(name))

    def _sub(self, pattern: re.Pattern[str], kind: str, text: str) -> str:
        return pattern.sub(lambda found: self._put(kind, found[0]), text)

    def _names(self, text: str) -> str:
        if not self._words:
            return text
        if self._pattern is None:
            longest_first = sorted(self._words, key=lambda word: (-len(word), word))
            words = "|".join(
                (r"(?:[a-z0-9-]+\.)*" if "." in word and self._words[word] == "host" else "")
                + re.escape(word)
                for word in longest_first
            )
            self._pattern = re.compile(
                rf"(?i)(?<![A-Za-z0-9])((?:{words}))(?![A-Za-z0-9])((?:\.[a-z][a-z0-9-]*)*)"
            )
        return self._pattern.sub(self._name, text)

    def _name(self, found: re.Match[str]) -> str:
        """A name, of a host with all of its domain."""
        kind = self._words.get(found[1].lower(), "host")
        return self._put(kind, found[0]) if kind == "host" else self._put(kind, found[1]) + found[2]

    def _address(self, found: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(found[0])
        except ValueError:
            return found[0]
        if address.is_loopback or address.is_unspecified or found[0] == "255.255.255.255":
            return found[0]
        return self._put("ip", found[0])

    def _home(self, found: re.Match[str]) -> str:
        """A home directory's owner is replaced, and all of the path but its last part."""
        name, below = (found[1], found[2]) if found[1] is not None else ("", found[4])
        home = (
            "/root"
            if not name
            else f"/home/{self._put('user', name) if name.lower() not in _COMMON else name}"
        )
        parts = below.rstrip("/").split("/")[1:]
        if len(parts) <= 1:
            return home + below
        hidden = self._put("path", "/".join(parts[:-1]))
        return f"{home}/{hidden}/{parts[-1]}"

    def _path(self, value: str) -> str:
        head, _, last = value.rpartition("/")
        return f"{self._put('path', head)}/{self._all(last)}" if head else value

    def _command(self, line: str) -> str:
        """Keep the boot arguments that matter; the rest of a command line is replaced as a whole."""
        kept: list[str] = []
        hidden: list[str] = []
        for word in line.split():
            private = _BOOT.fullmatch(word) is None or self._own_words(word) != word
            (hidden if private else kept).append(word)
        if hidden:
            kept.append(f"[{self._put('command', ' '.join(hidden))}: {len(hidden)} words]")
        return " ".join(kept)

    def _put(self, kind: str, original: str) -> str:
        """Return the placeholder of an original: the same for the same, in every file."""
        key = (kind, original if kind == "word" else original.lower())
        if key not in self._known:
            self._numbers[kind] += 1
            self._known[key] = f"{kind}-{self._numbers[kind]}"
            self.replaced[kind, self._known[key]] = original
        placeholder = self._known[key]
        self.counts.setdefault(placeholder, Counter())[self._file] += 1
        return placeholder

    def listing(self) -> list[dict[str, Any]]:
        """Return what was replaced, without the originals: kind, placeholder, how often, in which files."""
        return [
            {
                "kind": kind,
                "placeholder": placeholder,
                "times": sum(self.counts[placeholder].values()),
                "files": sorted(self.counts[placeholder]),
            }
            for kind, placeholder in sorted(self.replaced, key=_order)
        ]

    def originals(self) -> Iterable[tuple[str, str]]:
        """Yield placeholder and original: for the eyes of whoever makes the bundle, never for a file."""
        for kind, placeholder in sorted(self.replaced, key=_order):
            yield placeholder, self.replaced[kind, placeholder]


def _label(facts: Mapping[str, Any], name: str) -> str:
    """The label of an entry: its key; of a fact of the audit, whose value stands under `value`, its name."""
    fact = facts.get("name")
    return fact if name == "value" and isinstance(fact, str) else name


@cache
def vocabulary() -> frozenset[str]:
    """Every word, in small letters, that stands in regrepro's own sources, schemas and shipped scenarios.

    Whatever the program itself says is made of these, so that a word beside them came from the node.
    """
    package = Path(str(resources.files("regrepro")))
    files = [file for kind in ("*.py", "*.json", "*.in") for file in package.rglob(kind)]
    words = {*_KERNEL_WORDS, *calendar.month_abbr, *calendar.day_abbr, *errno.errorcode.values()}
    for text in (
        *(file.read_text(encoding="utf-8") for file in (*files, *shipped_files())),
        *_system_texts(),
    ):
        words.update(_WORD.findall(text))
    return frozenset(word.lower() for word in words)


def _system_texts() -> Iterator[str]:
    yield from (os.strerror(number) for number in errno.errorcode)
    yield from (str(one) for one in signal.valid_signals())


def _order(key: tuple[str, str]) -> tuple[int, int]:
    kind, placeholder = key
    return KINDS.index(kind), int(placeholder.rpartition("-")[2])

"""What a failed registration can be and what it cannot be.

The causes are the judge's layers. A cause is `decided` where a trace or the kernel's own message names
the layer, `supported` where something in the text or the audit speaks for it, `possible` where nothing
speaks against it, and `impossible` where something does. The same words have many causes, and none is
named that the text does not carry.
"""

from __future__ import annotations

from typing import Any

from regrepro.explain.formats import HOST
from regrepro.judge.layer_table import BY_NAME, LAYERS, ROWS
from regrepro.judge.layers import known_release
from regrepro.judge.narrowing import Decision

DECIDED = "decided"
SUPPORTED = "supported"
POSSIBLE = "possible"
IMPOSSIBLE = "impossible"
NOTHING_AGAINST = "nothing in the text speaks against it"
ORDER = (DECIDED, SUPPORTED, POSSIBLE, IMPOSSIBLE)


_SPEAKS_FOR = {
    "memlock-too-small": "memlock-accounting",
    "mr-limit": "mkey",
    "bar1-small": "bar-map",
    "bar1-used": "bar-map",
    "dmabuf": "dma-buf",
}
"""Findings of an audit, and the cause that each speaks for; `dmabuf` only as a warning."""


def weigh(
    decision: Decision,
    errno: str | None,
    buffer: str | None,
    *,
    supports: dict[str, str] | None = None,
    excludes: dict[str, str] | None = None,
    audit: dict[str, Any] | None = None,
) -> list[dict[str, str]]:
    """Weigh every cause that the judge leaves for one kind of failure, and those that it excludes. Returns
    `{cause, status, why, title, command}`, best first.
    """
    if decision.layer is not None:
        return [_entry(decision.layer.name, DECIDED, decision.layer.why)]
    status = dict.fromkeys(decision.candidates, (POSSIBLE, decision.why or NOTHING_AGAINST))
    status |= {name: (IMPOSSIBLE, why) for name, why in decision.excluded.items()}
    for name, why in (supports or {}).items():
        if name in status and status[name][0] == POSSIBLE:
            status[name] = (SUPPORTED, why)
    status |= {name: (IMPOSSIBLE, why) for name, why in (excludes or {}).items() if name in status}
    if audit is not None:
        narrow(status, audit, errno, buffer)
    if not any(state != IMPOSSIBLE for state, _ in status.values()):
        why = "everything that is known is excluded" if decision.candidates else NOTHING_AGAINST
        status["unknown"] = (POSSIBLE, why)
    entries = [_entry(name, state, why) for name, (state, why) in status.items()]
    return sorted(entries, key=lambda entry: (ORDER.index(entry["status"]), LAYERS.index(entry["cause"])))


def _entry(name: str, status: str, why: str) -> dict[str, str]:
    row = BY_NAME[name]
    return {"cause": name, "status": status, "why": why, "title": row.title, "command": row.command}


def narrow(
    status: dict[str, tuple[str, str]], audit: dict[str, Any], errno: str | None, buffer: str | None
) -> None:
    """Narrow by an audit of the node (`regrepro audit --json`): what it excludes, and what it speaks
    for.
    """
    facts = {
        (one.get("group"), one.get("name")): one for one in audit.get("facts", []) if isinstance(one, dict)
    }

    def value(group: str, name: str) -> Any:
        one = facts.get((group, name))
        return one.get("value") if one else None

    def close(name: str, why: str) -> None:
        if name in status:
            status[name] = (IMPOSSIBLE, f"the audit: {why}")

    def support(name: str, why: str) -> None:
        if name in status and status[name][0] in (POSSIBLE, SUPPORTED):
            status[name] = (SUPPORTED, f"the audit: {why}")

    kernel = known_release(str(value("system", "kernel") or ""))
    for row in ROWS:
        if kernel and row.not_on(errno or "", kernel, kernel):
            close(row.name, f"Linux {kernel[0]}.{kernel[1]} does not give {errno} for it")
    findings = {one.get("id"): one for one in audit.get("findings", []) if isinstance(one, dict)}
    conditions: dict[str, Any] = {}
    for exposure in audit.get("exposure", []):
        if isinstance(exposure, dict) and exposure.get("class") == "B":
            for one in exposure.get("conditions", []):
                conditions[str(one.get("what", ""))] = one
            if exposure.get("state") == "exposed":
                support("page-migration", "the node is exposed to it")
    for what, one in conditions.items():
        if one.get("holds") is not False:
            continue
        if "unpinnable memory" in what or "the kernel refuses" in what:
            close("page-migration", str(one.get("reason")))
            close("migration-target", str(one.get("reason")))
            if errno == "ENOMEM" and "unpinnable memory" in what:  # a huge page, and there only
                close("longterm-refused", str(one.get("reason")))
        elif "pins host memory" in what and "page-migration" in status:
            state, why = status["page-migration"]
            if state != IMPOSSIBLE:
                why += f"; the holder is not the NVIDIA driver's pin (the audit: {one.get('reason')})"
                status["page-migration"] = (state, why)
    processes = value("limits", "processes")
    free = [
        one.get("ipc_lock") is True
        or (isinstance(one.get("memlock"), dict) and one["memlock"].get("soft") is None)
        for one in (processes if isinstance(processes, list) else [])
        if isinstance(one, dict)
    ]
    if free and all(free):
        close("memlock-accounting", "no process with an RDMA device open has a locked-memory limit")
    loaded = value("nvidia", "peermem")
    if loaded == [] and errno == "EFAULT" and buffer != HOST:
        support("peer-memory", "nvidia-peermem is not loaded, so a GPU address cannot be registered this way")
    elif loaded == []:
        close("peer-memory", "nvidia-peermem is not loaded")
    for finding, name in _SPEAKS_FOR.items():
        told = findings.get(finding, {})
        if told and (finding != "dmabuf" or told.get("severity") == "warning"):
            support(name, str(told.get("title")))
    if value("nvidia", "state") == "absent":
        close("peer-memory", "there is no NVIDIA driver on this node")
        close("cuda-pin", "there is no NVIDIA driver on this node")

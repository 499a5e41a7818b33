"""The audit for people: facts, findings, what to do. Tables by rich where it is there and the output is
a terminal.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from regrepro.audit.finding import size
from regrepro.views.lines import PLAIN_WIDTH, Line, emit, width_of, wrap

_SIZES = ("total", "free", "available", "cma-total", "cma-free", "kho-scratch")


def shorten(text: str, width: int) -> str:
    """Cut a long text, visibly."""
    return text if len(text) <= width else text[: width - 1] + "…"


def value_text(fact: dict[str, Any]) -> str:
    """Write a fact's value on one line."""
    name, value = fact["name"], fact["value"]
    if value is None:
        return f"not known: {fact['why']}"
    if fact["group"] == "memory":
        if name in _SIZES:
            return size(value)
        if name == "zones":
            parts = [
                f"node {zone['node']} {zone['zone']} {zone['managed']} pages"
                + (
                    f" (CMA {zone['cma']}, free CMA {zone['free_cma']})"
                    if zone["cma"] or zone["free_cma"]
                    else ""
                )
                for zone in value
                if zone["managed"]
            ]
            return "; ".join(parts)
        if name == "page-blocks":
            total: dict[str, int] = {}
            for entry in value:
                for kind, count in entry["blocks"].items():
                    total[kind] = total.get(kind, 0) + count
            return ", ".join(f"{kind} {count}" for kind, count in total.items() if count)
        if name == "cma-areas":
            return "; ".join(f"{area['name']} {size(area['bytes'])}" for area in value) or "none"
        if name == "boot-log":
            lines = value["failed"] + [item["line"] for item in value["reserved"]] + value["kho"]
            begin = "" if value["reaches_boot"] else " (it does not reach back to the boot)"
            return ("; ".join(lines) or "nothing of reservations") + begin
        if name == "hugetlb":
            return ", ".join(f"{count} of {size(int(kib) << 10)}" for kib, count in value.items())
    if fact["group"] == "limits" and isinstance(value, dict):
        return ", ".join(f"{key} {'unlimited' if one is None else size(one)}" for key, one in value.items())
    if fact["group"] == "rdma" and name == "devices":
        return "; ".join(_device(device) for device in value) or "none"
    if fact["group"] == "nvidia" and name == "gpus":
        return "; ".join(
            f"{gpu['bus']} {gpu.get('name') or 'GPU'}"
            + (
                f", BAR1 {size(gpu.get('bar1_total') or gpu.get('bar1'))}"
                if gpu.get("bar1_total") or gpu.get("bar1")
                else ""
            )
            for gpu in value
        )
    if isinstance(value, dict):
        return ", ".join(f"{key}: {one}" for key, one in value.items())
    if isinstance(value, list):
        return "; ".join(str(one) if not isinstance(one, dict) else _pairs(one) for one in value) or "none"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _pairs(value: dict[str, Any]) -> str:
    return " ".join(f"{key} {one}" for key, one in value.items() if one not in (None, "", []))


def _device(device: dict[str, Any]) -> str:
    parts = [device["name"]]
    if device["driver"]:
        parts.append(device["driver"])
    if device["software"]:
        parts.append("(software)")
    if device["firmware"]:
        parts.append(f"firmware {device['firmware']}")
    for port in device["ports"]:
        parts.append(f"port {port['port']} {port['state'] or '?'} {port['rate'] or ''}".strip())
    if device["mr"] is not None:
        parts.append(f"{device['mr']} MRs" + (f" of {device['max_mr']}" if device["max_mr"] else ""))
    if device["odp"]:
        parts.append(f"ODP {device['odp']}")
    if device["relaxed_ordering"] is not None:
        parts.append(f"relaxed ordering {'on' if device['relaxed_ordering'] else 'off'}")
    return " ".join(parts)


MARKS = {"exposed": "EXPOSED", "warning": "WARNING", "unknown": "UNKNOWN", "note": "note", "ok": "ok"}
STYLES = {"exposed": "bold red", "warning": "yellow", "unknown": "magenta", "note": "", "ok": "green"}
STATES = {
    "exposed": ("EXPOSED", "bold red"),
    "not-exposed": ("not exposed", "green"),
    "unknown": ("cannot tell", "magenta"),
}
CLASSES = {"A": "class A, GPU buffers by peer memory", "B": "class B, host pages in unpinnable memory"}
NAME_WIDTH = 30
INDENT = " " * 10


def layout(result: dict[str, Any], width: int, *, with_facts: bool = True) -> list[Line]:
    """Lay the audit out: facts, what the driver asks for, findings, verdict."""
    lines: list[Line] = []
    if with_facts:
        lines += [[(f"Facts of {result['where']}", "bold")], []]
        for group in dict.fromkeys(fact["group"] for fact in result["facts"]):
            lines.append([(f"  {group}", "bold")])
            for fact in result["facts"]:
                if fact["group"] == group:
                    lines += _fact(fact, width)
            lines.append([])
    lines += [line for text in driver_lines(result["driver"]) for line in wrap(text, width, "    ", first="")]
    lines += [[], [("Findings", "bold")]]
    for finding in result["findings"]:
        lines.append([])
        mark = f"{MARKS[finding['severity']]:<{len(INDENT) - 2}}"
        title = wrap(finding["title"], width, INDENT, first=INDENT, style="bold")
        lines.append(
            [("  ", ""), (mark, STYLES[finding["severity"]]), (title[0][0][0][len(INDENT) :], "bold")]
        )
        lines += title[1:]
        lines += wrap(finding["explanation"], width, INDENT)
        if finding["severity"] in ("exposed", "warning", "unknown"):
            for item in finding["evidence"]:
                text = "- " + shorten(evidence_text(item), 400)
                lines += wrap(text, width, INDENT + "  ", first=INDENT, style="dim")
        if finding["fix"]:
            lines += wrap("what to do: " + finding["fix"], width, INDENT)
    lines += [[], [("Verdict", "bold")]]
    for one in result["exposure"]:
        words, style = STATES[one["state"]]
        lines.append([(f"  {CLASSES[one['class']]}: ", ""), (words, style)])
        lines += wrap(one["reason"], width, INDENT)
    return lines


def _fact(fact: dict[str, Any], width: int) -> list[Line]:
    name = fact["name"] + (" ~" if fact["how"] == "inferred" else "")
    style = "dim" if fact["value"] is None else ""
    text = f"{shorten(value_text(fact), 500)}  [{fact['source']}]"
    first = f"    {name:<{NAME_WIDTH - 4}} "
    return wrap(text, width, " " * (NAME_WIDTH + 1), first=first, style=style)


def plain(result: dict[str, Any], *, with_facts: bool = True) -> str:
    """Write the audit as text that reads anywhere."""
    out = io.StringIO()
    emit(layout(result, PLAIN_WIDTH, with_facts=with_facts), out)
    return out.getvalue()


def show(result: dict[str, Any], *, with_facts: bool = True) -> None:
    """Print the audit: in colour on a terminal that has it, else plainly."""
    emit(layout(result, width_of(sys.stdout), with_facts=with_facts))


def evidence_text(item: dict[str, Any]) -> str:
    """Write one piece of evidence on a line."""
    value = item["value"]
    if value is True or value is False or value is None:
        words = {True: "yes", False: "no", None: "not known"}[value]
        return f"{item['what']}: {words} ({item['source']})"
    group, slash, name = item["what"].partition("/")
    if slash and isinstance(value, (dict, list)):
        value = value_text({"group": group, "name": name, "value": value, "why": ""})
    if isinstance(value, int) and ("cma" in item["what"].lower() or "shell" in item["what"]):
        value = size(value)
    return f"{item['what']}: {value} [{item['source']}]"


def driver_lines(driver: dict[str, Any]) -> list[str]:
    """Write what the driver asks for, best source first."""
    asked = {"installed": "The installed driver", "version": "Driver", "source": "The driver's source"}[
        driver["asked"]
    ]
    if driver["asked"] == "installed" and driver["version"] is None:
        return ["No NVIDIA driver's version is known here, so nothing can be said of its host pin"]
    lines = [f"{asked} {driver['version'] or '(version not known)'}"]
    for one in driver["contracts"]:
        words = {
            "longterm": "asks for FOLL_LONGTERM",
            "pin": "pins without FOLL_LONGTERM",
            "get": "takes references without FOLL_LONGTERM",
            None: "not known",
        }[one["contract"]]
        lines.append(f"  host pin: {words} ({one['how']}, {one['source']}: {one['why']})")
    if not driver["contracts"]:
        lines.append("  host pin: nothing to be said")
    source = driver["source"]
    if source:
        by_arch = ", ".join(f"{arch}: {answer}" for arch, answer in source["by_arch"].items())
        lines.append(f"  FOLL_LONGTERM in its source: {source['variant']} ({by_arch})")
        lines += [f"  {note}" for note in source["notes"]]
    if driver["peermem"] and driver["peermem"]["value"]:
        lines.append(f"  nvidia-peermem: {driver['peermem']['value']} ({driver['peermem']['how']})")
    return lines

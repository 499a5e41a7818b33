"""The audit for people: facts, findings, what to do. Tables by rich where it is there and the output is
a terminal.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from regrepro.audit.findings import size

_SIZES = ("total", "free", "available", "cma-total", "cma-free", "kho-scratch")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Take control characters out of foreign text before it reaches a terminal."""
    return _CONTROL.sub("?", text)


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


def plain(result: dict[str, Any], *, with_facts: bool = True) -> str:
    """Write the audit as text that reads anywhere."""
    lines: list[str] = []
    if with_facts:
        lines.append(f"Facts of {result['where']}")
        group = ""
        for fact in result["facts"]:
            if fact["group"] != group:
                group = fact["group"]
                lines += ["", f"  {group}"]
            mark = "~" if fact["how"] == "inferred" else " "
            text = clean(shorten(value_text(fact), 400))
            lines.append(f"   {mark}{fact['name']:<28} {text}  [{clean(fact['source'])}]")
        lines.append("")
    lines += driver_lines(result["driver"])
    lines += ["", "Findings"]
    for finding in result["findings"]:
        lines += ["", f"  {MARKS[finding['severity']]:<8} {clean(finding['title'])}"]
        lines.append(f"           {clean(finding['explanation'])}")
        for item in finding["evidence"]:
            if finding["severity"] in ("exposed", "warning", "unknown"):
                lines.append(f"           - {clean(shorten(evidence_text(item), 300))}")
        if finding["fix"]:
            lines.append(f"           what to do: {clean(finding['fix'])}")
    lines += ["", "Verdict"]
    for one in result["exposure"]:
        words = {"exposed": "EXPOSED", "not-exposed": "not exposed", "unknown": "cannot tell"}[one["state"]]
        name = {"A": "A, GPU buffers by peer memory", "B": "B, host pages in unpinnable memory"}[one["class"]]
        lines.append(f"  class {name}: {words}: {clean(one['reason'])}")
    return "\n".join(lines) + "\n"


def evidence_text(item: dict[str, Any]) -> str:
    """Write one piece of evidence on a line."""
    value = item["value"]
    if value is True or value is False or value is None:
        words = {True: "yes", False: "no", None: "not known"}[value]
        return f"{item['what']}: {words} ({item['source']})"
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
        lines.append(f"  host pin: {words} ({one['how']}, {clean(one['source'])}: {clean(one['why'])})")
    if not driver["contracts"]:
        lines.append("  host pin: nothing to be said")
    source = driver["source"]
    if source:
        by_arch = ", ".join(f"{arch}: {answer}" for arch, answer in source["by_arch"].items())
        lines.append(f"  FOLL_LONGTERM in its source: {source['variant']} ({by_arch})")
        lines += [f"  {clean(note)}" for note in source["notes"]]
    if driver["peermem"] and driver["peermem"]["value"]:
        lines.append(f"  nvidia-peermem: {driver['peermem']['value']} ({driver['peermem']['how']})")
    return lines


def show(result: dict[str, Any], *, with_facts: bool = True) -> None:
    """Print the audit: with rich on a terminal that has it, else plainly."""
    if sys.stdout.isatty():
        try:
            _rich(result, with_facts=with_facts)
            return
        except ImportError:
            pass
    sys.stdout.write(plain(result, with_facts=with_facts))


_STYLES = {"exposed": "bold red", "warning": "yellow", "unknown": "magenta", "note": "", "ok": "green"}


def _rich(result: dict[str, Any], *, with_facts: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if with_facts:
        table = Table(title=f"Facts of {result['where']}", title_justify="left", box=None, pad_edge=False)
        for heading in ("group", "fact", "value", "read in"):
            table.add_column(heading, overflow="fold")
        group = ""
        for fact in result["facts"]:
            first = fact["group"] if fact["group"] != group else ""
            group = fact["group"]
            style = "dim" if fact["value"] is None else ""
            table.add_row(
                Text(first, "bold"),
                Text(fact["name"] + (" ~" if fact["how"] == "inferred" else "")),
                Text(clean(shorten(value_text(fact), 400)), style),
                Text(clean(fact["source"]), "dim"),
            )
        console.print(table)
        console.print()
    for line in driver_lines(result["driver"]):
        console.print(Text(line))
    console.print()
    table = Table(title="Findings", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 1, 0))
    table.add_column("")
    table.add_column("", overflow="fold")
    for finding in result["findings"]:
        text = Text(clean(finding["title"]) + "\n", "bold")
        text.append(clean(finding["explanation"]), "not bold")
        if finding["severity"] in ("exposed", "warning", "unknown"):
            for item in finding["evidence"]:
                text.append("\n- " + clean(shorten(evidence_text(item), 300)), "not bold dim")
        if finding["fix"]:
            text.append("\nwhat to do: " + clean(finding["fix"]), "not bold")
        table.add_row(Text(MARKS[finding["severity"]], _STYLES[finding["severity"]]), text)
    console.print(table)
    for one in result["exposure"]:
        words = {"exposed": "EXPOSED", "not-exposed": "not exposed", "unknown": "cannot tell"}[one["state"]]
        style = {"exposed": "bold red", "not-exposed": "green", "unknown": "magenta"}[one["state"]]
        last = Text(f"class {one['class']}: ")
        last.append(words, style)
        last.append(f": {clean(one['reason'])}")
        console.print(last)

"""What verdicts and their evidence say, in plain words: one sentence or part of one for each piece.

Terminal, reports and bundle show the same words. Each function takes the `evidence` of a verdict and returns
an empty string where there is nothing to say, or "not known: …" where the record says why it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PLACES = {
    "cma": "in CMA",
    "movable-zone": "in ZONE_MOVABLE",
    "isolate": "in isolated pageblocks",
    "ordinary": "in ordinary memory",
    "unknown": "in a place not known",
    "absent": "not present",
}
FLAGS = {
    "pin": "FOLL_PIN without FOLL_LONGTERM",
    "get": "FOLL_GET",
    "longterm": "FOLL_PIN with FOLL_LONGTERM",
}
"""What a pin asks the kernel for, by its kind."""


BOOT_WORDS = ("cma=", "hugetlb_cma=", "movablecore=", "kernelcore=", "movable_node", "kho=")
"""Boot arguments that make unpinnable memory, by their beginning."""


def boot_of(header: Mapping[str, Any]) -> list[str]:
    """Return the boot arguments that make unpinnable memory."""
    line = str(mapping_of(header.get("node")).get("cmdline") or "")
    return [word for word in line.split() if word.startswith(BOOT_WORDS)]


def places(counts: Mapping[str, Any]) -> list[str]:
    """Return how many pages lie where, a sentence's part each."""
    return [f"{count} {PLACES.get(str(name), name)}" for name, count in counts.items()]


def value_of(evidence: Mapping[str, Any], name: str) -> Any:
    """Return the value of one piece of evidence, None where there is none."""
    return mapping_of(evidence.get(name)).get("value")


def how_known(evidence: Mapping[str, Any], name: str) -> str:
    """Return how a piece of evidence is known; `missing` where it is not."""
    return str(mapping_of(evidence.get(name)).get("how") or "missing")


def missing(evidence: Mapping[str, Any], name: str) -> str:
    """Return `not known: why` where a piece of evidence is missing, else nothing."""
    item = mapping_of(evidence.get(name))
    return f"not known: {item.get('source')}" if item.get("how") == "missing" and item.get("source") else ""


def placement(evidence: Mapping[str, Any]) -> str:
    """Return where the pages lay when the registration began."""
    found = value_of(evidence, "placement")
    if not isinstance(found, Mapping):
        return missing(evidence, "placement")
    total, how = value_of(evidence, "pages"), how_known(evidence, "placement")
    parts = places(found)
    if len(parts) == 1:
        where = PLACES.get(str(next(iter(found))), next(iter(found)))
        return f"{'its one page' if total == 1 else f'all {pages(total)}'} {where} ({how})"
    return f"of {pages(total)} {', '.join(parts) or 'none is known'} ({how})"


def pin(evidence: Mapping[str, Any]) -> str:
    """Return who held which pins, and whether they were alive before and after."""
    pins = value_of(evidence, "pins")
    if not isinstance(pins, list):
        return ""
    if not pins:
        return "none was held"
    parts = []
    for pin in mappings_of(pins):
        signs = [pin.get("alive_before"), pin.get("alive_after")]
        life = (
            "alive before and after"
            if signs == [True, True]
            else "cannot be asked"
            if None in signs
            else "not alive"
        )
        kind = FLAGS.get(str(pin.get("kind")), pin.get("kind"))
        if pin.get("owner") == "own-code":  # nobody promised anything: what it asks for is measured
            kind = "code of the user's own"
        parts.append(
            f"{pin.get('owner')} held {pages(pin.get('pages'))} by {pin.get('api')} ({kind}), {life}"
        )
    return "; ".join(parts) + (
        " (a stand-in for the driver's pin)" if how_known(evidence, "pins") == "stand-in" else ""
    )


def flags(evidence: Mapping[str, Any]) -> str:
    """What each pin asked the kernel for, as the kernel saw it; calls of one kind are told once."""
    texts: dict[str, None] = {}
    for call in mappings_of(value_of(evidence, "pin_flags")):
        flags = "|".join(str(flag) for flag in list_of(call.get("flags"))) or "no flags"
        modules = ", ".join(str(name) for name in list_of(call.get("modules")))
        by = f" by [{modules}]" if modules else f" from {call['caller']}" if call.get("caller") else ""
        texts[f"{call.get('fn')}({flags}){by}"] = None
    return "; ".join(texts) + " (seen by the kernel's trace)" if texts else ""


def counts(value: object) -> str:
    """Return one side of the reference counts."""
    if not isinstance(value, Mapping):
        return "not known"
    words = {"refcount": "", "mapcount": "mapped ", "pincount": "pin count "}
    parts = []
    for name, count in value.items():
        number = f"{count[0]} to {count[1]}" if isinstance(count, list) and len(count) == 2 else f"{count}"
        parts.append(f"{words.get(str(name), str(name) + ' ')}{number}{'x' if name == 'mapcount' else ''}")
    return ", ".join(parts)


def contract(evidence: Mapping[str, Any]) -> str:
    """What the pins promised, measured by what they did to the pages; empty where that could not be told."""
    pins = [mapping_of(pin) for pin in mapping_of(value_of(evidence, "pin_contract")).values()]
    names = {"longterm": "FOLL_LONGTERM", "plain": "no FOLL_LONGTERM"}
    told = [f"{names[kind]}: {pin.get('why')}" for pin in pins if (kind := str(pin.get("contract"))) in names]
    return "; ".join(dict.fromkeys(told))


def references(evidence: Mapping[str, Any]) -> str:
    """Return the reference counts before and after the registration."""
    value = value_of(evidence, "references")
    if value is None and not value_of(evidence, "pins"):
        return ""  # nobody held anything: nothing to count
    if not isinstance(value, Mapping):
        return missing(evidence, "references")
    return f"before {counts(value.get('before'))}; after {counts(value.get('after'))} (one FOLL_PIN is 1,024)"


def movement(evidence: Mapping[str, Any]) -> str:
    """Return how many pages moved, and how many stayed."""
    moved, stayed = value_of(evidence, "pages_moved"), value_of(evidence, "pages_unmoved")
    if moved is None and stayed is None:
        return missing(evidence, "pages_moved")
    text = f"{pages(moved)} moved, {stayed} stayed in unpinnable memory"
    tried = value_of(evidence, "pages_tried")
    return text + (f" (of the {tried} that were tried before it failed)" if tried is not None else "")


def registrar(evidence: Mapping[str, Any]) -> str:
    """Return what registered, and on which device."""
    value = value_of(evidence, "registrar")
    if not isinstance(value, Mapping):
        return ""
    note = f" ({value['note']}, a stand-in)" if value.get("note") else ""
    return f"{value.get('verb')} on {value.get('device') or 'no device'}{note}"


def trace(evidence: Mapping[str, Any]) -> str:
    """Return why there is no trace; nothing where there is one."""
    value = value_of(evidence, "trace")
    if not isinstance(value, Mapping):
        return ""
    if value.get("status") == "complete":
        return ""
    return f"no trace, it is {value.get('status')}: {value.get('why') or 'no reason recorded'}"


def release(evidence: Mapping[str, Any]) -> str:
    """Return what became of the same call once the pins were released."""
    value = value_of(evidence, "release")
    if not isinstance(value, Mapping):
        return ""
    count = value.get("released")
    parts = ["the pin was released" if count == 1 else f"{count} pins were released"]
    if value.get("bytes_kept") is not None:
        parts[0] += ", no byte changed" if value["bytes_kept"] else ", the buffer's bytes changed"
    if "again_errno" in value:
        parts.append(f"the same call again: {value['again_errno'] or 'OK'}")
        if value.get("same_unpinnable_pages"):
            parts[-1] += f", on the same {pages(value['same_unpinnable_pages'])}, still unpinnable before"
        if value.get("again_moved") is not None:
            parts.append(f"{pages(value['again_moved'])} moved")
    if value.get("pinned_again_on_ordinary"):
        parts.append(f"pinned again, on ordinary memory: {value['pinned_again_on_ordinary']}")
    return "; ".join(parts)


def layer(evidence: Mapping[str, Any]) -> str:
    """Return the deepest layer that failed, why it is that one, and how it is known."""
    item = mapping_of(evidence.get("layer"))
    value = mapping_of(item.get("value"))
    source = f", {item['source']}" if item.get("source") and item.get("source") != value.get("why") else ""
    return f"{value.get('layer')}: {value.get('why')} ({item.get('how')}{source})" if value else ""


def controls(item: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each control of a verdict."""
    texts = []
    for control in mappings_of(item.get("controls")):
        mark = "held" if control.get("held") else "not held"
        texts.append(f"{control.get('name')} ({control.get('changed')}): {control.get('reason')} [{mark}]")
    return texts


def path_item(node: Mapping[str, Any]) -> str:
    """Return one item of a trace's tree as text."""
    name, text = str(node.get("fn")), str(node.get("text") or "")
    if name in text:
        return text
    errno = f" {node['errno']}" if node.get("errno") else ""
    returned = f" = {node['ret']}{errno}" if node.get("ret") is not None else ""
    return f"{name}{returned}{'  ' + text if text else ''}"


def deepest(nodes: Sequence[Mapping[str, Any]]) -> int | None:
    """The item that failed deepest: the one that says so, else the failing one of the greatest depth."""
    failing = [n for n, node in enumerate(nodes) if node.get("failing")]
    marked = [n for n in failing if nodes[n].get("deepest")]
    if marked:
        return marked[0]
    depths = {n: number_of(nodes[n].get("depth")) for n in failing}
    return max(failing, key=lambda n: depths[n], default=None)


def number_of(value: object) -> int:
    """Return a value if it is an integer, else 0."""
    return value if isinstance(value, int) else 0


def stand_ins(header: Mapping[str, Any], items: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each stand-in that took part, of the header and of the verdicts."""
    texts: dict[str, str] = {}
    for stand_in in mappings_of(header.get("stand_ins")):
        name = str(stand_in.get("name"))
        texts[name] = f"{name}, in the place of {stand_in.get('replaces')}: {stand_in.get('what')}"
    pins = {
        "process-vm": "a real FOLL_PIN from user space (process_vm_writev)",
        "vmsplice": "a real FOLL_GET reference from user space",
        "io-uring": "a real FOLL_LONGTERM pin from user space",
    }
    for item in items:
        for name in list_of(value_of(mapping_of(item.get("evidence")), "stand_ins")):
            what = f", in the place of the driver's pin: {pins[name]}" if name in pins else ""
            texts.setdefault(str(name), f"{name}{what}")
    return list(texts.values())


def pages(count: object) -> str:
    """Return `1 page`, `8 pages`."""
    return "1 page" if count == 1 else f"{count} pages"


def fact(value: object) -> str:
    """Return a fact of a header as words."""
    if isinstance(value, list):
        return " ".join(str(item) for item in value) or "nothing"
    return "not known" if value is None else str(value)


def plain(value: object) -> str:
    """Return any JSON value as words."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(plain(item) for item in value) or "-"
    return str(value)


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def list_of(value: object) -> list[Any]:
    """Return a value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def mappings_of(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in a value that is a list, else nothing."""
    return [item for item in list_of(value) if isinstance(item, Mapping)]

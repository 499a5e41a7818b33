"""Makes the JSON Schema of a record and the tables of docs/record.md from the classes of `record.events`.

    python -m regrepro.record.schema DIRECTORY

writes `src/regrepro/schema/record-2.json`, and the tables between the markers of `docs/record.md`, in a
checkout.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from regrepro.record.events import (
    EVENTS,
    SCHEMA,
    CallTrace,
    Event,
    Header,
    PageRuns,
    PassEvent,
    Shape,
)

SCHEMA_FILE = "src/regrepro/schema/record-2.json"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_TABLES: dict[str, tuple[type[Any], ...]] = {
    "header": (Header,),
    "events": tuple(EVENTS.values()),
    "page-state": (PageRuns,),
    "trace": (CallTrace,),
}


def hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a class' keys by name."""
    return get_type_hints(cls, include_extras=True)


def _any_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    named = [part["type"] for part in parts if set(part) == {"type"}]
    rest = [part for part in parts if set(part) != {"type"}]
    if named:
        rest.append({"type": named[0] if len(named) == 1 else named})
    return rest[0] if len(rest) == 1 else {"anyOf": rest}


class _Schema:
    """The definitions that were made so far, by name of their class."""

    def __init__(self) -> None:
        self.defs: dict[str, Any] = {}

    def ref(self, cls: type[Any]) -> dict[str, Any]:
        name = f"event-{cls.NAME}" if getattr(cls, "NAME", "") else cls.__name__
        if name not in self.defs:
            self.defs[name] = {}
            self.defs[name] = self._of_class(cls)
        return {"$ref": f"#/$defs/{name}"}

    def _of_class(self, cls: type[Any]) -> dict[str, Any]:
        required, properties = [], {}
        for item in fields(cls):
            told = self.of(hints(cls)[item.name])
            doc = item.metadata.get("doc")
            properties[item.name] = {"description": doc, **told} if doc else told
            if not item.metadata.get("optional"):
                required.append(item.name)
        made = {
            "description": _sentence(cls),
            "type": "object",
            "required": required,
            "properties": properties,
        }
        return made | dict(getattr(cls, "RULES", {}))

    def of(self, hint: Any) -> dict[str, Any]:
        """Return the schema of a type."""
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._annotated(args[0], args[1:])
        if origin in (Union, types.UnionType):
            return _any_of([self.of(part) for part in args])
        if origin is Literal:
            return {"enum": list(args)}
        if origin is list:
            return {"type": "array", **({} if args[0] is Any else {"items": self.of(args[0])})}
        if origin is tuple:
            parts = [self.of(part) for part in args]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(args[1])}
        if hint in _PLAIN:
            return {"type": _PLAIN[hint]}
        if is_dataclass(hint) and isinstance(hint, type):
            return self.ref(hint)
        return {"type": "object"} if origin is not None else {}

    def _annotated(self, hint: Any, extra: tuple[Any, ...]) -> dict[str, Any]:
        shapes = [self.ref(item.cls) for item in extra if isinstance(item, Shape)]
        if shapes:
            null = [{"type": "null"}] if type(None) in get_args(hint) else []
            return _any_of([*shapes, *null])
        made = self.of(hint)
        for item in extra:
            made |= item.keywords
        return made


def _sentence(cls: type[Any]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def record_schema() -> dict[str, Any]:
    """Return the JSON Schema of one line of a record."""
    made = _Schema()
    made.ref(Header)
    made.defs["Header"]["properties"]["schema"] = {"const": SCHEMA}
    choices = [
        {"if": {"properties": {"event": {"const": name}}}, "then": made.ref(cls)}
        for name, cls in EVENTS.items()
    ]
    event = made.ref(Event)
    made.defs["Event"]["properties"]["event"] = {"type": "string"}
    made.defs["Event"]["required"].append("event")
    made.defs["Event"]["allOf"] = choices
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:regrepro:record-2",
        "title": f"One line of record.jsonl, schema {SCHEMA}",
        "description": "The format is described in docs/record.md. The first line is a header, all others "
        "are events. Keys and events that are not listed are allowed: readers leave them out.",
        "if": {"required": ["schema"]},
        "then": {"$ref": "#/$defs/Header"},
        "else": event,
        "$defs": made.defs,
    }


def table(name: str) -> str:
    """Return a table of docs/record.md."""
    classes = _TABLES[name]
    if name == "events":
        rows = [f"| `{cls.NAME}` | {_sentence(cls)} {_keys(cls)} |" for cls in classes]
        return "\n".join(["| `event` | what, and further keys |", "| --- | --- |", *rows])
    rows = [f"| `{item.name}` | {_doc(hints(classes[0])[item.name], item)} |" for item in fields(classes[0])]
    return "\n".join(["| key | what |", "| --- | --- |", *rows])


def _doc(hint: Any, item: Any) -> str:
    told = str(item.metadata.get("doc") or "")
    values = [f"`{value}`" for value in get_args(hint)] if get_origin(hint) is Literal else []
    if values and not all(value in told for value in values):
        told = f"{', '.join(values)}; {told}"
    return told.replace("|", "\\|")


def _keys(cls: type[Any]) -> str:
    base = PassEvent if issubclass(cls, PassEvent) else Event
    common = {item.name for item in fields(base)}
    own = [item for item in fields(cls) if item.name not in common]
    return "; ".join(f"`{item.name}`: {_doc(hints(cls)[item.name], item)}" for item in own)


def with_tables(text: str) -> str:
    """Return docs/record.md with its tables as they are to be."""

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}\n{table(found[2])}\n{found[3]}"

    return re.sub(r"(<!-- generated: ([a-z-]+) -->)\n.*?\n?(<!-- end -->)", replaced, text, flags=re.DOTALL)


def schema_text() -> str:
    """Return the text of schema/record-2.json."""
    return json.dumps(record_schema(), separators=(",", ":"), ensure_ascii=False) + "\n"


def main(root: Path) -> None:
    """Write what is made from the classes into a checkout."""
    (root / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
    page = root / "docs/record.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

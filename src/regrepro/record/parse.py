"""Turns events as they were read into objects of their classes, and checks the types of their keys, once."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from regrepro.record.events import EVENTS, Event

_T = TypeVar("_T")
_Reader = Callable[[Any], Any]


class Malformed(Exception):
    """An event lacks a key, or one has a value of another type: the text names it."""


def parse(event: Mapping[str, Any]) -> Event | None:
    """Return an event as an object of its class; None where its type is not known. Keys that are not declared
    are left out, and so is what else a JSON Schema says of a value. Raises `Malformed`.
    """
    kind = event.get("event")
    cls = EVENTS.get(kind) if isinstance(kind, str) else None
    return None if cls is None else read_as(cls, event)


def read_as(cls: type[_T], value: Any) -> _T:
    """Return a JSON object as an object of a class of `record.events`. Raises `Malformed`."""
    if not isinstance(value, Mapping):
        raise Malformed("is no object")
    found: dict[str, Any] = {}
    for name, optional, read in _keys_of(cast(Any, cls)):
        if name in value:
            try:
                found[name] = read(value[name])
            except Malformed as error:
                raise Malformed(f"{name} {error}") from None
        elif not optional:
            raise Malformed(f"{name} is missing")
    return cls(**found)


@cache
def _keys_of(cls: Any) -> list[tuple[str, bool, _Reader]]:
    hints = get_type_hints(cls, include_extras=True)
    return [
        (item.name, bool(item.metadata.get("optional")), _reader(hints[item.name])) for item in fields(cls)
    ]


def _reader(hint: Any) -> _Reader:
    """Return what turns a JSON value into one of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return _reader(args[0])
    if origin in (Union, types.UnionType):
        return _one_of([_reader(part) for part in args])
    if origin is list:
        return _list_of(_reader(args[0]))
    if origin is tuple:
        return _tuple_of([_reader(part) for part in args])
    if origin is dict:
        return _dict_of(_reader(args[1]))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: read_as(cast(Any, hint), value)
    if origin is Literal:  # a word that a later version has is for the judge to say
        return _of_type((str,), "text")
    wanted = {str: ((str,), "text"), bool: ((bool,), "true or false"), type(None): ((type(None),), "null")}
    numbers = {int: ((int,), "whole number"), float: ((int, float), "number")}
    return _of_type(*{**wanted, **numbers}.get(hint, ((Mapping,), "object")))


def _of_type(wanted: tuple[type[Any], ...], what: str) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise Malformed(f"is no {what}" if what != "null" else "is not null")
        return value

    return read


def _one_of(parts: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        first: Malformed | None = None
        for part in parts:
            try:
                return part(value)
            except Malformed as error:
                first = first or error
        raise first or Malformed("is of no type")

    return read


def _list_of(part: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise Malformed("is no list")
        return [part(item) for item in value]

    return read


def _dict_of(part: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Malformed("is no object")
        return {str(name): part(item) for name, item in value.items()}

    return read


def _tuple_of(parts: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(parts):
            raise Malformed(f"is no list of {len(parts)}")
        return tuple(part(item) for part, item in zip(parts, value, strict=True))

    return read

"""Text that is not ours (records, logs, names of other processes, file names) and may be hostile.

What a terminal, a log, Markdown, TAP or C would obey is never passed on: control characters, newlines, escape
sequences, and what turns the direction of text (bidi) are shown as Python would write them, `\\x1b`.
"""

from __future__ import annotations

from typing import Any


def visible(text: str, keep: str = "") -> str:
    """Return a text with everything that cannot be printed written out; `keep`: characters that stay.

    What can be printed is Unicode's word (str.isprintable): no control or format character (Cc, Cf), no
    separator but the space (Zl, Zp, Zs), no surrogate.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode("ascii")
        for sign in text
    )


def visible_value(value: Any) -> Any:
    """Return a JSON value whose texts, keys too, are `visible`."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): visible_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [visible_value(item) for item in value]
    return value

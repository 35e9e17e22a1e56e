"""Untrusted values as strict JSON and as text for a terminal: they may neither end a run nor make a line unreadable."""

from __future__ import annotations

import json
import math
import numbers
import unicodedata
from collections.abc import Mapping
from decimal import Decimal

_MAX_DEPTH = 20
"""Deepest level of nested lists and dicts; deeper ones become text."""


def plain(value: object, depth: int = 0) -> object:
    """The value as JSON: null for a number that is not finite, text for other types and for values nested too deep."""
    if value is None or isinstance(value, (bool, str)):
        return value
    try:
        if depth < _MAX_DEPTH and isinstance(value, Mapping):
            return {text_of(key): plain(item, depth + 1) for key, item in value.items()}
        if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
            return [plain(item, depth + 1) for item in value]
        item = getattr(value, "item", None)
        if item is not None and getattr(value, "shape", None) == ():  # a scalar of numpy or torch
            value = item()
        if isinstance(value, (bool, numbers.Integral)):
            json.dumps(int(value))  # raises where Python refuses to write so many digits
            return value if isinstance(value, bool) else int(value)
        if isinstance(value, (numbers.Real, Decimal)):
            return finite(float(value))
    except Exception:  # the user's object may raise anything
        return text_of(value)
    return text_of(value)


def text_of(value: object) -> str:
    """The value as text, or its type if that fails."""
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def finite(value: float) -> float | None:
    """The value; None if it is not finite, which JSON cannot represent."""
    return float(value) if math.isfinite(value) else None


def printable(text: str) -> str:
    """The text with control and invisible characters escaped for a terminal; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()

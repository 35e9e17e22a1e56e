"""Plain data between a program's process and the one that judges it: JSON whose arrays begin with their type.

Values are read by their contents: a subclass of a plain type travels as that type, so that none of its methods
comes along. Everything else is opaque: it stays where it is, and a number stands for it.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_BYTES = 32 * 2**20
"""Largest message."""
_MAX_DEPTH = 100
_MAX_NODES = 2**22
_WORD = 2**63
_KEYS = type(dict[str, None]().keys())
_SEQUENCES: dict[str, type] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": deque}
_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}
_AS_THEY_ARE = frozenset({type(None), bool, str, float})
_EXACT: dict[type, Callable] = {
    int: lambda value: int.__add__(value, 0),
    float: float.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    **{kind: lambda value, kind=kind: kind(kind.__iter__(value)) for kind in _TAGS},
    dict: lambda value: dict(dict.items(value)),
    Decimal: lambda value: Decimal(Decimal.__str__(value)),
    Fraction: lambda value: Fraction(*Fraction.as_integer_ratio(value)),
}
"""Conversion from an instance of a subclass to one of the type itself, by the type's own methods."""


class NotPlainError(ValueError):
    """The value is opaque, and nothing may stand for it; or it is too large or too deep."""


def encode(value: object, stand_in: Callable[[object], int | None]) -> bytes:
    """The value as text. `stand_in` numbers objects that are not plain; where it returns None: NotPlainError."""
    tree = _Encoder(stand_in).tree(value, _MAX_DEPTH)
    data = json.dumps(tree, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise NotPlainError(f"a value of {len(data)} bytes; at most {MAX_BYTES} are allowed")
    return data


def decode(data: bytes, opaque: Callable[[int], object]) -> Any:
    """The value of a text from anywhere. ValueError, TypeError, RecursionError, MemoryError: it is not such a text."""
    return _Decoder(opaque).value(json.loads(data), _MAX_DEPTH)


class _Encoder:
    def __init__(self, stand_in: Callable[[object], int | None]) -> None:
        self._stand_in = stand_in
        self._nodes_left = _MAX_NODES

    def tree(self, value: Any, depth: int) -> object:
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        self._nodes_left -= 1
        if depth == 0 or self._nodes_left < 0:
            raise NotPlainError("a value that is too deep or too large")
        if kind is int:
            return value if -_WORD < value < _WORD else ["i", hex(value)]
        if kind in _TAGS:
            return [_TAGS[kind], *[self.tree(item, depth - 1) for item in value]]
        if kind is _KEYS:
            return ["k", *[self.tree(item, depth - 1) for item in value]]
        if kind is dict:
            return ["d", *[self.tree(part, depth - 1) for item in value.items() for part in item]]
        simple = _simple(kind, value)
        if simple is not None:
            return simple
        for base, exact in _EXACT.items():
            if issubclass(kind, base):
                return self.tree(exact(value), depth)
        numpy = sys.modules.get("numpy")
        if issubclass(kind, getattr(numpy, "generic", ())):
            item = value.item()
            if type(item) is not kind:
                return self.tree(item, depth - 1)
        number = self._stand_in(value)
        if number is None:
            raise NotPlainError(f"a value of type {kind.__name__}, which is not plain data")
        return ["o", number]


def _simple(kind: type, value: Any) -> list | None:
    """The tree of a value without parts; None for other types."""
    if kind is bytes or kind is bytearray:
        return ["b" if kind is bytes else "B", value.decode("latin-1")]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is range:
        return ["r", *[hex(bound) for bound in (value.start, value.stop, value.step)]]
    if kind is Decimal:
        return ["D", str(value)]
    if kind is Fraction:
        return ["F", hex(value.numerator), hex(value.denominator)]
    if kind is date or kind is datetime:
        return ["date" if kind is date else "datetime", value.isoformat()]
    if kind is timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    return None


class _Decoder:
    def __init__(self, opaque: Callable[[int], object]) -> None:
        self._opaque = opaque

    def value(self, tree: object, depth: int) -> object:
        if type(tree) is not list:
            if type(tree) is dict:
                raise ValueError("an object, where only arrays are allowed")
            return tree
        if depth == 0:
            raise ValueError("a value that is too deep")
        tag, *parts = tree
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([self.value(part, depth - 1) for part in parts])
        if tag == "k":
            return dict.fromkeys([self.value(part, depth - 1) for part in parts]).keys()
        if tag == "d":
            values = iter([self.value(part, depth - 1) for part in parts])
            return dict(zip(values, values, strict=True))
        if tag == "o":
            (number,) = parts
            return self._opaque(int(number))
        return _READERS[tag](*parts)


_READERS: dict[str, Callable] = {
    "i": lambda text: int(text, 16),
    "b": lambda text: text.encode("latin-1"),
    "B": lambda text: bytearray(text, "latin-1"),
    "c": complex,
    "r": lambda *bounds: range(*[int(bound, 16) for bound in bounds]),
    "D": Decimal,
    "F": lambda *parts: Fraction(*[int(part, 16) for part in parts]),
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "timedelta": timedelta,
}

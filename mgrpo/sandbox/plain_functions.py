"""The Python that a test may use outside of the program's process: functions of plain values, without side effects."""

from __future__ import annotations

import builtins
import collections
import copy
import datetime
import decimal
import fractions
import functools
import itertools
import json
import math
import operator
import re
import statistics
import string
import time
from types import ModuleType

_FUNCTIONS = (
    *("abs", "all", "any", "bin", "bool", "bytearray", "bytes", "chr", "complex", "dict", "divmod", "enumerate"),
    *("filter", "float", "frozenset", "hex", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max"),
    *("min", "next", "object", "oct", "ord", "pow", "range", "repr", "reversed", "round", "set", "slice", "sorted"),
    *("str", "sum", "tuple", "type", "zip", "Ellipsis", "NotImplemented"),
)
EXCEPTIONS = tuple(
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
)
BUILTINS: dict[str, object] = {name: getattr(builtins, name) for name in (*_FUNCTIONS, *EXCEPTIONS)}
"""Functions, types and exceptions by name."""


def _public(module: ModuleType) -> tuple[str, ...]:
    return tuple(name for name in getattr(module, "__all__", dir(module)) if not name.startswith("_"))


_MODULES: dict[ModuleType, tuple[str, ...]] = {
    math: _public(math),
    itertools: _public(itertools),
    operator: tuple(name for name in _public(operator) if name not in ("attrgetter", "methodcaller", "call")),
    statistics: _public(statistics),
    string: ("ascii_letters", "ascii_lowercase", "ascii_uppercase", "digits", "punctuation", "whitespace"),
    collections: ("Counter", "OrderedDict", "defaultdict", "deque"),
    copy: ("copy", "deepcopy"),
    datetime: ("date", "datetime", "timedelta"),
    decimal: ("Decimal",),
    fractions: ("Fraction",),
    functools: ("reduce",),
    json: ("dumps", "loads"),
    re: ("findall", "fullmatch", "match", "search", "split", "sub", "DOTALL", "IGNORECASE", "MULTILINE"),
    time: ("time", "perf_counter", "monotonic"),
}
MODULES = {
    module.__name__: {name: getattr(module, name) for name in names if hasattr(module, name)}
    for module, names in _MODULES.items()
}
"""Functions by their module's name and their own."""
BARE_NAMES = {
    "Counter": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
    "OrderedDict": "collections",
    "deepcopy": "copy",
    "isclose": "math",
}
"""Functions that a test calls by their bare names where the program imports them."""
METHODS = frozenset(
    {
        *("append", "copy", "count", "extend", "get", "index", "items", "keys", "pop", "values", "add", "update"),
        *("capitalize", "casefold", "endswith", "find", "isalnum", "isalpha", "isdigit", "islower", "isspace"),
        *("isupper", "join", "lower", "lstrip", "replace", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("swapcase", "title", "upper", "difference", "intersection", "issubset", "issuperset", "union"),
        *("symmetric_difference", "insert", "remove", "reverse", "sort", "most_common", "total_seconds", "bit_length"),
    }
)
"""Methods of plain values."""

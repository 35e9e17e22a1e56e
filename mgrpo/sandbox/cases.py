"""Tests in the forms that data sets use: lists, their JSON text, or Open Instruct's compressed form of it.

The compressed form is a pickle. It is read here without the pickle module: only opcodes that build lists, dictionaries,
strings and numbers are accepted, so nothing in it can run.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_BYTES = 256 * 2**20
"""Largest unpacked size of the tests of one program."""
MAX_TESTS = 10_000
"""Most tests of one program."""
_MARK = object()


@dataclass(frozen=True, slots=True)
class StdioTest:
    input: str
    output: str


def assert_tests(value: object) -> list[str]:
    """A list of assert statements; ValueError for anything else."""
    tests = _tests(value)
    for index, test in enumerate(tests):
        if not isinstance(test, str):
            raise ValueError(f"test {index} is {_shown(test)}; expected an assert statement as text")
    return tests


def stdio_tests(value: object) -> list[StdioTest]:
    """Inputs with their expected outputs; ValueError for anything else."""
    return [_stdio_test(index, test) for index, test in enumerate(_tests(value))]


def _stdio_test(index: int, test: object) -> StdioTest:
    if isinstance(test, dict):
        given, output = test.get("input"), test.get("output")
        if isinstance(given, list) and all(isinstance(line, str) for line in given):
            given = "\n".join(given)
        if isinstance(given, str) and isinstance(output, str):
            return StdioTest(given, output)
    raise ValueError(f'test {index} is {_shown(test)}; expected {{"input": text, "output": text}}')


def _tests(value: object) -> list:
    tests = _unpacked(value) if isinstance(value, str) and value else value or []
    if isinstance(tests, list) and len(tests) == 1:
        # A label inside a list of one, as in data sets with several verifiers per row.
        inner = tests[0]
        if isinstance(inner, list):
            return inner
        if isinstance(inner, str) and inner.lstrip().startswith("["):
            tests = _unpacked(inner)
    if not isinstance(tests, list):
        raise ValueError(f"the tests are {_shown(tests)}; expected a list, or its JSON text")
    return tests


def _unpacked(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
        if not inflater.eof:
            raise ValueError("it is truncated or too large")
        return _plain_value(data)
    except (ValueError, binascii.Error, zlib.error) as err:
        raise ValueError(
            f"the tests {_shown(text)} are neither JSON nor Open Instruct's compressed form: {err}"
        ) from err


def _plain_value(pickled: bytes) -> object:
    """The lists, dictionaries, strings and numbers of a pickle; ValueError where it contains anything else."""
    stack: list = []
    memo: dict[object, object] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            name = opcode.name
            if name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            elif name in _LITERALS:
                stack.append(argument)
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[argument])
            elif name in _BUILDERS:
                _BUILDERS[name](stack)
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"it contains more than plain data ({name})")
    except (IndexError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"it is damaged ({err!r})") from err
    raise ValueError("it has no end marker")


def _since_mark(stack: list) -> list:
    start = max(index for index, value in enumerate(stack) if value is _MARK)
    values = stack[start + 1 :]
    del stack[start:]
    return values


def _append(stack: list) -> None:
    value = stack.pop()
    stack[-1].append(value)


def _extend(stack: list) -> None:
    values = _since_mark(stack)
    stack[-1].extend(values)


def _set(stack: list) -> None:
    value, key = stack.pop(), stack.pop()
    stack[-1][key] = value


def _update(stack: list) -> None:
    values: Iterator = iter(_since_mark(stack))
    stack[-1].update(zip(values, values, strict=True))


_CONSTANTS: dict[str, Callable[[], object]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_LITERALS = frozenset(
    {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
)
_BUILDERS: dict[str, Callable[[list], None]] = {
    "APPEND": _append,
    "APPENDS": _extend,
    "SETITEM": _set,
    "SETITEMS": _update,
}


def _shown(value: object) -> str:
    return repr(value)[:80]

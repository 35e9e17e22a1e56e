"""Families that write a call as a JSON object, apart by what stands around it: Hermes and Qwen, Llama, Mistral, DeepSeek.

The decoder finds the end of an object, so an argument may hold the text that ends a call.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mgrpo.environments.environment import Call
from mgrpo.environments.formats.format import Block, Reader

MAX_DEPTH = 100
"""Of values in values; the arguments of a call are written out again, with more frames on the stack than here."""
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_KEYS = ("arguments", "parameters")


class Fault(ValueError):
    """A call cannot be read; the text says why."""

    def __init__(self, why: str, *, at: int) -> None:
        super().__init__(why)
        self.at = at
        """How far it was read."""


def skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a position after white space, and where it ends."""
    at = skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as err:
        raise Fault(f"not JSON, {err.msg} at character {err.pos - at} of it", at=err.pos) from None
    except ValueError:
        raise Fault("a number has too many digits", at=at) from None
    except RecursionError:
        raise Fault("values are nested too deeply", at=at) from None
    if text.count("[", at, end) + text.count("{", at, end) > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise Fault("values are nested too deeply", at=end)
    return value, end


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[object] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        level = inner
    return depth


def call_of(value: Any, *, at: int = 0) -> Call:
    """The call that `{"name": ..., "arguments": {...}}` is, or `parameters`; no arguments: an empty object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Fault('it is not an object with a "name"', at=at)
    key = next((key for key in _KEYS if key in value), _KEYS[0])
    identity = value.get("id")
    return Call(
        name=value["name"],
        arguments=arguments_of(value.get(key, {}), at=at),
        id=identity if isinstance(identity, str) else "",
    )


def arguments_of(value: Any, *, at: int = 0) -> dict[str, Any]:
    """An object, or the text of one."""
    if isinstance(value, str):
        try:
            value, _ = decoded(value, 0)
        except Fault as fault:
            raise Fault(f"its arguments are {fault}", at=at) from None
    if not isinstance(value, dict):
        raise Fault("its arguments are not an object", at=at)
    return value


def hermes(begin: str = "<tool_call>", end: str = "</tool_call>") -> Reader:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the closing tag optional at the end of the turn."""

    def read(text: str, at: int) -> Block | None:
        start = text.find(begin, at)
        if start < 0:
            return None
        inside = start + len(begin)
        try:
            value, stop = decoded(text, inside)
            call = call_of(value, at=stop)
            stop = skip_space(text, stop)
            if stop < len(text) and not text.startswith(end, stop):
                raise Fault(f"text stands between the object and {end}", at=stop)
            return Block(start=start, end=min(stop + len(end), len(text)), calls=(call,))
        except Fault as fault:
            closing = text.find(end, fault.at)
            return Block(start=start, end=closing + len(end) if closing >= 0 else len(text), faults=(str(fault),))

    return read

"""Common parts of the readers of all families: untrusted JSON, arguments, and the reason why a call cannot be read."""

from __future__ import annotations

import json
from typing import Any

from mgrpo.environments.environment import Tool
from mgrpo.environments.formats.format import Block
from mgrpo.environments.offered.call_arguments import read_value

MAX_DEPTH = 100
"""Most values in values; the arguments of a call are written out again, with more frames on the stack than here."""
_DECODER = json.JSONDecoder()


class Fault(ValueError):
    """A call that cannot be read; the text is the reason."""

    def __init__(self, why: str, *, at: int) -> None:
        super().__init__(why)
        self.at = at
        """The position up to which it was read."""


def skip_space(text: str, at: int, *, also: str = "") -> int:
    """The next position without white space or one of the characters of `also`."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a position, after white space, and its end."""
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


def arguments_of(value: Any, *, at: int = 0) -> dict[str, Any]:
    """Arguments from an object or from its JSON text."""
    if isinstance(value, str):
        try:
            value, _ = decoded(value, 0)
        except Fault as fault:
            raise Fault(f"its arguments are {fault}", at=at) from None
    if not isinstance(value, dict):
        raise Fault("its arguments are not an object", at=at)
    return value


def read_argument(tool: Tool | None, name: str, text: str) -> Any:
    """The value of an argument that is written as plain text; the text itself where the tool's schema gives it no other type."""
    value = text if tool is None else read_value(tool, name, text)
    return text if _depth(value) > MAX_DEPTH else value


def unreadable(text: str, start: int, fault: Fault, *, closing: str) -> Block:
    """A call that cannot be read, up to its closing mark or to the end of the text: half a call is not content."""
    end = text.find(closing, fault.at)
    return Block(start=start, end=end + len(closing) if end >= 0 else len(text), faults=(str(fault),))

"""Families that write a call as a JSON object, apart by what stands around it: Hermes and Qwen, Llama, Mistral, DeepSeek.

The decoder finds the end of an object, so an argument may hold the text that ends a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader

MAX_DEPTH = 100
"""Of values in values; the arguments of a call are written out again, with more frames on the stack than here."""
_DECODER = json.JSONDecoder()
_KEYS = ("arguments", "parameters")
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>\w*)\s*)?(?:\[ARGS\])?")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_MARK = re.compile(r"<｜tool▁(?:calls▁(?:begin|end)|call▁begin)｜>")
_DEEPSEEK_HEAD = re.compile(r"(?P<name>[^\s<]+)<｜tool▁sep｜>(?:(?P<v3_name>[^\s{`]+)\s*```(?:json)?)?")
_FENCE = re.compile(r"\s*```")


class Fault(ValueError):
    """A call cannot be read; the text says why."""

    def __init__(self, why: str, *, at: int) -> None:
        super().__init__(why)
        self.at = at
        """How far it was read."""


def skip_space(text: str, at: int, *, also: str = "") -> int:
    """Where neither white space nor one of a few other characters stands."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


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


def llama3_json(tools: Sequence[Tool]) -> Reader:
    """`{"name": ..., "parameters": {...}}` anywhere, several apart by semicolons; `<|python_tag|>` may come first.

    Another object, as in a formula or an answer, is content.
    """
    names = "|".join(re.escape(tool.name) for tool in tools)
    begins = re.compile(r"(<\|python_tag\|>)\s*\{?|\{")
    call = re.compile(rf'\{{\s*"(?:type"\s*:\s*"function"|name"\s*:\s*"(?:{names})")')

    def read(text: str, at: int) -> Block | None:
        while begin := begins.search(text, at):
            start, brace = begin.start(), begin.end() - 1
            if text[brace] != "{":
                return Block(start=start, end=len(text), faults=("an object must follow <|python_tag|>",))
            is_call = begin[1] is not None or call.match(text, brace) is not None
            try:
                value, end = decoded(text, brace)
            except Fault as fault:
                if is_call:
                    return Block(start=start, end=len(text), faults=(str(fault),))
                at = max(fault.at, brace + 1)
                continue
            if is_call or (isinstance(value, dict) and "name" in value and any(key in value for key in _KEYS)):
                following = skip_space(text, end)
                end = following + 1 if text.startswith(";", following) else end
                return _block(start, end, [value])
            at = end
        return None

    return read


def mistral(text: str, at: int) -> Block | None:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    start = text.find(_MISTRAL, at)
    if start < 0:
        return None
    inside = skip_space(text, start + len(_MISTRAL))
    try:
        if text.startswith(("[", "{"), inside):
            value, end = decoded(text, inside)
            return _block(start, end, value if isinstance(value, list) else [value])
        head = _MISTRAL_HEAD.match(text, inside)
        if head is None:
            raise Fault("a name and its arguments must follow [TOOL_CALLS]", at=inside)
        value, end = decoded(text, head.end())
        call = Call(name=head["name"], arguments=arguments_of(value, at=end), id=head["id"] or "")
        return Block(start=start, end=end, calls=(call,))
    except Fault as fault:
        following = text.find(_MISTRAL, max(fault.at, inside))
        return Block(start=start, end=following if following >= 0 else len(text), faults=(str(fault),))


def deepseek(text: str, at: int) -> Block | None:
    """Version 3: "function", separator, name, JSON in a code fence. Version 3.1: name, separator, JSON."""
    mark = _DEEPSEEK_MARK.search(text, at)
    if mark is None or mark[0] != _DEEPSEEK_BEGIN:
        return mark and Block(start=mark.start(), end=mark.end())
    try:
        head = _DEEPSEEK_HEAD.match(text, mark.end())
        if head is None:
            raise Fault("a name and <｜tool▁sep｜> must follow <｜tool▁call▁begin｜>", at=mark.end())
        value, end = decoded(text, head.end())
        call = Call(name=head["v3_name"] or head["name"], arguments=arguments_of(value, at=end))
        fence = _FENCE.match(text, end)
        end = skip_space(text, fence.end() if fence else end)
        if end < len(text) and not text.startswith(_DEEPSEEK_END, end):
            raise Fault("text stands between the object and <｜tool▁call▁end｜>", at=end)
        return Block(start=mark.start(), end=min(end + len(_DEEPSEEK_END), len(text)), calls=(call,))
    except Fault as fault:
        closing = text.find(_DEEPSEEK_END, fault.at)
        end = closing + len(_DEEPSEEK_END) if closing >= 0 else len(text)
        return Block(start=mark.start(), end=end, faults=(str(fault),))


def _block(start: int, end: int, values: Sequence[Any]) -> Block:
    calls, faults = [], []
    for value in values:
        try:
            calls.append(call_of(value))
        except Fault as fault:
            faults.append(str(fault))
    return Block(start=start, end=end, calls=tuple(calls), faults=tuple(faults))

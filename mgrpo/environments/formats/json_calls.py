"""Families that write a call as a JSON object, with different marks around it: Hermes and Qwen, Llama, Mistral, DeepSeek.

The decoder finds the end of an object, so an argument may hold the text that ends a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader
from mgrpo.environments.formats.values import Fault, arguments_of, decoded, skip_space, unreadable

_HERMES, _HERMES_ENDS = "<tool_call>", "</tool_call>"
_KEYS = ("arguments", "parameters")
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(r"(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\](?P<id>\w*)\s*)?(?:\[ARGS\])?")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_MARK = re.compile(r"<｜tool▁(?:calls▁(?:begin|end)|call▁begin)｜>")
_DEEPSEEK_HEAD = re.compile(r"(?P<name>[^\s<]+)<｜tool▁sep｜>(?:(?P<v3_name>[^\s{`]+)\s*```(?:json)?)?")
_FENCE = re.compile(r"\s*```")


def hermes(text: str, at: int) -> Block | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the closing tag optional at the end of the turn."""
    start = text.find(_HERMES, at)
    if start < 0:
        return None
    try:
        value, end = decoded(text, start + len(_HERMES))
        call = call_of(value, at=end)
        return Block(start=start, end=_after(text, end, _HERMES_ENDS), calls=(call,))
    except Fault as fault:
        return unreadable(text, start, fault, closing=_HERMES_ENDS)


def llama3_json(tools: Sequence[Tool]) -> Reader:
    """`{"name": ..., "parameters": {...}}` anywhere, several separated by semicolons; `<|python_tag|>` may come first.

    Another object, as in a formula or an answer, is content.
    """
    names = "|".join(re.escape(tool.name) for tool in tools)
    begins = re.compile(r"(<\|python_tag\|>)\s*\{?|\{(?=\s*\")")
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
                if fault.at == brace:
                    return None
                at = fault.at
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
            return _block(start, end, value if isinstance(value, list) and value else [value])
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
        end = _after(text, fence.end() if fence else end, _DEEPSEEK_END)
        return Block(start=mark.start(), end=end, calls=(call,))
    except Fault as fault:
        return unreadable(text, mark.start(), fault, closing=_DEEPSEEK_END)


def _after(text: str, at: int, closing: str) -> int:
    """The end of a call's closing tag; that of the text, if it ends before the tag. Fault where other text is in between."""
    at = skip_space(text, at)
    if at < len(text) and not text.startswith(closing, at):
        raise Fault(f"text stands between the object and {closing}", at=at)
    return min(at + len(closing), len(text))


def call_of(value: Any, *, at: int = 0) -> Call:
    """The call in `{"name": ..., "arguments": {...}}`, or with `parameters`; without arguments it has none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Fault('it is not an object with a "name"', at=at)
    key = next((key for key in _KEYS if key in value), _KEYS[0])
    identity = value.get("id")
    return Call(
        name=value["name"],
        arguments=arguments_of(value.get(key, {}), at=at),
        id=identity if isinstance(identity, str) else "",
    )


def _block(start: int, end: int, values: Sequence[Any]) -> Block:
    calls, faults = [], []
    for value in values:
        try:
            calls.append(call_of(value))
        except Fault as fault:
            faults.append(str(fault))
    return Block(start=start, end=end, calls=tuple(calls), faults=tuple(faults))

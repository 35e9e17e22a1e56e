"""Families that write calls as Python does: Llama 4 and the pythonic Llama 3.2, OLMo 3, LFM2.

Only names, keywords and literals are read, by a reader that evaluates nothing: it finds the end of a call, and accepts
models' deviations from Python, such as line breaks in a string, `true` or a keyword named `from`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader
from mgrpo.environments.formats.values import MAX_DEPTH, Fault, skip_space, unreadable

_HEAD = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_NUMBER = re.compile(
    r"[+-]?\s*(?:0[xX][\da-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?)"
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_STRING = re.compile(
    r"(?P<prefix>[rR]?)(?:"
    r"'''(?P<three_single>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)'''"
    r'|"""(?P<three_double>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""'
    r"|'(?P<single>[^'\\]*(?:\\.[^'\\]*)*)'"
    r'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)")',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_TOO_LARGE = 10**4300
"""Python does not write integers of more digits, so they could not be sent on."""
_LIST = r"\s*(?P<list>(?P<mark><\|python_(?:start|tag)\|>\s*)?\[)"
_LIST_FIRST, _LIST_AFTER_THOUGHT = re.compile(_LIST), re.compile(rf"(?:</think>|\[/THINK\]){_LIST}")
_LIST_ENDS = re.compile(r"\](?:\s*<\|python_end\|>)?")


def pythonic(tools: Sequence[Tool]) -> Reader:
    """`[name(key=value), ...]` at the beginning of a turn, after its thoughts; a list of anything but calls is content."""
    names = {tool.name for tool in tools}

    def read(text: str, at: int) -> Block | None:
        begins = _LIST_FIRST.match(text, at) or _LIST_AFTER_THOUGHT.search(text, at)
        while begins:
            calls, end, fault = _calls(text, begins.end(), _LIST_ENDS, "]")
            head = _HEAD.match(text, begins.end())
            if fault is None:
                return Block(start=begins.start("list"), end=end, calls=tuple(calls))
            if begins["mark"] or (head and head[1] in names):
                start = begins.start("list")
                return Block(start=start, end=len(text), calls=tuple(calls), faults=(str(fault),))
            begins = _LIST_AFTER_THOUGHT.search(text, begins.end())
        return None

    return read


def tagged(begin: str, end: str) -> Reader:
    """Calls between tags, one per line or in a list."""
    begins = re.compile(rf"{re.escape(begin)}(?:\s*\[)?")
    ends = re.compile(rf"(?:\]\s*)?{re.escape(end)}")

    def read(text: str, at: int) -> Block | None:
        begun = begins.search(text, at)
        if begun is None:
            return None
        calls, stop, fault = _calls(text, begun.end(), ends, end)
        if fault is None:
            return Block(start=begun.start(), end=stop, calls=tuple(calls))
        return replace(unreadable(text, begun.start(), fault, closing=end), calls=tuple(calls))

    return read


def _calls(text: str, at: int, ends: re.Pattern[str], closing: str) -> tuple[list[Call], int, Fault | None]:
    """The calls up to their end or to one that cannot be read, the position of that, and the fault."""
    calls: list[Call] = []
    try:
        at = skip_space(text, at, also=",;")
        while not (end := ends.match(text, at)):
            if at == len(text):
                raise Fault(f"{closing} is missing", at=at)
            call, at = _call(text, at)
            calls.append(call)
            at = skip_space(text, at, also=",;")
        if not calls:
            raise Fault("there is no call in it", at=at)
        return calls, end.end(), None
    except Fault as fault:
        return calls, fault.at, fault


def _call(text: str, at: int) -> tuple[Call, int]:
    head = _HEAD.match(text, at)
    if head is None:
        raise Fault("a call must be name(key=value, ...)", at=at)
    arguments, at = {}, skip_space(text, head.end())
    while not text.startswith(")", at):
        keyword = _KEYWORD.match(text, at)
        if keyword is None:
            raise Fault(f"the arguments of {head[1]} must be key=value", at=at)
        arguments[keyword[1]], at = _value(text, keyword.end(), 1)
        at = _after_item(text, at, ")")
    return Call(name=head[1], arguments=arguments), at + 1


def _after_item(text: str, at: int, closing: str) -> int:
    """The position of the next item or of the closing bracket."""
    at = skip_space(text, at)
    if text.startswith(",", at):
        return skip_space(text, at + 1)
    if not text.startswith(closing, at):
        raise Fault(f"a comma or {closing} must follow a value", at=at)
    return at


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The literal at a position, after white space, and its end."""
    at = skip_space(text, at)
    if depth > MAX_DEPTH:
        raise Fault("values are nested too deeply", at=at)
    if text.startswith(("[", "(", "{"), at):
        return _container(text, at, depth)
    if _STRING.match(text, at):
        return _string(text, at)
    if number := _NUMBER.match(text, at):
        return _number(number[0], at), number.end()
    word = _WORD.match(text, at)
    if word and word[0] in _WORDS:
        return _WORDS[word[0]], word.end()
    raise Fault("values must be literals: text in quotes, numbers, True, False, None, lists or dicts", at=at)


def _container(text: str, at: int, depth: int) -> tuple[Any, int]:
    """A list, tuple or set as a list; a dict; a single value in parentheses as itself."""
    opening, closing = text[at], _CLOSING[text[at]]
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    is_in_parentheses = False
    at = skip_space(text, at + 1)
    while not text.startswith(closing, at):
        item, at = _value(text, at, depth + 1)
        colon = skip_space(text, at)
        if opening == "{" and text.startswith(":", colon):
            if isinstance(item, (list, dict)):
                raise Fault("the keys of a dict must be text", at=at)
            pairs[item if isinstance(item, str) else json.dumps(item)], at = _value(text, colon + 1, depth + 1)
        else:
            items.append(item)
        at = _after_item(text, end := at, closing)
        is_in_parentheses = opening == "(" and len(items) == 1 and "," not in text[end:at]
    if pairs and items:
        raise Fault("a dict has a key without a value", at=at)
    if opening == "{" and not items:
        return pairs, at + 1
    return items[0] if is_in_parentheses else items, at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    """Text in quotes; several in a row are one."""
    parts = []
    while found := _STRING.match(text, at):
        part = next(group for group in found.groups()[1:] if group is not None)
        parts.append(part if found["prefix"] else _ESCAPE.sub(_unescaped, part))
        end, at = found.end(), skip_space(text, found.end())
    return "".join(parts), end


def _unescaped(found: re.Match[str]) -> str:
    if found[5]:
        return found[5] if found[5] in "\\'\"" else _ESCAPED.get(found[5], found[0])
    code = int(found[4], 8) if found[4] else int(found[1] or found[2] or found[3], 16)
    return chr(code) if code <= sys.maxunicode else found[0]


def _number(text: str, at: int) -> int | float:
    text = "".join(text.split())
    try:
        if text.lstrip("+-").isdecimal():
            return int(text)
        if not re.match(r"[+-]?0[xXoObB]", text):
            return float(text)
        value = int(text, 0)
    except ValueError:
        raise Fault("a number cannot be read", at=at) from None
    if abs(value) >= _TOO_LARGE:
        raise Fault("a number has too many digits", at=at)
    return value

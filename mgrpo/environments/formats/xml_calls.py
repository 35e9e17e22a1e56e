"""Families that write each argument between tags of its own: Qwen3-Coder and its kin, GLM.

A value is plain text without any escapes: it ends at the first closing tag. The tool's schema gives its type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader
from mgrpo.environments.formats.values import Fault, decoded, skip_space, unreadable

_QWEN_BEGINS = re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>")
_QWEN_NAME = re.compile(r"\s*([^<>\s]+)\s*>")
_QWEN_PARAMETER = re.compile(r"\s*<parameter=\s*([^<>\s]+)\s*>\n?")
_QWEN_ENDS = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_GLM_NAME = re.compile(r"<tool_call>\s*([^<>\s]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_GLM_ENDS = re.compile(r"\s*</tool_call>")
_CLOSING = "</tool_call>"
_NOT_IN_VALUES = ("<parameter=", "</function>", "<arg_key>", _CLOSING)
"""A value with one of these has no closing tag of its own, or a misspelt one."""


def qwen3_xml(tools: Sequence[Tool]) -> Reader:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, the outer tags optional."""
    schemas = schemas_of(tools)

    def read(text: str, at: int) -> Block | None:
        begins = _QWEN_BEGINS.search(text, at)
        if begins is None:
            return None
        at = begins.end()
        try:
            name = _QWEN_NAME.match(text, at) if begins[0].endswith("=") else None
            if name is None:
                raise Fault("<function=NAME> must follow <tool_call>", at=at)
            schema = schemas.get(name[1], {})
            arguments, at = _arguments(text, name.end(), _QWEN_PARAMETER, "</parameter>", schema, padding="\n")
            ends = _QWEN_ENDS.match(text, at)
            if ends is None:
                raise Fault(
                    "after <function=...> only <parameter=KEY>VALUE</parameter> and </function> may stand", at=at
                )
            return Block(start=begins.start(), end=ends.end(), calls=(Call(name=name[1], arguments=arguments),))
        except Fault as fault:
            return unreadable(text, begins.start(), fault, closing=_CLOSING)

    return read


def glm(tools: Sequence[Tool]) -> Reader:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`."""
    schemas = schemas_of(tools)

    def read(text: str, at: int) -> Block | None:
        start = text.find("<tool_call>", at)
        if start < 0:
            return None
        try:
            name = _GLM_NAME.match(text, start)
            if name is None:
                raise Fault("a name must follow <tool_call>", at=start)
            arguments, at = _arguments(text, name.end(), _GLM_ARGUMENT, "</arg_value>", schemas.get(name[1], {}))
            ends = _GLM_ENDS.match(text, at)
            if ends is None:
                raise Fault("after the name only <arg_key>, <arg_value> and </tool_call> may stand", at=at)
            call = Call(name=name[1], arguments=arguments)
            return Block(start=start, end=ends.end(), calls=(call,))
        except Fault as fault:
            return unreadable(text, start, fault, closing=_CLOSING)

    return read


def _arguments(
    text: str, at: int, begins: re.Pattern[str], closing: str, schemas: Mapping[str, Any], *, padding: str = ""
) -> tuple[dict[str, Any], int]:
    """The arguments from a position on, and their end; `padding` after a value is markup."""
    arguments = {}
    while begin := begins.match(text, at):
        end = text.find(closing, begin.end())
        value = text[begin.end() : max(end, begin.end())].removesuffix(padding)
        key = begin[1].strip()
        if end < 0 or any(mark in value for mark in _NOT_IN_VALUES):
            raise Fault(f"{closing} is missing after the value of {key}", at=begin.end())
        arguments[key] = typed(value, schemas.get(key))
        at = end + len(closing)
    return arguments, at


def typed(text: str, schema: object) -> Any:
    """The value of a text under a JSON schema; the text itself where it has none, for the tool to refuse.

    More lenient than `coerced`, which comes later: "1_000" is an integer, "1" a boolean, and "3" an integer where text also fits.
    """
    types = _types(schema)
    if "null" in types and text.strip().lower() == "null":
        return None
    for name, convert in _CONVERSIONS.items():
        if name in types:
            with suppress(ValueError):
                return convert(text)
    return text


def _number(text: str) -> int | float:
    with suppress(ValueError):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "1", "false", "0"):
        raise ValueError(word)
    return word in ("true", "1")


def _json(text: str, kind: type) -> Any:
    value, end = decoded(text, 0)
    if not isinstance(value, kind) or skip_space(text, end) < len(text):
        raise ValueError(kind)
    return value


_CONVERSIONS: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "object": partial(_json, kind=dict),
    "array": partial(_json, kind=list),
}
"""Tried in this order where a schema allows several types."""


def _types(schema: object) -> set[str]:
    """The types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", ())
    types = {named} if isinstance(named, str) else set(named)
    for key in ("anyOf", "oneOf"):
        types = types.union(*(_types(choice) for choice in schema.get(key, ())))
    return types


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schema of each parameter of each tool."""
    return {tool.name: tool.parameters.get("properties", {}) for tool in tools}

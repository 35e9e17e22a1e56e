"""Families that write each argument between tags of its own: Qwen3-Coder and its kin, GLM.

A value is plain text, which nothing escapes: it ends at the first closing tag. The tool's schema says what it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader
from mgrpo.environments.formats.json_calls import Fault, decoded, skip_space

_QWEN_BEGINS = re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>")
_QWEN_NAME = re.compile(r"\s*([^<>\s]+)\s*>")
_QWEN_PARAMETER = re.compile(r"\s*<parameter=\s*([^<>\s]+)\s*>\n?")
_QWEN_ENDS = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_GLM_NAME = re.compile(r"<tool_call>\s*([^<>\s]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_GLM_ENDS = re.compile(r"\s*</tool_call>")
_CLOSING = "</tool_call>"


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
            arguments, at = _arguments(text, name.end(), _QWEN_PARAMETER, "</parameter>", schemas.get(name[1], {}))
            ends = _QWEN_ENDS.match(text, at)
            if ends is None:
                raise Fault(
                    "after <function=...> only <parameter=KEY>VALUE</parameter> and </function> may stand", at=at
                )
            return Block(start=begins.start(), end=ends.end(), calls=(Call(name=name[1], arguments=arguments),))
        except Fault as fault:
            return _broken(text, begins.start(), fault)

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
            return _broken(text, start, fault)

    return read


def _arguments(
    text: str, at: int, begins: re.Pattern[str], closing: str, schemas: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """The arguments that begin at a position, and where they end; a line break that begins a value also ends it."""
    arguments = {}
    while begin := begins.match(text, at):
        end = text.find(closing, begin.end())
        if end < 0:
            raise Fault(f"{closing} is missing", at=begin.end())
        key = begin[1].strip()
        value = text[begin.end() : end].removesuffix("\n" if begin[0].endswith("\n") else "")
        arguments[key] = typed(value, schemas.get(key))
        at = end + len(closing)
    return arguments, at


def typed(text: str, schema: object) -> Any:
    """The value that a text means under a JSON schema; the text itself where it means none, for the tool to refuse."""
    types = _types(schema)
    word = text.strip().lower()
    if "null" in types and word == "null":
        return None
    if "boolean" in types and word in ("true", "false"):
        return word == "true"
    if not types or types <= {"string", "null"}:
        return text
    try:
        value, end = decoded(text, 0)
    except Fault:
        return text
    is_whole = skip_space(text, end) == len(text)
    return value if is_whole and _names_of_type(value) & types else text


def _types(schema: object) -> set[str]:
    """The types that a schema allows, none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type", ())
    types = {named} if isinstance(named, str) else set(named)
    for key in ("anyOf", "oneOf"):
        types = types.union(*(_types(choice) for choice in schema.get(key, ())))
    return types


def _names_of_type(value: object) -> set[str]:
    """A JSON schema's names of a value that is not text."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {{float: "number", list: "array", dict: "object"}.get(type(value), "")}


def schemas_of(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schema of each parameter of each tool."""
    return {tool.name: tool.parameters.get("properties", {}) for tool in tools}


def _broken(text: str, start: int, fault: Fault) -> Block:
    closing = text.find(_CLOSING, fault.at)
    return Block(start=start, end=closing + len(_CLOSING) if closing >= 0 else len(text), faults=(str(fault),))

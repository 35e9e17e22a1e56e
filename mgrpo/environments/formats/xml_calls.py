"""Families that write each argument between separate tags: Qwen3-Coder and its kin, GLM.

A value is plain text without any escapes: it ends at the first closing tag. The tool's schema gives its type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader
from mgrpo.environments.formats.values import Fault, read_argument, unreadable

_QWEN_BEGINS = re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>")
_QWEN_NAME = re.compile(r"\s*([^<>\s]+)\s*>")
_QWEN_PARAMETER = re.compile(r"\s*<parameter=\s*([^<>\s]+)\s*>\n?")
_QWEN_ENDS = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_GLM_NAME = re.compile(r"<tool_call>\s*([^<>\s]+)\s*")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_GLM_ENDS = re.compile(r"\s*</tool_call>")
_CLOSING = "</tool_call>"
_NOT_IN_VALUES = ("<parameter=", "</function>", "<arg_key>", _CLOSING)
"""A value that contains one of these lacks its closing tag, or has it misspelt."""


def qwen3_xml(tools: Sequence[Tool]) -> Reader:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, the outer tags optional."""
    named = {tool.name: tool for tool in tools}

    def read(text: str, at: int) -> Block | None:
        begins = _QWEN_BEGINS.search(text, at)
        if begins is None:
            return None
        at = begins.end()
        try:
            name = _QWEN_NAME.match(text, at) if begins[0].endswith("=") else None
            if name is None:
                raise Fault("<function=NAME> must follow <tool_call>", at=at)
            tool = named.get(name[1])
            arguments, at = _arguments(text, name.end(), _QWEN_PARAMETER, "</parameter>", tool, padding="\n")
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
    named = {tool.name: tool for tool in tools}

    def read(text: str, at: int) -> Block | None:
        start = text.find("<tool_call>", at)
        if start < 0:
            return None
        try:
            name = _GLM_NAME.match(text, start)
            if name is None:
                raise Fault("a name must follow <tool_call>", at=start)
            arguments, at = _arguments(text, name.end(), _GLM_ARGUMENT, "</arg_value>", named.get(name[1]))
            ends = _GLM_ENDS.match(text, at)
            if ends is None:
                raise Fault("after the name only <arg_key>, <arg_value> and </tool_call> may stand", at=at)
            call = Call(name=name[1], arguments=arguments)
            return Block(start=start, end=ends.end(), calls=(call,))
        except Fault as fault:
            return unreadable(text, start, fault, closing=_CLOSING)

    return read


def _arguments(
    text: str, at: int, begins: re.Pattern[str], closing: str, tool: Tool | None, *, padding: str = ""
) -> tuple[dict[str, Any], int]:
    """The arguments from a position on, and their end; `padding` after a value is markup."""
    arguments = {}
    while begin := begins.match(text, at):
        end = text.find(closing, begin.end())
        value = text[begin.end() : max(end, begin.end())].removesuffix(padding)
        key = begin[1].strip()
        if end < 0 or any(mark in value for mark in _NOT_IN_VALUES):
            raise Fault(f"{closing} is missing after the value of {key}", at=begin.end())
        arguments[key] = read_argument(tool, key, value)
        at = end + len(closing)
    return arguments, at

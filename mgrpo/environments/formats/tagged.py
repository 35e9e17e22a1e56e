"""Formats with calls as tags around plain text, the value of the tool's first parameter: Open Instruct's and DR Tulu's.

A turn stops at the closing tag, and the answer goes on in the same turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader
from mgrpo.environments.formats.values import read_argument

_CALL_TOOL = re.compile(r"<call_tool\b([^<>]*)>")
_ATTRIBUTE = re.compile(r"(?<![\w-])([\w-]+)\s*=\s*\"([^\"]*)\"")
_CALL_TOOL_ENDS = "</call_tool>"


def first_parameter(tool: Tool) -> str:
    """The first required parameter, else the first one, else "text"."""
    required = tool.parameters.get("required") or tool.parameters.get("properties") or ()
    return next(iter(required), "text")


def tags(tools: Sequence[Tool]) -> Reader:
    """`<name>text</name>`."""
    parameters = {tool.name: first_parameter(tool) for tool in tools}
    opening = re.compile("|".join(f"<{re.escape(name)}>" for name in parameters) or "(?!)")

    def read(text: str, at: int) -> Block | None:
        opens = opening.search(text, at)
        if opens is None:
            return None
        name = opens[0][1:-1]
        closing = f"</{name}>"
        ends = text.find(closing, opens.end())
        if ends < 0:
            return Block(start=opens.start(), end=len(text), faults=(f"{closing} is missing",))
        call = Call(name=name, arguments={parameters[name]: text[opens.end() : ends]})
        return Block(start=opens.start(), end=ends + len(closing), calls=(call,))

    return read


def call_tool(tools: Sequence[Tool]) -> Reader:
    """`<call_tool name="..." key="value">text</call_tool>`; the other attributes are arguments also."""
    parameters = {tool.name: first_parameter(tool) for tool in tools}
    named = {tool.name: tool for tool in tools}

    def read(text: str, at: int) -> Block | None:
        opens = _CALL_TOOL.search(text, at)
        if opens is None:
            return None
        ends = text.find(_CALL_TOOL_ENDS, opens.end())
        end = ends + len(_CALL_TOOL_ENDS) if ends >= 0 else len(text)
        attributes = dict(_ATTRIBUTE.findall(opens[1]))
        name = attributes.pop("name", "")
        if ends < 0 or not name:
            fault = 'the attribute name="..." is missing' if ends >= 0 else f"{_CALL_TOOL_ENDS} is missing"
            return Block(start=opens.start(), end=end, faults=(fault,))
        arguments = {key: read_argument(named.get(name), key, value) for key, value in attributes.items()}
        arguments[parameters.get(name, "text")] = text[opens.end() : ends].strip()
        return Block(start=opens.start(), end=end, calls=(Call(name=name, arguments=arguments),))

    return read

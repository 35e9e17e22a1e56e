"""Formats whose calls are tags around plain text, which the tool's first parameter takes: Open Instruct's and DR Tulu's.

A turn stops at the closing tag, and the answer goes on in the same turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Reader


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

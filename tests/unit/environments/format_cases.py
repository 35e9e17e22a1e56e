"""Tools and turns that the tests of formats share."""

from __future__ import annotations

import json
from typing import Any

from mgrpo.environments.environment import Call, Tool

ADD = Tool(
    name="add",
    description="Adds.",
    parameters={
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "note": {"type": "string"},
            "items": {"type": "array", "items": {"type": "number"}},
            "options": {"type": "object"},
            "is_exact": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
        "required": ["a"],
    },
)
CODE = Tool(
    name="code",
    description="Runs Python.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
TOOLS = (ADD, CODE)


def add(**arguments: Any) -> Call:
    return Call(name="add", arguments=arguments)


def code(text: str) -> Call:
    return Call(name="code", arguments={"code": text})


def as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


def hermes(*calls: Call) -> str:
    return "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls)

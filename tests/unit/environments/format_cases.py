"""Tools, and calls as each family of models writes them, written apart from what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
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
NOW = Tool(name="now", description="The time.", parameters={"type": "object", "properties": {}})
TOOLS = (ADD, CODE, NOW)


def add(**arguments: Any) -> Call:
    return Call(name="add", arguments=arguments)


def code(text: str) -> Call:
    return Call(name="code", arguments={"code": text})


NOW_CALL = Call(name="now", arguments={})
ALL_TYPES = add(
    a=-2,
    note="say \"hi\", 'yo' \\ é 世\t{[(1]",
    items=[1, 2.5, -3],
    options={"b": {"c": [None, True]}, "d e": "f"},
    is_exact=False,
    limit=None,
)
GOOD = ((add(a=2),), (NOW_CALL,), (ALL_TYPES,), (add(a=1, limit=0.5), code("x = 1"), add(a=3)))
"""Turns that every family can write."""


def as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


def as_python(call: Call) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(*calls: Call) -> str:
    return "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls)


def qwen3_xml(*calls: Call) -> str:
    def one(call: Call) -> str:
        arguments = call.arguments.items()
        parameters = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments)
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(one(call) for call in calls)


def glm45(*calls: Call) -> str:
    def one(call: Call) -> str:
        arguments = call.arguments.items()
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in arguments)
        return f"<tool_call>{call.name}\n{pairs}</tool_call>"

    return "\n".join(one(call) for call in calls)


def llama3_json(*calls: Call) -> str:
    return "; ".join(as_json(call, "parameters") for call in calls)


def pythonic(*calls: Call) -> str:
    return f"[{', '.join(as_python(call) for call in calls)}]"


def olmo3(*calls: Call) -> str:
    return "<function_calls>\n{}\n</function_calls>".format("\n".join(as_python(call) for call in calls))


def lfm2(*calls: Call) -> str:
    return f"<|tool_call_start|>{pythonic(*calls)}<|tool_call_end|>"


def mistral(*calls: Call) -> str:
    return f"[TOOL_CALLS] [{', '.join(as_json(call) for call in calls)}]"


def mistral_v11(*calls: Call) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(call.arguments)}" for call in calls)


def deepseek_v3(*calls: Call) -> str:
    def one(call: Call) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"

    return f"<｜tool▁calls▁begin｜>{chr(10).join(one(call) for call in calls)}<｜tool▁calls▁end｜>"


def deepseek_v31(*calls: Call) -> str:
    def one(call: Call) -> str:
        return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{json.dumps(call.arguments)}<｜tool▁call▁end｜>"

    return f"<｜tool▁calls▁begin｜>{''.join(one(call) for call in calls)}<｜tool▁calls▁end｜>"


def harmony(*calls: Call) -> str:
    def one(call: Call) -> str:
        header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        return f"{header}{json.dumps(call.arguments, ensure_ascii=False)}<|call|>"

    return "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant" + "<|start|>assistant".join(map(one, calls))


WRITERS: dict[str, Callable[..., str]] = {
    "hermes": hermes,
    "qwen3_xml": qwen3_xml,
    "glm45": glm45,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "olmo3": olmo3,
    "lfm2": lfm2,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "harmony": harmony,
}

"""The formats by name, and which of them a chat template asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mgrpo.environments.environment import Tool
from mgrpo.environments.formats import harmony, json_calls, pythonic, tagged, vllm_door, xml_calls
from mgrpo.environments.formats.format import Format

_OBJECT = '{"name": ..., "arguments": {...}}'
_LLAMA_STOPS = ("<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")


def _hermes(tools: Sequence[Tool]) -> Format:
    return Format(name="hermes", read=json_calls.hermes, example=f"<tool_call>\n{_OBJECT}\n</tool_call>")


def _qwen3_xml(tools: Sequence[Tool]) -> Format:
    parameter = "<parameter=KEY>\nVALUE\n</parameter>"
    return Format(
        name="qwen3_xml",
        read=xml_calls.qwen3_xml(tools),
        example=f"<tool_call>\n<function=NAME>\n{parameter}\n</function>\n</tool_call>",
    )


def _glm45(tools: Sequence[Tool]) -> Format:
    return Format(
        name="glm45",
        read=xml_calls.glm(tools),
        example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        stop_tokens=("<|observation|>", "<|user|>"),
    )


def _llama3_json(tools: Sequence[Tool]) -> Format:
    return Format(
        name="llama3_json",
        read=json_calls.llama3_json(tools),
        example='{"name": ..., "parameters": {...}}',
        stop_tokens=_LLAMA_STOPS,
    )


def _pythonic(tools: Sequence[Tool]) -> Format:
    return Format(
        name="pythonic", read=pythonic.pythonic(tools), example="[NAME(KEY=VALUE, ...)]", stop_tokens=_LLAMA_STOPS
    )


def _olmo3(tools: Sequence[Tool]) -> Format:
    return Format(
        name="olmo3",
        read=pythonic.tagged("<function_calls>", "</function_calls>"),
        example="<function_calls>\nNAME(KEY=VALUE, ...)\n</function_calls>",
    )


def _lfm2(tools: Sequence[Tool]) -> Format:
    return Format(
        name="lfm2",
        read=pythonic.tagged("<|tool_call_start|>", "<|tool_call_end|>"),
        example="<|tool_call_start|>[NAME(KEY=VALUE, ...)]<|tool_call_end|>",
    )


def _mistral(tools: Sequence[Tool]) -> Format:
    return Format(name="mistral", read=json_calls.mistral, example=f"[TOOL_CALLS][{_OBJECT}]")


def _deepseek_v3(tools: Sequence[Tool]) -> Format:
    call = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>"
    example = f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
    return Format(name="deepseek_v3", read=json_calls.deepseek, example=example)


def _deepseek_v31(tools: Sequence[Tool]) -> Format:
    call = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"
    example = f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
    return Format(name="deepseek_v31", read=json_calls.deepseek, example=example)


def _harmony(tools: Sequence[Tool]) -> Format:
    return Format(
        name="harmony",
        read=harmony.harmony(tools),
        example="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>",
        stop_tokens=("<|call|>", "<|return|>"),
    )


def _legacy(tools: Sequence[Tool]) -> Format:
    return Format(
        name="legacy",
        read=tagged.tags(tools),
        example=" or ".join(f"<{tool.name}>...</{tool.name}>" for tool in tools),
        stop_strings=tuple(f"</{tool.name}>" for tool in tools),
        calls_in_thoughts=True,
        answer_tag="output",
    )


def _dr_tulu(tools: Sequence[Tool]) -> Format:
    return Format(
        name="dr_tulu",
        read=tagged.call_tool(tools),
        example='<call_tool name="...">...</call_tool>',
        stop_strings=("</call_tool>",),
        calls_in_thoughts=True,
        answer_tag="tool_output",
    )


FAMILIES: dict[str, Callable[[Sequence[Tool]], Format]] = {
    "hermes": _hermes,
    "qwen3_xml": _qwen3_xml,
    "glm45": _glm45,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
    "olmo3": _olmo3,
    "lfm2": _lfm2,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "harmony": _harmony,
    "legacy": _legacy,
    "dr_tulu": _dr_tulu,
}
ALIASES = {
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "qwen3_coder": "qwen3_xml",
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "vllm_hermes": "hermes",
    "vllm_llama3_json": "llama3_json",
    "vllm_olmo3": "olmo3",
    "vllm_qwen3_coder": "qwen3_xml",
    "vllm_qwen3_xml": "qwen3_xml",
}
"""Other names of vLLM and of Open Instruct."""
_DOOR = "vllm:"
_MARKS = (
    ("qwen3_xml", ("<function=",)),
    ("glm45", ("<arg_key>",)),
    ("olmo3", ("<function_calls>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("harmony", ("<|channel|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('{"name": function name, "parameters"',)),
    ("llama3_json", ("<|python_tag|>",)),
    ("hermes", ("<tool_call>",)),
    ("dr_tulu", ("<call_tool",)),
    ("legacy", ("<output>",)),
)
"""Marks in the templates of each family, looked for in this order."""


def named(name: str, tools: Sequence[Tool], *, tokenizer: Any = None) -> Format:
    """The format of a family of models, by one of its names.

    Args:
        name: a name of `FAMILIES` or `ALIASES`, or `vllm:` and the name of a parser of vLLM's, which alone needs the tokenizer.
    """
    if name.startswith(_DOOR):
        return vllm_door.from_vllm(name.removeprefix(_DOOR), tools, tokenizer)
    family = FAMILIES.get(ALIASES.get(name, name))
    if family is None:
        raise ValueError(f"tool_parser_type={name!r} is unknown; expected auto, {_names()}, or vllm:NAME")
    return family(tools)


def detected(template: str) -> str:
    """The family for which a chat template, as Jinja text, writes calls or asks for them."""
    for family, marks in _MARKS:
        if all(mark in template for mark in marks):
            return family
    raise ValueError(
        "tool_parser_type=auto finds no format of tool calls in the chat template; "
        f"set it to the one that the model was trained with: {_names()}, or vllm:NAME"
    )


def _names() -> str:
    return ", ".join((*FAMILIES, *ALIASES))

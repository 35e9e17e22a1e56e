"""The formats by name, and which of them a chat template asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgrpo.environments.environment import Tool
from mgrpo.environments.formats import json_calls, tagged
from mgrpo.environments.formats.format import Format


def _hermes(tools: Sequence[Tool]) -> Format:
    return Format(
        name="hermes",
        read=json_calls.hermes(),
        example='<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>',
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


FAMILIES: dict[str, Callable[[Sequence[Tool]], Format]] = {
    "hermes": _hermes,
    "legacy": _legacy,
}
ALIASES = {
    "qwen3_json": "hermes",
    "vllm_hermes": "hermes",
}


def named(name: str, tools: Sequence[Tool]) -> Format:
    """The format of a family of models, or one of its other names."""
    family = FAMILIES.get(ALIASES.get(name, name))
    if family is None:
        names = ", ".join(sorted({*FAMILIES, *ALIASES}))
        raise ValueError(f"tool_parser_type={name!r} is unknown; expected auto or one of {names}")
    return family(tools)

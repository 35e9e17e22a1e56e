"""vLLM's own parsers of tool calls, for the formats that have none here. vLLM is imported only when one is asked for.

Its parsers take seconds to import, and look up the marks of their format in the tokenizer's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats.format import Block, Format
from mgrpo.environments.formats.values import Fault, arguments_of


def from_vllm(name: str, tools: Sequence[Tool], tokenizer: Any) -> Format:
    """The format with this name in vLLM's `--tool-call-parser`."""
    setting = f"tool_parser_type='vllm:{name}'"
    if tokenizer is None:
        raise ValueError(f"{setting} needs the tokenizer, which is not here; choose a parser without the prefix vllm:")
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager

        parser_class = ToolParserManager.get_tool_parser(name)
    except ImportError as err:
        hint = "install it beside vLLM" if err.name and not err.name.startswith("vllm") else "install vLLM"
        raise ValueError(f"{setting} cannot be imported: {err}; {hint}") from err
    except KeyError as err:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ValueError(f"{setting}: vLLM has no such parser; it has {known}") from err
    schemas = [tool.schema for tool in tools]
    parameters = [ChatCompletionToolsParam(**schema) for schema in schemas]
    request = ChatCompletionRequest(model="", messages=[], tools=schemas or None)
    try:
        parser_class(tokenizer, parameters)
    except Exception as err:
        raise ValueError(f"{setting} does not fit the model's tokenizer: {err}") from err

    def read(text: str, at: int) -> Block | None:
        try:
            # A parser keeps the text that it has read.
            found = parser_class(tokenizer, parameters).extract_tool_calls(text[at:], request)
        except Exception as err:
            return Block(start=at, end=len(text), faults=(f"vLLM's parser failed with {type(err).__name__}",))
        if not found.tool_calls:
            return None
        calls, faults = [], []
        for call in found.tool_calls:
            try:
                calls.append(Call(name=call.function.name, arguments=arguments_of(call.function.arguments)))
            except Fault as fault:
                faults.append(str(fault))
        # Text between calls is lost with them.
        start = at + len(found.content or "") if text.startswith(found.content or "", at) else at
        return Block(start=start, end=len(text), calls=tuple(calls), faults=tuple(faults))

    return Format(name=f"vllm:{name}", read=read, example="the chat template shows it")

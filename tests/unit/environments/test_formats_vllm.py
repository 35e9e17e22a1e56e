"""vLLM's own parsers as the oracle: a model that learns a format here is served with theirs. They take seconds to import."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Callable, Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgrpo.environments.environment import Call
from mgrpo.environments.formats import named
from tests.unit.environments.format_cases import GOOD, NOW_CALL, TOOLS, WRITERS, add, code, mistral_v11

pytestmark = pytest.mark.slow
MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
NEEDS = {
    "qwen3_xml": ("ijson", "mistral_common"),
    "glm45": ("ijson", "mistral_common"),
    "mistral": ("ijson", "mistral_common"),
}
"""What vLLM's parsers import and its CPU build does not install."""
FAMILIES = [family for family in WRITERS if family != "harmony"]
"""vLLM reads gpt-oss from ids, with a vocabulary that it downloads."""

Oracle = Callable[[str, str], list[Call] | None]


def tokenizer(*marks: str) -> PreTrainedTokenizerFast:
    """Bytes and the marks, which the parsers look up."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(alphabet, []))
    bytes_only.pre_tokenizer, bytes_only.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    made.add_tokens(list(marks))
    return made


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """The calls that vLLM's parser of a name reads; None: it fails. Calls whose arguments are no object are left out."""
    level = os.environ.get("VLLM_LOGGING_LEVEL")
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    tokenizers = {True: tokenizer(*MARKS, "[ARGS]"), False: tokenizer(*MARKS)}
    schemas = [tool.schema for tool in TOOLS]
    parameters = [ChatCompletionToolsParam(**schema) for schema in schemas]
    request = ChatCompletionRequest(model="", messages=[], tools=schemas)

    def read(name: str, text: str) -> list[Call] | None:
        parser = ToolParserManager.get_tool_parser(name)(tokenizers["[ARGS]" in text], parameters)
        try:
            found = parser.extract_tool_calls(text, request).tool_calls
        except Exception:
            return None
        calls = []
        for call in found:
            try:
                arguments = json.loads(call.function.arguments)
            except ValueError:
                continue
            if call.function.name and isinstance(arguments, dict):
                calls.append(Call(name=call.function.name, arguments=arguments))
        return calls

    yield read
    if level is None:
        del os.environ["VLLM_LOGGING_LEVEL"]
    else:
        os.environ["VLLM_LOGGING_LEVEL"] = level


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    missing = [module for module in NEEDS.get(request.param, ()) if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"vLLM's parser of {request.param} imports {' and '.join(missing)}, which vLLM does not install")
    return request.param


def without_ids(calls: tuple[Call, ...]) -> list[Call]:
    return [Call(name=call.name, arguments=call.arguments) for call in calls]


def test_good_calls_are_read_as_vllm_reads_them(family, oracle):
    """With text before them and none, several in a turn, all types of arguments."""
    writers = [WRITERS[family], *([mistral_v11] if family == "mistral" else [])]
    for calls in GOOD:
        for text in (writer(*calls) for writer in writers):
            assert oracle(family, text) == list(calls)
            assert without_ids(named(family, TOOLS).parse(text).calls) == list(calls)


@pytest.mark.parametrize("name", ["granite4", "llama4_json", "llama4_pythonic", "qwen3_json"])
def test_name_that_vllm_also_has_is_the_same_format(name, oracle):
    """`--tool-call-parser` of the server and `tool_parser_type` of the run are the same word."""
    calls = (add(a=1, limit=0.5), NOW_CALL)
    text = WRITERS[named(name, TOOLS).name](*calls)
    assert oracle(name, text) == list(named(name, TOOLS).parse(text).calls) == list(calls)


def slips(text: str, *, seed: str) -> Iterator[str]:
    """The text cut, with a character left out, and with one put in."""
    rng = random.Random(seed)
    for at in sorted(rng.sample(range(1, len(text)), min(40, len(text) - 1))):
        yield text[:at]
        yield text[:at] + text[at + 1 :]
        yield text[:at] + rng.choice("{}[]()\"'<>,= a1") + text[at:]


def test_call_that_vllm_reads_is_read_or_told_to_the_model(family, oracle):
    """Of broken text also: a call is never lost in silence. Ours may read more: one broken call does not spoil the others."""
    reader = named(family, TOOLS)
    equal = []
    for calls in ((add(a=2, note="x y"),), (NOW_CALL,), (add(a=1, limit=0.5), code("x = 1"))):
        for text in slips(WRITERS[family](*calls), seed=family):
            parsed = reader.parse(text)
            theirs = oracle(family, text) or []
            ours = without_ids(parsed.calls)
            assert parsed.unreadable or all(call in ours for call in theirs), (text, theirs, parsed)
            equal.append(ours == theirs)
    assert sum(equal) > len(equal) / 3


def test_door_to_vllm_reads_what_its_parser_reads(oracle):
    """`vllm:NAME`, for the families that have no parser of ours."""
    text = 'Well. <tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>'
    door = named("vllm:hunyuan_a13b", TOOLS, tokenizer=tokenizer())
    assert without_ids(door.parse(text).calls) == oracle("hunyuan_a13b", text) == [add(a=1)]
    assert door.parse(text).content == "Well."
    assert door.parse("Well.").content == "Well."
    hermes = named("vllm:hermes", TOOLS, tokenizer=tokenizer(*MARKS))
    text = WRITERS["hermes"](add(a=1))
    parsed = hermes.parse(f"<think>{text}</think>{text}")
    assert (without_ids(parsed.calls), parsed.content) == ([add(a=1)], "")


def test_door_to_vllm_refuses_at_the_start():
    """An unknown name, or a tokenizer without the marks of the format."""
    with pytest.raises(ValueError, match=r"tool_parser_type='vllm:hermse': vLLM has no such parser; it has .*hermes"):
        named("vllm:hermse", TOOLS, tokenizer=tokenizer())
    with pytest.raises(ValueError, match=r"'vllm:deepseek_v3' does not fit the model's tokenizer: .*could not locate"):
        named("vllm:deepseek_v3", TOOLS, tokenizer=tokenizer())
    with pytest.raises(ValueError, match=r"'vllm:hermes' needs the tokenizer"):
        named("vllm:hermes", TOOLS)

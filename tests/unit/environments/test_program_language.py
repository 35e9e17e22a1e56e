"""Chats of a program in the model's own template: the ids are those that the template would have written."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from mgrpo.environments.environment import Tool
from mgrpo.environments.formats import named
from mgrpo.environments.loop.bridge import Bridges
from mgrpo.environments.loop.conversation import Conversation
from mgrpo.environments.loop.program_language import ProgramLanguage
from mgrpo.environments.loop.trajectory import Sampled, Trajectory
from tests.unit.environments.chat_templates import JOINED, make_tokenizer

pytest.importorskip("transformers")

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def language(tokenizer: Any, *, add_bos: bool = False, thinks: bool = False) -> ProgramLanguage:
    template = JOINED.replace(r"assistant\n' }}{%- endif", r"assistant\n<think>' }}{%- endif") if thinks else JOINED

    def bridges_of(tools: Any) -> Bridges:
        stops = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
        return Bridges(tokenizer, template, template_kwargs={}, tools=tools, stop_token_ids=stops)

    return ProgramLanguage(
        tokenizer,
        format_of=partial(named, "hermes"),
        bridges_of=bridges_of,
        add_bos=add_bos,
        max_observation_tokens=100,
    )


def written(tokenizer: Any, messages: list[dict], *, tools: Any = None) -> str:
    return tokenizer.apply_chat_template(
        messages, chat_template=JOINED, tools=tools, tokenize=False, add_generation_prompt=True
    )


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def sampled(tokenizer: Any, text: str) -> Sampled:
    tokens = np.array(ids(tokenizer, text), np.int32)
    zeros = np.zeros(len(tokens))
    return Sampled(
        tokens=tokens,
        logprobs=zeros.astype(np.float32),
        policy_versions=zeros.astype(np.int32),
        finish_reason="stop",
    )


def wish(*messages: dict, tools: list[dict] | None = None) -> dict[str, Any]:
    return {"messages": [*messages], "tools": tools or [], "max_tokens": None}


def test_a_program_and_the_template_write_the_same_ids(tokenizer: Any) -> None:
    """An opening, an answered call and a word of the user: what the model is shown is what it was made for."""
    trajectory = Trajectory(context=np.zeros(0, np.int32), has_tools=False)
    talk = Conversation(language(tokenizer), trajectory, [])
    talk.take(talk.step(wish(*ASKED, tools=[SCHEMA])))
    assert trajectory.has_tools
    call = 'so\n<tool_call>\n{"name": "look", "arguments": {"x": "1"}}\n</tool_call><|im_end|>'
    first = talk.heard(sampled(tokenizer, call))["message"]
    assert (first["content"], first["tool_calls"][0]["function"]) == ("so", {"name": "look", "arguments": {"x": "1"}})
    answered = [*ASKED, first, {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2<|im_end|>"}]
    talk.take(talk.step(wish(*answered, tools=[SCHEMA])))
    last = talk.heard(sampled(tokenizer, "2<|im_end|>"))["message"]
    talk.take(talk.step(wish(*answered, last, {"role": "user", "content": "Sure?"}, tools=[SCHEMA])))

    known = written(tokenizer, ASKED, tools=[SCHEMA])
    assert talk.opening == ids(tokenizer, known)
    whole = [*talk.opening, *(token for part in trajectory.parts for token in part.tokens.tolist())]
    after = "2<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    middle = "\n<|im_start|>user\n<tool_response>\n2<|im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(whole) == known + call + middle + after
    # The one in the tool's answer is text.
    text = tokenizer.decode(whole)
    assert whole.count(end) == text.count("<|im_end|>") - 1


def test_the_calls_of_a_chat_are_read_by_its_own_tools(tokenizer: Any) -> None:
    own = language(tokenizer)
    tool = Tool(name="look", description="", parameters={"type": "object", "properties": {}})
    assert own.with_tools([]) is own and own.with_tools([tool]) is own.with_tools([tool])
    assert "look" in own.with_tools([tool]).written(own.with_tools([tool]).opening(ASKED))
    assert "look" not in own.written(own.opening(ASKED))


def test_a_turn_that_begins_in_a_thought_is_read_so(tokenizer: Any) -> None:
    turn = sampled(tokenizer, "hmm<|im_end|>")
    tool = [Tool(name="look", description="", parameters={"type": "object", "properties": {}})]
    found = [language(tokenizer, thinks=thinks).with_tools(tool).read(turn, calls=True) for thinks in (True, False)]
    assert [each.content for each in found] == ["", "hmm"]


def test_the_first_token_of_a_chat_is_that_of_all_prompts(tokenizer: Any) -> None:
    bos = tokenizer.convert_tokens_to_ids(tokenizer.bos_token)
    with_bos, without = (language(tokenizer, add_bos=add).opening(ASKED) for add in (True, False))
    assert with_bos == [bos, *without]


def test_ids_that_no_tokenizer_has_are_refused(tokenizer: Any) -> None:
    """An engine would die of them."""
    for bad in (-1, len(tokenizer)):
        with pytest.raises(ValueError, match=f"the id {bad} is not among"):
            language(tokenizer).written([1, bad])


@pytest.mark.parametrize(
    ("added", "why"),
    [
        ([{"role": "system", "content": "x"}], "have the roles system"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "have the roles user, user"),
    ],
)
def test_messages_without_a_bridge_are_refused(tokenizer: Any, added: list[dict], why: str) -> None:
    talk = Conversation(language(tokenizer), Trajectory(context=np.zeros(0, np.int32)), [])
    talk.take(talk.step(wish(*ASKED)))
    first = talk.heard(sampled(tokenizer, "2<|im_end|>"))["message"]
    with pytest.raises(ValueError, match=why):
        talk.step(wish(*ASKED, first, *added))


def test_a_tool_without_a_name_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="has no name"):
        Conversation(language(tokenizer), Trajectory(context=np.zeros(0, np.int32)), []).step(
            wish(*ASKED, tools=[{"type": "function"}])
        )

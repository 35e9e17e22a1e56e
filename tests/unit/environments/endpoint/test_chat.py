"""Chat completions as a dialect: every parameter that a client can send is answered, ignored or refused, and nothing else is."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mgrpo.environments.endpoint import chat
from mgrpo.environments.endpoint.messages import BadRequest, ContextFull, Fault
from mgrpo.environments.endpoint.session import Turned
from mgrpo.environments.endpoint.tree import Node

MESSAGES = [{"role": "user", "content": "x"}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


def turned(message: dict[str, Any], finish_reason: str = "stop") -> Turned:
    node = Node(
        number=3,
        parent=None,
        added=[1, 2, 3],
        rewrites=False,
        tokens=[104, 105],
        length=3,
        finish_reason=finish_reason,
        messages=[],
        message={"role": "assistant", **message},
        stop=None,
        num_unreadable=0,
        key=b"",
    )
    return Turned(node=node, token_logprobs=np.array([-0.5, -0.25], np.float32), text_of_token=chr)


def test_every_parameter_of_the_client_has_its_rule() -> None:
    """One that were forgotten would be refused, although some framework sends it, or change the distribution unseen."""
    given = inspect.signature(openai.resources.chat.completions.Completions.create).parameters
    names = set(given) - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    rules = [chat.ANSWERED, chat.IGNORED, chat.SAMPLING, chat.REFUSED.keys()]
    assert names <= set().union(*rules)
    assert sum(map(len, rules)) == len(set().union(*rules)), "one rule each"


@pytest.mark.parametrize("name", sorted(chat.REFUSED))
def test_what_is_refused_may_be_null_or_what_changes_nothing(name: str) -> None:
    """Frameworks send defaults."""
    for value in (None, *chat.REFUSED[name][0]):
        chat.request({"messages": MESSAGES, name: value})
    with pytest.raises(BadRequest) as refused:
        chat.request({"messages": MESSAGES, name: {"a": 2}})
    assert refused.value.param == name


def test_true_is_not_one() -> None:
    with pytest.raises(BadRequest):
        chat.request({"messages": MESSAGES, "n": True})
    with pytest.raises(BadRequest):
        chat.request({"messages": MESSAGES, "top_logprobs": False})


def test_a_request_keeps_what_it_asks_for() -> None:
    body = {
        "messages": MESSAGES,
        "tools": [{"type": "function"}],
        "max_tokens": 9,
        "max_completion_tokens": 7,
        "stop": "END",
        "tool_choice": "none",
        "temperature": 0,
        "top_p": None,
    }
    found = chat.request(body)
    assert (found.messages, found.tools) == (MESSAGES, [{"type": "function"}])
    assert (found.max_tokens, found.stop, found.reads_calls) == (7, ("END",), False)
    assert found.settings == {"temperature": 0}


@pytest.mark.parametrize(
    ("message", "finish_reason", "content", "finish"),
    [
        ({"content": "hi"}, "stop", "hi", "stop"),
        ({"content": ""}, "stop", "", "stop"),
        ({"content": "h"}, "length", "h", "length"),
        ({"content": "", "tool_calls": [CALL]}, "stop", None, "tool_calls"),
        ({"content": "a", "reasoning_content": "b", "tool_calls": [CALL, CALL]}, "stop", "a", "tool_calls"),
    ],
)
def test_replies_and_streams_say_the_same(message: Any, finish_reason: str, content: Any, finish: str) -> None:
    """Read by the client's own types; agents choose one or the other by accident."""
    body = {"model": "m", "logprobs": True, "stream_options": {"include_usage": True}}
    said = turned(message, finish_reason)
    whole = ChatCompletion.model_validate(chat.reply(said, body))
    choice = whole.choices[0]
    assert (whole.model, choice.message.content, choice.finish_reason) == ("m", content, finish)
    lines = b"".join(chat.events(said, body)).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")) for line in lines[:-2]]
    deltas = [each.choices[0].delta for each in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == message.get("reasoning_content", "") == getattr(choice.message, "reasoning_content", "")
    calls = [call.model_dump(exclude={"index"}) for delta in deltas for call in delta.tool_calls or ()]
    assert calls == message.get("tool_calls", []) == [call.model_dump() for call in choice.message.tool_calls or ()]
    assert [each.choices[0].finish_reason for each in chunks[:-1]] == [None] * (len(chunks) - 2) + [finish]
    assert chunks[-1].usage == whole.usage and whole.usage and whole.usage.total_tokens == 5
    entries = [
        entry for each in chunks[:-1] if each.choices[0].logprobs for entry in each.choices[0].logprobs.content or ()
    ]
    assert choice.logprobs and entries == choice.logprobs.content
    assert [(entry.token, entry.bytes, entry.logprob) for entry in entries] == [("h", [104], -0.5), ("i", [105], -0.25)]


def test_log_probabilities_are_not_made_unless_asked_for() -> None:
    assert chat.reply(turned({"content": "hi"}), {})["choices"][0]["logprobs"] is None


def test_ids_without_a_text_have_log_probabilities() -> None:
    """Models have more ids than their tokenizers, and parts of characters."""

    def text_of_token(number: int) -> str:
        if number == 104:
            raise ValueError("none")
        return "\ufffd"

    said = turned({"content": "hi"})
    found = Turned(node=said.node, token_logprobs=said.token_logprobs, text_of_token=text_of_token).logprobs
    assert [(entry["token"], entry["bytes"]) for entry in found] == [
        ("token_id:104", list(b"token_id:104")),
        ("\ufffd", None),
    ]


def test_errors_are_in_openais_form() -> None:
    fault = ContextFull("too long", num_tokens=5, limit=4)
    error = chat.error(fault)["error"]
    assert error == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    event = chat.error_event(Fault(503, "server_error", "gone"))
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "gone" and event.endswith(b"\n\n")

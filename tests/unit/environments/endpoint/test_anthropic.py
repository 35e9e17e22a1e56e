"""Anthropic's Messages as turns of a session, by tables."""

from __future__ import annotations

import inspect
import json

import pytest
from hypothesis import given

from mgrpo.environments.endpoint import anthropic as dialect
from mgrpo.environments.endpoint.messages import BadRequest, ContextFull, Fault
from mgrpo.environments.normal_form import essence
from tests.unit.environments.endpoint.turns import CALLS, TEXT, read, turned

ASK = {"role": "user", "content": "count to 2"}


def body(*messages, **fields):
    return {"model": "m", "max_tokens": 9, "messages": list(messages) or [ASK], **fields}


def text(text):
    return {"type": "text", "text": text}


def use(name="add", given=None, id="t1"):
    return {"type": "tool_use", "id": id, "name": name, "input": given or {}}


def result(content=None, id="t1", **fields):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def tool(content, id="t1"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def call(arguments, name="add", id="t1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


MESSAGES = {
    "text": ([ASK], [ASK]),
    "blocks are lines": ([{"role": "user", "content": [text("a"), text("b")]}], [{"role": "user", "content": "a\nb"}]),
    "nothing": ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    "a result": ([{"role": "user", "content": [result("1")]}], [tool("1")]),
    "a result without content": ([{"role": "user", "content": [result()]}], [tool("")]),
    "a result in blocks": ([{"role": "user", "content": [result([text("a"), text("b")])]}], [tool("a\nb")]),
    "a failed result": ([{"role": "user", "content": [result("no file", is_error=True)]}], [tool("no file")]),
    "a failed result that does not say why": ([{"role": "user", "content": [result(is_error=True)]}], [tool("error")]),
    "text beside results": (
        [{"role": "user", "content": [result("1"), result("2", "t2"), text("go on"), text("now")]}],
        [tool("1"), tool("2", "t2"), {"role": "user", "content": "go on\nnow"}],
    ),
    "a turn with thought and a call": (
        [ASK, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            text("I add."), use(given={"x": 1}),
        ]}, {"role": "user", "content": [result("2")]}],
        [ASK, {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [call('{"x": 1}')]}, tool("2")],
    ),
    "a turn sent in several messages": (
        [ASK, {"role": "assistant", "content": "I add."}, {"role": "assistant", "content": [use()]},
         {"role": "assistant", "content": [use(id="t2")]}, {"role": "user", "content": [result("2")]}],
        [ASK, {"role": "assistant", "content": "I add.", "tool_calls": [call("{}"), call("{}", id="t2")]}, tool("2")],
    ),
    "a turn that said nothing": (
        [ASK, {"role": "assistant", "content": []}, ASK], [ASK, {"role": "assistant", "content": ""}, ASK],
    ),
    "a system message in the middle": (
        [ASK, {"role": "system", "content": [text("be brief")]}, ASK], [ASK, {"role": "system", "content": "be brief"}, ASK],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_blocks_become_messages_of_a_chat(given, expected):
    """Otherwise the same conversation is another one when it comes through Messages, and is tokenized again."""
    assert dialect.request(body(*given)).messages == expected


def test_the_other_fields_of_a_request():
    """What an agent asks for reaches the session by the session's names."""
    request = dialect.request(
        body(
            system=[text("Use"), {**text("the tool."), "cache_control": {"type": "ephemeral"}}],
            tools=[{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}, "strict": True}],
            tool_choice={"type": "none"},
            stop_sequences=["END"],
            temperature=0.5,
            top_k=3,
            thinking={"type": "adaptive"},
            output_config={"effort": "low"},
            metadata={"user_id": "1"},
        )
    )
    assert request.messages == [{"role": "system", "content": "Use\nthe tool."}, ASK]
    assert request.tools == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    ]
    assert (request.max_tokens, request.stop, request.reads_calls) == (9, ("END",), False)
    assert request.settings == {"temperature": 0.5, "top_k": 3}
    assert len(dialect.request(body(stop_sequences=["x" * 256] * 16)).stop) == 16


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED = {
    "no limit": ({"max_tokens": ...}, "max_tokens: Field required"),
    "limit of 0": ({"max_tokens": 0}, "max_tokens: Input should be"),
    "limit that is true": ({"max_tokens": True}, "max_tokens: Input should be"),
    "no messages": ({"messages": []}, "messages: at least one message is required"),
    "messages that are none": ({"messages": [3]}, "messages.0.role"),
    "a role": ({"messages": [{"role": "tool", "content": "1"}]}, "messages.0.role"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    "a block": ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
    "an image": ({"messages": [{"role": "user", "content": [text("a"), IMAGE]}]}, "messages.0.content.1.type: blocks of the type 'image'"),
    "an image in a result": ({"messages": [{"role": "user", "content": [result([IMAGE])]}]}, "messages.0.content.0.content.0.type"),
    "text that is none": ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content.0.text"),
    "a result of nothing": ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    "a call without input": ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a"}]}, ASK]}, "messages.0.content.0"),
    "prefill": ({"messages": [ASK, {"role": "assistant", "content": "The"}]}, "messages: assistant message prefill is not supported"),
    "system": ({"system": 3}, "system: "),
    "tools": ({"tools": {}}, "tools: "),
    "a tool": ({"tools": [3]}, "tools.0.name"),
    "a tool without schema": ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    "a tool of Anthropic's": ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools.0.type: 'web_search_20250305'"),
    "a forced call": ({"tool_choice": {"type": "any"}}, "tool_choice: only auto and none"),
    "a choice": ({"tool_choice": "auto"}, "tool_choice"),
    "a blank stop": ({"stop_sequences": [" "]}, "stop_sequences: each stop sequence must contain"),
    "17 stops": ({"stop_sequences": list("abcdefghijklmnopq")}, "stop_sequences: Input should be a list of at most 16"),
    "a long stop": ({"stop_sequences": ["x" * 257]}, "stop_sequences: each stop sequence should have at most 256"),
    "a grammar": ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    "an output_config": ({"output_config": [1]}, "output_config"),
    "servers of tools": ({"mcp_servers": [{}]}, "mcp_servers"),
    "an unknown field": ({"guided_json": {}}, "guided_json: Extra inputs are not permitted"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_in_which_words(change, words):
    """An agent that sends it must learn which field it was, and the run must not sample something else instead."""
    with pytest.raises(BadRequest) as caught:
        dialect.request({name: value for name, value in (body() | change).items() if value is not ...})
    assert caught.value.status == 400 and caught.value.message.startswith(words)


@given(TEXT, TEXT, CALLS)
def test_a_turn_sent_back_is_the_turn(content, thought, calls):
    """Whatever a turn said, a client that repeats the reply repeats the turn: otherwise its history is a new root."""
    turn = turned(content, thought=thought, calls=calls)
    said = {"role": "assistant", "content": dialect.reply(turn, {})["content"]}
    assert essence(dialect.request(body(ASK, said, ASK)).messages[1]) == essence(turn.message)


@given(TEXT, TEXT, CALLS)
def test_the_deltas_of_a_stream_put_together_are_the_reply(content, thought, calls):
    """A streaming agent must see the same turn."""
    turn = turned(content, thought=thought, calls=calls)
    blocks, inputs, ended = [], {}, {}
    for _, event in read(dialect.events(turn, {"model": "m"})):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[event["index"]][name] += delta[name]
        elif event["type"] == "message_delta":
            ended = event["delta"] | {"usage": event["usage"]}
    for index, written in inputs.items():
        blocks[index]["input"] = json.loads(written)
    whole = dialect.reply(turn, {"model": "m"})
    assert blocks == whole["content"] and ended == {name: whole[name] for name in ended}


def test_the_order_of_events_is_the_one_of_the_api():
    """Clients build a message from events in this order, and fail on any other."""
    turn = turned("I add.", thought="hm", calls=[("add", {"x": 1})])
    names = [name for name, _ in read(dialect.events(turn, {}))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = ["content_block_start", "ping", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *thinking, *block, *block, "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("turn", "reason", "sequence"),
    [
        (turned("a"), "end_turn", None),
        (turned("a", calls=[("add", {})]), "tool_use", None),
        (turned("a", finish_reason="length"), "max_tokens", None),
        (turned("a", stop="END"), "stop_sequence", "END"),
    ],
)
def test_why_a_turn_ended(turn, reason, sequence):
    """Agents go on by it: with a call, or with a longer limit."""
    whole = dialect.reply(turn, {"model": "m"})
    assert (whole["stop_reason"], whole["stop_sequence"], whole["model"]) == (reason, sequence, "m")
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (40, 7)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (
            ContextFull("m", num_tokens=70, limit=60),
            "invalid_request_error",
            "prompt is too long: 70 tokens > 60 maximum",
        ),
        (Fault(401, "authentication_error", "m"), "authentication_error", "m"),
        (Fault(404, "not_found", "m"), "not_found_error", "m"),
        (Fault(405, "x", "m"), "invalid_request_error", "m"),
        (Fault(413, "x", "m"), "request_too_large", "m"),
        (Fault(429, "x", "m"), "rate_limit_error", "m"),
        (Fault(500, "server_error", "m"), "api_error", "m"),
        (Fault(503, "server_error", "m"), "overloaded_error", "m"),
    ],
)
def test_errors_have_the_words_of_the_api(fault, kind, words):
    """Claude Code compacts when a prompt is too long, and looks for these words."""
    expected = {"type": "error", "error": {"type": kind, "message": words}}
    assert dialect.error(fault) == expected and read([dialect.error_event(fault)]) == [("error", expected)]


def test_every_parameter_of_the_client_has_an_answer():
    """A parameter that the client has learned since must be refused or ignored by a decision."""
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    client = anthropic.Anthropic(api_key="x")
    own = {"extra_headers", "extra_query", "extra_body", "timeout"}
    known = dialect.ANSWERED | dialect.IGNORED | dialect.REFUSED.keys()
    for function in (client.messages.create, client.beta.messages.create, client.messages.count_tokens):
        assert set(inspect.signature(function).parameters) - own <= known

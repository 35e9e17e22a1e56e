"""OpenAI's Responses as turns of a session, by tables."""

from __future__ import annotations

import inspect

import openai
import pytest
from hypothesis import given
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mgrpo.environments.endpoint import responses as dialect
from mgrpo.environments.endpoint.messages import BadRequest, Fault
from mgrpo.environments.normal_form import essence
from tests.unit.environments.endpoint.turns import CALLS, TEXT, read, turned

ASK = {"role": "user", "content": "count to 2"}
EVENT: TypeAdapter = TypeAdapter(ResponseStreamEvent)


def body(*items, **fields):
    return {"model": "m", "input": list(items) or "count to 2", **fields}


def part(text, kind="input_text"):
    return {"type": kind, "text": text}


def said(text, **fields):
    return {"type": "message", "role": "assistant", "content": [part(text, "output_text")], **fields}


def thought(text=None, **fields):
    content = [] if text is None else [part(text, "reasoning_text")]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **fields}


def called(arguments="{}", name="add", id="c1"):
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def output(text, id="c1"):
    return {"type": "function_call_output", "call_id": id, "output": text}


def call(arguments="{}", name="add", id="c1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(content="", **fields):
    return {"role": "assistant", "content": content, **fields}


def tool(content, id="c1"):
    return {"role": "tool", "tool_call_id": id, "content": content}


MESSAGES = {
    "text": ([], [ASK]),
    "a message": ([ASK], [ASK]),
    "parts": ([{"type": "message", "role": "user", "content": [part("count"), part(" to 2")]}], [ASK]),
    "a developer's message": ([{"role": "developer", "content": "Use it."}], [{"role": "developer", "content": "Use it."}]),
    "a turn in items": (
        [ASK, thought("hm"), said("I add."), called('{"x": 1}'), called(id="c2"), output("2"), output([part("3")], "c2")],
        [ASK, turn("I add.", reasoning_content="hm", tool_calls=[call('{"x": 1}'), call(id="c2")]), tool("2"), tool("3", "c2")],
    ),
    "a turn of calls alone": ([ASK, called(), output("2")], [ASK, turn(tool_calls=[call()]), tool("2")]),
    "two turns": (
        [ASK, called(), output("2"), thought("done"), said("2")],
        [ASK, turn(tool_calls=[call()]), tool("2"), turn("2", reasoning_content="done")],
    ),
    "two turns side by side": ([ASK, said("a"), said("b"), ASK], [ASK, turn("a"), turn("b"), ASK]),
    "a thought after a call is another turn's": (
        [ASK, called(), thought("hm"), called()], [ASK, turn(tool_calls=[call()]), turn(reasoning_content="hm", tool_calls=[call()])],
    ),
    "a summary of thoughts": (
        [ASK, thought(summary=[part("hm", "summary_text")]), said("2"), ASK], [ASK, turn("2", reasoning_content="hm"), ASK],
    ),
    "thoughts that only the server reads": (
        [ASK, thought(encrypted_content="x"), said("2"), ASK], [ASK, turn("2", reasoning_content=""), ASK],
    ),
    "a turn that said nothing": ([ASK, said(""), ASK], [ASK, turn(""), ASK]),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_items_become_messages_of_a_chat(given, expected):
    """Otherwise the same conversation is another one when it comes through Responses, and is tokenized again."""
    assert dialect.request(body(*given)).messages == expected


def test_the_other_fields_of_a_request():
    """What an agent asks for reaches the session by the session's names."""
    parameters = {"type": "object", "properties": {}}
    request = dialect.request(
        body(
            instructions="Use the tool.",
            previous_response_id="resp_12",
            tools=[{"type": "function", "name": "add", "parameters": parameters, "strict": True}],
            tool_choice="none",
            max_output_tokens=9,
            temperature=0.5,
            store=False,
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "low"},
            text={"format": {"type": "text"}, "verbosity": "low"},
            conversation=None,
        )
    )
    assert request.tools == [
        {"type": "function", "function": {"name": "add", "description": "", "parameters": parameters}}
    ]
    assert (request.max_tokens, request.reads_calls, request.previous) == (9, False, 12)
    assert request.settings == {"temperature": 0.5} and request.instructions == "Use the tool."
    assert request.messages == [ASK]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,"}
REFUSED = {
    "no input": ({"input": ...}, "input", "invalid_value"),
    "nothing": ({"input": []}, "input", "invalid_value"),
    "a number": ({"input": [3]}, "input[0]", "invalid_value"),
    "a role": ({"input": [{"role": "tool", "content": "1"}]}, "input[0].role", "invalid_value"),
    "a reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "invalid_value"),
    "an unhashable kind": ({"input": [{"type": {}}]}, "input[0].type", "invalid_value"),
    "an image": ({"input": [{"role": "user", "content": [part("a"), IMAGE]}]}, "input[0].content[1].type", "invalid_value"),
    "an image from a tool": ({"input": [output([IMAGE])]}, "input[0].output[0].type", "invalid_value"),
    "a call without arguments": ({"input": [{"type": "function_call", "name": "a"}]}, "input[0]", "invalid_value"),
    "content": ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "invalid_value"),
    "instructions": ({"instructions": 3}, "instructions", "invalid_value"),
    "limit of 0": ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    "a hosted tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    "tools": ({"tools": {}}, "tools", "invalid_value"),
    "a tool without name": ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
    "a forced call": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "a named call": ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice", "invalid_value"),
    "a grammar": ({"text": {"format": {"type": "json_schema"}}}, "text.format", "invalid_value"),
    "text": ({"text": 3}, "text", "invalid_value"),
    "the likeliest tokens": ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    "in the background": ({"background": True}, "background", "invalid_value"),
    "a conversation": ({"conversation": "conv_1"}, "conversation", "invalid_value"),
    "a response of others": ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    "a response that is none": ({"previous_response_id": 3}, "previous_response_id", "previous_response_not_found"),
    "an unknown field": ({"guided_json": {}}, "guided_json", "unknown_parameter"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_by_which_name(change, param, code):
    """An agent that sends it must learn which field it was, and the run must not sample something else instead."""
    with pytest.raises(BadRequest) as caught:
        dialect.request({name: value for name, value in (body() | change).items() if value is not ...})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


@given(TEXT, TEXT, CALLS)
def test_a_turn_sent_back_is_the_turn(content, thought, calls):
    """Whatever a turn said, a client that repeats the output repeats the turn: otherwise its history is a new root."""
    turn = turned(content, thought=thought, calls=calls)
    output = dialect.reply(turn, {})["output"]
    given = dialect.request(body(ASK, *output, ASK)).messages
    assert [essence(message) for message in given] == [essence(message) for message in (ASK, turn.message, ASK)]


@given(TEXT, TEXT, CALLS)
def test_the_events_of_a_stream_are_those_of_the_client_and_add_up_to_the_reply(content, thought, calls):
    """A streaming agent must see the same turn, by events that its client knows."""
    turn = turned(content, thought=thought, calls=calls)
    items, whole = [], None
    for place, (name, event) in enumerate(read(dialect.events(turn, {"model": "m"}))):
        known = EVENT.validate_python(event)
        assert (name, place) == (known.type, known.sequence_number)
        if name == "response.output_item.added":
            assert known.output_index == len(items)
            items.append(event["item"])
        elif name == "response.content_part.added":
            assert known.item_id == items[-1]["id"] and known.content_index == len(items[-1]["content"])
            items[-1]["content"].append(event["part"])
        elif name in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[-1]["content"][-1]["text"] += event["delta"]
        elif name == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif name == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
        elif name in ("response.completed", "response.incomplete"):
            whole = event["response"]
    reply = dialect.reply(turn, {"model": "m"})
    assert whole is not None and items == whole["output"] == reply["output"]
    assert {**whole, "created_at": 0, "completed_at": 0} == {**reply, "created_at": 0, "completed_at": 0}


def test_the_order_of_events_is_the_one_of_the_api():
    """Clients build a response from events in this order."""
    turn = turned("I add.", thought="hm", calls=[("add", {"x": 1})])
    names = [name.removeprefix("response.") for name, _ in read(dialect.events(turn, {}))]
    parts = ["content_part.added", "{0}.delta", "{0}.done", "content_part.done"]
    of_item = {
        "reasoning_text": [part.format("reasoning_text") for part in parts],
        "output_text": [part.format("output_text") for part in parts],
        "call": ["function_call_arguments.delta", "function_call_arguments.done"],
    }
    items = [["output_item.added", *inner, "output_item.done"] for inner in of_item.values()]
    assert names == ["created", "in_progress", *(name for item in items for name in item), "completed"]


@pytest.mark.parametrize(
    ("turn", "status", "reason"),
    [(turned("a"), "completed", None), (turned("a", finish_reason="length"), "incomplete", "max_output_tokens")],
)
def test_a_reply_is_a_response_of_the_client(turn, status, reason):
    """Agents read it by the client's types, and go on by its status and its id."""
    found = Response.model_validate(
        dialect.reply(turn, {"model": "m", "previous_response_id": "resp_1", "instructions": "i"})
    )
    assert (found.id, found.model, found.previous_response_id, found.instructions) == ("resp_3", "m", "resp_1", "i")
    assert found.status == status and (found.incomplete_details and found.incomplete_details.reason) == reason
    assert found.output_text == "a" and found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (40, 7, 47)


def test_errors_have_the_form_of_the_api():
    """Clients raise by the status, and show the message and the code."""
    fault = Fault(400, "invalid_request_error", "m", "trajectory_over", "input")
    inner = {"message": "m", "type": "invalid_request_error", "param": "input", "code": "trajectory_over"}
    assert dialect.error(fault) == {"error": inner}
    [(name, event)] = read([dialect.error_event(fault)])
    assert name == "error" and event["type"] == "error" and event["error"] == inner
    assert EVENT.validate_python(event).message == "m"


def test_every_parameter_of_the_client_has_an_answer():
    """A parameter that the client has learned since must be refused or ignored by a decision."""
    own = {"extra_headers", "extra_query", "extra_body", "timeout"}
    known = dialect.ANSWERED | dialect.IGNORED | dialect.REFUSED.keys()
    client = openai.OpenAI(api_key="x")
    assert set(inspect.signature(client.responses.create).parameters) - own <= known

"""OpenAI's Responses as turns of a session: bodies, replies, events and errors. Pure; no HTTP and no ids of tokens.

Input items become messages of a chat: the items of one turn (reasoning, text, calls) are one message of the assistant.
`previous_response_id` names a recorded turn, whose history the session prepends; `store` changes nothing, as every turn is
recorded for as long as its trajectory lasts.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mgrpo.environments.endpoint.chat import error
from mgrpo.environments.endpoint.messages import BadRequest, Fault
from mgrpo.environments.endpoint.session import Turned, TurnRequest

ANSWERED = frozenset(
    [
        "model",
        "input",
        "instructions",
        "previous_response_id",
        "max_output_tokens",
        "tools",
        "tool_choice",
        "stream",
        "temperature",
        "top_p",
        "top_logprobs",
        "include",
        "text",
    ]
)
IGNORED = frozenset(
    [
        "store",
        "metadata",
        "user",
        "safety_identifier",
        "parallel_tool_calls",
        "max_tool_calls",
        "reasoning",
        "service_tier",
        "stream_options",
        "truncation",
        "context_management",
        "access_programs",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "background_options",
    ]
)
"""Fields that change neither the model's text nor the sampling."""
REFUSED = {
    "background": "a call waits for its turn here",
    "conversation": "send the whole history in input, or a previous_response_id",
    "prompt": "templates of prompts are not kept here; send input",
    "moderation": "nothing is moderated here",
    "image": "images are not supported",
}
SAMPLING = ("temperature", "top_p")
_MOST_METADATA = 16
_OTHER_DISTRIBUTION = "it would sample from another distribution than the one that is trained"
_ID = re.compile(r"resp_([0-9]{1,9})")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def request(body: Mapping[str, Any]) -> TurnRequest:
    """The turn request in a body of `POST /v1/responses`.

    Raises:
        BadRequest: in OpenAI's words, with the path of the field as `param`.
    """
    for name in body:
        if name in REFUSED and body[name]:
            raise _refusal(name, REFUSED[name])
        if name not in ANSWERED | IGNORED | REFUSED.keys():
            raise BadRequest(f"Unknown parameter: '{name}'.", "unknown_parameter", name)
    _check_text(body.get("text"))
    if body.get("top_logprobs"):
        raise _refusal("top_logprobs", "only the sampled tokens have log-probabilities; leave it out or give 0")
    choice = "auto" if body.get("tool_choice") is None else body["tool_choice"]
    if choice not in ("auto", "none"):
        raise _refusal("tool_choice", f"only auto and none are possible: with any other {_OTHER_DISTRIBUTION}")
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise _refusal("instructions", "expected a string")
    return TurnRequest(
        messages=_messages(body.get("input")),
        tools=_tools(body.get("tools")),
        max_tokens=_at_least_one(body.get("max_output_tokens"), "max_output_tokens"),
        stop=(),
        reads_calls=choice != "none",
        settings={name: body[name] for name in SAMPLING if body.get(name) is not None},
        previous=_previous(body.get("previous_response_id")),
        instructions=instructions or None,
    )


def reply(turned: Turned, body: Mapping[str, Any]) -> dict[str, Any]:
    """The response that answers a request."""
    output = _output(turned, with_logprobs="message.output_text.logprobs" in _included(body))
    is_cut = turned.node.finish_reason == "length"
    return _response(turned, body) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "completed_at": None if is_cut else int(time.time()),
        "output": output,
        "usage": _usage(turned),
    }


def events(turned: Turned, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The reply as a stream of numbered events."""
    whole, numbers = reply(turned, body), itertools.count()

    def event(kind: str, **fields: Any) -> bytes:
        return _sse(f"response.{kind}", {"type": f"response.{kind}", "sequence_number": next(numbers), **fields})

    begun = _response(turned, body)
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            yield event("output_item.added", output_index=index, item=item | {"arguments": "", "status": "in_progress"})
            yield event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        else:
            yield event("output_item.added", output_index=index, item=item | {"content": [], "status": "in_progress"})
            for part in item["content"]:
                yield from _part_events(event, at | {"content_index": 0}, part)
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)


def error_event(fault: Fault) -> bytes:
    """The end of a stream that has begun. Clients raise the inner error."""
    flat = {"type": "error", "sequence_number": 0, "code": fault.code, "message": fault.message, "param": fault.param}
    return _sse("error", flat | error(fault))


def _check_text(text: Any) -> None:
    if not isinstance(text, Mapping | None):
        raise _refusal("text", "expected an object")
    format_of = (text or {}).get("format")
    if format_of is not None and (not isinstance(format_of, Mapping) or format_of.get("type") != "text"):
        raise _refusal("text.format", f"only {{'type': 'text'}} is possible: with any other {_OTHER_DISTRIBUTION}")


def _previous(name: Any) -> int | None:
    """The number of the turn in `previous_response_id`."""
    if name is None:
        return None
    found = _ID.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise not_found(name)
    return int(found[1])


def not_found(name: object) -> BadRequest:
    """No turn of this trajectory has this id."""
    message = f"Previous response with id '{str(name)[:80]}' not found."
    return BadRequest(message, "previous_response_not_found", "previous_response_id")


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages of the items: neighbours of one turn are merged."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _refusal("input", "expected a string, or a list with at least one item")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise _refusal(where, "expected an object")
        kind = item.get("type", "message")
        if kind == "function_call_output":
            content = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content})
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            messages.append({"role": item["role"], "content": _text(item.get("content"), f"{where}.content")})
        else:
            said = _said(kind, item, where)
            if not messages or messages[-1]["role"] != "assistant" or not _goes_on(messages[-1], said):
                messages.append({"role": "assistant", "content": ""})
            messages[-1] |= said | _calls(messages[-1], said)
    return messages


def _said(kind: object, item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The part of a turn in an item."""
    if kind == "message" and item.get("role") == "assistant":
        return {"content": _text(item.get("content"), f"{where}.content")}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"reasoning_content": _text(parts, f"{where}.content")}
    if kind == "function_call":
        if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
            raise _refusal(where, "a function_call needs a name, and arguments as a string")
        function = {"name": item["name"], "arguments": item["arguments"]}
        return {"tool_calls": [{"id": str(item.get("call_id", "")), "type": "function", "function": function}]}
    if kind == "message":
        raise _refusal(f"{where}.role", f"{item.get('role')!r} is none of user, assistant, system and developer")
    known = "message, reasoning, function_call and function_call_output"
    raise _refusal(f"{where}.type", f"items of the type {kind!r} are not supported; {known} are")


def _goes_on(turn: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """True if `said` may belong to the same turn as the parts before it: reasoning, then text, then calls."""
    if "tool_calls" in said:
        return True
    return "tool_calls" not in turn and not turn["content"] and ("content" in said or "reasoning_content" not in turn)


def _calls(turn: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [*turn.get("tool_calls", ()), *said["tool_calls"]]} if "tool_calls" in said else {}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(where, "expected a string or a list of parts")
    return "".join(_text_of_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in (*_TEXTS, "refusal"):
        raise _refusal(f"{where}.type", f"parts of the type {kind!r} are not supported here; text is")
    if not isinstance(text, str):
        raise _refusal(where, "a part of text needs a string as its text")
    return text


def _tools(given: Any) -> list[dict[str, Any]]:
    """The tools as JSON schemas of a chat."""
    if not isinstance(given, list | None):
        raise _refusal("tools", "expected a list")
    tools = []
    for number, tool in enumerate(given or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise _refusal(f"tools[{number}].type", f"tools of the type {kind!r} are not offered here; function is")
        if not isinstance(tool.get("name"), str):
            raise _refusal(f"tools[{number}].name", "expected a string")
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        if tool.get("parameters") is not None:
            function["parameters"] = tool["parameters"]
        tools.append({"type": "function", "function": function})
    return tools


def _at_least_one(value: Any, name: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise _refusal(name, "expected a whole number, at least 1")
    return value


def _refusal(name: str, why: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{name}': {why}.", "invalid_value", name)


def _included(body: Mapping[str, Any]) -> list[Any]:
    included = body.get("include")
    return included if isinstance(included, list) else []


def _response(turned: Turned, body: Mapping[str, Any]) -> dict[str, Any]:
    """A response without output."""
    return {
        "id": f"resp_{turned.node.number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": _metadata(body.get("metadata")),
        "model": body.get("model") or "policy",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "store": bool(body.get("store", True)),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
    }


def _metadata(given: Any) -> dict[str, str]:
    """A request's metadata within the limits of OpenAI's API; each event repeats it."""
    if not isinstance(given, Mapping) or len(given) > _MOST_METADATA:
        return {}
    return {name[:64]: value[:512] for name, value in given.items() if isinstance(value, str)}


def _output(turned: Turned, *, with_logprobs: bool) -> list[dict[str, Any]]:
    """The items of a turn. One without text and calls has an empty message, so that its history repeats it."""
    message, number = turned.message, turned.node.number
    status = "incomplete" if turned.node.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thought}
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": [part], "status": status})
    calls = message.get("tool_calls", ())
    if message.get("content") or not calls:
        text = message.get("content") or ""
        part = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": turned.logprobs if with_logprobs else [],
        }
        items.append(
            {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        )
    for place, call in enumerate(calls):
        items.append(
            {
                "id": f"fc_{number}_{place}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": status,
            }
        )
    return items


def _part_events(event: Any, at: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[bytes]:
    if part["type"] == "reasoning_text":
        yield event("content_part.added", **at, part={**part, "text": ""})
        yield event("reasoning_text.delta", **at, delta=part["text"])
        yield event("reasoning_text.done", **at, text=part["text"])
    else:
        logprobs = part["logprobs"]
        yield event("content_part.added", **at, part={**part, "text": "", "logprobs": []})
        yield event("output_text.delta", **at, delta=part["text"], logprobs=logprobs)
        yield event("output_text.done", **at, text=part["text"], logprobs=logprobs)
    yield event("content_part.done", **at, part=part)


def _usage(turned: Turned) -> dict[str, Any]:
    num_context, num_sampled = turned.usage
    return {
        "input_tokens": num_context,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_context + num_sampled,
    }


def _sse(kind: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

"""Anthropic's Messages as turns of a session: bodies, replies, events and errors. Pure; no HTTP and no ids of tokens.

Blocks become messages of a chat: each tool_result one of the role tool, text around them one of the user, the blocks of a turn one
of the assistant. Thinking is kept, and ignored in comparisons (tree.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mgrpo.environments.endpoint.messages import BadRequest, ContextFull, Fault
from mgrpo.environments.endpoint.session import LONGEST_STOP, MOST_STOPS, Turned, TurnRequest

ANSWERED = frozenset(
    [
        "model",
        "messages",
        "max_tokens",
        "system",
        "tools",
        "tool_choice",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "output_config",
    ]
)
IGNORED = frozenset(
    [
        "metadata",
        "cache_control",
        "thinking",
        "service_tier",
        "speed",
        "inference_geo",
        "diagnostics",
        "user_profile_id",
        "workspace_id",
        "billing_policy",
        "betas",
        "context_management",
        "fallbacks",
        "fallback_credit_token",
    ]
)
"""Fields that change neither the model's text nor the sampling."""
REFUSED = {
    "container": "no code is executed here",
    "mcp_servers": "no server of tools is called from here; give their tools to the client",
    "prefill": "a turn begins where the chat template opens it",
    "compaction": "histories are not compacted here; ask for a summary as for any turn",
    "thread": "send the whole history in messages",
    "output_format": "it would sample from another distribution than the one that is trained",
}
SAMPLING = ("temperature", "top_p", "top_k")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def request(body: Mapping[str, Any]) -> TurnRequest:
    """The turn request in a body of `POST /v1/messages`.

    Raises:
        BadRequest: in Anthropic's words, with the path of the field.
    """
    for name in body:
        if name in REFUSED and body[name] is not None:
            raise _refusal(name, REFUSED[name])
        if name not in ANSWERED | IGNORED | REFUSED.keys():
            raise _refusal(name, "Extra inputs are not permitted")
    config = body.get("output_config")
    if not isinstance(config, Mapping | None):
        raise _refusal("output_config", "Input should be an object")
    if config and config.get("format") is not None:
        raise _refusal("output_config.format", REFUSED["output_format"])
    if "max_tokens" not in body:
        raise _refusal("max_tokens", "Field required")
    choice = _choice(body.get("tool_choice"))
    return TurnRequest(
        messages=_messages(body),
        tools=_tools(body.get("tools")),
        max_tokens=_at_least_one(body["max_tokens"], "max_tokens"),
        stop=_stops(body.get("stop_sequences")),
        reads_calls=choice != "none",
        settings={name: body[name] for name in SAMPLING if body.get(name) is not None},
    )


def reply(turned: Turned, body: Mapping[str, Any]) -> dict[str, Any]:
    """The message that answers a request."""
    return {
        "id": _id(turned),
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": _content(turned),
        "stop_reason": _stop_reason(turned),
        "stop_sequence": turned.stop,
        "usage": _usage(turned),
    }


def events(turned: Turned, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The reply as a stream; the deltas of a block add up to the block."""
    whole = reply(turned, body)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**begun, "usage": {**whole["usage"], "output_tokens": 0}})
    for index, block in enumerate(whole["content"]):
        empty, deltas = _in_deltas(block)
        yield _event("content_block_start", index=index, content_block=empty)
        if index == 0:
            yield _event("ping")
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield _event("message_delta", delta=ended, usage=whole["usage"])
    yield _event("message_stop")


def error(fault: Fault) -> dict[str, Any]:
    """The body of an error; for a full context with "prompt is too long", at which clients compact."""
    message = fault.message
    if isinstance(fault, ContextFull):
        message = f"prompt is too long: {fault.num_tokens} tokens > {fault.limit} maximum"
    kind = _KINDS.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(fault: Fault) -> bytes:
    """The end of a stream that has begun."""
    return _sse("error", error(fault))


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _refusal("messages", "at least one message is required")
    messages = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for number, message in enumerate(given):
        where = f"messages.{number}"
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            turn = _assistant(_blocks(message.get("content"), where), where)
            if number and given[number - 1]["role"] == "assistant":
                _join(messages[-1], turn)
            else:
                messages.append(turn)
        elif role == "user":
            messages += _user(_blocks(message.get("content"), where), where)
        elif role == "system":
            messages.append({"role": "system", "content": _text(message.get("content"), f"{where}.content")})
        else:
            raise _refusal(f"{where}.role", "Input should be 'user', 'assistant' or 'system'")
    if given[-1]["role"] == "assistant":
        raise _refusal("messages", "assistant message prefill is not supported; the last message must be a user's")
    return messages


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _refusal(f"{where}.content", "Input should be a text or a list of blocks")
    return content


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """A message for each result, and one for the text between two of them."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        here = f"{where}.content.{number}"
        if block.get("type") == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise _refusal(f"{here}.tool_use_id", "Field required")
            text = _text(block.get("content") or "", f"{here}.content")
            if block.get("is_error") and not text:
                text = "error"
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
            continue
        text = _text_of_block(block, here)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + text
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    for number, block in enumerate(blocks):
        here, kind = f"{where}.content.{number}", block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                raise _refusal(here, "a tool_use needs a name and an object as input")
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            call = {"id": str(block.get("id", "")), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise _refusal(f"{here}.thinking", "Field required")
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
        elif kind != "redacted_thinking":
            turn["content"] += _text_of_block(block, here)
    return turn


def _join(first: dict[str, Any], second: Mapping[str, Any]) -> None:
    """Add a turn's further blocks: consecutive messages of the assistant are one turn."""
    for name in ("content", "reasoning_content"):
        if second.get(name):
            first[name] = first.get(name, "") + second[name]
    if calls := second.get("tool_calls"):
        first["tool_calls"] = [*first.get("tool_calls", ()), *calls]


def _text(content: Any, where: str) -> str:
    """Text, or blocks of text, joined as separate lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _refusal(where, "Input should be a text or a list of blocks")
    return "\n".join(_text_of_block(block, f"{where}.{number}") for number, block in enumerate(content))


def _text_of_block(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise _refusal(f"{where}.type", f"blocks of the type {block.get('type')!r} are not supported here; text is")
    if not isinstance(block.get("text"), str):
        raise _refusal(f"{where}.text", "Input should be a valid string")
    return block["text"]


def _tools(given: Any) -> list[dict[str, Any]]:
    """The tools as JSON schemas of a chat."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise _refusal("tools", "Input should be a list")
    tools = []
    for number, tool in enumerate(given):
        where = f"tools.{number}"
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise _refusal(f"{where}.name", "Field required")
        if tool.get("type") not in (None, "custom"):
            raise _refusal(f"{where}.type", f"{tool['type']!r} is not offered here; give a tool with an input_schema")
        if not isinstance(tool.get("input_schema"), dict):
            raise _refusal(f"{where}.input_schema", "Field required")
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool["input_schema"],
        }
        tools.append({"type": "function", "function": function})
    return tools


def _choice(given: Any) -> str:
    choice = "auto" if given is None else given.get("type") if isinstance(given, dict) else None
    if choice not in ("auto", "none"):
        raise _refusal("tool_choice", f"only auto and none are possible: any other one {REFUSED['output_format'][3:]}")
    return choice


def _stops(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > MOST_STOPS:
        raise _refusal("stop_sequences", f"Input should be a list of at most {MOST_STOPS} items")
    if not all(isinstance(stop, str) and stop.strip() for stop in given):
        raise _refusal("stop_sequences", "each stop sequence must contain non-whitespace")
    if any(len(stop) > LONGEST_STOP for stop in given):
        raise _refusal("stop_sequences", f"each stop sequence should have at most {LONGEST_STOP} characters")
    return tuple(given)


def _at_least_one(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(name, "Input should be a whole number greater than or equal to 1")
    return value


def _refusal(name: str, why: str) -> BadRequest:
    return BadRequest(f"{name}: {why}", param=name)


def _id(turned: Turned) -> str:
    return f"msg_{turned.node.number}"


def _content(turned: Turned) -> list[dict[str, Any]]:
    message = turned.message
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": _id(turned)})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        given = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _stop_reason(turned: Turned) -> str:
    if turned.node.finish_reason == "length":
        return "max_tokens"
    if turned.message.get("tool_calls"):
        return "tool_use"
    return "end_turn" if turned.stop is None else "stop_sequence"


def _usage(turned: Turned) -> dict[str, int]:
    num_context, num_sampled = turned.usage
    return {
        "input_tokens": num_context,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def _in_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The beginning of a block, and its deltas."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _event(kind: str, **fields: Any) -> bytes:
    return _sse(kind, {"type": kind, **fields})


def _sse(kind: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()

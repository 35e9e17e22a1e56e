"""Messages of requests: their keys, their form for chat templates, and the errors of refused requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Tool
from mgrpo.environments.normal_form import Chat, calls_of, essence, text_of, tool_of, valid

ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_FAULT_CHARS = 2000
"""Most characters of an error, which may quote a name chosen by the client."""
_MOST_TOOL_BYTES = 1 << 19
"""Bytes of a request's tools as JSON: languages of tools outlive the request."""


class Fault(Exception):
    """A request that is answered with an error, in the form of its API."""

    def __init__(self, status: int, kind: str, message: str, code: str | None = None, param: str | None = None) -> None:
        """
        Args:
            status: of HTTP.
            kind: as OpenAI's `type`, such as "invalid_request_error".
        """
        message = message[:_MOST_FAULT_CHARS]
        super().__init__(message)
        self.status, self.kind, self.message, self.code = status, kind, message, code
        self.param = param and param[:_MOST_FAULT_CHARS]


class BadRequest(Fault, ValueError):
    """An invalid request, with status 400."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(400, "invalid_request_error", message, code, param)


class ContextFull(BadRequest):
    """No room for a further token."""

    def __init__(self, message: str, *, num_tokens: int, limit: int) -> None:
        """
        Args:
            num_tokens: tokens of the context.
            limit: the most that the context may have.
        """
        super().__init__(message, "context_length_exceeded", "messages")
        self.num_tokens, self.limit = num_tokens, limit


def key_of_tools(tools: Sequence[Tool]) -> bytes:
    """The key of a conversation without messages."""
    return _hash(_as_json([tool.schema for tool in tools]))


def key_after(key: bytes, message: Chat) -> bytes:
    """The key of a conversation with one message more. Equal keys: equal forms of all messages, and equal tools."""
    form = essence(message)
    text = form["content"].encode()
    # Most messages have no calls, and JSON takes longer than everything else here.
    calls = _as_json(form["calls"]) if "calls" in form else b""
    return _hash(b"%s%s %d %s%s" % (key, form["role"].encode(), len(text), text, calls))


def _hash(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()


def _as_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def checked(messages: Any) -> list[Chat]:
    """A request's messages, after a check that there is at least one and that each has a known role."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise BadRequest(
                f"messages[{place}] has the role {role!r:.40}; expected one of {', '.join(ROLES)}",
                param=f"messages[{place}].role",
            )
    return messages


def check_arguments(messages: Sequence[Chat]) -> None:
    """Raise BadRequest for the first call whose arguments are no object."""
    for place, message in enumerate(messages):
        for number, (name, arguments) in enumerate(calls_of(message)):
            if not isinstance(arguments, Mapping):
                where = f"messages[{place}].tool_calls[{number}].function.arguments"
                called = message["tool_calls"][number].get("id")
                raise BadRequest(
                    f"Invalid value for '{where}': the call {called!r:.80} of {name!r:.80} has {arguments!r:.80}, and the chat "
                    "template takes arguments apart; expected an object, or JSON text of one.",
                    "invalid_value",
                    where,
                )


def tools_of(schemas: Any) -> list[Tool]:
    """The tools of a request."""
    if not isinstance(schemas, list | tuple):
        raise BadRequest(f"tools={schemas!r:.80} must be a list", param="tools")
    try:
        tools = [tool_of(schema) for schema in schemas]
    except ValueError as err:
        raise BadRequest(str(err), param="tools") from None
    if tools and (num_bytes := len(json.dumps([tool.schema for tool in tools]))) > _MOST_TOOL_BYTES:
        raise BadRequest(f"tools hold {num_bytes} bytes as JSON; expected at most {_MOST_TOOL_BYTES}", param="tools")
    return tools


def recorded(message: Chat) -> dict[str, Any]:
    """The part of a message that a trajectory's record keeps: its role, text, calls, ids and thinking.

    Templates write no other field, so that others would be kept without costing a token.
    """
    found: dict[str, Any] = {"role": message["role"], "content": text_of(message)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_recorded_call(call) for call in calls]
    wanted = {"assistant": ("reasoning_content",), "tool": ("tool_call_id", "name")}.get(message["role"], ())
    return found | {name: valid(value) for name in wanted if isinstance(value := message.get(name), str)}


def _recorded_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    own = {"name": valid(function["name"]), "arguments": function.get("arguments")}
    return {"type": "function", "id": valid(str(call.get("id") or "")), "function": own}


def for_template(messages: Sequence[Chat]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text, calls with objects, and answers that name their tool."""
    found = []
    names: dict[str, str] = {}
    for message in messages:
        form = essence(message)
        plain: dict[str, Any] = {"role": form["role"], "content": form["content"]}
        if form["role"] == "assistant":
            if isinstance(thought := message.get("reasoning_content"), str) and thought:
                plain["reasoning_content"] = valid(thought)
            if "calls" in form:
                plain["tool_calls"] = _calls(message)
                names |= {call["id"]: call["function"]["name"] for call in plain["tool_calls"]}
        elif form["role"] == "tool":
            called = message.get("tool_call_id")
            plain["tool_call_id"] = valid(called) if isinstance(called, str) else ""
            plain["name"] = name_of(message, names)
        found.append(plain)
    return found


def name_of(message: Chat, names: Mapping[str, str]) -> str:
    """The tool that has answered; `names` has those of calls by their ids."""
    name, called = message.get("name"), message.get("tool_call_id")
    if isinstance(name, str) and name:
        return valid(name)
    return names.get(called, "") if isinstance(called, str) else ""


def _calls(message: Chat) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "id": valid(str(call.get("id") or "")),
            "function": {"name": valid(name), "arguments": arguments},
        }
        for call, (name, arguments) in zip(message["tool_calls"], calls_of(message), strict=True)
    ]

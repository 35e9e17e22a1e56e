"""Canonical form of chat messages, however a client writes them: messages with equal forms have the same meaning.

The form has a message's role, its text and its calls as JSON values. It has no ids, no thinking, no field without a meaning, and
of JSON neither the spacing nor the order of keys. Messages are untrusted: any fault in one is a ValueError.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Tool
from mgrpo.environments.formats.thoughts import without_thoughts

Chat = Mapping[str, Any]
_MEANT = ("audio", "function_call", "images")
"""Fields of a message with content that no template writes."""
_EXACT = 2**53
"""Whole numbers below it are the same as integers and as floating point numbers."""


def essence(message: Chat) -> dict[str, Any]:
    """A message's form: `{"role", "content"}`, and `"calls"` as pairs of a name and its arguments where there are any.

    Raises:
        ValueError: it is no message of text and calls.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{message!r:.100} is not a message; expected an object with a role and a content")
    if meant := next((name for name in _MEANT if message.get(name)), None):
        raise ValueError(f"a message has {meant}, which cannot be shown to the model; expected text and tool_calls")
    role = "system" if message["role"] == "developer" else message["role"]
    text = text_of(message)
    found: dict[str, Any] = {"role": role, "content": said(text) if role == "assistant" else text}
    if calls := calls_of(message):
        found["calls"] = calls
    return found


def said(text: str) -> str:
    """A turn's text without thoughts and the white space around it, which templates drop."""
    return without_thoughts(text, is_thinking=False).strip()


def calls_of(message: Chat) -> list[tuple[str, Any]]:
    """The name and the arguments of each call: JSON text is its value, also where a client has written it as JSON twice; other text stays."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise ValueError(f"tool_calls={calls!r:.100} must be a list")
    return [_call(call) for call in calls]


def _call(call: Any) -> tuple[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"the call {call!r:.100} has no name; expected a function with a name and its arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Python's JSON raises RecursionError where brackets are nested too deeply.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
            if isinstance(arguments, str) and isinstance(inner := json.loads(arguments), Mapping):
                arguments = inner
    return function["name"], {} if arguments is None else plain(arguments)


def plain(value: Any) -> Any:
    """A JSON value with one form of each number, and without lone surrogates."""
    if isinstance(value, str):
        return valid(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, Mapping):
        return {valid(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def text_of(message: Chat) -> str:
    """The text of a message, which may be in parts, or missing.

    Raises:
        ValueError: a part is not text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return valid(content or "")
    parts = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str) or not str(kind).endswith("text"):
            raise ValueError(f"a part {kind!r:.40} of a message is not text, and the model reads only text")
    return valid("".join(part["text"] for part in parts))


def tool_of(schema: Any) -> Tool:
    """A tool from its schema as chat templates take it, or from the function in it alone."""
    function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"the tool {schema!r:.200} has no name; expected a schema with the name of a function")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"the tool {function['name']!r:.80} has parameters={parameters!r:.80}; expected a JSON schema")
    return Tool(
        name=valid(function["name"]),
        description=valid(str(function.get("description") or "")),
        parameters=whole(parameters),
        returns=whole(function.get("return")),
    )


def whole(value: Any) -> Any:
    """A JSON value without lone surrogates, otherwise unchanged: templates write it into prompts."""
    if isinstance(value, str):
        return valid(value)
    if isinstance(value, Mapping):
        return {valid(str(key)): whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, Sequence) else value


def valid(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return text if text.isascii() else text.encode(errors="replace").decode()

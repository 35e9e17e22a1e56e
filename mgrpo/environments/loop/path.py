"""The conversation of a program's trajectory: it only grows, and every chat must repeat what it holds. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Chat = Mapping[str, Any]


class Strays(ValueError):
    """A wish that does not continue the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The conversation up to the model's last turn."""

    messages: Sequence[Chat]
    tools: Sequence[Chat]
    """Schemas, the same in every chat."""

    def added(self, messages: Sequence[Chat], tools: Sequence[Chat]) -> list[Chat]:
        """The messages that a chat adds to it, at least one.

        Raises:
            Strays: the chat does not repeat the conversation.
        """
        if list(tools) != list(self.tools):
            raise Strays("its tools are others than those of the first chat")
        for place, known in enumerate(self.messages):
            if place >= len(messages):
                raise Strays(f"it leaves out the last {len(self.messages) - place} of {len(self.messages)} messages")
            if (now := _essence(messages[place])) != (was := _essence(known)):
                raise Strays(f"its message {place} is {_shown(now)}, and was {_shown(was)}")
        if len(messages) == len(self.messages):
            raise Strays("it adds no message to what the model has said")
        return list(messages[len(self.messages) :])


def _essence(message: Chat) -> dict[str, Any]:
    """The parts of a message that must be repeated, however they are written: its role, text and calls."""
    found = {"role": message["role"], "content": text_of(message)}
    if calls := message.get("tool_calls"):
        found["calls"] = [_call(call) for call in calls]
    return found


def _call(call: Any) -> Any:
    """A call's name and arguments, which libraries write as an object or as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return function.get("name"), arguments


def text_of(message: Chat) -> str:
    """The text of a message, which may be in parts, or missing.

    Raises:
        Strays: a part is not text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise Strays(f"the content {content!r:.100} of a message is not text")
    return "".join(part["text"] for part in parts)


def _shown(essence: Mapping[str, Any]) -> str:
    text = json.dumps(essence, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:80]} ... {text[-70:]}"

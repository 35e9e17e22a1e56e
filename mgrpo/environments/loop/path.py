"""The conversation of a program's trajectory: it only grows, and every chat must repeat what it holds. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgrpo.environments.normal_form import Chat, essence


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
            ValueError: one of its messages says what the model cannot read.
        """
        if list(tools) != list(self.tools):
            raise Strays("its tools are others than those of the first chat")
        for place, known in enumerate(self.messages):
            if place >= len(messages):
                raise Strays(f"it leaves out the last {len(self.messages) - place} of {len(self.messages)} messages")
            if (now := essence(messages[place])) != (was := essence(known)):
                raise Strays(f"its message {place} is {_shown(now)}, and was {_shown(was)}")
        if len(messages) == len(self.messages):
            raise Strays("it adds no message to what the model has said")
        return list(messages[len(self.messages) :])


def _shown(essence: Mapping[str, Any]) -> str:
    text = json.dumps(essence, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:80]} ... {text[-70:]}"

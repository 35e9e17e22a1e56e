"""A user program's conversation with the model: its messages to token ids, sampled turns to replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mgrpo.environments.environment import Tool
from mgrpo.environments.loop import episodes
from mgrpo.environments.loop.trajectory import Sampled, Trajectory
from mgrpo.environments.normal_form import Chat, essence, text_of, tool_of


class Chats(episodes.Language, Protocol):
    """A language for chats with the model."""

    def with_tools(self, tools: Sequence[Tool]) -> Chats:
        """This language with these tools."""

    def opening(self, messages: Sequence[Chat]) -> list[int]:
        """Ids of a conversation, up to the opening of the model's turn; ValueError where the template refuses it."""

    def written(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens; ValueError for ids that the tokenizer does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A sampling request of the program that can be met."""

    ids: list[int]
    """The ids after the model's last turn; at first, the whole opening."""
    messages: list[Chat] | None = None
    """The whole chat; None: the program continues by ids."""
    tools: list[Chat]
    added: list[Chat]
    """Messages of the chat that are new to the trajectory."""
    chats: Chats
    max_tokens: int | None


class Strays(ValueError):
    """A sampling request that does not continue the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The conversation up to the model's last turn. It only grows, and every chat must repeat it."""

    messages: Sequence[Chat]
    tools: Sequence[Chat]
    """Schemas, the same in every chat."""

    def added(self, messages: Sequence[Chat], tools: Sequence[Chat]) -> list[Chat]:
        """The messages that a chat adds to it, at least one.

        Raises:
            Strays: the chat does not repeat the conversation.
            ValueError: a message has content that the model cannot read.
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


class Conversation:
    """The conversation of one trajectory, to which it appends."""

    def __init__(self, chats: Chats, trajectory: Trajectory, known: Sequence[int]) -> None:
        """`known`: the ids of the row's prompt."""
        self.chats, self.trajectory = chats, trajectory
        self.opening = list(known)
        """The ids that the first turn follows."""
        self._path: Path | None = None
        """None: no turn yet, or the program continues by ids."""
        self._step: Step | None = None
        self._turn: Sampled | None = None

    def step(self, wish: Mapping[str, Any]) -> Step:
        """Read a sampling request of the program, without changing the trajectory.

        Raises:
            ValueError: the request cannot be met.
        """
        if "ids" in wish:
            return self._by_ids(wish["ids"], wish["max_tokens"])
        messages, schemas = wish["messages"], wish["tools"]
        added: list[Chat] = []
        if self._turn is None:
            chats = self.chats.with_tools([tool_of(schema) for schema in schemas])
            ids = chats.opening([{**message, "content": text_of(message)} for message in messages])
        else:
            chats, added = self._added(messages, schemas)
            ids = self._between(chats, added, self._turn)
        return Step(ids=ids, messages=messages, tools=schemas, added=added, chats=chats, max_tokens=wish["max_tokens"])

    def take(self, step: Step) -> None:
        """Append the step to the trajectory; the model's turn, passed to `heard`, follows."""
        self._step = step
        self.trajectory.has_tools |= bool(step.tools)
        if self._turn is None:
            self.opening = step.ids
        elif step.ids:
            self.trajectory.add_bridge(step.ids)
        self.trajectory.messages += step.added

    def heard(self, turn: Sampled) -> dict[str, Any]:
        """Append the model's turn; returns the program's answer."""
        trajectory, step = self.trajectory, self._step
        assert step is not None
        keep = 0 if self._turn is None else len(self.opening) + trajectory.num_tokens - len(step.ids)
        trajectory.add_sampled(turn)
        self._turn = turn
        said = step.chats.read(turn, calls=bool(step.tools))
        trajectory.last_content = said.content
        is_whole = turn.finish_reason == "stop"
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if is_whole and said.calls:
            first = trajectory.num_calls
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id or f"call{first + number:05d}",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for number, call in enumerate(said.calls)
            ]
        unreadable = list(said.unreadable) if is_whole else []
        self._note([call["function"]["name"] for call in message.get("tool_calls", ())], step.tools, len(unreadable))
        trajectory.messages.append(message)
        self._path = None if step.messages is None else Path(messages=[*step.messages, message], tools=step.tools)
        return {
            "keep": keep,
            "before": step.ids,
            "sampled": turn.tokens.tolist(),
            "logprobs": turn.logprobs.tolist(),
            "message": message,
            "finish_reason": turn.finish_reason,
            "unreadable": unreadable,
        }

    def _by_ids(self, ids: Sequence[int], max_tokens: int | None) -> Step:
        self.chats.written(ids)
        so_far = self.trajectory.preceding.tolist() if self._turn is not None else []
        if ids[: len(so_far)] != so_far or not ids:
            raise self._strays("its ids do not begin with those of the trajectory, which are model.ids")
        return Step(ids=list(ids[len(so_far) :]), tools=[], added=[], chats=self.chats, max_tokens=max_tokens)

    def _added(self, messages: Sequence[Chat], schemas: Sequence[Chat]) -> tuple[Chats, list[Chat]]:
        assert self._step is not None
        if self._path is None:
            raise self._strays("the trajectory goes on by ids since model.sample")
        try:
            return self._step.chats, self._path.added(messages, schemas)
        except Strays as err:
            raise self._strays(str(err)) from None

    def _strays(self, why: str) -> Strays:
        """The error for a request that does not extend the trajectory (a new branch would begin here)."""
        return Strays(
            f"this does not go on from where the trajectory is: {why}; repeat all messages as they were, those of the model as "
            "chat returned them, and add to them"
        )

    def _between(self, chats: Chats, added: Sequence[Chat], turn: Sampled) -> list[int]:
        """The bridge from the last turn to the next one."""
        roles = [message["role"] for message in added]
        texts = [text_of(message) for message in added]
        if roles == ["user"]:
            return chats.after_act(texts[0], turn)
        if set(roles) == {"tool"}:
            return chats.after_calls(list(zip(self._names(added), texts, strict=True)), turn)
        raise ValueError(
            f"the messages that follow the model's have the roles {', '.join(map(str, roles))}; expected one of the user, or "
            'one of the role "tool" for each call'
        )

    def _names(self, added: Sequence[Chat]) -> list[str]:
        """The names of the tools that have answered."""
        calls = self.trajectory.messages[-1].get("tool_calls", [])
        assert isinstance(calls, list)
        by_id = {call["id"]: call["function"]["name"] for call in calls}
        in_order = [call["function"]["name"] for call in calls] + [""] * len(added)
        return [
            str(message.get("name") or by_id.get(message.get("tool_call_id")) or name)
            for message, name in zip(added, in_order, strict=False)
        ]

    def _note(self, calls: Sequence[str], schemas: Sequence[Chat], num_unreadable: int) -> None:
        """Record the calls of the last turn in it."""
        known = {tool_of(schema).name for schema in schemas}
        names = [name if name in known else "" for name in calls] + [""] * num_unreadable
        trajectory = self.trajectory
        trajectory.num_calls += len(names)
        trajectory.num_calling_turns += bool(names)
        trajectory.turns[-1] = replace(
            trajectory.turns[-1],
            calls=tuple(names),
            failed=tuple(not name for name in names),
            seconds=(0.0,) * len(names),
            num_unknown=sum(name not in known for name in calls),
            num_unreadable=num_unreadable,
        )


def _shown(message: Mapping[str, Any]) -> str:
    text = json.dumps(message, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:80]} ... {text[-70:]}"

"""The turns of one session as a tree: the recorded turn that a request continues, and the tokens that it adds. Pure.

A node is a sampled turn. It keeps the ids between its parent and itself, so that memory grows with the conversation's length,
not with its square. Ids of recorded turns come from here, never from a client's text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from mgrpo.environments.endpoint.messages import (
    BadRequest,
    ContextFull,
    check_arguments,
    checked,
    for_template,
    key_after,
    key_of_tools,
    name_of,
    recorded,
    tools_of,
)
from mgrpo.environments.environment import Tool
from mgrpo.environments.loop.bridge import BridgeError
from mgrpo.environments.loop.program_language import Shown, TextTooLong
from mgrpo.environments.normal_form import Chat, essence, text_of


class ChatLanguage(Protocol):
    """The language of chats with these tools."""

    @property
    def strips(self) -> bool:
        """True if thinking is removed from earlier turns after a new user message."""

    def with_tools(self, tools: Sequence[Tool]) -> ChatLanguage:
        """This language with these tools."""

    def opening(
        self, messages: Sequence[Mapping[str, Any]], untrusted: Sequence[int] = (), *, room: int | None = None
    ) -> list[int]:
        """Ids of a conversation; TextTooLong before it is tokenized, ValueError where the template refuses it."""

    def check_room(self, texts: Sequence[str], room: int) -> None:
        """Raise TextTooLong where texts cannot have as few tokens as `room`."""

    def after(self, messages: Sequence[tuple[str, str, str]], last: int) -> list[int]:
        """Ids after a turn that ends with the id `last`; BridgeError where the template cannot be followed."""

    def rewritten(
        self, context: Sequence[int], turns: Sequence[tuple[int, int]], messages: Sequence[tuple[str, str, str]]
    ) -> list[int] | None:
        """The whole context of the next turn, with thinking removed from these turns; None if the template keeps it."""

    def shown(self, tokens: np.ndarray, *, calls: bool, stop: Sequence[str] = ()) -> Shown:
        """A turn as a client sees it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """The turn to sample for a request."""

    parent: Node | None
    """The turn that it continues; None: its context was rendered."""
    key: bytes
    """Key of the whole conversation."""
    added: list[int]
    """The ids after the parent's last one; all of the context without a parent, or where this rewrites it."""
    rewrites: bool
    """True if the parent's context is not the beginning of this one."""
    length: int
    """Tokens of the context."""
    messages: list[Chat]
    """Messages that follow the parent, as they are recorded; all of them without a parent."""
    num_bytes: int
    """Bytes of `messages` as JSON."""
    tools: Sequence[Tool]
    is_first: bool
    """True if no turn had begun: special tokens in messages of users and systems are tokens."""
    difference: str | None = None
    """Reason why it continues no turn although there are some."""


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One sampled turn."""

    number: int
    """Number in the order of requests, from 0."""
    parent: Node | None
    added: array[int]
    rewrites: bool
    tokens: list[int]
    """The sampled tokens."""
    length: int
    """Tokens of its context."""
    finish_reason: str
    messages: list[Chat]
    """Messages between its parent and itself."""
    message: dict[str, Any]
    """The turn as a message of a chat; arguments are JSON."""
    stop: str | None
    """The client's string that ended it."""
    num_unreadable: int
    """Calls that were begun and could not be read."""
    key: bytes
    """Key of the conversation with this turn."""
    delivered: bool = False
    """True once a client has read it."""

    @property
    def calls(self) -> dict[str, str]:
        """The name of each called tool by the call's id."""
        return {call["id"]: call["function"]["name"] for call in self.message.get("tool_calls", ())}

    @property
    def end(self) -> int:
        """Tokens of its context and its own."""
        return self.length + len(self.tokens)


class Tree:
    """All turns of one session."""

    def __init__(self, language: ChatLanguage) -> None:
        """`language`: language of chats without tools."""
        self.language = language
        self.nodes: dict[int, Node] = {}
        self.num_rendered_again = 0
        """Contexts that were rendered although there were turns."""
        self.first_difference: str | None = None
        """Reason for the first of them."""
        self._by_key: dict[bytes, list[Node]] = {}
        self._own: frozenset[bytes] | None = None
        """Messages of the first conversation, in which special tokens are tokens; None: no turn has begun."""
        self._num_calls = 0

    @property
    def has_begun(self) -> bool:
        """True once a turn has begun."""
        return self._own is not None

    def ask(
        self,
        messages: Any,
        tools: Any = (),
        previous: int | None = None,
        *,
        room: int | None = None,
        language: ChatLanguage | None = None,
    ) -> Ask:
        """The turn to sample for a request; records nothing.

        Args:
            messages, tools: of the request, as JSON.
            previous: the preferred turn among those with equal text.
            room: most tokens of a context; a text that would have more is not tokenized.
            language: language to encode with, for chats without tools; None: this tree's, which belongs to the loop's thread.
        Raises:
            BadRequest: these cannot be shown to the model.
        """
        try:
            return self._ask(checked(messages), tools_of(tools or ()), previous, room, language or self.language)
        except BadRequest:
            raise
        except TextTooLong as err:
            raise ContextFull(
                f"This model's maximum context length is {room} tokens. However, your messages resulted in at least "
                f"{err.num_tokens} tokens. Please reduce the length of the messages.",
                num_tokens=err.num_tokens,
                limit=room or 0,
            ) from None
        except ValueError as err:
            raise BadRequest(str(err), param="messages") from None
        except RecursionError:
            raise BadRequest("the values of messages or tools are nested too deeply", param="messages") from None

    def _ask(
        self,
        messages: list[Chat],
        tools: Sequence[Tool],
        previous: int | None,
        room: int | None,
        language: ChatLanguage,
    ) -> Ask:
        language = language.with_tools(tools)
        keys = [key_of_tools(tools)]
        for message in messages:
            keys.append(key_after(keys[-1], message))
        # At least one message is added to the model's turns.
        place = next((place for place in range(len(messages) - 1, 0, -1) if keys[place] in self._by_key), 0)
        why = None
        if place:
            added = messages[place:]
            node = self._meant(self._by_key[keys[place]], added, previous)
            try:
                following = _following(node, added)
                if room is not None:
                    language.check_room([text for _, text, _ in following], max(0, room - node.end))
                rewritten = self._rewritten(language, node, following)
                ids = language.after(following, node.tokens[-1]) if rewritten is None else rewritten
            except BridgeError as err:
                why = str(err)
            else:
                return Ask(
                    parent=node,
                    key=keys[-1],
                    added=ids,
                    rewrites=rewritten is not None,
                    length=len(ids) if rewritten is not None else node.end + len(ids),
                    **_recorded(added),
                    tools=tools,
                    is_first=False,
                )
        own = self._own
        try:
            ids = language.opening(for_template(messages), _untrusted(messages, own), room=room)
        except TextTooLong:
            raise
        except ValueError:
            # Templates that take arguments apart say neither which message it was nor which call.
            check_arguments(messages)
            raise
        if self.nodes and why is None:
            why = self._difference(messages, tools)
        return Ask(
            parent=None,
            key=keys[-1],
            added=ids,
            rewrites=False,
            length=len(ids),
            **_recorded(messages),
            tools=tools,
            is_first=own is None,
            difference=why,
        )

    def begin(self, ask: Ask) -> None:
        """Record that a turn is being sampled; only the first one's messages may hold special tokens."""
        if self._own is None:
            self._own = frozenset(key_after(b"", message) for message in ask.messages)

    def add(
        self,
        ask: Ask,
        number: int,
        tokens: Sequence[int],
        finish_reason: str,
        *,
        reads_calls: bool = True,
        stop: Sequence[str] = (),
    ) -> Node:
        """Record the turn that was sampled for a request, which has begun.

        Args:
            number: number of the turn, not yet in the tree.
            tokens: at least one.
            reads_calls: False: calls are text, or there are no tools.
            stop: strings; the client's text ends before the first of them, and the tokens stay unchanged.
        """
        language = self.language.with_tools(ask.tools)
        shown = language.shown(np.array(tokens, np.int32), calls=reads_calls, stop=stop)
        message: dict[str, Any] = {"role": "assistant", "content": shown.parsed.content}
        if shown.thought:
            message["reasoning_content"] = shown.thought
        if finish_reason == "stop" and shown.parsed.calls:
            message["tool_calls"] = [self._call(call.name, call.arguments) for call in shown.parsed.calls]
        if ask.parent is None and self.nodes:
            self.num_rendered_again += 1
            self.first_difference = self.first_difference or ask.difference
        node = Node(
            number=number,
            parent=ask.parent,
            added=array("i", ask.added),
            rewrites=ask.rewrites,
            tokens=list(tokens),
            length=ask.length,
            finish_reason=finish_reason,
            messages=ask.messages,
            message=message,
            stop=shown.stop,
            num_unreadable=len(shown.parsed.unreadable) if finish_reason == "stop" else 0,
            key=key_after(ask.key, message),
        )
        self.nodes[number] = node
        self._by_key.setdefault(node.key, []).append(node)
        return node

    def history(self, number: int) -> list[Chat]:
        """All messages up to and with a turn."""
        parts, node = [], self.nodes.get(number)
        while node is not None:
            parts.append([*node.messages, node.message])
            node = node.parent
        return [message for part in reversed(parts) for message in part]

    def context(self, node: Node) -> list[int]:
        """All ids of a turn's context."""
        parts: list[Sequence[int]] = []
        while node.parent is not None and not node.rewrites:
            parts += [node.added, node.parent.tokens]
            node = node.parent
        return list(chain(node.added, *reversed(parts)))

    def _rewritten(
        self, language: ChatLanguage, node: Node, following: Sequence[tuple[str, str, str]]
    ) -> list[int] | None:
        """The context after a turn if a user message follows and the template removes earlier thinking; else None."""
        if not language.strips or "user" not in {role for role, _, _ in following}:
            return None
        turns: list[tuple[int, int]] = []
        one: Node | None = node
        while one is not None:
            turns.append((one.length, one.end))
            # A user message before this turn has removed the thinking of those before it.
            is_first = one.rewrites or any(message["role"] == "user" for message in one.messages)
            one = None if is_first else one.parent
        return language.rewritten([*self.context(node), *node.tokens], turns[::-1], following)

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        # Mistral's templates ask for nine letters and digits.
        called = f"call{self._num_calls:05d}"
        self._num_calls += 1
        text = json.dumps(dict(arguments), ensure_ascii=False)
        return {"type": "function", "id": called, "function": {"name": name, "arguments": text}}

    def _meant(self, nodes: Sequence[Node], added: Sequence[Chat], previous: int | None) -> Node:
        """Choose the parent among turns with equal text: the requested one, else the one with most answered calls, else a
        delivered one, else the newest."""
        answered = {called for message in added if isinstance(called := message.get("tool_call_id"), str) and called}
        return max(
            nodes,
            key=lambda node: (node.number == previous, len(answered & node.calls.keys()), node.delivered, node.number),
        )

    def _difference(self, messages: Sequence[Chat], tools: Sequence[Tool]) -> str:
        """The first difference between a conversation and that of the newest turn."""
        known = self.history(max(self.nodes))
        for place, (now, was) in enumerate(zip(messages, known, strict=False)):
            if (one := essence(now)) != (other := essence(was)):
                return f"its message {place} is {_brief(one)}, and was {_brief(other)}"
        if len(messages) <= len(known):
            return f"it has {len(messages)} messages, and there were {len(known)}"
        return "its tools are others, or messages of the model follow that were not sampled here"


def _untrusted(messages: Sequence[Chat], own: frozenset[bytes] | None) -> list[int]:
    """Indices of messages whose special tokens are text: tool answers, and messages that are not in the first conversation."""
    return [
        place
        for place, message in enumerate(messages)
        if message["role"] == "tool" or (own is not None and key_after(b"", message) not in own)
    ]


def _recorded(messages: Sequence[Chat]) -> dict[str, Any]:
    """The fields of an `Ask` for its messages."""
    kept = [recorded(message) for message in messages]
    return {"messages": kept, "num_bytes": sum(len(json.dumps(message)) for message in kept)}


def _following(node: Node, added: Sequence[Chat]) -> list[tuple[str, str, str]]:
    """Role, text and tool of the messages that follow a turn.

    Raises:
        BridgeError: the model itself speaks in them.
    """
    names = node.calls
    in_order = iter(names.values())
    found = []
    for message in added:
        form = essence(message)
        if form["role"] == "assistant":
            raise BridgeError("what follows has a message of the model that was not sampled here")
        is_answer = form["role"] == "tool"
        expected = next(in_order, "") if is_answer else ""
        found.append((form["role"], text_of(message), (name_of(message, names) or expected) if is_answer else ""))
    return found


def _brief(form: Mapping[str, Any]) -> str:
    text = json.dumps(form, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:80]} ... {text[-70:]}"

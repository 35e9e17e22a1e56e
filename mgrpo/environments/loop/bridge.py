"""The tokens between two turns of a trajectory, as the chat template writes them around observations.

A trajectory only grows: the sampled ids stay as they are, and a bridge is appended. The text of a bridge is found by
`frames`; here it is encoded, so that the ids are those of the template's own text, and no observation becomes a token that was
added to the vocabulary: such tokens are markup, special or not, of this template or of another one.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mgrpo.data.templates import render
from mgrpo.data.tokenizer import token_ids
from mgrpo.environments.environment import Tool
from mgrpo.environments.loop.frames import BridgeError, Message, TextSpan, TurnFrame, find_frame
from mgrpo.environments.normal_form import valid

__all__ = ["BridgeError", "Bridges"]

_CALLED, _MARK = "qzcalledzq", "qzanswerzq"
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_MOST_KNOWN = 256
"""Most kinds of bridges that are kept: clients choose them."""
_MOST_MESSAGES = 64
"""Most messages of one bridge; to find it takes longer than in proportion to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    frame: TurnFrame
    end_id: int
    guarded_ids: list[int]
    """The guarded tokens of the frame, in order."""


class Bridges:
    """Bridges of one chat template, with the tools in its prompts.

    A turn ends with the template's end token or with another stop token. After any other token, where a turn was cut, a
    bridge begins with the end token.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        *,
        template_kwargs: Mapping[str, object],
        tools: Sequence[Tool],
        stop_token_ids: Sequence[int],
    ) -> None:
        """Store the settings; templates are rendered on first use.

        Args:
            tools: the tools in the prompts.
            stop_token_ids: ids that end a turn.
        """
        self._tokenizer, self._template, self._kwargs = tokenizer, template, template_kwargs
        self._tools = [tool.schema for tool in tools]
        # OLMo's templates have a separate role for tool answers.
        self._tool_roles = ("tool", "environment") if "'environment'" in template else ("tool",)
        self._stop_ids = frozenset(stop_token_ids)
        added = tokenizer.added_tokens_decoder
        self._added = {token.content: number for number, token in added.items()}
        self._before = next((token.content for token in added.values() if token.special and not token.rstrip), "")
        """Text of the token that precedes tool answers when they are encoded: no text is encoded alone."""
        # White space is a token of its own in some vocabularies, and a letter may be: neither can be kept out of a text.
        guarded = {content: number for content, number in self._added.items() if len(content.strip()) > 1}
        self._guarded_ids = frozenset(guarded.values())
        words = sorted(guarded, key=len, reverse=True)
        self.guarded = re.compile("|".join(map(re.escape, words)) or "(?!)")
        """Pattern of the tokens that no observation may contain."""
        self.has_marked_tools = bool(self.guarded.search(json.dumps(self._tools, ensure_ascii=False)))
        """True if a tool's schema contains such tokens, so that a conversation needs `guarded_opening`."""
        self._known: dict[tuple[str, ...], _Known | str] = {}
        """Frames by the roles of the messages after a turn; a text: the reason why the template cannot be followed."""

    def check(self, *roles: str) -> None:
        """Raise BridgeError unless the template can be followed after a turn and messages of these roles."""
        self._of(roles)

    def opening(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to the opening of the model's turn; ValueError where the template refuses it."""
        return self.render(messages, True)

    def guarded_opening(
        self,
        messages: Sequence[Message],
        untrusted: Container[int],
        *,
        bos: str = "",
        check: Callable[[Sequence[str]], None] = lambda texts: None,
    ) -> list[int]:
        """Token ids of a conversation up to the opening of the model's turn; untrusted messages and all tools are plain text.

        Args:
            untrusted: indices of messages whose text must not become a token that was added to the vocabulary.
            bos: stands before the text.
            check: called with the pieces of the text before they are tokenized.
        Raises:
            ValueError: the template refuses the conversation. Errors of `check` pass through.
        """
        messages = [self._fitted(message) for message in messages]
        mark = _absent([messages, self._tools])

        def within(text: str) -> str:
            return mark.join(self._within_tokens(text))

        for change in (within, mark.join):
            marked = [
                _changed(message, change) if place in untrusted else message for place, message in enumerate(messages)
            ]
            pieces = (bos + self.render(marked, True, tools=_marked(self._tools, change))).split(mark)
            check(pieces)
            ids = [*self.encoded(pieces[:1])[0], *self._behind(self._before, pieces[1:])]
            own = [self._added[found[0]] for piece in pieces for found in self.guarded.finditer(piece)]
            if own == [one for one in ids if one in self._guarded_ids]:
                break
            # The tokenizer rewrites a text before it looks for tokens: no two characters of a message stay together.
        return ids

    def rewrites_tools(self, text: str, ids: Sequence[int]) -> bool:
        """True if the tokenizer produced guarded tokens, perhaps in tools, from a text that does not contain them."""
        return bool(self._tools) and sum(one in self._guarded_ids for one in ids) > len(self.guarded.findall(text))

    def _fitted(self, message: Message) -> Message:
        """A message as this template writes it: some templates have no form for calls, or for tool answers."""
        if message["role"] == "tool":
            return message if self._tool_role == "tool" else {**message, "role": self._tool_role}
        if (calls := message.get("tool_calls")) and not self._writes_calls:
            texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            return {**message, "content": "\n".join([*filter(None, [message["content"]]), *texts])}
        return message

    @cached_property
    def _tool_role(self) -> str:
        """The role in which this template writes tool answers."""
        return next((role for role in self._tool_roles if _MARK in self._probed(role)), "user")

    @cached_property
    def _writes_calls(self) -> bool:
        return _CALLED in self._probed(self._tool_roles[0])

    def _probed(self, role: str) -> str:
        """The text of a call and its answer; "" where the template refuses them."""
        written: tuple[object, ...] = ({}, "{}")
        for arguments in written:
            call = {"type": "function", "id": "call00000", "function": {"name": _CALLED, "arguments": arguments}}
            asked: Message = {"role": "user", "content": "Q"}
            calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            answer: Message = {"role": role, "name": _CALLED, "tool_call_id": "call00000", "content": _MARK}
            with contextlib.suppress(ValueError):
                return self.render([asked, calling, answer], True)
        return ""

    def after_tools(self, texts: Sequence[str], names: Sequence[str], *, last: int) -> list[int]:
        """The ids after a turn that called tools.

        Args:
            texts: the observation of each call, in order; at least one.
            names: the names of the called tools, as the model wrote them.
            last: the last id that was sampled.
        """
        if len(texts) > 1 and (known := self._several(len(texts))) is not None:
            return self._ids(known, texts, names, last)
        return self._ids(self._of(("tool",)), ["\n".join(texts)], names[:1], last)

    def after(self, roles: Sequence[str], texts: Sequence[str], names: Sequence[str], *, last: int | None) -> list[int]:
        """The ids after a turn that several messages follow.

        Args:
            roles: of each message: tool, user or system.
            names: for each message, the tool that has answered, or "".
            last: as for `after_user`.
        Raises:
            BridgeError: the template writes such messages in a way that cannot be followed.
        """
        return self._ids(self._of(tuple(roles)), texts, names, last)

    def in_turn(self, texts: Sequence[str], tags: tuple[str, str]) -> list[int]:
        """The ids of observations in the turn that asked, which goes on; each stands between these."""

        def spans(observations: Sequence[str]) -> Iterator[TextSpan]:
            for number, text in enumerate(observations):
                yield TextSpan(text=("\n" if number else "") + tags[0], is_own=True)
                yield TextSpan(text=text, is_own=False)
                yield TextSpan(text=tags[1], is_own=True)

        neutral = self._behind(self._before, [_text(list(spans(["x"] * len(texts))))])
        guarded = [number for number in neutral if number in self._guarded_ids]
        return self._without_others(list(spans([valid(text) for text in texts])), self._before, guarded)

    def after_user(self, text: str, *, last: int | None) -> list[int]:
        """The ids after a turn that an environment answers as a user would; `last`: the last id, None if it does not end the turn."""
        return self._ids(self._of(("user",)), [text], [], last)

    def user_frame(self, text: str) -> str:
        """The text after a turn that a user answers."""
        frame = self._of(("user",)).frame
        return frame.end + _text(frame.filled([text], []))

    def ends(self, last: int) -> bool:
        """True if this id ends a turn."""
        return last in self._stop_ids or last == self._of(("user",)).end_id

    def _of(self, roles: tuple[str, ...]) -> _Known:
        if len(roles) > _MOST_MESSAGES:
            raise BridgeError(f"{len(roles)} messages follow a turn of the model; {_MOST_MESSAGES} may")
        if (known := self._known.get(roles)) is None:
            try:
                known = self._found(roles)
            except BridgeError as err:
                known = str(err)
            if len(self._known) >= _MOST_KNOWN:
                self._known.pop(next(iter(self._known)), None)
            self._known[roles] = known
        if isinstance(known, str):
            raise BridgeError(known)
        return known

    def _several(self, num_texts: int) -> _Known | None:
        """The bridge after several calls of one turn; None if the template takes only one answer."""
        try:
            return self._of(("tool",) * num_texts)
        except BridgeError:
            return None

    def _found(self, roles: tuple[str, ...]) -> _Known:
        tokens = {number: token for token, number in self._added.items()}
        ends = [tokens[number] for number in sorted(self._stop_ids) if number in tokens]
        try:
            frame = find_frame(self.render, roles, tool_roles=self._tool_roles, ends=ends, added=list(self._added))
            neutral = _text(frame.filled(["x"] * len(roles), ["x"] * len(roles)))
            whole, before, after = self.encoded([frame.before + frame.end + neutral, frame.before, frame.end + neutral])
            if whole != before + after or after[0] != self._added[frame.end]:
                raise BridgeError(f"the tokenizer does not split a text at {frame.end!r}, which ends a turn")
        except BridgeError as err:
            who = "an environment that answers as a user does" if roles == ("user",) else "tools"
            raise BridgeError(f"the chat template cannot be used with {who}: {err}") from err
        guarded_ids = [number for number in after[1:] if number in self._guarded_ids]
        return _Known(frame=frame, end_id=after[0], guarded_ids=guarded_ids)

    def render(
        self, messages: Sequence[Message], opens: bool, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The text of messages, with or without the opening of the model's next turn; ValueError where the template refuses.

        Args:
            tools: schemas to write; None: those of these bridges.
        """
        return render(
            messages,
            self._tokenizer,
            self._template,
            add_bos=False,
            kwargs=self._kwargs,
            tools=(self._tools if tools is None else tools) or None,
            add_opening=opens,
        )

    def _ids(self, known: _Known, texts: Sequence[str], names: Sequence[str], last: int | None) -> list[int]:
        spans = known.frame.filled(*([valid(text) for text in some] for some in (texts, names)))
        ids = self._without_others(spans, known.frame.end, known.guarded_ids)
        is_ended = last == known.end_id or (last in self._stop_ids and not known.frame.is_header)
        return ids if is_ended else [known.end_id, *ids]

    def _without_others(self, spans: Sequence[TextSpan], before: str, guarded: Sequence[int]) -> list[int]:
        """Token ids of a text behind the token `before`; its guarded ids are exactly those of the template's own spans."""
        ids = self._behind(before, self._pieces(spans))
        if [one for one in ids if one in self._guarded_ids] != guarded:
            # The tokenizer rewrites a text before it looks for tokens: no two characters of an observation stay together.
            pieces = [piece for span in spans for piece in ([span.text] if span.is_own else span.text)]
            ids = self._behind(before, pieces)
        return ids

    def _pieces(self, spans: Sequence[TextSpan]) -> list[str]:
        """The text, cut within each guarded token that is not of an own span."""
        own, start = [], 0
        for span in spans:
            own += [(start, start + len(span.text))] if span.is_own else []
            start += len(span.text)
        return self._within_tokens(_text(spans), own)

    def _within_tokens(self, text: str, own: Sequence[tuple[int, int]] = ()) -> list[str]:
        """A text, cut after the first character of each guarded token outside of these stretches."""
        pieces, start, place = [], 0, 0
        while match := self.guarded.search(text, place):
            place = match.end()
            if not any(first <= match.start() and match.end() <= end for first, end in own):
                place = match.start() + 1
                pieces.append(text[start:place])
                start = place
        return [*pieces, text[start:]]

    def _behind(self, before: str, pieces: Sequence[str]) -> list[int]:
        """The ids of a text in pieces, each encoded behind a token, as no text is encoded alone."""
        encoded = self.encoded([before + piece for piece in pieces])
        return [number for ids in encoded for number in ids[bool(before) :]]

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, in which every special token is written out."""
        return token_ids(self._tokenizer, texts)


def _absent(values: Any) -> str:
    """A character for private use that no text of these values has; ValueError where they have all of them."""
    taken = set(_PRIVATE.findall(json.dumps(values, ensure_ascii=False, default=str)))
    mark = next((mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in taken), None)
    if mark is None:
        raise ValueError("messages and tools use all characters for private use")
    return mark


def _marked(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with other texts, except words that templates look for, such as the keys of a schema."""
    if isinstance(value, Mapping):
        return {_marked(key, change): _marked(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, change) for item in value]
    is_text = isinstance(value, str) and not (value.isascii() and value.isidentifier())
    return change(value) if is_text else value


def _changed(message: Message, change: Callable[[str], str]) -> Message:
    """A message with another text, also in its calls."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {change(key): changed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [changed(item) for item in value]
        return change(value) if isinstance(value, str) else value

    found = {name: change(value) if isinstance(value, str) else value for name, value in message.items()}
    found["role"] = message["role"]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {
                **call,
                "id": change(call["id"]),
                "function": {
                    "name": change(call["function"]["name"]),
                    "arguments": changed(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    return found


def _text(spans: Sequence[TextSpan]) -> str:
    return "".join(span.text for span in spans)

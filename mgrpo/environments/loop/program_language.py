"""The language of programs: the opening of a chat, and one language for each set of tools that chats name."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from mgrpo.data.templates import with_bos
from mgrpo.data.tokenizer import decode, load_tokenizer, token_ids
from mgrpo.environments.environment import Tool
from mgrpo.environments.formats import Format, Parsed, named
from mgrpo.environments.formats.format import without_end
from mgrpo.environments.formats.thoughts import thought_in, without_thoughts
from mgrpo.environments.loop.bridge import BridgeError, Bridges
from mgrpo.environments.loop.language import TemplateLanguage
from mgrpo.environments.loop.stripping import find_stripping
from mgrpo.environments.normal_form import whole

_MOST_KNOWN = 64


class TextTooLong(ValueError):
    """A text that is not tokenized, as it would have too many tokens."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: lower bound of its tokens."""
        super().__init__(f"a text has at least {num_tokens} tokens")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A turn as a client sees it."""

    parsed: Parsed
    thought: str
    """Thinking of the turn; "" without any."""
    stop: str | None
    """The client's string that ended it."""


class ProgramLanguage(TemplateLanguage):
    """Implements `environments.loop.conversation.Chats`."""

    spec: LanguageSpec | None = None
    """Specification from which it was built."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        format_of: Callable[[Sequence[Tool]], Format],
        bridges_of: Callable[[Sequence[Tool]], Bridges],
        tools: Sequence[Tool] = (),
        add_bos: bool,
        max_observation_tokens: int,
        strips: bool = False,
        longest_token_bytes: int = 0,
    ) -> None:
        """
        Args:
            strips: remove thinking from earlier turns if the template does so.
            longest_token_bytes: bytes of the longest token of the vocabulary; 0: looked up.
            format_of, bridges_of: the format and the bridges of a chat with these tools.
        """
        bridges = bridges_of(tools)
        super().__init__(
            tokenizer,
            format_of(tools),
            bridges,
            max_observation_tokens=max_observation_tokens,
            stripping=find_stripping(bridges) if strips else None,
            is_thinking=bridges.opening([{"role": "user", "content": "Q"}]).rstrip().endswith("<think>"),
        )
        self._format_of, self._bridges_of, self._add_bos, self._asked_to_strip = format_of, bridges_of, add_bos, strips
        self._known: dict[str, ProgramLanguage] = {}
        self._longest_token_bytes = longest_token_bytes or max(len(token.encode()) for token in tokenizer.get_vocab())
        self._text_of_token: dict[int, str] = {}

    def with_tools(self, tools: Sequence[Tool]) -> ProgramLanguage:
        """This language with these tools."""
        if not tools:
            return self
        key = json.dumps([tool.schema for tool in tools], sort_keys=True)
        if (known := self._known.get(key)) is None:
            # Clients choose their tools, and long requests are read in threads.
            if len(self._known) >= _MOST_KNOWN:
                self._known.pop(next(iter(self._known)), None)
            known = self._known[key] = ProgramLanguage(
                self.tokenizer,
                format_of=self._format_of,
                bridges_of=self._bridges_of,
                tools=tools,
                add_bos=self._add_bos,
                max_observation_tokens=self.max_observation_tokens,
                strips=self._asked_to_strip,
                longest_token_bytes=self._longest_token_bytes,
            )
        return known

    def opening(
        self, messages: Sequence[Mapping[str, Any]], untrusted: Container[int] = (), *, room: int | None = None
    ) -> list[int]:
        """Ids of a conversation, up to the opening of the model's turn. Special tokens in tools are text.

        Args:
            untrusted: places of messages in which special tokens are text.
            room: the most tokens that it may have; None: any number.
        Raises:
            TextTooLong: the text cannot have so few, and is not tokenized.
            ValueError: the template refuses the conversation.
        """
        plain = [whole(dict(message)) for message in messages]

        def check(texts: Sequence[str]) -> None:
            if room is not None:
                self.check_room(texts, room)

        if not self.bridges.has_marked_tools and not any(place in untrusted for place in range(len(plain))):
            text = self.bridges.opening(plain)
            check([text])
            ids = token_ids(self.tokenizer, [with_bos(text, self.tokenizer) if self._add_bos else text])[0]
            if not self.bridges.rewrites_tools(text, ids):
                return ids
        bos = with_bos("", self.tokenizer) if self._add_bos else ""
        return self.bridges.guarded_opening(plain, untrusted, bos=bos, check=check)

    def check_room(self, texts: Sequence[str], room: int) -> None:
        """Raise TextTooLong where texts cannot have as few tokens as `room`: each has as many bytes as the longest of all tokens."""
        num_bytes = sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)
        if (num_tokens := -(-num_bytes // self._longest_token_bytes)) > room:
            raise TextTooLong(num_tokens)

    def after(self, messages: Sequence[tuple[str, str, str]], last: int) -> list[int]:
        """Ids between a turn and the next one.

        Args:
            messages: role, text, and the name of the tool that answers, or "", of each message that follows the turn.
            last: the last id of the turn.
        Raises:
            BridgeError: the template writes such messages in a way that cannot be followed.
        """
        roles, texts, names = zip(*messages, strict=True)
        if self.format.tags is not None and "tool" in roles:
            if set(roles) != {"tool"}:
                raise BridgeError("tools answer within the turn, which no other message can follow there")
            return self.bridges.in_turn(texts, self.format.tags)
        if set(roles) == {"tool"}:
            return self.bridges.after_tools(texts, names, last=last)
        return self.bridges.after(roles, texts, names, last=last)

    @property
    def strips(self) -> bool:
        """True if thinking is removed from earlier turns after a new user message."""
        return self.stripping is not None

    def rewritten(
        self, context: Sequence[int], turns: Sequence[tuple[int, int]], messages: Sequence[tuple[str, str, str]]
    ) -> list[int] | None:
        """The whole context of the next turn, with thinking removed from earlier ones; None if they have none.

        Args:
            context: everything up to and with the last turn.
            turns: first place and end in it of each turn whose thinking is left out; the last one ends it.
            messages: as for `after`.
        Raises:
            BridgeError: as for `after`.
        """
        if self.stripping is None:
            return None
        found: list[int] = []
        at, last = 0, context[-1]
        for start, end in turns:
            is_ended = self.bridges.ends(context[end - 1])
            said = self._written(np.array(context[start : end - is_ended], np.int32))
            past = self.stripping.past_ids(context[:start], said)
            if past is None:
                continue
            found += [*context[at : start - len(self.stripping.opening_ids)], *past]
            # The template's end of a turn follows, with the text after it.
            at = end if end == len(context) else end - is_ended
            last = -1 if end == len(context) else last
        if not at:
            return None
        return [*found, *context[at:], *self.after(messages, last)]

    def shown(self, tokens: np.ndarray, *, calls: bool, stop: Sequence[str] = ()) -> Shown:
        """A turn as a client sees it.

        Args:
            tokens: `[len]` int32.
            calls: True to read calls.
            stop: strings; the text ends before the first of them.
        """
        text = self._written(tokens)
        places = [(place, one) for one in stop if (place := text.find(one)) >= 0]
        cut = min(places, default=None)
        text = text if cut is None else text[: cut[0]]
        thought = thought_in(text, is_thinking=self.is_thinking)
        if calls:
            parsed = self.format.parse(text, is_thinking=self.is_thinking)
        else:
            # Special tokens are not shown, unless they mark a thought.
            if cut is None and not thought and not self.is_thinking:
                text = decode(self.tokenizer, [tokens])[0]
            parsed = Parsed(content=without_thoughts(without_end(text), is_thinking=self.is_thinking).strip())
        return Shown(parsed=parsed, thought=thought, stop=None if cut is None else cut[1])

    def written(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens; ValueError for ids that the tokenizer does not have."""
        unknown = [number for number in ids if not 0 <= number < len(self.tokenizer)]
        if unknown:
            raise ValueError(f"the id {unknown[0]} is not among the tokenizer's {len(self.tokenizer)}")
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text_of_token(self, number: int) -> str:
        """The text of one id, cached; ValueError as for `written`."""
        if (text := self._text_of_token.get(number)) is None:
            text = self._text_of_token[number] = self.written([number])
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSpec:
    """Specification of a `ProgramLanguage`, as JSON: for processes without the run's configuration and its objects."""

    tokenizer: str
    """A folder."""
    template: str
    """The chat template's text."""
    template_kwargs: Mapping[str, object]
    format: str
    """The name of the format of calls."""
    stop_ids: Sequence[int]
    """All ids that end a turn."""
    add_bos: bool
    max_observation_tokens: int
    shows_tools: bool = True
    """True if the template receives the tools."""
    strips: bool = False
    """See `ProgramLanguage`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LanguageSpec:
        return cls(**values)

    def make(self, tokenizer: Any = None) -> ProgramLanguage:
        """The language of chats without tools. `tokenizer`: that of the folder, if it is loaded already."""
        tokenizer = tokenizer or load_tokenizer(self.tokenizer)

        def bridges_of(tools: Sequence[Tool]) -> Bridges:
            return Bridges(
                tokenizer,
                self.template,
                template_kwargs=self.template_kwargs,
                tools=tools if self.shows_tools else (),
                stop_token_ids=self.stop_ids,
            )

        made = ProgramLanguage(
            tokenizer,
            format_of=partial(named, self.format, tokenizer=tokenizer),
            bridges_of=bridges_of,
            add_bos=self.add_bos,
            max_observation_tokens=self.max_observation_tokens,
            strips=self.strips,
        )
        made.spec = self
        return made

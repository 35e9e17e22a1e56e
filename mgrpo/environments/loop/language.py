"""The language of one model: its tokenizer, the format of its calls and the bridges of its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mgrpo.data.tokenizer import decode
from mgrpo.environments.formats import Format, Parsed
from mgrpo.environments.loop.bridge import Bridges
from mgrpo.environments.loop.stripping import Stripping
from mgrpo.environments.loop.trajectory import Sampled

CUT = "\n[... {count} characters left out ...]\n"


def stop_ids_of(format: Format, tokenizer: Any) -> list[int]:
    """Tokens that end a turn besides the model's own, as far as the tokenizer has them."""
    ids = tokenizer.convert_tokens_to_ids(list(format.stop_tokens))
    return [token for token in ids if token is not None and token != tokenizer.unk_token_id]


class TemplateLanguage:
    """Implements `environments.loop.episodes.Language`."""

    def __init__(
        self,
        tokenizer: Any,
        format: Format,
        bridges: Bridges,
        *,
        max_observation_tokens: int,
        is_thinking: bool = False,
        stripping: Stripping | None = None,
    ) -> None:
        """
        Args:
            stripping: how the template leaves thinking out of earlier turns; None: these stay as they were sampled.
            is_thinking: prompts end inside a thought.
        """
        self.tokenizer, self.format, self.bridges = tokenizer, format, bridges
        self.max_observation_tokens, self.is_thinking = max_observation_tokens, is_thinking
        self.stripping = stripping

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a turn besides the model's own."""
        return stop_ids_of(self.format, self.tokenizer)

    def read(self, turn: Sampled, *, calls: bool) -> Parsed:
        """A turn, read with its calls or as a whole."""
        if calls:
            return self.format.parse(self._written(turn.tokens), is_thinking=self.is_thinking)
        return Parsed(content=decode(self.tokenizer, [turn.tokens])[0].strip())

    def after_calls(self, answers: Sequence[tuple[str, str]], turn: Sampled) -> list[int]:
        """Ids between this turn and the next one, for the name and the answer of each call."""
        last = int(turn.tokens[-1])
        names = [name for name, _ in answers]
        texts = [self._shortened(text, lambda part: self._after_tools([part], names[:1], last)) for _, text in answers]
        return self._after_tools(texts, names, last)

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        """The same where a turn is an action."""
        return self.bridges.after_user(self._shortened_act(answer, turn), last=int(turn.tokens[-1]))

    def afresh(self, answer: str, turn: Sampled, before: np.ndarray) -> np.ndarray | None:
        """The whole context of the next turn, where this one, an action sampled after `before`, is rewritten; else None."""
        if self.stripping is None:
            return None
        said = turn.tokens[:-1] if self.bridges.ends(int(turn.tokens[-1])) else turn.tokens
        found = self.stripping.context(before, self._written(said), self._shortened_act(answer, turn))
        return None if found is None else np.array(found, np.int32)

    def text(self, tokens: Sequence[np.ndarray]) -> list[str]:
        """The text of each, without special tokens."""
        return decode(self.tokenizer, tokens)

    def _written(self, tokens: np.ndarray) -> str:
        """The text with special tokens written out; ids that the tokenizer does not have are left out."""
        known = [token for token in tokens.tolist() if 0 <= token < len(self.tokenizer)]
        return self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _after_tools(self, texts: Sequence[str], names: Sequence[str], last: int) -> list[int]:
        if self.format.tags is not None:
            return self.bridges.in_turn(texts, self.format.tags)
        return self.bridges.after_tools(texts, names, last=last)

    def _shortened_act(self, answer: str, turn: Sampled) -> str:
        return self._shortened(answer, partial(self.bridges.after_user, last=int(turn.tokens[-1])))

    def _shortened(self, text: str, encode: Callable[[str], list[int]]) -> str:
        """The text, or as much of its beginning and its end as fits into the tokens of an observation.

        Args:
            encode: the bridge after a turn with this text as its only answer.
        """
        limit, frame = self.max_observation_tokens, len(encode(""))

        def size(part: str) -> int:
            return len(encode(part)) - frame

        if size(text) <= limit:
            return text
        shorten = _without_middle if size(_without_middle(text, 0)) <= limit else _beginning
        fits, fitting, exceeds = 0, 0, len(text)
        while exceeds - fits > 1 and limit - fitting > limit // 32:
            kept = (fits + exceeds) // 2
            count = size(shorten(text, kept))
            if count <= limit:
                fits, fitting = kept, count
            else:
                exceeds = kept
        return shorten(text, fits)


def _without_middle(text: str, kept: int) -> str:
    """The text with `kept` of its characters, and a notice in place of its middle."""
    start, end = kept - kept // 2, len(text) - kept // 2
    return text[:start] + CUT.format(count=len(text) - kept) + text[end:]


def _beginning(text: str, kept: int) -> str:
    return text[:kept]

"""How the model's turns are read and answered: its tokenizer, the format of its calls and the bridges of its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mgrpo.data.tokenizer import decode, token_ids
from mgrpo.environments.bridge import Bridges
from mgrpo.environments.formats import Format, Parsed
from mgrpo.environments.stripping import Stripping
from mgrpo.environments.trajectory import Sampled, Trajectory

CUT = "\n[... {count} tokens left out ...]\n"


class Language:
    """Implements `environments.episodes.Language`."""

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
            is_thinking: a prompt ends inside a thought.
        """
        self.tokenizer, self.format, self.bridges = tokenizer, format, bridges
        self.max_observation_tokens, self.is_thinking = max_observation_tokens, is_thinking
        self.stripping = stripping

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a turn besides the model's own."""
        ids = self.tokenizer.convert_tokens_to_ids(list(self.format.stop_tokens))
        return [token for token in ids if token is not None and token != self.tokenizer.unk_token_id]

    def read(self, turn: Sampled, *, calls: bool) -> Parsed:
        """What a turn says; with its calls, or as a whole."""
        if calls:
            return self.format.parse(self._written(turn.tokens), is_thinking=self.is_thinking)
        return Parsed(content=decode(self.tokenizer, [turn.tokens])[0].strip())

    def after_calls(self, answers: Sequence[tuple[str, str]], turn: Sampled) -> list[int]:
        """Ids between this turn and the next one, for the name and the answer of each call."""
        texts = [self._shortened(text) for _, text in answers]
        own = self.format.answer(texts)
        if own is not None:
            return self._plain(own)
        return self.bridges.after_tools(texts, [name for name, _ in answers], last=int(turn.tokens[-1]))

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        """The same where a turn is an action."""
        return self.bridges.after_user(self._shortened(answer), last=int(turn.tokens[-1]))

    def afresh(self, answer: str, turn: Sampled, before: np.ndarray) -> np.ndarray | None:
        """All that the next turn follows where this one, an action sampled after `before`, is not left as it was; else None."""
        if self.stripping is None:
            return None
        said = turn.tokens[:-1] if self.bridges.ends(int(turn.tokens[-1])) else turn.tokens
        found = self.stripping.context(before, self._written(said), self._shortened(answer))
        return None if found is None else np.array(found, np.int32)

    def text(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Of each, all tokens as text."""
        return decode(self.tokenizer, [np.concatenate([part.tokens for part in t.parts]) for t in trajectories])

    def _written(self, tokens: np.ndarray) -> str:
        """With special tokens written out; ids beyond the tokenizer's are no text."""
        known = [token for token in tokens.tolist() if 0 <= token < len(self.tokenizer)]
        return self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _plain(self, text: str) -> list[int]:
        """Its tokens, none of which is special."""
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return self.tokenizer(text, verbose=False, **options)["input_ids"]

    def _shortened(self, text: str) -> str:
        """What an observation may be long, its middle left out."""
        limit = self.max_observation_tokens
        if len(text) <= limit:  # A token is a byte at least, and most bytes are a character.
            return text
        ids = token_ids(self.tokenizer, [text])[0]
        if len(ids) <= limit:
            return text
        half = len(text) * limit // len(ids) // 2
        count = len(ids) - limit
        return text[:half] + CUT.format(count=count) + text[len(text) - half :]

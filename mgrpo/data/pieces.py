"""The text of single tokens, for reading a sample token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PARTIAL = "\ufffd"
"""A tokenizer's sign for bytes that are not a whole character yet."""


class TokenPieces:
    """Cuts a completion's text into its tokens'. Special tokens are written out; ids beyond the vocabulary have no text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Behind another token a tokenizer keeps the blank with which a word begins.
        self._anchor = next((ids for text in ("a", ".", "0") if (ids := self._ids(text))), [])
        self._before = self._decoded(self._anchor)
        self._known: dict[int, str] = {}

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        """`[len]`: one text for each token. A character of several tokens stands with the last of them."""
        pieces = [self._piece(token) for token in tokens]
        start = 0
        while start < len(pieces):
            end = start + 1
            if PARTIAL in pieces[start]:
                while end < len(pieces) and PARTIAL in pieces[end]:
                    end += 1
                whole = self._after_anchor(tokens[start:end])
                pieces[start:end] = [*[""] * (end - start - 1), whole]
            start = end
        return pieces

    def _piece(self, token: int) -> str:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._after_anchor([token])
        return found

    def _after_anchor(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if 0 <= token < len(self._tokenizer)]
        text = self._decoded([*self._anchor, *known])
        return text.removeprefix(self._before)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"][-1:]

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

"""The text of single tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mgrpo.data.pieces import TokenPieces

TEXTS = ("7 + 5 = 12\n\n  so: yes.", "<think>\nA naïve 中文 answer, 🙂🇩🇪!</think>", " \t$x^2$ \\frac{1}{2}", "")


@pytest.mark.parametrize("kind", ["smollm2", "deepseek", "qwen", "sentencepiece"])
def test_the_pieces_of_a_text_are_the_text(real: Callable[[str], Any], kind: str) -> None:
    """Colours over text that was never sampled would lie; blanks and characters of several tokens are what gets lost."""
    tokenizer = real(kind)
    pieces = TokenPieces(tokenizer)
    for text in TEXTS:
        # Behind a word, as after a prompt: at the beginning of a text some tokenizers drop the first blank.
        word, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("a", text))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        whole = tokenizer.decode([*word, *ids], **options).removeprefix(tokenizer.decode(word, **options))
        found = pieces(ids)
        assert len(found) == len(ids) and "".join(found) == whole
    eos = tokenizer.eos_token_id
    assert pieces([eos, len(tokenizer) + 5]) == [tokenizer.eos_token, ""]

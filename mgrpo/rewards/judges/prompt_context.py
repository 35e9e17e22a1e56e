"""Fitting a prompt into the judge's context: the number of tokens of a text, and the shortening of long ones."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Sequence
from pathlib import Path

CountTokens = Callable[[str], int]

_WORDS = (string.ascii_letters + " ").encode()
_ASCII = bytes(range(128))


@functools.lru_cache(maxsize=8)
def token_counter(model: str) -> CountTokens:
    """Counts with the model's own tokenizer where it is on this machine (a folder, the hub's cache), else estimates."""
    file = _tokenizer_file(model)
    if file is None:
        return estimate
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def estimate(text: str) -> int:
    """Tokens of a text, overestimated rather than underestimated: two for five letters or spaces, one for any other ASCII, one for two other bytes."""
    data = text.encode(errors="replace")
    num_other = len(data.translate(None, _WORDS))
    num_foreign = len(data.translate(None, _ASCII))
    return math.ceil(0.4 * (len(data) - num_other) + (num_other - num_foreign) + 0.5 * num_foreign)


def shortened(texts: Sequence[str], room: int, count: CountTokens) -> list[str]:
    """The texts in `room` tokens together: each gets an equal share of it, and of the room that shorter ones leave."""
    fitting = list(texts)
    sizes = [count(text) for text in texts]
    by_size = sorted(range(len(texts)), key=lambda place: sizes[place])
    for num_before, place in enumerate(by_size):
        share = room // (len(texts) - num_before)
        if sizes[place] > share:
            fitting[place] = shorten(texts[place], share, count)
            sizes[place] = count(fitting[place])
        room -= sizes[place]
    return fitting


def shorten(text: str, limit: int, count: CountTokens) -> str:
    """The text's beginning and end with a note between them, in at most `limit` tokens; "" where the note does not fit."""
    whole, kept, size = text, len(text), count(text)
    # In proportion to the excess, which fits after two or three counts; filling the last per cent of the room is not worth more.
    while size > limit and kept > 0:
        kept = min(kept - 1, int(0.99 * kept * limit / size))
        text = _without_middle(whole, kept)
        size = count(text)
    return text if size <= limit else ""


def _without_middle(text: str, kept: int) -> str:
    head, tail = (kept + 1) // 2, kept // 2
    return f"{text[:head]}\n[... {len(text) - kept} characters left out ...]\n{text[len(text) - tail :]}"


def _tokenizer_file(model: str) -> Path | None:
    local = Path(model) / "tokenizer.json"
    if local.is_file():
        return local
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:  # not a name that the hub could have
        return None
    return Path(cached) if isinstance(cached, str) else None

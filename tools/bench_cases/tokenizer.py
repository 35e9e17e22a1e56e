"""A tokenizer for cases that need none in particular."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

TURN = ["<|im_start|>", "<|im_end|>"]
"""Begin and end a turn."""


def train_tokenizer(folder: Path, texts: Iterable[str], *, vocab_size: int, template: str | None = None) -> Any:
    """Train a byte-level BPE, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {
        "special_tokens": TURN,
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "show_progress": False,
    }
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=TURN[1], chat_template=template)
    tokenizer.save_pretrained(folder)
    return tokenizer

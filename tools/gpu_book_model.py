"""Writes a Qwen2 of random weights, its tokenizer of made-up words and rows of prompts: the work of a real run, with nothing to learn.

    python tools/gpu_book_model.py FOLDER [--shape tiny|0.5b|1.5b] [--rows 512] [--prompt_tokens 256]

The tokenizer is in FOLDER/tokenizer, the rows are in FOLDER/train.jsonl, which is written last. The model never samples its end
token, so every completion has the most tokens that it may have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_check_models import COMMON, FAMILIES, random_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mgrpo.models.family import shape_of

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=2000,
    ),
    "0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151_936,
    ),
    "1.5b": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151_936,
    ),
}  # fmt: skip
SPECIAL_TOKENS = ["<pad>", "<unk>", "<eos>"]
PAD, _, EOS = range(3)
END_WEIGHT = -100.0


def never_ending(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with an end token that is never sampled.

    The first hidden dimension is 1 in every token's embedding and no layer adds to it, so it stays positive; the end token's
    embedding, which is also its row of the head, has a large negative number there.
    """
    for name, weight in weights:
        if name == "model.embed_tokens.weight":
            weight[:, 0] = 1.0
            weight[EOS, 0] = END_WEIGHT
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
        yield name, weight


def write_model(folder: Path, shape: str, device: torch.device) -> int:
    """Write config.json and model.safetensors; the size of the vocabulary."""
    hf = COMMON | FAMILIES["dense"] | SHAPES[shape]
    hf |= {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", "eos_token_id": EOS, "pad_token_id": PAD}
    (folder / "config.json").write_text(json.dumps(hf, indent=1))
    weights = dict(never_ending(random_weights(shape_of(hf), device)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return hf["vocab_size"]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer whose every token is a word between spaces.

    The copy beside config.json is for engines that load a model's tokenizer and are given token ids only: transformers loads
    it by Qwen2's class, which splits text into bytes.
    """
    words = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *(f"w{i}" for i in range(3, vocab))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    fast.save_pretrained(folder)
    fast.save_pretrained(folder / "tokenizer")


def write_rows(file: Path, count: int, *, vocab: int, longest: int) -> None:
    """Write prompts of random words, between half and all of `longest` long."""
    random = np.random.default_rng(1)
    with file.open("w") as rows:
        for _ in range(count):
            words = random.integers(len(SPECIAL_TOKENS), vocab, random.integers(longest // 2, longest + 1))
            row = {"prompt": " ".join(f"w{word}" for word in words), "ground_truth": "1", "dataset": "integer"}
            rows.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt_tokens", type=int, default=256, help="tokens of the longest prompt")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    vocab = write_model(args.folder, args.shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    write_tokenizer(args.folder, vocab)
    write_rows(args.folder / "train.jsonl", args.rows, vocab=vocab, longest=args.prompt_tokens)


if __name__ == "__main__":
    main()

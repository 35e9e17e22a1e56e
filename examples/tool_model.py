"""Small models for the examples with tools: half a million parameters that know how to use a tool, and mostly do not.

Supervised training on conversations that use the tool well, then briefly on conversations of which most guess and half of the
rest slip: groups of eight samples then hold right and wrong answers, which is what GRPO learns from.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SPECIAL_TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+*-=?.,:;!()[]{}\"'_/\\<>|#%&^~$@`"
# How byte-level tokenizers write space and newline; every other character represents itself.
BYTE_LEVEL_NAMES = ["\u0120", "\u010a"]
BATCH_SIZE = 48
NOISY_STEPS = 60
CHECK_EVERY = 20

Piece = tuple[str, bool]
"""Text, and whether the model writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The lesson of a model, and how much of it."""

    template: str
    """The chat template."""
    marks: list[str]
    """Texts around calls and answers that are tokens, and not special: observations may hold them."""
    draw: Callable[[random.Random], Any]
    """A random problem."""
    transcript: Callable[..., list[Piece]]
    """A conversation about a problem, with shares `guessed` and `wrong`."""
    known: Callable[[], tuple[list[Any], list[Any]]]
    """The problems of the run, which are new to the model."""
    vocab_size: int
    max_length: int
    clean_steps: int
    clean_loss: float


def make_tokenizer(lesson: Lesson, rng: random.Random) -> Qwen2Tokenizer:
    """Byte-level BPE as Qwen's, one token for each digit, with the few merges that conversations ask for.

    Merges make several spellings of one text, so that tokenizing a conversation again would not give its tokens back.
    """
    alphabet = [*CHARACTERS, *BYTE_LEVEL_NAMES]
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = Qwen2Tokenizer(vocab={"<pad>": 0}, merges=[]).backend_tokenizer.pre_tokenizer
    texts = [
        "".join(text for text, _ in lesson.transcript(lesson.draw(rng), rng, guessed=0.2, wrong=0.2))
        for _ in range(400)
    ]
    for mark in SPECIAL_TOKENS + lesson.marks:
        texts = [text.replace(mark, "\n") for text in texts]
    size = lesson.vocab_size - len(SPECIAL_TOKENS) - len(lesson.marks)
    whole.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    learned = json.loads(whole.to_str())["model"]
    tokens = [*SPECIAL_TOKENS, *sorted(learned["vocab"], key=learned["vocab"].get), *lesson.marks]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<pad>",
        padding_side="left",
        model_max_length=lesson.max_length,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens(lesson.marks)
    tokenizer.chat_template = lesson.template
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, max_length: int) -> Qwen2ForCausalLM:
    """The architecture with random weights."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=max_length,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_batch(
    lesson: Lesson, tokenizer: Qwen2Tokenizer, problems: list[Any], rng: random.Random, **shares: float
) -> dict[str, torch.Tensor]:
    """Conversations padded on the right; only what the model writes carries labels."""
    inputs, labels = [], []
    for problem in rng.choices(problems, k=BATCH_SIZE):
        pieces = lesson.transcript(problem, rng, **shares)
        encoded = [(tokenizer(text)["input_ids"], is_own) for text, is_own in pieces]
        inputs.append(torch.tensor([token for ids, _ in encoded for token in ids]))
        labels.append(torch.tensor([token if is_own else -100 for ids, is_own in encoded for token in ids]))
    pad = torch.nn.utils.rnn.pad_sequence
    # No attention mask: padding comes after every real token, where causal attention does not see it.
    return {
        "input_ids": pad(inputs, batch_first=True, padding_value=tokenizer.pad_token_id),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def train(
    lesson: Lesson,
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: list[Any],
    rng: random.Random,
    *,
    steps: int,
    rate: float,
    until: float = 0.0,
    **shares: float,
) -> None:
    """AdamW with a warm-up, until the loss is below `until`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - 0.7 * step / steps)
        loss = model(**make_batch(lesson, tokenizer, problems, rng, **shares)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == CHECK_EVERY - 1:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
            if loss.item() < until:
                return


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """A Hugging Face folder; a turn ends with <|im_end|>."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(lesson: Lesson, *, description: str, folder: Path) -> None:
    """Make the model as the command line says; `folder` is the default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the conversations")
    parser.add_argument("--out", type=Path, default=folder, help="folder for the model")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    problems, held_out = lesson.known()
    tokenizer = make_tokenizer(lesson, rng)
    model = make_model(tokenizer, lesson.max_length)
    # Supervised training draws problems of its own: those of the run are new to the model.
    known = {*problems, *held_out}
    own = [problem for problem in (lesson.draw(rng) for _ in range(20_000)) if problem not in known]
    train(
        lesson,
        model,
        tokenizer,
        own,
        rng,
        steps=lesson.clean_steps,
        rate=2e-3,
        until=lesson.clean_loss,
        guessed=0.1,
        wrong=0.0,
    )
    train(lesson, model, tokenizer, own, rng, steps=NOISY_STEPS, rate=5e-4, guessed=0.6, wrong=0.5)
    save(model, tokenizer, args.out)
    seconds = round(time.perf_counter() - start, 1)
    print(
        json.dumps(
            {"seed": args.seed, "parameters": model.num_parameters(), "tokens": len(tokenizer), "seconds": seconds}
        )
    )

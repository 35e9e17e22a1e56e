"""Makes the model of the tool `python`: half a million parameters that know how to write code, and mostly guess.

    python examples/python_tool/make_model.py [--seed N] [--out FOLDER]        # about two minutes on two CPU cores

Supervised training on conversations with the right code, then briefly on conversations of which most guess and half of the
rest slip: groups of eight samples then hold right and wrong answers, which is what GRPO learns from.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from task import TEMPLATE, Problem, draw, split_problems, transcript
from tokenizers import Tokenizer, models, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SPECIAL_TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<python>", "</python>", "<output>", "</output>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+*-=?.,:;!()[]{}\"'_/\\<>|#%&^~$@`"
# How byte-level tokenizers write space and newline; every other character represents itself.
BYTE_LEVEL_NAMES = ["\u0120", "\u010a"]
VOCAB_SIZE = 256
BATCH_SIZE = 48
CLEAN_STEPS, NOISY_STEPS = 600, 60
CHECK_EVERY = 20
CLEAN_LOSS = 0.05


def make_tokenizer(rng: random.Random) -> Qwen2Tokenizer:
    """Byte-level BPE as Qwen's, one token for each digit, with the few merges that conversations ask for.

    Merges make several spellings of one text, so that tokenizing a conversation again would not give its tokens back.
    """
    alphabet = [*CHARACTERS, *BYTE_LEVEL_NAMES]
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = Qwen2Tokenizer(vocab={"<pad>": 0}, merges=[]).backend_tokenizer.pre_tokenizer
    texts = ["".join(text for text, _ in transcript(draw(rng), rng, guessed=0.2, wrong=0.2)) for _ in range(400)]
    for mark in SPECIAL_TOKENS + MARKS:
        texts = [text.replace(mark, "\n") for text in texts]
    size = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKS)
    whole.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    learned = json.loads(whole.to_str())["model"]
    tokens = [*SPECIAL_TOKENS, *sorted(learned["vocab"], key=learned["vocab"].get), *MARKS]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<pad>",
        padding_side="left",
        model_max_length=256,
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.add_tokens(MARKS)  # They are tokens, and not special: observations may hold them.
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """The architecture with random weights."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_batch(tokenizer: Qwen2Tokenizer, problems: list[Problem], rng: random.Random, **shares: float) -> dict:
    """Conversations padded on the right; only what the model writes carries labels."""
    inputs, labels = [], []
    for problem in rng.choices(problems, k=BATCH_SIZE):
        pieces = transcript(problem, rng, **shares)
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
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: list[Problem],
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
        loss = model(**make_batch(tokenizer, problems, rng, **shares)).loss
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the conversations")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder for the model")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    problems, held_out = split_problems()
    tokenizer = make_tokenizer(rng)
    model = make_model(tokenizer)
    # Supervised training draws problems of its own: those of the run are new to the model.
    known = {*problems, *held_out}
    own = [problem for problem in (draw(rng) for _ in range(20_000)) if problem not in known]
    train(model, tokenizer, own, rng, steps=CLEAN_STEPS, rate=2e-3, until=CLEAN_LOSS, guessed=0.1, wrong=0.0)
    train(model, tokenizer, own, rng, steps=NOISY_STEPS, rate=5e-4, guessed=0.6, wrong=0.5)
    save(model, tokenizer, args.out)
    seconds = round(time.perf_counter() - start, 1)
    print(
        json.dumps(
            {"seed": args.seed, "parameters": model.num_parameters(), "tokens": len(tokenizer), "seconds": seconds}
        )
    )


if __name__ == "__main__":
    main()

"""Makes the quickstart's model: a 460k-parameter Qwen2 that knows addition but often samples wrong answers, so that RL can improve it.

    python examples/quickstart/make_model.py [--seed N] [--out FOLDER]        # about a minute on one CPU core

Supervised training on right sums until the greedy answers are good, then briefly on labels of which most are wrong. The
most likely answer stays right, but its probability falls to about a third: most groups of eight samples then hold right
and wrong answers, which is what GRPO learns from.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from pathlib import Path

import torch
from problems import Problem, answer_of, prompt_of, split_problems
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

# 2 special tokens and 62 characters: each of the model's 64 ids is a token, so every sampled id can be decoded.
SPECIAL_TOKENS = ["<pad>", "<eos>"]
CHARACTERS = string.digits + string.ascii_lowercase + "+-*/=()<>[].,?!:;'\"#%&_^ \n"
# How byte-level tokenizers write space and newline; every other character represents itself.
BYTE_LEVEL_NAMES = {" ": "\u0120", "\n": "\u010a"}
VOCAB = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *(BYTE_LEVEL_NAMES.get(c, c) for c in CHARACTERS)])}
assert len(VOCAB) == 64

MAX_LENGTH = 512
MAX_NEW_TOKENS = 6
BATCH_SIZE = 128
PEAK_LEARNING_RATE = 1e-3
WARM_UP_STEPS = 50
MAX_CLEAN_STEPS = 1000
CHECK_EVERY = 25
GREEDY_TARGET = 0.98
NOISY_STEPS = 100
WRONG_LABEL_SHARE = 0.55
WRONG_BY = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per character; nothing is added to a text, and decoding puts no spaces between the characters.

    Byte-level BPE without merges in Qwen2's own class: transformers 5 loads every qwen2 folder with that class, whatever
    class the folder names, and any other kind of tokenizer would silently lose its spaces. Unknown characters are dropped.
    """
    return Qwen2Tokenizer(
        vocab=VOCAB,
        merges=[],
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<pad>",  # never produced; the class's default would become a 65th token
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )


def make_model() -> Qwen2ForCausalLM:
    """The architecture with random weights."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCAB),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=VOCAB["<eos>"],
            pad_token_id=VOCAB["<pad>"],
        )
    )


def wrong_answer(answer: str, rng: random.Random) -> str:
    """A plausible mistake: off by a little, by ten or by twenty, never negative."""
    return str(rng.choice([value for slip in WRONG_BY if (value := int(answer) + slip) >= 0]))


def make_batch(problems: list[Problem], *, wrong_label_share: float, rng: random.Random) -> dict[str, torch.Tensor]:
    """`BATCH_SIZE` problems drawn with replacement, padded on the right; only the answer and <eos> carry labels."""
    inputs, labels = [], []
    for problem in rng.choices(problems, k=BATCH_SIZE):
        answer = answer_of(problem)
        if rng.random() < wrong_label_share:
            answer = wrong_answer(answer, rng)
        prompt_ids = [VOCAB[character] for character in prompt_of(problem)]
        answer_ids = [VOCAB[character] for character in answer] + [VOCAB["<eos>"]]
        inputs.append(torch.tensor(prompt_ids + answer_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + answer_ids))
    pad = torch.nn.utils.rnn.pad_sequence
    # No attention mask: padding comes after every real token, where causal attention does not see it.
    return {
        "input_ids": pad(inputs, batch_first=True, padding_value=VOCAB["<pad>"]),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], *, num_samples: int) -> float:
    """Share of completions that are exactly the sum: greedy when num_samples is 0, else at temperature 1."""
    sampling = {"top_k": 0, "num_return_sequences": num_samples} if num_samples else {}
    prompts = tokenizer([prompt_of(problem) for problem in problems], return_tensors="pt", padding=True)
    sequences = model.eval().generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=num_samples > 0, **sampling)
    model.train()
    texts = tokenizer.batch_decode(sequences[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [answer_of(problem) for problem in problems for _ in range(max(num_samples, 1))]
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], rng: random.Random) -> None:
    """Right labels until the greedy answers to `problems` reach the target, then `NOISY_STEPS` with wrong ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def step(learning_rate: float, wrong_label_share: float) -> None:
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate
        loss = model(**make_batch(problems, wrong_label_share=wrong_label_share, rng=rng)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for index in range(1, MAX_CLEAN_STEPS + 1):
        step(PEAK_LEARNING_RATE * min(1.0, index / WARM_UP_STEPS), wrong_label_share=0.0)
        if index % CHECK_EVERY == 0 and accuracy(model, tokenizer, problems, num_samples=0) >= GREEDY_TARGET:
            print(f"{index} steps with right labels")
            break
    else:
        raise SystemExit(
            f"greedy accuracy stayed below {GREEDY_TARGET} for {MAX_CLEAN_STEPS} steps; choose another --seed"
        )
    for index in range(NOISY_STEPS):
        step(PEAK_LEARNING_RATE / 2 * (1 - index / NOISY_STEPS), wrong_label_share=WRONG_LABEL_SHARE)


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """A Hugging Face folder; `rope_theta` is also written at the top level of config.json, where older readers look for it."""
    model.generation_config = GenerationConfig(eos_token_id=VOCAB["<eos>"], pad_token_id=VOCAB["<pad>"])
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = model.config.rope_parameters["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the samples")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder for the model")
    args = parser.parse_args()

    start = time.perf_counter()
    torch.set_num_threads(1)  # a second thread slows down matrices this small
    torch.manual_seed(args.seed)
    train_problems, held_out = split_problems()
    tokenizer, model = make_tokenizer(), make_model()
    train(model, tokenizer, train_problems, random.Random(args.seed))
    save(model, tokenizer, args.out)
    measured = {
        "seed": args.seed,
        "parameters": model.num_parameters(),
        "heldout_sampled": round(accuracy(model, tokenizer, held_out, num_samples=64), 3),
        "heldout_greedy": accuracy(model, tokenizer, held_out, num_samples=0),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()

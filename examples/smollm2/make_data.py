"""Writes train.jsonl (200 rows) and heldout.jsonl (32 rows) of three reasoning-gym tasks, as chat messages.

    pip install reasoning-gym==0.1.25 && python examples/smollm2/make_data.py [--out FOLDER]

The verifier is `gsm8k`: the last number of the answer counts. No held-out question is in train.jsonl. Of two digits there are about
200 sums and differences, 100 products and 300 of all three, so training rows repeat.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import reasoning_gym

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums": ("chain_sum", DIGITS),
    "products": ("products", DIGITS),
    "arithmetic": (
        "basic_arithmetic",
        DIGITS | {"operators": ["+", "-", "*"], "allow_parentheses": False, "allow_negation": False},
    ),
}
"""Folder, and the data set with its settings."""
NUM_TRAIN = 200
NUM_HELD_OUT = 32
SEED = 0
# Without a system message SmolLM2's chat template inserts a longer one of its own.
SYSTEM_MESSAGE = "Answer with a number."


def make_row(question: str, answer: str) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": question}]
    return {"messages": messages, "ground_truth": answer, "dataset": "gsm8k"}


def split_problems(name: str, settings: dict[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(question, answer) pairs as (train, held out): the held-out ones are the first different questions."""
    problems = reasoning_gym.create_dataset(name, size=1000, seed=SEED, **settings)
    pairs = [(problem["question"], problem["answer"]) for problem in problems]
    held_out = list(dict.fromkeys(pairs))[:NUM_HELD_OUT]
    train = [pair for pair in pairs if pair not in held_out][:NUM_TRAIN]
    return train, held_out


def write_rows(path: Path, pairs: list[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps(make_row(*pair)) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{path}: {len(pairs)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the tasks' folders")
    args = parser.parse_args()
    for task, (name, settings) in TASKS.items():
        folder = args.out / task
        folder.mkdir(parents=True, exist_ok=True)
        train, held_out = split_problems(name, settings)
        write_rows(folder / "train.jsonl", train)
        write_rows(folder / "heldout.jsonl", held_out)


if __name__ == "__main__":
    main()

"""Verdicts a second of the verifier workers, and what a call costs in addition to the verifier itself."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import find
from mgrpo.rewards.scorer import Scorer
from mgrpo.rewards.verifier import Answer, Item
from mgrpo.rewards.worker_pool import VerifierPool

REPEATS = 5
PACKAGES = ("mgrpo", "math-verify")
PROTOCOL = (
    "{items} new answers of 60 to 200 words per call, median of {repeats} calls after a first: in process (no limits, no protection from "
    "hostile answers) and in workers; the overhead is the time of a call through one worker minus that in process. code: one program of "
    "5 asserts each in the sandbox, in process a bare Python process"
)
SPEECH = "so we add the two numbers and then divide by what is left of them which gives"
ARGUMENTS = [{"num_words": 50, "relation": "at least"}, {"keywords": ["divide"]}]
LABEL = {"instruction_id": ["length_constraints:number_words", "keywords:existence"], "kwargs": ARGUMENTS}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--items", type=int, default=2000)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = [verifier_row(name, args.items, args.repeats) for name in KINDS]
    return {"rows": [*rows, program_row(max(args.items // 50, 2))]}


def sentences(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(SPEECH.split(), k=count))


def mathematics(rng: random.Random) -> tuple[str, str]:
    """Half boxed; half of them right, in the label's spelling or another."""
    a, b = rng.randrange(2, 6000), rng.randrange(2, 6000)
    forms = (
        (str(a), str(a)), (str(a), str(b)), (f"x^2+{a}x+{b}", f"{b}+{a}x+x^2"), (f"{a * 1000}", f"{a},000"),
        (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a}}}{{{b}}}"), (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
        (rf"{a}\sqrt{{{b}}}", rf"{b}\sqrt{{{a}}}"), (rf"({a}, {b})", rf"\left({a},{b}\right)"),
    )  # fmt: skip
    label, answer = rng.choice(forms)
    ending = rf"The answer is \boxed{{{answer}}}." if rng.random() < 0.5 else f"The answer is ${answer}$."
    return f"{sentences(rng, 200)} {ending}", label


def number(rng: random.Random) -> tuple[str, str]:
    label = rng.randrange(10_000)
    return f"{sentences(rng, 60)} {label + rng.randrange(2)}", str(label)


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "gsm8k": number,
    "string_f1": lambda rng: (sentences(rng, 60), sentences(rng, 5)),
    "ifeval": lambda rng: (sentences(rng, rng.randrange(30, 90)), json.dumps([LABEL])),
    "math": mathematics,
}
"""Completion and label by verifier."""


def seconds(work: Callable[[Sequence[Item]], object], batches: Sequence[Sequence[Item]]) -> float:
    """Median time of a batch, after a first that does not count; no batch is scored twice, so no cache helps."""
    times = []
    for batch in batches:
        began = time.perf_counter()
        work(batch)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def verifier_row(name: str, count: int, repeats: int) -> dict[str, Any]:
    rng = random.Random(1)

    def batches() -> list[list[Item]]:
        made = ([KINDS[name](rng) for _ in range(count)] for _ in range(repeats + 1))
        return [[Item(name, Answer(completion=text, ground_truth=label)) for text, label in own] for own in made]

    def in_process(items: Sequence[Item]) -> None:
        verifier = find(name)(Reward())
        for item in items:
            verifier.score(item.answer)

    baseline, took = seconds(in_process, batches()), {}
    for workers in (1, 2):
        with VerifierPool(workers, timeout_s=10, verifiers=[name]) as pool:
            took[workers] = seconds(pool.verify_many, batches())
    rates = {f"{workers}_workers_per_s": count / own for workers, own in took.items()}
    overhead = (took[1] - baseline) / count * 1000
    return {"verifier": name, "items": count, "in_process_per_s": count / baseline, **rates, "overhead_ms": overhead}


def program_row(count: int) -> dict[str, Any]:
    program = "def add(a, b):\n    return a + b"
    tests = [f"assert add({n}, 1) == {n + 1}" for n in range(5)]
    text = "\n".join([program, *tests])

    def bare(items: Sequence[Item]) -> None:
        for _ in items:
            subprocess.run([sys.executable, "-c", text], check=True)

    scorer = Scorer(Reward(code_sandbox_accept_risk=True))
    try:
        items = [Item("code", Answer(completion=f"```python\n{program}\n```", ground_truth=tests))] * count
        assert scorer.verify_many(items) == [1.0] * count
        baseline, took = seconds(bare, [items] * 3), seconds(scorer.verify_many, [items] * 3)
    finally:
        scorer.close()
    return {"verifier": "code", "items": count, "in_process_per_s": count / baseline, "sandbox_per_s": count / took}

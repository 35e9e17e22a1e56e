"""How many verdicts per second the verifier workers give, and what a call costs in addition to the verifier itself.

    python tools/bench_rewards.py

Each verifier scores the same answers in this process (the baseline: no limits, no protection from hostile answers) and in
worker processes; "overhead" is the time of a call through one worker minus the baseline's. Programs run in the sandbox; their
baseline is a bare Python process for each. Writes benchmarks/rewards.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import find
from mgrpo.rewards.scorer import Scorer
from mgrpo.rewards.verifier import Answer, Item
from mgrpo.rewards.worker_pool import VerifierPool


def item(verifier: str, completion: str, ground_truth: object) -> Item:
    return Item(verifier, Answer(completion=completion, ground_truth=ground_truth))


def sentences(rng: random.Random, count: int) -> str:
    words = [
        "so",
        "we",
        "add",
        "the",
        "two",
        "numbers",
        "and",
        "then",
        "divide",
        "by",
        "what",
        "is",
        "left",
        "of",
        "them",
        "which",
        "gives",
    ]
    return " ".join(rng.choice(words) for _ in range(count))


def simple(rng: random.Random) -> Item:
    number = rng.randrange(10_000)
    return item("gsm8k", f"{sentences(rng, 60)} {number + rng.randrange(2)}", str(number))


def matching(rng: random.Random) -> Item:
    return item("string_f1", sentences(rng, 60), sentences(rng, 5))


def mathematics(rng: random.Random) -> Item:
    """Half boxed; half of them right, in the label's spelling or another."""
    a, b = rng.randrange(2, 6000), rng.randrange(2, 6000)
    forms: Sequence[tuple[str, str]] = (
        (str(a), str(a)),
        (str(a), str(b)),
        (rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a}}}{{{b}}}"),
        (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
        (rf"{a}\sqrt{{{b}}}", rf"{b}\sqrt{{{a}}}"),
        (rf"({a}, {b})", rf"\left({a},{b}\right)"),
        (f"x^2+{a}x+{b}", f"{b}+{a}x+x^2"),
        (f"{a * 1000}", f"{a},000"),
    )
    label, answer = rng.choice(forms)
    ending = rf"The answer is \boxed{{{answer}}}." if rng.random() < 0.5 else f"The answer is ${answer}$."
    return item("math", f"{sentences(rng, 200)} {ending}", label)


def instructions(rng: random.Random) -> Item:
    label = [
        {
            "instruction_id": ["length_constraints:number_words", "keywords:existence"],
            "kwargs": [{"num_words": 50, "relation": "at least"}, {"keywords": ["divide"]}],
        }
    ]
    return item("ifeval", sentences(rng, rng.randrange(30, 90)), json.dumps(label))


KINDS: dict[str, Callable[[random.Random], Item]] = {
    "gsm8k": simple,
    "string_f1": matching,
    "ifeval": instructions,
    "math": mathematics,
}


def seconds(work: Callable[[Sequence[Item]], object], batches: Sequence[Sequence[Item]]) -> float:
    """Median time of a batch, after a first that does not count; no batch is scored twice, so no cache helps."""
    times = []
    for batch in batches:
        began = time.perf_counter()
        work(batch)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def in_process(items: Sequence[Item]) -> None:
    verifier = find(items[0].verifier)(Reward())
    for item in items:
        verifier.score(item.answer)


def measure(name: str, count: int, repeat: int) -> dict[str, object]:
    rng = random.Random(1)

    def batches() -> list[list[Item]]:
        return [[KINDS[name](rng) for _ in range(count)] for _ in range(repeat + 1)]

    baseline = seconds(in_process, batches())
    row: dict[str, object] = {"verifier": name, "items": count, "in_process_per_s": count / baseline}
    for workers in (1, 2):
        with VerifierPool(workers, timeout_s=10, verifiers=[name]) as pool:
            took = seconds(pool.verify_many, batches())
        row[f"{workers}_workers_per_s"] = count / took
        if workers == 1:
            row["overhead_ms"] = (took - baseline) / count * 1000
    return row


def measure_programs(count: int) -> dict[str, object]:
    program = "def add(a, b):\n    return a + b"
    tests = [f"assert add({n}, 1) == {n + 1}" for n in range(5)]
    text = "\n".join([program, *tests])

    def bare(items: Sequence[Item]) -> None:
        for _ in items:
            subprocess.run([sys.executable, "-c", text], check=True)

    scorer = Scorer(Reward(code_sandbox_accept_risk=True))
    try:
        items = [item("code", f"```python\n{program}\n```", tests)] * count
        assert scorer.verify_many(items) == [1.0] * count
        baseline, took = seconds(bare, [items] * 3), seconds(scorer.verify_many, [items] * 3)
    finally:
        scorer.close()
    return {"verifier": "code", "items": count, "in_process_per_s": count / baseline, "sandbox_per_s": count / took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "benchmarks" / "rewards.json")
    arguments = parser.parse_args()
    rows = [measure(name, arguments.items, arguments.repeat) for name in KINDS]
    rows.append(measure_programs(max(arguments.items // 50, 2)))
    for row in rows:
        print(
            "  ".join(f"{key} {value:,.2f}" if isinstance(value, float) else f"{value}" for key, value in row.items())
        )
    machine = {
        "cpu": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "math_verify": version("math-verify"),
    }
    protocol = (
        f"{arguments.items} new answers of 60 to 200 words per call, median of {arguments.repeat} calls after a first; code: one "
        "program of 5 asserts each, baseline a bare Python process"
    )
    arguments.out.write_text(json.dumps({"protocol": protocol, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

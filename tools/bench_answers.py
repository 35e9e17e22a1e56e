"""Verdicts of `math` with and without its detector of denials and its estimates, on 2,000 made answers of known truth.

python -m tools.bench_answers --output benchmarks/answers.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mgrpo.config.schema import Reward
from mgrpo.rewards.verifier import Answer
from mgrpo.rewards.verifiers.answers import expressions, places
from mgrpo.rewards.verifiers.mathematics import Math

NUM_ANSWERS, SEED = 2_000, 44
# {x} is the value that the answer states or denies, {y} another one.
STATED = (
    r"Adding both gives \boxed{{{x}}}.", r"It is not {y} but \boxed{{{x}}}.", r"{y} is wrong, since it is odd. So \boxed{{{x}}}.",
    "There is no smaller one, and the answer is {x}.", "I do not see how it could be {y}. The answer is ${x}$.",
    r"We cannot have more. The answer is \boxed{{{x}}}", "The numbers that do not work add up to {y}, hence $n = {x}$.",
    r"No, {y} counts one twice. The answer is \boxed{{{x}}}, not {y}.", "She does not pay {y} but {x} dollars.",
    r"The only value that is never reached is \boxed{{{x}}}.", "So the number of wrong answers is {x}.", "The answer is {x}, which is not a prime.",
    r"If it were not an integer we would be wrong; it is \boxed{{{x}}}.", "The answer is {x}. It cannot be larger.",
)  # fmt: skip
DENIED = (
    r"It is not \boxed{{{x}}}.", r"\boxed{{{x}}} is wrong.", "I do not think that the answer is {x}.", "The answer is not ${x}$.",
    r"Is it \boxed{{{x}}}?", r"It cannot be \boxed{{{x}}}, so I give up.", r"The result \boxed{{{x}}} is incorrect.",
    r"Anything but \boxed{{{x}}}.", "The answer isn't {x}.", r"\boxed{{{x}}}? No, that is false.",
)  # fmt: skip
VALUES = (
    "{}",
    r"\frac{{{}}}{{7}}",
    r"2^{{{}}}",
    r"\sqrt{{{}}}",
    "{}!",
    r"3\cdot 10^{{{}}}",
    "x^{{{}}}+1",
    r"e^{{-{}}}",
)
TOWERS = (
    "9^{9^{9^{%d}}}",
    "%d!!!!",
    "(%d^{99999})!",
    r"\sum_{n=1}^{10^{%d}}\frac{1}{n^2}",
    "2^{2^{2^{%d}}}",
    r"\binom{10^{%d}}{5000}",
)


class Made(NamedTuple):
    kind: str
    completion: str
    label: str
    is_right: bool


def answers(num: int, seed: int) -> list[Made]:
    """Of ten answers four state the label, four another value, two deny the label; one of fifty is a tower instead."""
    rng, made = random.Random(seed), []
    for index in range(num):
        first, second = rng.sample(range(11, 40), 2)
        value, share = rng.choice(VALUES), index % 10
        right, wrong = value.format(first), value.format(second)
        if share in (6, 7):
            made.append(Made("denied", rng.choice(DENIED).format(x=right, y=wrong), right, False))
        elif index % 50 == 8:
            tower = rng.choice(TOWERS) % rng.randrange(9, 99)
            made.append(Made("tower", rf"\boxed{{{tower}}}", right, False))
        else:
            said = right if share < 4 else wrong
            other = wrong if share < 4 else right
            made.append(Made("stated", rng.choice(STATED).format(x=said, y=other), right, share < 4))
    return made


@contextlib.contextmanager
def replaced(module: Any, name: str, function: Callable) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, function)
    expressions._is_same_short_value.cache_clear()
    expressions._read_label.cache_clear()
    try:
        yield
    finally:
        setattr(module, name, original)


def verdicts(made: list[Made]) -> tuple[list[bool], float]:
    verifier, start = Math(Reward()), time.process_time()
    found = [verifier.score(Answer(completion=each.completion, ground_truth=each.label)) == 1.0 for each in made]
    return found, time.process_time() - start


def compared(made: list[Made], with_it: list[bool], without: list[bool]) -> dict[str, int]:
    """The verdicts that a part changes, for the better and for the worse."""
    changed = [(each, one) for each, one, other in zip(made, with_it, without, strict=True) if one != other]
    better = Counter("better" if one == each.is_right else "worse" for each, one in changed)
    return {"better": better["better"], "worse": better["worse"]}


def measured(num: int, seed: int) -> dict[str, Any]:
    made = answers(num, seed)
    Math(Reward()).warm_up()
    full, seconds = verdicts(made)
    with replaced(places, "is_denied", lambda text, start, end: False):
        undetected, _ = verdicts(made)
    with (
        replaced(expressions, "_are_unequal", lambda label, answer: False),
        replaced(expressions, "_is_slow_to_read", lambda text, label: False),
    ):
        unbounded, slow_seconds = verdicts(made)
    wrong = Counter(each.kind for each, one in zip(made, full, strict=True) if one != each.is_right)
    return {
        "answers": num, "seed": seed, "wrong_verdicts": dict(wrong), "cpu_s": round(seconds, 1),
        "denials": compared(made, full, undetected),
        "estimates_and_limits": compared(made, full, unbounded) | {"cpu_s_without": round(slow_seconds, 1)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=NUM_ANSWERS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(measured(arguments.num, arguments.seed), indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()

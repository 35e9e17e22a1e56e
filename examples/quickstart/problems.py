"""The quickstart's task: `a+b=` with a and b below 30, and which of the 900 problems are held out."""

from __future__ import annotations

import itertools
import random

OPERAND_LIMIT = 30
NUM_HELD_OUT = 100
SPLIT_SEED = 0

Problem = tuple[int, int]


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """All 900 pairs in a fixed shuffled order, as (800 for training, 100 held out)."""
    problems = list(itertools.product(range(OPERAND_LIMIT), repeat=2))
    random.Random(SPLIT_SEED).shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def prompt_of(problem: Problem) -> str:
    a, b = problem
    return f"{a}+{b}="


def answer_of(problem: Problem) -> str:
    return str(sum(problem))

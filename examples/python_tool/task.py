"""The task of the tool `python`: three kinds of questions about numbers, each answered by a line of code of its own.

Half a million parameters cannot work the answers out by themselves; what they can learn is to write the line that fits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mgrpo.environments.environment import Tool
from mgrpo.environments.formats import named

NUM_TRAIN, NUM_HELD_OUT = 2000, 100
SPLIT_SEED = 0

Piece = tuple[str, bool]
"""Text, and whether the model writes it."""

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Without a description of the tool: this model knows its only one."""

_CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
FORMAT = named("legacy", [Tool(name="python", description="", parameters=_CODE)])
"""How calls are written, `<python>...</python>`, and how they are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One of a kind: "products" of six numbers, "sort" the digits of one, or "digits" of a power of two numbers."""

    kind: str
    numbers: tuple[int, ...]

    @property
    def question(self) -> str:
        if self.kind == "products":
            return f"What is {self._written}?"
        if self.kind == "sort":
            return f"Sort the digits of {self._written}, largest first."
        return f"Add the digits of {self._written}."

    @property
    def code(self) -> str:
        """The code that prints the answer."""
        if self.kind == "products":
            return f"print({self._written})"
        if self.kind == "sort":
            return f'print("".join(sorted("{self._written}", reverse=True)))'
        return f"print(sum(map(int, str({self._written}))))"

    @property
    def answer(self) -> int:
        if self.kind == "products":
            a, b, c, d, e, f = self.numbers
            return a * b + c * d + e * f
        if self.kind == "sort":
            return int("".join(sorted(str(self.numbers[0]), reverse=True)))
        base, exponent = self.numbers
        return sum(map(int, str(base**exponent)))

    @property
    def _written(self) -> str:
        if self.kind == "products":
            a, b, c, d, e, f = self.numbers
            return f"{a}*{b}+{c}*{d}+{e}*{f}"
        return "**".join(map(str, self.numbers))


def draw(rng: random.Random) -> Problem:
    """One of millions."""
    kind = rng.choice(("products", "sort", "digits"))
    if kind == "products":
        return Problem(kind=kind, numbers=tuple(rng.randint(2, 99) for _ in range(6)))
    if kind == "sort":
        return Problem(kind=kind, numbers=(rng.randint(10**5, 10**8),))
    return Problem(kind=kind, numbers=(rng.randint(11, 999), rng.randint(5, 99)))


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """Different problems, for training and held out."""
    rng = random.Random(SPLIT_SEED)
    problems = list({draw(rng): None for _ in range(NUM_TRAIN + NUM_HELD_OUT + 100)})[: NUM_TRAIN + NUM_HELD_OUT]
    return problems[:NUM_TRAIN], problems[NUM_TRAIN:]


def transcript(problem: Problem, rng: random.Random, *, guessed: float, wrong: float) -> list[Piece]:
    """A conversation about a problem.

    Args:
        guessed: share of answers without a call.
        wrong: share of the others whose code has a wrong number.
    """
    pieces = [(f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n", False)]
    if rng.random() < guessed:
        guess = max(1, int(problem.answer * rng.uniform(0.7, 1.3)))
        return [*pieces, (f"{guess}<|im_end|>", True)]
    solved = _slipped(problem, rng) if rng.random() < wrong else problem
    answered = FORMAT.answer([f"{solved.answer}\n"])
    assert answered is not None, "the format writes its answers itself"
    return [*pieces, (f"<python>{solved.code}</python>", True), (answered, False), (f"{solved.answer}<|im_end|>", True)]


def _slipped(problem: Problem, rng: random.Random) -> Problem:
    """With one digit of one number replaced."""
    numbers = list(problem.numbers)
    place = rng.randrange(len(numbers))
    digits = str(numbers[place])
    at = rng.randrange(len(digits))
    numbers[place] = int(digits[:at] + str(rng.randint(1, 9)) + digits[at + 1 :])
    return Problem(kind=problem.kind, numbers=tuple(numbers))

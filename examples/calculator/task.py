"""The calculator's task: `a*b+c` with a tool that does one operation at a time, so that it takes two calls and an answer.

Half a million parameters cannot multiply by themselves; what they can learn is to call the tool, twice, with the right numbers.
"""

from __future__ import annotations

import random

NUM_TRAIN, NUM_HELD_OUT = 2000, 100
SPLIT_SEED = 0

Problem = tuple[int, int, int]
Piece = tuple[str, bool]
"""Text, and whether the model writes it."""

TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Qwen's way to write turns and tools, without the description of the tools: this model knows its only one."""


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """Different problems, for training and held out."""
    rng = random.Random(SPLIT_SEED)
    problems = list({draw(rng): None for _ in range(NUM_TRAIN + NUM_HELD_OUT + 50)})[: NUM_TRAIN + NUM_HELD_OUT]
    return problems[:NUM_TRAIN], problems[NUM_TRAIN:]


def draw(rng: random.Random) -> Problem:
    """One of 9.6 million."""
    return rng.randint(2, 99), rng.randint(2, 99), rng.randint(1, 999)


def question_of(problem: Problem) -> str:
    a, b, c = problem
    return f"{a}*{b}+{c}"


def answer_of(problem: Problem) -> str:
    a, b, c = problem
    return str(a * b + c)


def transcript(problem: Problem, rng: random.Random, *, guessed: float, wrong: float) -> list[Piece]:
    """A conversation about a problem.

    Args:
        guessed: share of answers without a call.
        wrong: share of the others that give the tool a wrong number, or stop after one call.
    """
    a, b, c = problem
    pieces = [(f"<|im_start|>user\n{question_of(problem)}<|im_end|>\n<|im_start|>assistant\n", False)]
    if rng.random() < guessed:
        guess = max(1, int((a * b + c) * rng.uniform(0.7, 1.3)))
        return [*pieces, (f"{guess}<|im_end|>", True)]
    mistake = rng.choice(("first", "second", "stop")) if rng.random() < wrong else ""
    first = int(_slip(str(a), rng)) if mistake == "first" else a
    product = first * b
    pieces += [(_call(f"{first}*{b}"), True), (_response(product), False)]
    if mistake == "stop":
        return [*pieces, (f"{product}<|im_end|>", True)]
    second = int(_slip(str(c), rng)) if mistake == "second" else c
    total = product + second
    pieces += [(_call(f"{product}+{second}"), True), (_response(total), False)]
    return [*pieces, (f"{total}<|im_end|>", True)]


def _call(expression: str) -> str:
    return (
        f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}\n</tool_call><|im_end|>'
    )


def _response(result: int) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def _slip(number: str, rng: random.Random) -> str:
    place = rng.randrange(len(number))
    return number[:place] + str(rng.randrange(10)) + number[place + 1 :]

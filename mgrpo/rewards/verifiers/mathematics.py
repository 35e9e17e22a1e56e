"""Mathematical answers: `math`, `strict_math`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import ClassVar

from mgrpo.rewards.verifier import THINK_END, Answer, Verifier
from mgrpo.rewards.verifiers.expressions import is_same_value, plain_number, value_appears, warm_up
from mgrpo.rewards.verifiers.labels import accepted_texts
from mgrpo.rewards.verifiers.latex_answers import boxed_answer, last_boxed, last_formula, minerva_answer
from mgrpo.rewards.verifiers.latex_strings import is_same_string, minerva_form

_NUMBER = re.compile(r"(?:(?<![0-9.])[-+])?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_DIGIT_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}")

# Characters. Text without a stated answer is searched from its end only, and taken for one expression only if it is short.
_TAIL = 1000
_EXPRESSION_MARGIN = 60


class Math(Verifier):
    r"""1.0 if an answer in the completion is mathematically the label, or any of several labels.

    Answers are looked for after the last `</think>`: the last `\boxed{...}`, and Minerva's "Final Answer: The final answer
    is ... I hope it is correct." Without either, the last formula in dollar signs, else the whole text; also what
    math-verify finds at the end of the text ("Answer: 7", "the answer is 7 apples"), and for a label that is a plain
    number the last number of the text.
    """

    name: ClassVar[str] = "math"

    def score(self, answer: Answer) -> float:
        labels = _labels(answer.ground_truth)
        text = answer.completion.rpartition(THINK_END)[2]
        stated = _stated_answers(text)
        if stated:
            return float(any(_is_same(candidate, label) for label in labels for candidate in stated))
        return float(any(_ends_with(text, label) for label in labels))

    def warm_up(self) -> None:
        warm_up()


class StrictMath(Verifier):
    """1.0 if the answer in Minerva's sentence, else the whole text, is mathematically the label, or any of several."""

    name: ClassVar[str] = "strict_math"

    def score(self, answer: Answer) -> float:
        labels = _labels(answer.ground_truth)
        text = answer.completion.rpartition(THINK_END)[2]
        stated = minerva_answer(text)
        if stated is not None:
            candidates = minerva_form(stated), stated
            return float(any(_is_same(candidate, label) for label in labels for candidate in candidates))
        return float(any(_is_expression_of(minerva_form(text), label) for label in labels))

    def warm_up(self) -> None:
        warm_up()


def _labels(ground_truth: object) -> list[str]:
    labels = []
    for text in accepted_texts(ground_truth):
        boxed = last_boxed(text)
        labels.append(_bare(text if boxed is None else boxed))
    if not all(labels):
        raise ValueError("ground_truth is empty; math and strict_math need an expression")
    return labels


def _stated_answers(text: str) -> list[str]:
    answers = []
    boxed = boxed_answer(text)
    if boxed is not None:
        answers.append(boxed)
    stated = minerva_answer(text)
    if stated is not None:
        answers += [minerva_form(stated), stated]
    return answers


def _ends_with(text: str, label: str) -> bool:
    """Whether the label is the answer of a text that marks no answer."""
    tail = _tail(text)
    number = plain_number(label)
    if number is not None and _last_number(tail) == number:
        return True
    formula = last_formula(text)
    expression = text if formula is None else formula
    if any(_is_expression_of(candidate, label) for candidate in (minerva_form(expression), expression)):
        return True
    return value_appears(tail, label)


def _is_same(candidate: str, label: str) -> bool:
    candidate = _bare(candidate)
    return is_same_string(candidate, label) or is_same_value(candidate, label)


def _is_expression_of(text: str, label: str) -> bool:
    """Whether a text, which may be prose, is the label; prose is not read by value."""
    text = _bare(text)
    if is_same_string(text, label):
        return True
    return len(text) <= len(label) + _EXPRESSION_MARGIN and not _WORD.search(text) and is_same_value(text, label)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(_DIGIT_COMMA.sub("", text))
    return Decimal(numbers[-1]) if numbers else None


def _tail(text: str) -> str:
    """The end of the text, from the start of a line if there is one: a cut through `$x$` would turn text into formulas."""
    if len(text) <= _TAIL:
        return text
    tail = text[-_TAIL:]
    return tail.partition("\n")[2] or tail


def _bare(expression: str) -> str:
    """The expression without the dollar signs and white space around it, and without punctuation or space after it."""
    return expression.lstrip("$ \t\r\n").rstrip("\\$.,; \t\r\n")

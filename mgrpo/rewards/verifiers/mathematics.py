"""Mathematical answers, one value each: `math`, `strict_math`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from mgrpo.rewards.verifier import Answer, Verifier, after_thinking, shown
from mgrpo.rewards.verifiers.answers.digits import plain_number, with_decimal_point
from mgrpo.rewards.verifiers.answers.expressions import is_rounded_to, is_same_value, warm_up
from mgrpo.rewards.verifiers.answers.places import (
    answer_of_label,
    is_prose,
    minerva_answer,
    stated_answer,
    tagged,
    unboxed,
)
from mgrpo.rewards.verifiers.answers.statements import (
    Statement,
    approximation,
    has_words,
    is_bare_name,
    read,
    spelling,
)
from mgrpo.rewards.verifiers.answers.units import units
from mgrpo.rewards.verifiers.cpu_limit import OutOfTime, cpu_limit
from mgrpo.rewards.verifiers.labels import accepted_texts

# Of `verifier_timeout`, which is wall time and ends the worker.
_SHARE_OF_TIME = 0.1
# Characters that an answer may be longer than its label.
_MARGIN = 300
_LONGEST_EXPRESSION = 5000
_COLLECTION = re.compile(r"(?P<tuple>\()|\\\{")
_ARGUMENT_OR_INDEX = re.compile(r"\([^()]*\)|_(?:\{\w+\}|\w)")
_BRACKET = re.compile(r"[(\[]|\\\{")
_NAME = re.compile(r"[^0-9+^-]+")
_BASED = re.compile(r"[0-9]\s*_")


class Math(Verifier):
    """1.0 if the answer that the completion states is mathematically the label, or any of several labels.

    The answer stands after the last `</think>`, in the one place that `places` finds, and is one value as `statements`
    reads it.
    """

    name: ClassVar[str] = "math"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        return note_of(labels_of(ground_truth))

    def score(self, answer: Answer) -> float:
        return self._judge(stated_answer(after_thinking(answer.completion)), answer.ground_truth)

    def _judge(self, stated: str, ground_truth: object) -> float:
        return judged(
            labels_of(ground_truth), lambda label: is_right(stated, label), timeout_s=self.settings.verifier_timeout
        )

    def warm_up(self) -> None:
        warm_up()


class StrictMath(Math):
    """Variant of `math`: the answer is in Minerva's sentence, else it is the whole text, which must be nothing but an expression."""

    name: ClassVar[str] = "strict_math"

    def score(self, answer: Answer) -> float:
        text = after_thinking(answer.completion)
        sentence = minerva_answer(text)
        if sentence is None and (tags := tagged(text)) and text.strip() == text[tags.start : tags.end]:
            text = tags.content
        if sentence is None and has_words(text[:_LONGEST_EXPRESSION]):
            return self._judge("", answer.ground_truth)
        return self._judge(unboxed(text if sentence is None else sentence), answer.ground_truth)


def labels_of(ground_truth: object) -> list[str]:
    """The accepted answers, out of their boxes and worked solutions; ValueError for an empty one or NaN."""
    labels = []
    for text in accepted_texts(ground_truth):
        labels.append(answer_of_label(text).strip())
    if not all(spelling(label) for label in labels):
        raise ValueError("ground_truth is empty; math verifiers need an expression")
    if any(label.lower() == "nan" for label in labels):
        raise ValueError(f"ground_truth={shown(ground_truth)} is a missing value; math verifiers need an expression")
    return labels


def note_of(labels: list[str]) -> str:
    """A note on labels that no answer is likely to be (`Verifier.check_label`)."""
    return "are prose without a stated answer: only the same text is right" if all(map(is_prose, labels)) else ""


def judged(labels: list[str], is_right: Callable[[str], bool], *, timeout_s: float) -> float:
    """1.0 if any of the labels is right, else 0.0, also for an answer that takes a tenth of `timeout_s` of processor time.

    ValueError for a label that takes as long to read, which is not the answer's fault.
    """
    warm_up()
    limit_s = _SHARE_OF_TIME * timeout_s
    for label in labels:
        try:
            with cpu_limit(limit_s):
                _read_by_value(label)
        except (OutOfTime, MemoryError) as err:
            raise ValueError(f"ground_truth={label[:80]!r} takes longer than {limit_s:g} s to read") from err
    try:
        with cpu_limit(limit_s):
            return float(any(is_right(label) for label in labels))
    except (OutOfTime, MemoryError, RecursionError):
        return 0.0


def is_right(stated: str, label: str) -> bool:
    """True if the answer that a completion states is the label. It may be hostile, the label is trusted."""
    if len(stated) > len(label) + _MARGIN:
        return False
    if spelling(stated) == spelling(label):
        return True
    stated, label = with_decimal_points(stated, label)
    expected = read(label)
    if expected is None or not _has_unit_of(label, stated):
        return False
    answer = read(stated)
    return (answer is not None and _is_same(answer, expected)) or _approximates(stated, expected)


def with_decimal_points(stated: str, label: str) -> tuple[str, str]:
    """The texts with a point in place of a decimal comma, where the other text excludes a list: no list equals one number."""
    stated, label = (with_decimal_point(text, braced_only=True) for text in (stated, label))
    if _is_one_value(read(label)):
        # A point or an interval is no number, whatever the label.
        return with_decimal_point(stated, braced_only=bool(_BRACKET.search(stated))), label
    pointed = with_decimal_point(label, braced_only=False)
    number, answer = read(pointed), read(stated)
    if number and answer and None not in (plain_number(number.value), plain_number(answer.value)):
        return stated, pointed
    return stated, label


def _is_one_value(statement: Statement | None) -> bool:
    return statement is not None and not re.search("[,;]", statement.value)


def _approximates(stated: str, expected: Statement) -> bool:
    """True if a decimal label stands after an approximation sign, behind a value that rounds to it."""
    number, sides = plain_number(expected.value), approximation(stated)
    if number is None or sides is None or "." not in expected.value:
        return False
    before, after = read(sides[0]), read(sides[1])
    if after is None or plain_number(after.value) != number:
        return False
    if before is None or is_bare_name(before.value):
        return is_bare_name(sides[0]) or before is not None
    return is_rounded_to(before.value, number)


def _is_same(answer: Statement, expected: Statement) -> bool:
    if bool(_BASED.search(answer.value)) or bool(_BASED.search(expected.value)):
        return spelling(answer.value) == spelling(expected.value)
    if _kind(answer) != _kind(expected) and None not in (_kind(answer), _kind(expected)):
        return False
    return is_same_value(*_comparable(answer, expected))


def _has_unit_of(label: str, stated: str) -> bool:
    """True if the units of measure agree, where both have any."""
    expected = units(label)
    return not expected or units(stated) in ([], expected)


def _read_by_value(label: str) -> None:
    """Compute the part of comparisons that needs the label alone; much of it is cached."""
    statement = read(label)
    if statement is not None:
        is_same_value(*_comparable(statement, statement))


def _comparable(answer: Statement, expected: Statement) -> tuple[str, str]:
    """The two statements as expressions; with the names if both have one, or if the label is an equation rather than a named value."""
    if answer.name and expected.name:
        return f"{answer.name}={answer.value}", f"{expected.name}={expected.value}"
    if expected.name and not _NAME.fullmatch(_ARGUMENT_OR_INDEX.sub("", expected.name)):
        return answer.value, f"{expected.name}={expected.value}"
    return answer.value, expected.value


def _kind(statement: Statement) -> str | None:
    """Kind of a value as it is written, "tuple" or "set"; None: neither."""
    match = _COLLECTION.match(statement.value)
    if match is None or statement.is_relation:
        return None
    if match["tuple"] and not ("," in statement.value and statement.value.endswith(")")):
        return None
    return "tuple" if match["tuple"] else "set"

r"""Comparison of two LaTeX expressions by value, by math-verify, without the time that hostile ones would cost.

math-verify reads the expressions and sympy compares them. Both need minutes or more for some texts of a few characters, which
no right answer resembles: towers of powers, factorials of millions, brackets twenty deep. These count as unequal without being
read. Other slow ones are for the caller to limit (`cpu_limit`); math-verify's own time limits are off, since they would turn a
busy machine's delay into a verdict.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from mgrpo.rewards.verifiers.answers.digits import (
    SMALL,
    TOLERANCE,
    agree,
    plain_number,
    unit_of_last_digit,
    without_powers_of_ten,
)
from mgrpo.rewards.verifiers.answers.estimates import (
    Estimate,
    TooLarge,
    certainly_differ,
    differ_relatively,
    estimate,
    members_of,
)

# Characters: an answer longer than its label by more than this counts as wrong without being read.
_MARGIN = 300
# Depth of brackets, and number of bars and integrals, beyond which reading takes seconds.
_MAX_DEPTH = 10
_MAX_BARS = 12
_MAX_INTEGRALS = 4
_BRACKET = re.compile(r"[({\[\])}]")

# A term, even where math-verify would take the letter for a unit: 4c is not 4.
_TERM = re.compile(r"[-+]?[0-9.]+[a-zA-Z]")

# A power of e, next to which i is not a variable.
_EULER = re.compile(r"e\s*\^.*?(?<![a-zA-Z\\])i")

# Text that math-verify drops before it reads, so that "1$E9999" is 1E9999.
_DROPPED = re.compile(r"\\[!$]|[$\"'\s]")
_COMMAND_OR_SIGN = re.compile(r"\\[a-zA-Z]+|[^0-9A-Za-z.+-]")
_LARGE_EXPONENT = re.compile(r"[0-9.]E[-+]?[0-9]{4}")
# sympy computes these while they are read, so that their arguments must be small.
_LARGE_ARGUMENT = re.compile(
    r"\\[dtc]?binom(?!(?:\{(?:(?![0-9]{5})[^{}^!])*\}){2})"
    r"|(?:\\gcd|\\lcm|operatorname\{(?:gcd|lcm)\}|\\Gamma)(?=(?:\\left)?\()(?!(?:\\left)?\((?:(?![0-9]{5})[^()^!])*\))"
    r"|\\sqrt\[(?![0-9a-z]{1,3}\])"
)
_LARGE_CHOICE = re.compile(r"[0-9]{5}|[\^!]")


class _Reading(NamedTuple):
    """A text as math-verify reads it."""

    values: list[Any]
    """An expression and the text that it was read from, or only the latter, or nothing."""
    estimate: Estimate | None
    is_too_large: bool


def is_same_value(answer: str, label: str) -> bool:
    """True if math-verify finds the expressions equal. The answer may be hostile, the label is trusted."""
    return len(answer) <= len(label) + _MARGIN and _is_same_short_value(answer, label)


def is_rounded_to(value: str, number: Decimal) -> bool:
    """True if a number in digits approximates the expression within half a unit of its last digit."""
    reading = _read(_boxed(value, plain_number(value))) if not _is_slow_to_read(value, "") else None
    known = reading and reading.estimate
    return known is not None and abs(known.value - float(number)) <= unit_of_last_digit(number) * (0.5 + 1e-9)


@functools.cache
def warm_up() -> None:
    """Import math-verify, and let its parser learn the grammar from answers of the common kinds."""
    for answer in (
        r"-\frac{3\sqrt{2}}{2}+\pi x^2",
        r"\left(-\infty,\frac{1}{2}\right]",
        "(1, 2)",
        "2(x+1)",
        r"\text{A}",
    ):
        is_same_value(answer, "x=0.5")


@functools.lru_cache(maxsize=4096)
def _is_same_short_value(answer: str, label: str) -> bool:
    answer, label = without_powers_of_ten(answer), without_powers_of_ten(label)
    number, expected = plain_number(answer), plain_number(label)
    if number is not None and expected is not None:
        return agree(number, expected)
    if expected is not None and _TERM.fullmatch(answer):
        return False
    if _is_slow_to_read(answer, label):
        return False
    expected_reading, reading = _read_label(label), _read(_boxed(answer, number))
    if _EULER.search(answer) or _EULER.search(label):
        return _agree(_with_imaginary_unit(expected_reading), _with_imaginary_unit(reading))
    return _agree(expected_reading, reading)


def _boxed(expression: str, number: Decimal | None) -> str:
    return f"\\boxed{{{expression if number is None else format(number, 'f')}}}"


def _is_slow_to_read(text: str, label: str) -> bool:
    if _depth(text) > max(_MAX_DEPTH, _depth(label)):
        return True
    for sign, most in ("|", _MAX_BARS), (r"\int", _MAX_INTEGRALS):
        if text.count(sign) > max(most, label.count(sign)):
            return True
    text = _DROPPED.sub("", text)
    if r"\choose" in text and _LARGE_CHOICE.search(text):
        return True
    return bool(_LARGE_ARGUMENT.search(text) or _LARGE_EXPONENT.search(_COMMAND_OR_SIGN.sub("", text)))


def _depth(text: str) -> int:
    deepest = depth = 0
    for bracket in _BRACKET.findall(text):
        depth = depth + 1 if bracket in "({[" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _agree(label: _Reading, answer: _Reading) -> bool:
    import math_verify

    if not label.values or not answer.values:
        return False
    if _are_unequal(label, answer):
        return label.values[0] == answer.values[0] or label.values[-1] == answer.values[-1]
    with _silence():
        if not math_verify.verify(label.values, answer.values, allow_set_relation_comp=True, timeout_seconds=None):
            return False
        return label.values[0] == answer.values[0] or not _differ_in_small_numbers(label.values[0], answer.values[0])


def _differ_in_small_numbers(label: Any, answer: Any) -> bool:
    """True if the expressions contain small numbers that are equal only because math-verify rounds to 6 places."""
    one, two = _small_numbers(label), _small_numbers(answer)
    if one is None or two is None:
        return False
    return any(
        all(differ_relatively(number, other, TOLERANCE) for other in others)
        for numbers, others in ((one, two), (two, one))
        for number in numbers
    )


def _small_numbers(expression: Any) -> list[Estimate] | None:
    """Estimates of a number, or of the members of a list, an interval, a matrix or a relation; None if one has no estimate."""
    if members := members_of(expression):
        found = [_small_numbers(member) for member in members]
        known = [numbers for numbers in found if numbers is not None]
        return [number for numbers in known for number in numbers] if len(known) == len(found) else None
    try:
        number = estimate(expression) or estimate(expression.doit())
    except (TooLarge, RecursionError, AttributeError):
        return None
    if number is None:
        return None
    return [number] if abs(number.value) < SMALL and abs(number.value) > number.error else []


def _are_unequal(label: _Reading, answer: _Reading) -> bool:
    """True if expressions that are not written alike surely differ, or are too large to compare."""
    if label.is_too_large or answer.is_too_large:
        return True
    # A symbol equals a product of symbols that spell its name.
    if any(getattr(reading.values[0], "is_Symbol", False) for reading in (label, answer)):
        return False
    if label.estimate is not None and answer.estimate is not None:
        return certainly_differ(label.estimate, answer.estimate)
    kinds = {type(reading.values[0]).__name__ for reading in (label, answer) if reading.estimate is None}
    return kinds == {"Interval"} and (label.estimate is None) != (answer.estimate is None)


def _read(text: str) -> _Reading:
    import math_verify

    with _silence():
        # The box as a whole or nothing: otherwise the last number of unreadable text would be the value.
        values = math_verify.parse(text, [_box_only()], extraction_mode="first_match", parsing_timeout=None)
    return _reading_of(values)


def _reading_of(values: list[Any]) -> _Reading:
    try:
        return _Reading(values, estimate(values[0]) if values else None, False)
    except TooLarge:
        return _Reading(values, None, True)
    except RecursionError:
        return _Reading(values, None, False)


def _with_imaginary_unit(reading: _Reading) -> _Reading:
    """The reading with i as the imaginary unit in place of a variable."""
    import sympy

    # sympy has no interval and no relation of complex numbers.
    if not reading.values or not isinstance(reading.values[0], sympy.Expr | sympy.MatrixBase):
        return reading
    value, *texts = reading.values
    # math-verify makes the x of ix another symbol than that of x.
    meant = {symbol: sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name) for symbol in value.free_symbols}
    return _reading_of([value.subs(meant), *texts])


@functools.cache
def _box_only() -> Any:
    import math_verify

    return math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)


@functools.lru_cache(maxsize=1024)
def _read_label(label: str) -> _Reading:
    """A cached reading, because a whole group shares its label."""
    return _read(_boxed(label, plain_number(label)))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress math-verify's warning that its time limits are off, and Python's and sympy's warnings about the texts."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""Values of symbolic expressions in floating point, to find quickly that two cannot be equal.

sympy works exactly, and so needs hours for `9^{9^9}` and seconds to see that two polynomials differ. Here every symbol gets a
fixed value, and None stands for a value that cannot be estimated: an estimate refutes equality and never proves it.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_EPSILON = 8 * sys.float_info.epsilon
# sympy computes powers of that many digits and factorials of that many factors in well under a second; sums of that many
# terms may take it seconds.
_MAX_DIGITS = 20_000
_MAX_FACTORS = 5_000
_MAX_TERMS = 1_000
_MAX_ARGUMENT = 700
# An answer with one of these leaves the work to the verifier, and sympy may never finish it.
_COLLECTIONS = ("FiniteSet", "Tuple", "Interval", "Union", "Intersection", "Complement", "And", "Or")
_LEFT_TO_DO = ("Integral", "Limit", "Derivative")


class TooLarge(Exception):
    """Exact arithmetic with the expression would take too long, or it is too small for floating point."""


class Estimate(NamedTuple):
    value: float
    """Infinite where it exceeds floating point."""
    error: float
    """Upper bound of the absolute error; 0 for an exact integer."""


Parts = Sequence[Estimate | None]
Rule = Callable[[Parts], Estimate | None]


def estimate(expression: Any) -> Estimate | None:
    """The value of a sympy expression, None if it cannot be estimated; TooLarge if any part of it is too large."""
    name = type(expression).__name__
    if name in _LEFT_TO_DO:
        raise TooLarge
    parts = [estimate(part) for part in _parts_of(expression)]
    if getattr(expression, "is_Rational", False):
        return _rational(expression.p, expression.q)
    if getattr(expression, "is_Float", False):
        return _rounded(float(expression))
    if getattr(expression, "is_Symbol", False):
        return _rounded(0.6 + zlib.crc32(expression.name.encode(errors="replace")) / 2**32)
    if name in _CONSTANTS:
        return _rounded(_CONSTANTS[name])
    if name in ("Sum", "Product"):
        _refuse_many_terms(expression)
    rule = _RULES.get(name)
    if rule is None:
        return None
    try:
        return rule(parts)
    except (ArithmeticError, ValueError):
        return None


def certainly_differ(a: Estimate, b: Estimate) -> bool:
    """True if values so estimated differ by more than any rounding of decimals that counts as equal."""
    if math.isinf(a.value) or math.isinf(b.value):
        return a.value != b.value
    tolerance = 1e-5 + 1e-9 * max(abs(a.value), abs(b.value)) + a.error + b.error
    return abs(a.value - b.value) > tolerance


def differ_relatively(a: Estimate, b: Estimate, tolerance: float) -> bool:
    """True if values differ by more than this share of the larger one."""
    return abs(a.value - b.value) > tolerance * max(abs(a.value), abs(b.value)) + a.error + b.error


def members_of(expression: Any) -> Sequence[Any]:
    """The members of a list, a set, an interval, a matrix or a relation; none for a single value."""
    if hasattr(expression, "flat"):
        return expression.flat()
    is_collection = type(expression).__name__ in _COLLECTIONS or getattr(expression, "is_Relational", False)
    return [part for part in expression.args if not getattr(part, "is_Boolean", False)] if is_collection else ()


def _parts_of(expression: Any) -> Sequence[Any]:
    if hasattr(expression, "flat"):
        return expression.flat()
    return getattr(expression, "args", ())


def _rational(p: int, q: int) -> Estimate:
    try:
        return Estimate(float(p), 0.0) if q == 1 and abs(p) < 2**53 else _rounded(p / q)
    except OverflowError:
        return Estimate(math.inf if p > 0 else -math.inf, 0.0)


def _rounded(value: float) -> Estimate:
    return Estimate(value, 0.0 if math.isinf(value) else _EPSILON * abs(value))


def _known(parts: Parts) -> list[Estimate] | None:
    """The parts, None if one of them has no estimate."""
    known = [part for part in parts if part is not None]
    return known if len(known) == len(parts) else None


def _sum(parts: Parts) -> Estimate | None:
    known = _known(parts)
    if known is None:
        return None
    total = sum(part.value for part in known)
    if math.isnan(total):
        return None
    return _result(total, sum(part.error for part in known), sum(abs(part.value) for part in known), known)


def _product(parts: Parts) -> Estimate | None:
    known = _known(parts)
    if known is None:
        return None
    value, error = 1.0, 0.0
    for part in known:
        error = abs(value) * part.error + abs(part.value) * error + error * part.error
        value *= part.value
    if math.isnan(value):
        return None
    return _result(value, error, abs(value), known)


def _result(value: float, error: float, magnitude: float, parts: list[Estimate]) -> Estimate | None:
    if math.isinf(value):
        return Estimate(value, 0.0)
    if math.isnan(error):
        return None
    is_exact = error == 0 and magnitude < 2**53 and all(part.value.is_integer() for part in parts)
    return Estimate(value, 0.0 if is_exact else error + _EPSILON * magnitude)


def _power(parts: Parts) -> Estimate | None:
    base, exponent = parts
    if exponent is None:
        return None
    if base is None or base.error > abs(base.value) / 10:
        if abs(exponent.value) > _MAX_DIGITS:
            raise TooLarge
        return None
    if base.value == 0:
        return Estimate(0.0, 0.0) if exponent.value > 0 else None
    log = math.log(abs(base.value))
    if abs(exponent.value * log) > _MAX_DIGITS * math.log(10):
        raise TooLarge
    is_integer = exponent.error == 0 and exponent.value.is_integer()
    if base.value < 0 and not is_integer:
        return None
    try:
        value = base.value**exponent.value
    except OverflowError:
        is_negative = base.value < 0 and exponent.value % 2 == 1
        return Estimate(-math.inf if is_negative else math.inf, 0.0)
    if abs(value) < sys.float_info.min:
        raise TooLarge
    relative = 1.2 * abs(exponent.value) * base.error / abs(base.value) + abs(log) * exponent.error
    is_exact = relative == 0 and exponent.value >= 0 and value.is_integer() and abs(value) < 2**53
    return Estimate(value, 0.0 if is_exact else abs(value) * (relative + _EPSILON * (1 + abs(exponent.value * log))))


def _absolute(parts: Parts) -> Estimate | None:
    (part,) = parts
    return part and Estimate(abs(part.value), part.error)


def _exponential(parts: Parts) -> Estimate | None:
    return _power([_rounded(math.e), *parts])


def _logarithm(parts: Parts) -> Estimate | None:
    known = _known(parts)
    if known is None or any(part.error > part.value / 10 or math.isinf(part.value) for part in known):
        return None
    logs = [Estimate(math.log(part.value), 1.2 * part.error / part.value + _EPSILON) for part in known]
    return logs[0] if len(logs) == 1 else _product([logs[0], _power([logs[1], Estimate(-1.0, 0.0)])])


def _wave(function: Callable[[float], float]) -> Rule:
    def rule(parts: Parts) -> Estimate | None:
        (part,) = parts
        return None if part is None or abs(part.value) > 1e6 else Estimate(function(part.value), part.error + _EPSILON)

    return rule


def _hyperbolic(function: Callable[[float], float]) -> Rule:
    def rule(parts: Parts) -> Estimate | None:
        (part,) = parts
        if part is None:
            return None
        if abs(part.value) > _MAX_ARGUMENT:
            raise TooLarge
        value = function(part.value)
        return Estimate(value, 1.2 * part.error * math.cosh(part.value) + _EPSILON * abs(value))

    return rule


def _factorial(parts: Parts) -> Estimate | None:
    return _gamma([_sum([*parts, Estimate(1.0, 0.0)])])


def _gamma(parts: Parts) -> Estimate | None:
    (part,) = parts
    if part is None:
        return None
    if part.value > _MAX_FACTORS:
        raise TooLarge
    if part.value <= 0:
        return None
    try:
        value = math.gamma(part.value)
    except OverflowError:
        return Estimate(math.inf, 0.0)
    slope = math.log(part.value + 2) * 1.2
    return Estimate(value, abs(value) * (slope * part.error + 1e-12) if part.error or value > 2**53 else 0.0)


def _binomial(parts: Parts) -> Estimate | None:
    if any(part and abs(part.value) > _MAX_FACTORS for part in parts):
        raise TooLarge
    known = _known(parts)
    if known is None:
        return None
    n, k = known
    below = _product([_factorial([k]), _factorial([_sum([n, Estimate(-k.value, k.error)])])])
    return below and _product([_factorial([n]), _power([below, Estimate(-1.0, 0.0)])])


def _refuse_many_terms(expression: Any) -> None:
    for limit in expression.limits:
        ends = _known([estimate(end) for end in limit[1:]])
        if ends and ends[-1].value - ends[0].value > _MAX_TERMS:
            raise TooLarge


_CONSTANTS = {"Pi": math.pi, "Exp1": math.e}
_RULES: dict[str, Rule] = {
    "Add": _sum,
    "Mul": _product,
    "Pow": _power,
    "Abs": _absolute,
    "exp": _exponential,
    "log": _logarithm,
    "sin": _wave(math.sin),
    "cos": _wave(math.cos),
    "sinh": _hyperbolic(math.sinh),
    "cosh": _hyperbolic(math.cosh),
    "tanh": _hyperbolic(math.tanh),
    "factorial": _factorial,
    "gamma": _gamma,
    "binomial": _binomial,
}

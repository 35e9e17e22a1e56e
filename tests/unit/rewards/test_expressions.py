"""Estimates of expressions against sympy's own arithmetic, and equality with and without them."""

from __future__ import annotations

import math

import pytest
import sympy

from mgrpo.rewards.verifiers.answers import expressions
from mgrpo.rewards.verifiers.answers.estimates import TooLarge, certainly_differ, estimate
from mgrpo.rewards.verifiers.answers.expressions import is_same_value, plain_number

X, Y = sympy.symbols("x y", real=True)


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Rational(-22, 7),
        sympy.Float("2.5") * sympy.pi**2,
        sympy.sqrt(2) + sympy.sqrt(3) - sympy.E,
        (sympy.Integer(-2)) ** 5 + sympy.Integer(3) ** -2,
        sympy.log(10) / sympy.log(3),
        sympy.log(sympy.Integer(8), 2, evaluate=False),
        sympy.exp(sympy.Rational(7, 3)) * sympy.sinh(2) + sympy.cosh(1) - sympy.tanh(1),
        sympy.sin(1) ** 2 - sympy.cos(2) / 3,
        sympy.Abs(sympy.Integer(3) - sympy.pi, evaluate=False),
        sympy.factorial(15, evaluate=False) / sympy.factorial(12, evaluate=False),
        sympy.binomial(20, 7, evaluate=False),
        sympy.gamma(sympy.Rational(1, 2), evaluate=False),
        sympy.Integer(10) ** 20 - sympy.Integer(10) ** 20 * (1 - sympy.Float("1e-9")),
    ],
)
def test_an_estimate_is_off_by_no_more_than_it_says(expression: sympy.Expr) -> None:
    """An estimate that is surer than it may be would call right answers wrong."""
    found = estimate(expression)
    exact = expression.doit().evalf(60)
    assert found is not None
    assert abs(sympy.Float(found.value, 60) - exact) <= found.error
    assert found.error <= 1e-9 * max(abs(found.value), 1) or abs(found.value) < 1e12


def test_estimates_of_equal_expressions_agree() -> None:
    """Expanded and factored answers have to pass on to exact arithmetic."""
    for one, other in (
        ((X + 1) ** 5, sympy.expand((X + 1) ** 5)),
        (sympy.sqrt(X**2 * Y), X * sympy.sqrt(Y)),
        (sympy.exp(X) * sympy.exp(Y), sympy.exp(X + Y)),
        (sympy.Float("0.333333"), sympy.Rational(1, 3)),
        (sympy.factorial(X + 1), (X + 1) * sympy.factorial(X)),
        (sympy.binomial(X, 2), X * (X - 1) / 2),
    ):
        estimates = estimate(one), estimate(other)
        assert None in estimates or not certainly_differ(*estimates)
    assert certainly_differ(estimate((X + 1) ** 5), estimate((X + 1) ** 4))
    assert certainly_differ(estimate(X), estimate(Y))
    assert certainly_differ(estimate(sympy.Integer(10) ** 400), estimate(sympy.Integer(1)))


@pytest.mark.parametrize(
    "expression",
    [sympy.I, sympy.oo, sympy.nan, sympy.log(-1, evaluate=False), sympy.Function("f")(X),
     sympy.Eq(X, 1), sympy.FiniteSet(1, 2), sympy.Matrix([1, 2]), (sympy.Integer(-8)) ** sympy.Rational(1, 3)],
)  # fmt: skip
def test_what_has_no_real_value_has_no_estimate(expression: object) -> None:
    """A guess would refute what sympy can prove."""
    assert estimate(expression) is None


@pytest.mark.parametrize(
    "text",
    ["9^{9^9}", "10^{-100000}", "100000!", "(9^{9^9}, 1)", "x > 9^{9^9}", r"\begin{pmatrix}1\\9^{9^9}\end{pmatrix}"],
)
def test_large_parts_are_found_wherever_they_stand(text: str) -> None:
    """sympy would compute them before it compares anything."""
    import math_verify

    with pytest.raises(TooLarge):
        estimate(math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)[0])


def test_equality_is_the_same_without_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short cut must not decide otherwise than math-verify does."""
    texts = [
        "1/3",
        "0.333333",
        "0.33",
        r"\sqrt{2}",
        "1.414214",
        "x^2+2x+1",
        "(x+1)^2",
        "(x+1)^3",
        "ab",
        "abc",
        "cab",
        "9",
    ]
    texts += [
        r"9\%",
        "0.09",
        "e",
        "E",
        r"\pi",
        "x=9",
        "(1,2)",
        "[1,2]",
        r"\{1,2\}",
        "1,2",
        "2,1",
        "3i",
        r"\text{abc}",
        "-9",
    ]
    pairs = [(answer, label) for answer in texts for label in texts]
    with_estimates = [is_same_value(*pair) for pair in pairs]
    expressions._is_same_short_value.cache_clear()
    monkeypatch.setattr(expressions, "_are_unequal", lambda label, answer: False)
    without = [is_same_value(*pair) for pair in pairs]
    expressions._is_same_short_value.cache_clear()
    assert [pair for pair, one, other in zip(pairs, with_estimates, without, strict=True) if one != other] == []
    assert sum(without) > len(texts)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", "1234.5"),
        ("1{,}234", "1234"),
        (r"1\,234\,567", "1234567"),
        (r"1,\!234", "1234"),
        ("-.5", "-0.5"),
        ("5.", "5"),
        ("+007", "7"),
        ("12,34", None),
        ("1, 234", None),
        ("1234,567", None),
        ("1e5", None),
        ("", None),
        (".", None),
        ("-", None),
        ("\u0665", None),
    ],
)
def test_plain_numbers(text: str, value: str | None) -> None:
    """A list taken for a number with separators would be compared as one number."""
    found = plain_number(text)
    assert (found is None) == (value is None)
    assert found is None or float(found) == math.fsum([float(str(value))])

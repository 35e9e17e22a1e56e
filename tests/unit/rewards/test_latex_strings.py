"""Normal forms of LaTeX answers, worked by hand from the rules of Hendrycks et al. and of Minerva."""

from __future__ import annotations

import pytest

from mgrpo.rewards.verifiers.answers.latex_strings import is_same_string, minerva_form


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 5", "5"),
        ("a = b = 1/2", "1/2"),
        ("an apple", "apple"),
        ("so $5$ it is", "5"),
        ("first $5$ then $6$", "5"),
        ("costs $5", "costs5"),
        (r"\$18.90", "18.90"),
        ("1,234,567", "1234567"),
        ("1,2a", "1,2a"),
        ("12 square inches", "12"),
        (r"5\text{ m}", "5"),
        (r"12\text{ cm}^2", "12"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{(C)}", "(C)"),
        (r"\overline{AB}", "AB"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{2}", r"\frac{1}{{}2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"90^\circ", "90"),
        (r"10^{\text{th}}", "10^{th}"),
        ("\\text{a\nb}", "\\text{a\nb}"),
        ("", ""),
    ],
)
def test_minerva_form(answer: str, normal: str) -> None:
    """A step more or less changes which answers of published runs count as right."""
    assert minerva_form(answer) == normal


@pytest.mark.parametrize(
    ("answer", "label", "is_same"),
    [
        (r"\frac12", r"\frac{1}{2}", True),
        (r"\frac1{2}", r"\dfrac{1}{2}", True),
        (r"\tfrac12", r"\frac12", True),
        ("1/2", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("0.50", r"\frac{1}{2}", False),
        ("-1/2", r"\frac{-1}{2}", True),
        ("01/2", r"\frac{1}{2}", False),
        (".5", "0.5", True),
        (r"\sqrt3", r"\sqrt{3}", True),
        ("x=5", "5", True),
        ("xy=5", "5", True),
        ("xyz=5", "5", False),
        ("x=y=5", "5", False),
        (r"5\text{ cm}", "5", True),
        (r"5\text{cm}", "5", False),
        (r"50\%", "50", True),
        ("50%", "50", False),
        (r"\$5", "5", True),
        (r"90^\circ", "90", True),
        (r"\left( 1, 2 \right)", "(1,2)", True),
        ("(1,2)", "(2,1)", False),
        # Where a step fails (a letter over 2, two units, a root of nothing), only equal texts are the same.
        ("x/2", "x /2", False),
        ("x/2", "x/2", True),
        (r"1\text{ m}2\text{ cm}", r"1 \text{ m}2\text{ cm}", False),
        (r"2\sqrt", r"2 \sqrt", False),
        (r"\frac", r" \frac", False),
        (r"\frac1", r" \frac1", True),
    ],
)
def test_hendrycks_forms_agree(answer: str, label: str, is_same: bool) -> None:
    """A step more or less changes which answers of published runs count as right."""
    assert is_same_string(answer, label) == is_same
    assert is_same_string(label, answer) == is_same

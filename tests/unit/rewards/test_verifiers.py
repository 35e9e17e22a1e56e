"""What each verifier calls right, on hand-worked answers."""

from __future__ import annotations

import pytest

from mgrpo.rewards import verifiers


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        ("5", 5, 1.0),
        (" 5\n", 5, 1.0),
        ("-12", "-12", 1.0),
        ("0", "0", 1.0),
        ("7", "+07", 1.0),
        ("5", ["5"], 1.0),
        ("+5", 5, 0.0),
        ("05", 5, 0.0),
        ("5.0", 5, 0.0),
        ("5 5", 5, 0.0),
        ("", 5, 0.0),
        ("\u0665", 5, 0.0),
        ("-0", 0, 0.0),
    ],
)
def test_integer_accepts_the_one_canonical_form(completion: str, label: object, score: float) -> None:
    """A looser rule would reward spellings that the quickstart's curve does not count."""
    assert verifiers.integer(completion, label) == score


@pytest.mark.parametrize("label", [5.5, "five", "", None, True, {"value": 5}, ["1", "2"]])
def test_integer_refuses_a_label_that_is_no_integer(label: object) -> None:
    """Scoring 0 against a broken label would punish every answer to that prompt."""
    with pytest.raises(ValueError, match="not an integer"):
        verifiers.integer("5", label)


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        ("so it is 5.0", "5", 1.0),
        ("so it is +5.", "5", 1.0),
        ("1,234 apples", "1234", 1.0),
        ("she pays $1234", "1,234", 1.0),
        ("first 7, then 8", "8", 1.0),
        ("10-5", 5, 1.0),
        ("it is -5", "-5", 1.0),
        ("it is -5", "5", 0.0),
        (".50", 0.5, 1.0),
        ("first 8, then 7", "8", 0.0),
        ("no idea", "8", 0.0),
        ("5", "steps ... #### 5", 1.0),
        ("9" * 200_000, "8", 0.0),
    ],
)
def test_gsm8k_compares_the_last_numbers_by_value(completion: str, label: object, score: float) -> None:
    """Comparing strings would call 5.0 wrong where 5 is expected (and a label with a comma wrong for everyone)."""
    assert verifiers.gsm8k(completion, label) == score


def test_gsm8k_refuses_a_label_without_a_number() -> None:
    """Such a row can never be solved; it must show up as an error, not as a hard prompt."""
    with pytest.raises(ValueError, match="no number"):
        verifiers.gsm8k("5", "many")


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        (r"so \boxed{8}", "8", 1.0),
        (r"so \boxed{8}", 8, 1.0),
        (r"<think>\boxed{9}</think>\boxed{8}", "8", 1.0),
        (r"<think>\boxed{8}</think> 9", "8", 0.0),
        (r"\boxed{3} no, \boxed{4}", "4", 1.0),
        (r"\boxed{3} no, \boxed{4}", "3", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{0.50}", r"\frac12", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$", 1.0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{7}", r"\boxed{7}", 1.0),
        (r"\boxed{8}", "7", 0.0),
        (r"\boxed{}", "7", 0.0),
        ("Answer: 7", "7", 1.0),
        ("The answer is 7 apples.", "7", 1.0),
        ("it is $x=7$", "7", 1.0),
        ("7, or rather 8", "7", 0.0),
        ("no idea", "7", 0.0),
        ("", "7", 0.0),
        (r"\boxed{7} then \boxed{8", "7", 1.0),
        ("a line\n" * 1000 + r"so it is $\frac{1}{2}$", "0.5", 1.0),
    ],
)
def test_math_compares_values_of_the_last_answer(completion: str, label: object, score: float) -> None:
    """Joining boxes, reading the thoughts, or comparing strings only would give right answers no reward."""
    assert verifiers.math(completion, label) == score


@pytest.mark.parametrize("label", ["", "$$", None, {"a": 1}, ["1", "2"]])
def test_math_refuses_a_label_it_cannot_read(label: object) -> None:
    """An unreadable label is no score, not a wrong answer."""
    with pytest.raises(ValueError, match="ground_truth"):
        verifiers.math(r"\boxed{7}", label)


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\boxed{1}}", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\fbox{1} \fboxed{2}", "2"),
        (r"\boxed{\left\{1\right\}}", r"\left\{1\right\}"),
        ("boxed", None),
        (r"\boxed{" * 20_000, None),
    ],
)
def test_last_boxed_pairs_braces(text: str, contents: str | None) -> None:
    """A cut-off expression would be compared with the whole label and lose."""
    assert verifiers.last_boxed(text) == contents


def test_an_unknown_verifier_is_an_error_that_names_the_nearest() -> None:
    """A misspelt name that scores 0 wastes a whole run."""
    with pytest.raises(ValueError, match=r"unknown verifier 'maths'; did you mean math\?.*gsm8k, integer, math"):
        verifiers.find("maths")
    assert verifiers.find("GSM8K") is verifiers.gsm8k

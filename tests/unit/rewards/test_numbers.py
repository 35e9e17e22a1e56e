"""What the verifiers of numbers call right, on hand-worked answers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgrpo.config.schema import Reward
from mgrpo.rewards.verifier import Answer
from mgrpo.rewards.verifiers.numbers import GSM8K, Integer


def score(verifier: type[Integer | GSM8K], completion: str, label: object) -> float:
    return verifier(Reward()).score(Answer(completion=completion, ground_truth=label))


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
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
def test_integer_accepts_the_one_canonical_form(completion: str, label: object, expected: float) -> None:
    """A looser rule would reward spellings that the quickstart's curve does not count."""
    assert score(Integer, completion, label) == expected


@pytest.mark.parametrize("label", [5.5, "five", "", None, True, {"value": 5}, ["1", "2"]])
def test_integer_refuses_a_label_that_is_no_integer(label: object) -> None:
    """Scoring 0 against a broken label would punish every answer to that prompt."""
    with pytest.raises(ValueError, match="not an integer"):
        score(Integer, "5", label)


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        ("first 7, then 8", "8", 1.0),
        ("first 8, then 7", "8", 0.0),
        ("so it is 5.0", "5", 0.0),
        ("so it is +5.", "5", 0.0),
        ("so it is +5.", "+5", 1.0),
        ("it is -5", "-5", 1.0),
        ("it is -5", "5", 0.0),
        ("10-5", 5, 0.0),
        ("1,234 apples", "1234", 1.0),
        ("she pays $1,234,567.", "1234567", 1.0),
        ("1,2,3", "3", 1.0),
        ("1,2,3", "123", 0.0),
        ("half is .5", ".5", 1.0),
        ("half is .5", 0.5, 0.0),
        ("half is .5", "5", 0.0),
        ("1/2", "1/2", 0.0),
        ("1", "1/2", 0.0),
        ("2", "1/2", 0.0),
        ("1.2.3", ".3", 1.0),
        ("\u0663", "\u0663", 1.0),
        ("no idea", "8", 0.0),
        ("", "8", 0.0),
        ("Many", "many", 1.0),
        ("5", "many", 0.0),
    ],
)
def test_gsm8k_compares_the_spelling_of_the_last_number(completion: str, label: object, expected: float) -> None:
    """Scores would not be comparable with runs of other trainers if 5.0 counted for 5, or a sign went lost."""
    assert score(GSM8K, completion, label) == expected


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("1,234", "1234", "1234.0"),
        ("#### 1,234.50", "1234.5", "1234"),
        ("steps 3+2=5 #### 5", "5", "3"),
        ("5.0", "5", "5.00"),
        ("5.0", "5.0", "50"),
        (5.0, "5", "05"),
        (" 72 ", "72", "27"),
        ("$72", "72", "-72"),
        ("+07", "7", "+7"),
        ("-0.0", "0", "-0"),
        (["5", "6"], "6", "7"),
    ],
)
def test_gsm8k_accepts_the_plain_form_of_the_label(label: object, right: str, wrong: str) -> None:
    """Compared as written only, a label with a comma would be wrong for every answer, and its prompt unsolvable."""
    assert score(GSM8K, right, label) == 1.0
    assert score(GSM8K, wrong, label) == 0.0


@pytest.mark.parametrize("label", ["", "  ", None, True, [], {"answer": 5}])
def test_gsm8k_refuses_a_label_that_says_nothing(label: object) -> None:
    """Such a row can never be solved; it must show up as an error, not as a hard prompt."""
    with pytest.raises(ValueError, match="ground_truth"):
        score(GSM8K, "5", label)


@given(st.text(), st.sampled_from(["5", "x", "1,2", "\ud800", "#### 7"]))
def test_numbers_score_any_text_as_right_or_wrong(text: str, label: str) -> None:
    """An exception would leave an odd answer without a score, where it is plainly wrong."""
    assert score(Integer, text, 5) in (0.0, 1.0)
    assert score(GSM8K, text, label) in (0.0, 1.0)


@given(st.text(), st.sampled_from([" ", "\n", "\t ", "\u00a0"]))
def test_integer_takes_no_notice_of_space_around_the_answer(text: str, space: str) -> None:
    """A chat template that ends in a newline would change rewards."""
    assert score(Integer, text, 5) == score(Integer, space + text + space, 5)


@pytest.mark.parametrize("unit", ["9", "9,", "9.", ".", "-", "1 ", "A", "\0", "\ud800"])
def test_numbers_take_linear_time(unit: str) -> None:
    """A policy that learns to repeat a token would stall the run at the verifier."""
    started = time.process_time()
    assert score(GSM8K, (unit * 200_000)[:200_000], "8") == 0.0
    assert score(Integer, (unit * 200_000)[:200_000], "8") == 0.0
    assert time.process_time() - started < 5

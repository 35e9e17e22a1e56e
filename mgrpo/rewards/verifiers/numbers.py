"""Numbers compared as they are written: `integer`, `gsm8k`."""

from __future__ import annotations

import re
from typing import ClassVar

from mgrpo.rewards.verifier import Answer, Verifier, has_open_thought, shown, single
from mgrpo.rewards.verifiers.labels import accepted_texts

_NUMBER = re.compile(r"[-+]?(?:\d*\.\d+|\d+)")
_DIGITS_AROUND_COMMA = re.compile(r"(\d),(\d)")


class Integer(Verifier):
    """1.0 if the stripped completion is the integer, written the one canonical way: "+5", "05" and "5.0" are not 5."""

    name: ClassVar[str] = "integer"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        _digits(ground_truth)
        return ""

    def score(self, answer: Answer) -> float:
        return float(answer.completion.strip() == _digits(answer.ground_truth))


class GSM8K(Verifier):
    """1.0 if the completion's last number is written as the label is, or as the label's plain form.

    The plain form of "#### 1,234.50" is 1234.5; the completion is not put into such a form, so 5.0 is wrong where the
    label is 5. A completion without a number is compared as a whole, in lower case.
    """

    name: ClassVar[str] = "gsm8k"

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        labels = accepted_texts(ground_truth)
        is_one_number = any(len(_numbers_of_label(label)) == 1 for label in labels)
        return "" if is_one_number else "hold no number, or several: no answer with a number in it can be right"

    def score(self, answer: Answer) -> float:
        text = "" if has_open_thought(answer.completion) else _without_thousands_commas(answer.completion)
        numbers = _NUMBER.findall(text)
        written = numbers[-1] if numbers else text.lower()
        return float(any(written in _spellings(label) for label in accepted_texts(answer.ground_truth)))


def _digits(ground_truth: object) -> str:
    """The label's integer in its one spelling."""
    label = single(ground_truth)
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if isinstance(label, str) and re.fullmatch(r"[-+]?[0-9]+", label.strip()):
        return str(int(label))
    raise ValueError(f"ground_truth={shown(label)} is not an integer; write an int or a string of digits")


def _spellings(label: str) -> set[str]:
    """The spellings that are right for a label."""
    if not label.strip():
        raise ValueError("ground_truth is empty; gsm8k needs a number")
    spellings = {label.lower()}
    numbers = _numbers_of_label(label)
    # With several numbers ("1/2") none of them is the answer.
    if len(numbers) == 1:
        spellings |= {numbers[0], _plain(numbers[0])}
    return spellings


def _numbers_of_label(label: str) -> list[str]:
    return _NUMBER.findall(_without_thousands_commas(label.rpartition("####")[2]))


def _plain(number: str) -> str:
    """The number without plus sign, leading zeros and trailing zeros of decimals."""
    whole, _, decimals = number.lstrip("+-").partition(".")
    plain = (whole.lstrip("0") or "0") + f".{decimals}".rstrip("0").rstrip(".")
    return f"-{plain}" if number.startswith("-") and plain != "0" else plain


def _without_thousands_commas(text: str) -> str:
    """The text without commas between digits; of "1,2,3" only the first goes, since its right digit is used up."""
    return _DIGITS_AROUND_COMMA.sub(r"\1\2", text)

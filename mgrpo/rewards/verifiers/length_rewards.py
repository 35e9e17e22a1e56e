"""Rewards for the number of tokens, and the constant 0: `max_length`, `up_to_max_length`, `passthrough`."""

from __future__ import annotations

import math
import re
from typing import ClassVar

from mgrpo.rewards.verifier import Answer, Verifier, shown, single

_PLAIN_NUMBER = re.compile(r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


class _OfLength(Verifier):
    """A reward for the number of tokens; the label gives one."""

    @classmethod
    def check_label(cls, ground_truth: object) -> str:
        _wanted_length(ground_truth)
        return ""


class MaxLength(_OfLength):
    """1.0 for a completion of as many tokens as the label gives, less for every token more or fewer, at least 0.0."""

    name: ClassVar[str] = "max_length"

    def score(self, answer: Answer) -> float:
        miss = abs(_num_tokens(answer) - _wanted_length(answer.ground_truth))
        return _falling(miss, self.settings.max_length_verifier_max_length)


class UpToMaxLength(_OfLength):
    """1.0 for a completion of at most as many tokens as the label gives, less for every token more, at least 0.0."""

    name: ClassVar[str] = "up_to_max_length"

    def score(self, answer: Answer) -> float:
        excess = max(0.0, _num_tokens(answer) - _wanted_length(answer.ground_truth))
        return _falling(excess, self.settings.max_length_verifier_max_length)


class Passthrough(Verifier):
    """0.0, for rows that an environment rewards."""

    name: ClassVar[str] = "passthrough"

    def score(self, answer: Answer) -> float:
        return 0.0


def _falling(miss: float, zero_at: int) -> float:
    return max(0.0, 1.0 - miss / zero_at)


def _num_tokens(answer: Answer) -> int:
    if answer.num_tokens is None:
        raise ValueError(
            "the number of tokens is not known; give verify() num_tokens or completion_ids to use a length verifier"
        )
    return answer.num_tokens


def _wanted_length(ground_truth: object) -> float:
    label = single(ground_truth)
    # Python also reads 1_0 and digits of other scripts.
    is_number = isinstance(label, (int, float)) and not isinstance(label, bool)
    is_written = isinstance(label, str) and _PLAIN_NUMBER.fullmatch(label.strip())
    try:
        length = float(label) if is_number or is_written else math.nan  # type: ignore[arg-type]
    except OverflowError:
        length = math.nan
    if not 0 <= length < math.inf:
        raise ValueError(f"ground_truth={shown(label)} is not a length; write a number of tokens, for example 512")
    return length

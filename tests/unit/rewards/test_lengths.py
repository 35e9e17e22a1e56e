"""Scores of the verifiers of lengths, worked by hand."""

from __future__ import annotations

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.verifier import Answer, Verifier
from mgrpo.rewards.verifiers.length_rewards import MaxLength, Passthrough, UpToMaxLength

SETTINGS = Reward(max_length_verifier_max_length=1000)


def score(verifier: type[Verifier], num_tokens: int | None, label: object) -> float:
    return verifier(SETTINGS).score(Answer(completion="any", ground_truth=label, num_tokens=num_tokens))


@pytest.mark.parametrize(
    ("num_tokens", "label", "max_length", "up_to"),
    [
        (100, "100", 1.0, 1.0),
        (0, 100, 0.9, 1.0),
        (150, 100.0, 0.95, 0.95),
        (50, "100.0", 0.95, 1.0),
        (50, " 1e2 ", 0.95, 1.0),
        (1100, [100], 0.0, 0.0),
        (5000, 100, 0.0, 0.0),
        (0, 5000, 0.0, 1.0),
        (0, "0", 1.0, 1.0),
    ],
)
def test_lengths_fall_with_the_miss_and_stop_at_zero(
    num_tokens: int, label: object, max_length: float, up_to: float
) -> None:
    """Scores below 0 would make one long completion outweigh a whole group."""
    assert score(MaxLength, num_tokens, label) == pytest.approx(max_length)
    assert score(UpToMaxLength, num_tokens, label) == pytest.approx(up_to)


@pytest.mark.parametrize(
    "label", ["many", "", "1,000", None, True, -1, "nan", "inf", "1_0", "\u0661", 10**400, [1, 2], {"max": 3}]
)
@pytest.mark.parametrize("verifier", [MaxLength, UpToMaxLength])
def test_lengths_refuse_a_label_that_is_no_length(verifier: type[Verifier], label: object) -> None:
    """A label of nan would otherwise score nan or 1, depending on the order of a comparison."""
    with pytest.raises(ValueError, match="is not a length"):
        score(verifier, 5, label)


@pytest.mark.parametrize("verifier", [MaxLength, UpToMaxLength])
def test_lengths_ask_for_the_number_of_tokens(verifier: type[Verifier]) -> None:
    """Counting words or characters in its place would be a silent change of unit."""
    with pytest.raises(ValueError, match="num_tokens or completion_ids"):
        score(verifier, None, 100)


def test_passthrough_scores_nothing() -> None:
    """Rows that an environment rewards would be rewarded twice."""
    assert score(Passthrough, None, {"any": "thing"}) == 0.0

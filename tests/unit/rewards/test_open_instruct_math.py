"""The lax reading of Open Instruct: candidates from several places, strings before values."""

from __future__ import annotations

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.verifier import Answer
from mgrpo.rewards.verifiers.open_instruct_math import MathOpenInstruct

MINERVA = "Final Answer: The final answer is {}. I hope it is correct."


@pytest.mark.parametrize(
    ("completion", "label", "expected"),
    [
        (r"\boxed{8} " + MINERVA.format("7"), "7", 1.0),
        (r"\boxed{8} " + MINERVA.format("7"), "8", 1.0),
        (r"\boxed{3} and \boxed{4}", "4", 1.0),
        (r"\boxed{3} and \boxed{4}", "3", 0.0),
        (r"<think>\boxed{8}</think> so 9", "8", 1.0),
        ("first $7$, then $8$", "8", 1.0),
        ("first $7$, then $8$", "7", 0.0),
        ("x^2 + 1", "1+x^2", 1.0),
        ("x = 7", "7", 1.0),
        ("7", "7", 1.0),
        ("The answer is 7", "7", 0.0),
        (r"\boxed{y=5}", "x=5", 1.0),
        (r"\boxed{5\text{ cm}}", "5", 1.0),
        (r"\boxed{\frac12}", "0.5", 1.0),
        (r"\boxed{7}", ["6", "7"], 1.0),
        ("", "7", 0.0),
    ],
)
def test_any_candidate_counts(completion: str, label: object, expected: float) -> None:
    """Runs that follow Open Instruct's recipes would be compared by another measure."""
    verifier = MathOpenInstruct(Reward())
    assert verifier.score(Answer(completion=completion, ground_truth=label)) == expected

"""Held-out accuracy counts every sample, scored or not."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.algo.samples import train_samples
from mgrpo.evaluation import summarise
from mgrpo.types import Completion, Prompt, RolloutGroup, Score, ScoredGroup


def group(rewards: list[float], lengths: list[int] | None = None) -> ScoredGroup:
    prompt = Prompt(id=(0, 0), tokens=np.array([5, 6], np.int32), text="", verifiers=("integer",), ground_truths=(1,))
    completions = tuple(
        Completion(
            tokens=np.arange(n, dtype=np.int32),
            logprobs=np.full(n, -1.0, np.float32),
            policy_versions=np.zeros(n, np.int32),
            finish_reason="stop" if n < 4 else "length",
            text="",
        )
        for n in lengths or [2] * len(rewards)
    )
    scores = tuple(Score(reward=r, parts={"correct": float(r > 0) if r == r else r}) for r in rewards)
    return ScoredGroup(group=RolloutGroup(prompt=prompt, completions=completions), scores=scores)


def test_pass_at_1_and_at_n():
    """Worked by hand; a completion without a score is wrong, and outside the mean score."""
    nan = float("nan")
    metrics = summarise([group([1.0, 0.0, 0.0, nan], [1, 2, 3, 4]), group([0.0, 0.0, 0.0, 0.0])])
    assert metrics["eval/pass_at_1"] == pytest.approx(1 / 8)
    assert metrics["eval/pass_at_4"] == pytest.approx(1 / 2)
    assert metrics["eval/scores"] == pytest.approx(1 / 7)
    assert metrics["eval/stop_rate"] == pytest.approx(7 / 8)


def test_a_completion_without_a_score_trains_nothing_and_is_kept():
    """NaN leaves the group's mean; its sample has advantage 0 and no trained token."""
    samples = train_samples([group([1.0, 0.0, float("nan")]), group([1.0, 1.0, 1.0])], normalization="standard")
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert [sample.advantage for sample in samples] == pytest.approx([1.0, -1.0, 0.0, 0.0, 0.0, 0.0], abs=1e-6)
    assert [bool(sample.loss_mask.any()) for sample in samples] == [True, True, False, True, True, True]

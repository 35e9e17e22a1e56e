"""What an evaluation says: accuracy and lengths of completions for held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mgrpo.types import ScoredGroup


def mean_score(scores: Sequence[float] | Sequence[np.ndarray]) -> float:
    """Mean of the scores that could be given; NaN when there is none."""
    known = np.asarray(scores, dtype=np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else float("nan")


def summarise(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Metrics of an evaluation.

    `eval/pass_at_1` is the mean over prompts of the share of correct samples; `eval/pass_at_{n}`, with n samples a prompt,
    the share of prompts with at least one correct sample. Completions without a score count as wrong. Without verifiers
    nothing is correct or wrong, and there are neither.
    """
    lengths = np.array([len(completion.tokens) for group in groups for completion in group.group.completions])
    stopped = [completion.finish_reason == "stop" for group in groups for completion in group.group.completions]
    metrics = {
        "eval/scores": mean_score([group.rewards for group in groups]),
        "eval/sequence_lengths": float(lengths.mean()),
        "eval/stop_rate": float(np.mean(stopped)),
    }
    if all("correct" in score.parts for group in groups for score in group.scores):
        correct = np.nan_to_num([[score.parts["correct"] for score in group.scores] for group in groups])
        metrics["eval/pass_at_1"] = float(correct.mean())
        metrics[f"eval/pass_at_{correct.shape[1]}"] = float(correct.any(axis=1).mean())
    return metrics

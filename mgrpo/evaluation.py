"""What an evaluation says: accuracy, rewards and lengths of completions for held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mgrpo.telemetry.batch import (
    RewardScale,
    completion_lengths,
    error_rates,
    is_solved,
    mean_min_max,
    mean_score,
    no_score_rate,
    reward_metrics,
    stopped,
    tokens_per_second,
)
from mgrpo.types import ScoredGroup

__all__ = ["mean_score", "pass_at_k", "summarise"]


def summarise(
    groups: Sequence[ScoredGroup], *, scale: RewardScale | None = None, generate_s: float | None = None
) -> dict[str, float]:
    """Metrics of an evaluation, all of them numbers.

    A completion is correct when each of its verifiers gave the full score and, with `scale`, its reward is the highest
    one: a right answer that misses the format or was cut off is not correct where these cost reward. One without a score
    is wrong. `eval/pass_at_1` is the mean over prompts of the share of correct completions, `eval/pass_at_{n}`, with n
    completions a prompt, the share of prompts with at least one. Without verifiers nothing is correct or wrong, and
    there is no pass@k.

    Args:
        groups: the same number of completions in each.
        scale: see `batch_metrics`; None also leaves out what only verifiers have.
        generate_s: seconds the engines took; None leaves out their speed.
    """
    mean, least, most = mean_min_max(completion_lengths(groups))
    rewards = reward_metrics(groups, scale) | error_rates(groups, scale)
    metrics = {
        "eval/scores": mean_score([reward for group in groups for reward in group.rewards]),
        "eval/no_score_rate": no_score_rate(groups),
        "eval/sequence_lengths": mean,
        "eval/sequence_lengths_min": least,
        "eval/sequence_lengths_max": most,
        "eval/stop_rate": mean_score(stopped(groups)),
        **{f"eval/{name}": value for name, value in rewards.items()},
    }
    if generate_s is not None:
        metrics["time/eval_actor_tokens_per_second"] = tokens_per_second(groups, generate_s)
    if groups and all("correct" in score.parts for group in groups for score in group.scores):
        metrics |= _accuracy(np.stack([_correct(group, scale) for group in groups]))
    return metrics


def pass_at_k(num_correct: np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """Chance that k of a prompt's `num_samples` completions, drawn without replacement, hold a correct one.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374). The quotient is the
    product of 1 - k / i over i = n - c + 1 .. n: nothing overflows, and the factor at i = k is 0 where n - c < k.

    Args:
        num_correct: `[prompts]` integers, c.
        k: at most `num_samples`.
    Returns:
        `[prompts]` float64.
    """
    i = np.arange(1, num_samples + 1)
    return 1.0 - np.where(i > num_samples - np.asarray(num_correct)[:, None], 1.0 - k / i, 1.0).prod(axis=1)


def _correct(group: ScoredGroup, scale: RewardScale | None) -> np.ndarray:
    """`[group]` bool."""
    correct = np.array([score.parts["correct"] == 1.0 for score in group.scores])
    return correct if scale is None else correct & is_solved(group, scale)


def _accuracy(correct: np.ndarray) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... from `[prompts, n]` bool."""
    n = correct.shape[1]
    metrics = {"eval/pass_at_1": float(correct.mean()), f"eval/pass_at_{n}": float(correct.any(axis=1).mean())}
    for k in (1 << power for power in range(n.bit_length())):
        metrics[f"eval/pass_at_{k}_unbiased"] = float(pass_at_k(correct.sum(axis=1), n, k).mean())
    return metrics

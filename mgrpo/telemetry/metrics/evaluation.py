"""Metrics of an evaluation: accuracy, rewards and lengths of completions for held-out prompts.

Evaluations in training and `mgrpo eval` share these functions and the random stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

import numpy as np

from mgrpo.telemetry.metrics.agents import agent_metrics
from mgrpo.telemetry.metrics.batch import (
    completion_lengths,
    error_rates,
    is_solved,
    mean_min_max,
    mean_score,
    no_score_rate,
    reward_metrics,
    scorer_metrics,
    stopped,
    tokens_per_second,
)
from mgrpo.telemetry.metrics.turns import turn_metrics
from mgrpo.types import RewardScale, ScoredGroup


def evaluation_metrics(
    groups: Sequence[ScoredGroup],
    *,
    scale: RewardScale | None = None,
    sources: Sequence[str] = (),
    generate_s: float | None = None,
) -> dict[str, float]:
    """Metrics of one evaluation, all of them numbers.

    A completion is correct when each of its verifiers gave the full score and, with `scale`, its reward is the highest
    possible: a right answer that misses the format or was cut off is not correct if these cost reward. A completion
    without a score is wrong. With n completions per prompt, `eval/pass_at_1` is the mean share of correct completions
    and `eval/pass_at_{n}` the share of prompts with at least one. Without verifiers no completion is correct or wrong, and
    there is no pass@k. Each of several sources and verifiers is also measured separately.

    Args:
        groups: the same number of completions in each.
        scale: see `batch_metrics`; None also leaves out the metrics that only verifiers provide.
        sources: the short name of each group's dataset; empty: no metrics per source.
        generate_s: seconds that generation took; None leaves out its speed.
    """
    mean, least, most = mean_min_max(completion_lengths(groups))
    scored = reward_metrics(groups, scale) | scorer_metrics(groups, scale)
    others = scored | error_rates(groups, scale) | turn_metrics(groups) | agent_metrics(groups)
    metrics = {
        "eval/scores": mean_score([reward for group in groups for reward in group.rewards]),
        "eval/no_score_rate": no_score_rate(groups),
        "eval/sequence_lengths": mean,
        "eval/sequence_lengths_min": least,
        "eval/sequence_lengths_max": most,
        "eval/stop_rate": mean_score(stopped(groups)),
        **{f"eval/{name}": value for name, value in others.items() if not name.startswith("time/")},
    }
    if generate_s is not None:
        metrics["time/eval_actor_tokens_per_second"] = tokens_per_second(groups, generate_s)
    flags = correctness(groups, scale)
    correct = None if flags is None or not groups else np.array(flags)
    if correct is not None:
        metrics |= _accuracy(correct)
    for kind, names in (("source", [{name} for name in sources]), ("verifier", _verifiers(groups))):
        if len(set().union(*names)) > 1:
            metrics |= _by_name(kind, names, groups, correct)
    return metrics


def correctness(groups: Sequence[ScoredGroup], scale: RewardScale | None) -> list[list[bool]] | None:
    """For each completion of each group, True if it is correct; None: functions, environments or agents score instead of verifiers."""
    if scale is not None and not scale.verification_reward:
        return None
    if not all("correct" in score.parts for group in groups for score in group.scores):
        return None
    return [_correct(group, scale).tolist() for group in groups]


def short_names(paths: Iterable[str]) -> list[str]:
    """A name without a slash for each dataset: the shortest suffix of its path that distinguishes it."""
    paths = list(paths)
    parts_of = {path: _parts(path) for path in paths}
    names: dict[str, str] = {}
    for path, parts in parts_of.items():
        others = [other for key, other in parts_of.items() if key != path]
        length = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
        names[path] = "-".join(parts[-length:])
    return [names[path] for path in paths]


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


def _pass_rates(correct: np.ndarray) -> dict[str, float]:
    """The share of correct completions, and of prompts with at least one, from `[prompts, n]` bool."""
    return {"pass_at_1": float(correct.mean()), f"pass_at_{correct.shape[1]}": float(correct.any(axis=1).mean())}


def _correct(group: ScoredGroup, scale: RewardScale | None) -> np.ndarray:
    """`[group]` bool: the correct completions of a group."""
    correct = np.array([score.parts["correct"] == 1.0 for score in group.scores])
    return correct if scale is None else correct & is_solved(group, scale)


def _accuracy(correct: np.ndarray) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... from `[prompts, n]` bool."""
    n = correct.shape[1]
    metrics = {f"eval/{name}": value for name, value in _pass_rates(correct).items()}
    for k in (1 << power for power in range(n.bit_length())):
        metrics[f"eval/pass_at_{k}_unbiased"] = float(pass_at_k(correct.sum(axis=1), n, k).mean())
    return metrics


def _by_name(
    kind: str, names: Sequence[set[str]], groups: Sequence[ScoredGroup], correct: np.ndarray | None
) -> dict[str, float]:
    """Accuracy and mean reward of the groups with each name; `names` has a set per group."""
    metrics: dict[str, float] = {}
    for name in sorted(set().union(*names)):
        members = [index for index, group_names in enumerate(names) if name in group_names]
        prefix = f"eval/by_{kind}/{name}"
        metrics[f"{prefix}/scores"] = mean_score([reward for index in members for reward in groups[index].rewards])
        if correct is not None:
            metrics |= {f"{prefix}/{key}": value for key, value in _pass_rates(correct[members]).items()}
    return metrics


def _verifiers(groups: Sequence[ScoredGroup]) -> list[set[str]]:
    return [{name.lower() for name in group.group.prompt.verifiers} for group in groups]


def _parts(path: str) -> tuple[str, ...]:
    """Folders and file name of a dataset, without the extension."""
    pure = PurePosixPath(path)
    whole = pure.with_suffix("") if pure.suffix in (".jsonl", ".json", ".parquet") else pure
    return tuple(part for part in whole.parts if part not in ("/", "..")) or (path.replace("/", "-") or "data",)

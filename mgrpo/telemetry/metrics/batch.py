"""Metrics of one step's rollouts, under the names that other trainers use; docs/metrics.md defines each.

Rank 0 holds the whole step, whatever the number of learners, so everything is computed here once, in plain numpy. Undefined
values (the mean of no values, a missing score) are NaN and become null in metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mgrpo.telemetry.metrics.agents import agent_metrics
from mgrpo.telemetry.metrics.turns import turn_metrics
from mgrpo.types import Completion, PackLengths, RewardScale, ScoredGroup, TrainSample

Metrics = dict[str, float | list[int]]

LENGTH_BINS = 16
"""Bin i counts lengths from 2^i to below 2^(i + 1); the first also counts 0, the last everything longer."""
RATE_BINS = 12
"""Bins: nothing solved (0 or less), tenths of (0, 1), everything solved (1 or more)."""
MAGNITUDES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Edges of 15 bins of advantages: magnitudes [8, inf), [4, 8) ... (0, 0.25) below 0, exactly 0, the same above 0."""

_TOLERANCE = 1e-8
"""Scores this close count as equal: 0.1 + 0.2 must reach 0.3."""


def batch_metrics(
    kept: Sequence[ScoredGroup],
    dropped: Sequence[ScoredGroup],
    *,
    samples: Sequence[TrainSample],
    packs: PackLengths,
    batch_size: int,
    policy_version: int,
    num_excluded_prompts: int,
    engine_s: float,
    scale: RewardScale | None,
) -> Metrics:
    """All metrics of a step's rollouts, advantages and packs; histograms are lists of at most 16 counts.

    Args:
        kept: groups that the step trains on.
        dropped: groups that a filter left out.
        samples: one per completion of `kept`, or one per branch of it, in order.
        packs: lengths in the packs of one pass over `samples`, of all mini-batches and data-parallel ranks.
        batch_size: completions of a full step.
        policy_version: version of the weights from which the step's first update starts.
        num_excluded_prompts: prompts that this step's results exclude from further sampling.
        engine_s: seconds in which engines had work, for `kept` and `dropped`.
        scale: None with a user's own reward functions; then no completion is solved or unsolved.
    """
    sampled = [*kept, *dropped]
    return {
        **_scores(kept, sampled),
        **_verified(kept, scale),
        **reward_metrics(kept, scale),
        **scorer_metrics(sampled, scale),
        **error_rates(sampled, scale),
        **_lengths(kept, sampled),
        **_training(samples, batch_size),
        **_packing(samples, packs),
        **_filtering(kept, dropped, scale, num_excluded_prompts),
        **_policy_versions(kept, policy_version),
        **turn_metrics(sampled),
        **agent_metrics(sampled),
        **kept_metrics(sampled),
        "time/actor_tokens_per_second": tokens_per_second(sampled, engine_s),
    }


def kept_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Sizes of sampling masks; empty if the sampling is not cut.

    Counts every sampled token of the completions with masks. A mask that the engine did not return in full is empty.
    """
    completions = [completion for group in groups for completion in group.group.completions]
    sizes = [c.kept.sizes[c.loss_mask] for c in completions if c.kept is not None]
    if not sizes:
        return {}
    every = np.concatenate(sizes)
    known = every[every > 0]
    return {
        "rollout/kept_tokens_avg": mean_score(known),
        "rollout/kept_single_share": _share(known == 1),
        "rollout/kept_unknown_share": _share(every == 0),
    }


def staleness(groups: Sequence[ScoredGroup], *, policy_version: int) -> dict[str, float]:
    """Age of the weights that sampled these groups, in versions of the policy.

    Args:
        policy_version: version of the weights from which the step starts.
    """
    versions = [[_sampled_versions(completion) for completion in group.group.completions] for group in groups]
    ages = [
        policy_version - min((int(own.min()) for own in group if own.size), default=policy_version)
        for group in versions
    ]
    mean, _, oldest = mean_min_max(ages)
    return {
        "async/age_mean": mean,
        "async/age_max": oldest,
        "async/mixed_completions": sum(own.size > 0 and own.min() < own.max() for group in versions for own in group),
    }


def reward_metrics(groups: Sequence[ScoredGroup], scale: RewardScale | None) -> dict[str, float]:
    """Rewards from each verifier, the format rule or each of the user's functions, over the completions it scored."""
    parts = [score.parts for group in groups for score in group.scores]
    names = sorted({name for part in parts for name in part})
    given = {name: [part[name] for part in parts if name in part] for name in names}
    metrics = {f"objective/{name}_reward": mean_score(given[name]) for name in names}
    if scale is None:
        return metrics
    metrics |= {f"objective/{name}_correct_rate": _share(_known(given[name]) > 0) for name in _verifiers(groups)}
    verified = scale.verification_reward * _known(_verifier_sums(groups, scale.weights))
    if verified.size:
        metrics["objective/verifiable_reward"] = mean_score(verified)
        metrics["objective/verifiable_correct_rate"] = _share(verified > 0)
    if "format" in given:
        metrics["val/format_scores"] = scale.format_reward * mean_score(given["format"])
    return metrics


def scorer_metrics(groups: Sequence[ScoredGroup], scale: RewardScale | None) -> dict[str, float]:
    """Mean and spread of the scores of each verifier, or of each of the user's functions."""
    parts = [score.parts for group in groups for score in group.scores]
    names = sorted({name for part in parts for name in part}) if scale is None else _verifiers(groups)
    given = {name: [part[name] for part in parts if name in part] for name in names}
    return {
        **{f"rewards/{name}/mean": mean_score(scores) for name, scores in given.items()},
        **{f"rewards/{name}/std": _sample_std(scores) for name, scores in given.items()},
    }


def error_rates(groups: Sequence[ScoredGroup], scale: RewardScale | None) -> dict[str, float]:
    """Share of the completions given to each verifier that it could not score.

    Empty for a user's functions: one that returns None does not apply to the completion, which is not an error.
    """
    if scale is None:
        return {}
    parts = [score.parts for group in groups for score in group.scores]
    return {
        f"objective/{name}_error_rate": _share([np.isnan(part[name]) for part in parts if name in part])
        for name in _verifiers(groups)
    }


def is_solved(group: ScoredGroup, scale: RewardScale) -> np.ndarray:
    """`[group]` bool: True if the reward, without the penalty for length, is the highest that the prompt allows.

    False without a score.
    """
    return scale.shares(group) >= 1 - _TOLERANCE


def mean_score(scores: Sequence[float] | Sequence[np.ndarray] | np.ndarray) -> float:
    """Mean of the scores that are not NaN; NaN without any."""
    known = _known(scores)
    return float(known.mean()) if known.size else float("nan")


def mean_min_max(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean, minimum and maximum; NaN without values."""
    values = np.asarray(values, dtype=np.float64)
    if not values.size:
        return (float("nan"),) * 3
    return float(values.mean()), float(values.min()), float(values.max())


def tokens_per_second(groups: Sequence[ScoredGroup], seconds: float) -> float:
    """Tokens that the engines read and sampled per second; a prompt is read once for all of its completions."""
    num_tokens = sum(_prompt_lengths(groups)) + sum(completion_lengths(groups))
    return num_tokens / seconds if seconds > 0 else float("nan")


def completion_lengths(groups: Sequence[ScoredGroup]) -> list[int]:
    """Sampled tokens of every completion, in order."""
    return [completion.num_sampled for group in groups for completion in group.group.completions]


def stopped(groups: Sequence[ScoredGroup]) -> list[bool]:
    """For each completion, in order, True if it ended with a stop token or string."""
    return [completion.finish_reason == "stop" for group in groups for completion in group.group.completions]


def no_score_rate(groups: Sequence[ScoredGroup]) -> float:
    """Share of completions without a score."""
    return _share(np.isnan(_rewards(groups)))


def length_histogram(lengths: Iterable[int]) -> list[int]:
    """Counts in `LENGTH_BINS` bins that double in width."""
    # The bit length of an integer is exact where a logarithm rounds.
    bins = [min(max(int(length).bit_length() - 1, 0), LENGTH_BINS - 1) for length in lengths]
    return np.bincount(np.array(bins, dtype=np.int64), minlength=LENGTH_BINS).tolist()


def rate_histogram(rates: Iterable[float]) -> list[int]:
    """Counts in `RATE_BINS` bins; NaN is in none."""
    known = _known(list(rates))
    bins = np.clip(np.floor(known * 10 + _TOLERANCE), 0, 9).astype(np.int64) + 1
    bins[known <= _TOLERANCE] = 0
    bins[known >= 1 - _TOLERANCE] = RATE_BINS - 1
    return np.bincount(bins, minlength=RATE_BINS).tolist()


def advantage_histogram(advantages: np.ndarray) -> list[int]:
    """Counts in bins that are symmetric around 0, see `MAGNITUDES`."""
    advantages = np.asarray(advantages, dtype=np.float64)
    zero = len(MAGNITUDES) + 1
    bins = zero + np.sign(advantages).astype(np.int64) * (1 + np.digitize(np.abs(advantages), MAGNITUDES))
    return np.bincount(bins, minlength=2 * zero + 1).tolist()


def _scores(kept: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup]) -> Metrics:
    # A standard deviation needs two scores.
    spread = [rewards for rewards in (_known(group.rewards) for group in sampled) if rewards.size > 1]
    return {
        "scores": mean_score(_rewards(kept)),
        "reward": mean_score(_rewards(sampled)),
        "reward_std": mean_score([_sample_std(rewards) for rewards in spread]),
        "frac_reward_zero_std": _share([_is_flat(rewards) for rewards in spread]),
        "val/no_score_rate": no_score_rate(sampled),
    }


def _verified(kept: Sequence[ScoredGroup], scale: RewardScale | None) -> Metrics:
    """Solved and unsolved completions, and the rate at which each prompt is solved."""
    if scale is None:
        return {}
    lengths = np.array(completion_lengths(kept), dtype=np.int64)
    solved = _joined([is_solved(group, scale) for group in kept], bool)
    unsolved = ~solved & ~np.isnan(_rewards(kept))
    rates = [_solve_rate(group, scale) for group in kept]
    return {
        "unsolved_batch_size_ratio": _share(unsolved[solved | unsolved]),
        "val/sequence_lengths_solved": mean_score(lengths[solved]),
        "val/sequence_lengths_unsolved": mean_score(lengths[unsolved]),
        "val/sequence_lengths_solved_hist": length_histogram(lengths[solved]),
        "val/sequence_lengths_unsolved_hist": length_histogram(lengths[unsolved]),
        "batch/percent_solved_mean": mean_score(rates),
        "batch/percent_solved_hist": rate_histogram(rates),
    }


def _lengths(kept: Sequence[ScoredGroup], sampled: Sequence[ScoredGroup]) -> Metrics:
    lengths = completion_lengths(kept)
    mean, least, most = mean_min_max(lengths)
    all_lengths, ended = np.array(completion_lengths(sampled)), np.array(stopped(sampled), dtype=bool)
    metrics: Metrics = {
        "val/sequence_lengths": mean,
        "val/sequence_lengths_min": least,
        "val/sequence_lengths_max": most,
        "val/stop_rate": _share(stopped(kept)),
        "batch/prompt_lengths": length_histogram(_prompt_lengths(kept)),
        "batch/response_lengths": length_histogram(lengths),
        "completions/clipped_ratio": _share(~ended),
    }
    for name, chosen in (("length", all_lengths), ("terminated_length", all_lengths[ended])):
        for which, value in zip(("mean", "min", "max"), mean_min_max(chosen), strict=True):
            metrics[f"completions/{which}_{name}"] = value
    return metrics


def _training(samples: Sequence[TrainSample], batch_size: int) -> Metrics:
    trained = [sample for sample in samples if sample.loss_mask.any() and not sample.continues]
    advantages = np.array([sample.advantage for sample in trained], dtype=np.float64)
    mean, least, most = mean_min_max(advantages)
    return {
        "real_batch_size_ratio": len(trained) / batch_size,
        "val/total_reward_groups": len({sample.group for sample in trained}),
        "val/advantages_mean": mean,
        "val/advantages_min": least,
        "val/advantages_max": most,
        "val/advantages_hist": advantage_histogram(advantages),
    }


def _packing(samples: Sequence[TrainSample], packs: PackLengths) -> Metrics:
    num_responses = sum(sample.num_predicted for sample in samples)
    num_completions = sum(not sample.continues for sample in samples)
    return {
        "packed_ratio": packs.filled / num_completions if num_completions else float("nan"),
        "batch/padding_frac": packs.padding / packs.tokens if packs.tokens else float("nan"),
        "batch/lost_token_frac": 1 - packs.responses / num_responses if num_responses else float("nan"),
    }


def _filtering(
    kept: Sequence[ScoredGroup], dropped: Sequence[ScoredGroup], scale: RewardScale | None, num_excluded: int
) -> Metrics:
    """Number of groups left out, in total and by the kind of their reward, which is equal within each group."""
    num_sampled = len(kept) + len(dropped)
    kinds = [_kind(group, scale) for group in dropped]
    return {
        "batch/total_prompts": len(kept),
        "batch/filtered_prompts": len(dropped),
        "batch/filtered_prompts_pct": len(dropped) / num_sampled if num_sampled else 0.0,
        **{f"batch/filtered_prompts_{kind}": kinds.count(kind) for kind in ("zero", "solved", "nonzero", "unscored")},
        "batch/no_resampled_prompts": num_excluded,
        # Always 0: steps wait for groups that would become too old.
        "stale_results_dropped": 0,
    }


def _kind(group: ScoredGroup, scale: RewardScale | None) -> str:
    """The kind of the equal rewards of a group that was left out."""
    is_scored = ~np.isnan(group.rewards)
    if not is_scored.any():
        return "unscored"
    if np.all(np.abs(group.rewards[is_scored]) <= _TOLERANCE):
        return "zero"
    return "solved" if scale is not None and is_solved(group, scale)[is_scored].all() else "nonzero"


def _policy_versions(kept: Sequence[ScoredGroup], policy_version: int) -> Metrics:
    versions = [_sampled_versions(completion) for group in kept for completion in group.group.completions]
    mean, oldest, newest = mean_min_max(_joined(versions, np.float64))
    return {
        "model_step_mean": mean,
        "model_step_min": oldest,
        "model_step_max": newest,
        "num_steps_off_policy": policy_version - mean,
    }


def _sampled_versions(completion: Completion) -> np.ndarray:
    """The version that sampled each token; the text between turns was not sampled and has none."""
    return completion.policy_versions[completion.loss_mask]


def _solve_rate(group: ScoredGroup, scale: RewardScale) -> float:
    highest = scale.highest(group)
    return mean_score(group.rewards) / highest if highest > 0 else float("nan")


def _verifiers(groups: Sequence[ScoredGroup]) -> list[str]:
    """Names of the verifiers that scored, spelled as in `Score.parts`."""
    named = {name.lower() for group in groups for name in group.group.prompt.verifiers}
    return sorted(named & {name for group in groups for score in group.scores for name in score.parts})


def _verifier_sums(groups: Sequence[ScoredGroup], weights: Mapping[str, float]) -> list[float]:
    """Weighted sum of each completion's verifiers; completions without a verifier are left out."""
    sums = []
    for group in groups:
        names = {name.lower() for name in group.group.prompt.verifiers}
        for score in group.scores:
            given = [weights.get(name, 1.0) * value for name, value in score.parts.items() if name in names]
            if given:
                sums.append(sum(given))
    return sums


def _rewards(groups: Sequence[ScoredGroup]) -> np.ndarray:
    """The rewards of all completions, `[completions]` float64; NaN without a score."""
    return _joined([group.rewards for group in groups], np.float64)


def _prompt_lengths(groups: Sequence[ScoredGroup]) -> list[int]:
    return [len(group.group.prompt.tokens) for group in groups]


def _is_flat(rewards: np.ndarray) -> bool:
    """True if known rewards are equal up to rounding: std([0.1, 0.1, 0.1]) is 1.4e-17, not 0."""
    return bool(np.ptp(rewards) <= _TOLERANCE * np.abs(rewards).max())


def _sample_std(values: Sequence[float] | np.ndarray) -> float:
    """Standard deviation of the known values with divisor n - 1; NaN with fewer than two."""
    known = _known(values)
    return float(known.std(ddof=1)) if known.size > 1 else float("nan")


def _share(flags: Sequence[bool] | np.ndarray) -> float:
    """Share of the flags that are set; NaN without flags."""
    return float(np.mean(flags)) if len(flags) else float("nan")


def _known(values: Sequence[float] | Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """`[known]` float64: the values that are not NaN."""
    values = np.asarray(values, dtype=np.float64)
    return values[~np.isnan(values)]


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)

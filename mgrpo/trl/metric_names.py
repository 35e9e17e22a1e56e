"""Metrics of a run under the names that TRL's trainer logs them by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

STEP = {
    "loss/total_avg": "loss",
    "optim/grad_norm": "grad_norm",
    "lr": "learning_rate",
    "policy/entropy_avg": "entropy",
    "policy/entropy_coef": "entropy_coef",
    "objective/kl2_avg": "kl",
    "policy/clipfrac_avg": "clip_ratio/region_mean",
    "debug/vllm_vs_local_logprob_diff_mean": "sampling/sampling_logp_difference/mean",
    "debug/vllm_vs_local_logprob_diff_max": "sampling/sampling_logp_difference/max",
    "val/rho_weight": "sampling/importance_sampling_ratio/mean",
    "tools/aggregate/avg_calls_per_rollout": "tools/call_frequency",
    "tools/aggregate/failure_rate": "tools/failure_frequency",
    "time/total": "step_time",
}
"""Names of docs/metrics.md and TRL's."""
SAME = re.compile(r"reward|reward_std|frac_reward_zero_std|(completions|clip_ratio|rewards)/.+")
"""Names that both have."""
EVALUATION = {
    "eval/scores": "reward",
    "eval/sequence_lengths": "completions/mean_length",
    "eval/sequence_lengths_min": "completions/min_length",
    "eval/sequence_lengths_max": "completions/max_length",
}


def of_step(metrics: Mapping[str, float | list[int]]) -> Iterator[tuple[str, float]]:
    """TRL's metrics of a training step; those without a name in TRL are in metrics.jsonl only."""
    for name, value in metrics.items():
        if isinstance(value, list):
            continue
        if name in STEP or SAME.fullmatch(name):
            yield STEP.get(name, name), value
        elif name.startswith("custom/"):
            yield name.removeprefix("custom/"), value
    for function in _functions(metrics):
        yield f"rewards/{function}/mean", float(metrics[f"objective/{function}_reward"])  # type: ignore[arg-type]


def of_evaluation(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """TRL's metrics of an evaluation, and pass@k; each name begins with `prefix`, as a rule `eval_`."""
    own = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
    found = {theirs: metrics[ours] for ours, theirs in EVALUATION.items() if ours in metrics}
    found |= {name: value for name, value in own.items() if SAME.fullmatch(name) or name.startswith("pass_at_")}
    found |= {f"rewards/{function}/mean": own[f"objective/{function}_reward"] for function in _functions(own)}
    found |= {name.removeprefix("custom/"): value for name, value in own.items() if name.startswith("custom/")}
    if "stop_rate" in own:
        found["completions/clipped_ratio"] = 1 - own["stop_rate"]
    return {prefix + name: value for name, value in found.items()}


def evaluated(name: str) -> str:
    """The name in docs/metrics.md of a metric of an evaluation that TRL calls `name`, with or without `eval_`."""
    name = name.removeprefix("eval_")
    for ours, theirs in EVALUATION.items():
        if name == theirs:
            return ours
    function = re.fullmatch(r"rewards/(.+)/mean", name)
    return f"eval/objective/{function[1]}_reward" if function else f"eval/{name.removeprefix('eval/')}"


def mean(values: list[float]) -> float | None:
    """Mean of those that are numbers; None where none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _functions(metrics: Mapping[str, object]) -> Iterator[str]:
    """The reward functions that have scored."""
    for name in metrics:
        if (match := re.fullmatch(r"rewards/(.+)/std", name)) and f"objective/{match[1]}_reward" in metrics:
            yield match[1]

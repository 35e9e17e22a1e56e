"""The first comparison of learner and engines: whether both compute the same model, before any weight changes.

Both have the weights of the model's folder then, so that their log-probabilities of the sampled tokens differ by rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mgrpo.config import Config
from mgrpo.policy.policy import Microbatch

LIMITS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
"""Largest mean difference by rounding, in nats, by `model_dtype`; docs/precision.md and docs/models.md have what was measured."""
EIGHT_BITS = 0.15
"""The same where keys and values, or matrix products, have 8 bits."""
FREE_ROUTING = 2.0
"""Factor for experts in 16 bits that engine and learner choose each by themselves: a tie that rounding decides changes a token."""
FATAL = 10.0
"""Factor at which the run ends, with `max_initial_mismatch=auto`."""
SCORE = "start"
"""The name of the scores that are compared."""


class Mismatch(NamedTuple):
    """The absolute differences of log-probabilities, in nats."""

    mean: float
    largest: float
    token: int
    """The id of the token with the largest difference."""
    num_tokens: int

    def exceeds(self, limit: float) -> bool:
        """Also true for a difference that is not a number."""
        return not self.mean <= limit


def differences(batches: Sequence[Microbatch]) -> list[list[float]]:
    """Sum, number, largest and its token, of each micro-batch's trained tokens that the present weights have sampled; in JSON."""
    found = []
    for batch in batches:
        pack = batch.pack
        gaps = np.abs(batch.logprobs[SCORE].float().cpu().numpy() - pack.rollout_logprobs)
        gaps = np.where(pack.loss_mask & np.isfinite(pack.rollout_logprobs) & (pack.ages == 0), gaps, -1.0)
        counted = gaps[~(gaps < 0)]
        if len(counted):
            place = int(np.argmax(gaps))
            found.append([float(counted.sum()), len(counted), float(gaps[place]), int(pack.targets[place])])
    return found


def mismatch_of(parts: Sequence[Sequence[Any]]) -> Mismatch | None:
    """The differences of all micro-batches, as `differences` returns them; None without any token."""
    if not parts:
        return None
    total, count = (sum(part[index] for part in parts) for index in (0, 1))
    largest, token = max(((part[2], part[3]) for part in parts), key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return Mismatch(total / count, largest, token, count)


def limit_of(config: Config, *, has_experts: bool) -> float:
    """The largest mean difference that rounding explains, in nats."""
    limit = LIMITS[config.model.model_dtype]
    if has_experts and config.parallel.routing_replay != "rollout" and config.model.model_dtype != "float32":
        limit *= FREE_ROUTING
    if config.parallel.fp8 != "none" or config.engine.vllm_kv_cache_dtype != "auto":
        limit = max(limit, EIGHT_BITS)
    return limit


def fatal_of(config: Config, limit: float) -> float:
    """The mean difference that ends the run, in nats."""
    chosen = config.engine.max_initial_mismatch
    return FATAL * limit if chosen == "auto" else math.inf if chosen is None else chosen


def sentence(found: Mismatch, limit: float) -> str:
    """The finding and its likely causes."""
    return (
        f"learner and engines differ by {found.mean:.2g} nats on average over {found.num_tokens} sampled tokens before the first "
        f"update, where rounding explains {limit:g}; the largest difference is {found.largest:.2g}, of token {found.token}. They "
        "compute different models: a field of config.json that only one of them reads, settings in vllm_extra_args, or weights "
        "that did not arrive (weight_sync_check_every=1 compares them)"
    )

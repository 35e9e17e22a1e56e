"""Check before the first update that learner and engines compute the same model.

Both still have the weights of the model's folder, so that their log-probabilities of the sampled tokens differ by rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mgrpo.config import Config
from mgrpo.policy.policy import Microbatch

LIMITS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
"""Largest mean difference by rounding, in nats, by `model_dtype`; measurements: docs/precision.md and docs/models.md."""
EIGHT_BITS = 0.15
"""The same where keys and values, or matrix products, have 8 bits."""
FREE_ROUTING = 2.0
"""Factor for MoE models in 16 bits without routing replay: a routing tie that rounding decides changes a token."""
FATAL = 10.0
"""Factor at which the run ends, with `max_initial_mismatch=auto`."""
SHOWN = 24
"""Characters of a token's text in a message."""
SCORE = "start"
"""The name of the scores that are compared."""


class Mismatch(NamedTuple):
    """The absolute differences of log-probabilities, in nats."""

    mean: float
    largest: float
    token: int
    """Id of the token with the largest difference."""
    position: int
    """Its position in prompt and completion."""
    learner: float
    """Its log-probability in the learner."""
    engine: float
    """Its log-probability in the engine."""
    num_tokens: int

    def exceeds(self, limit: float) -> bool:
        """True if the mean difference is above `limit` or NaN."""
        return not self.mean <= limit


def differences(batches: Sequence[Microbatch]) -> list[list[float]]:
    """Sum and number of each micro-batch's differences, and `Mismatch`'s fields of the largest; in JSON.

    Only trained tokens that the present weights have sampled count.
    """
    found = []
    for batch in batches:
        pack, learner = batch.pack, batch.logprobs[SCORE].float().cpu().numpy()
        gaps = np.abs(learner - pack.rollout_logprobs)
        gaps = np.where(pack.loss_mask & np.isfinite(pack.rollout_logprobs) & (pack.ages == 0), gaps, -1.0)
        counted = gaps[~(gaps < 0)]
        if len(counted):
            place = int(np.argmax(gaps))
            position = int(pack.positions[pack.rows[place]]) + 1
            own = [float(learner[place]), float(pack.rollout_logprobs[place])]
            found.append(
                [float(counted.sum()), len(counted), float(gaps[place]), int(pack.targets[place]), position, *own]
            )
    return found


def mismatch_of(parts: Sequence[Sequence[Any]]) -> Mismatch | None:
    """The differences of all micro-batches, as `differences` returns them; None without any token."""
    if not parts:
        return None
    total, count = (sum(part[index] for part in parts) for index in (0, 1))
    largest, token, position, learner, engine = max(
        (part[2:] for part in parts), key=lambda fields: (math.isnan(fields[0]), fields[0])
    )
    return Mismatch(total / count, largest, token, position, learner, engine, count)


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


def sentence(found: Mismatch, limit: float, pieces: Callable[[Sequence[int]], list[str]] | None = None) -> str:
    """The finding and its likely causes.

    Args:
        pieces: the text of single tokens; None leaves it out.
    """
    text = f", {''.join(pieces([found.token]))[:SHOWN]!r}," if pieces else ""
    return (
        f"learner and engines differ by {found.mean:.2g} nats on average over {found.num_tokens} sampled tokens before the first "
        f"update, where rounding explains {limit:g}; the largest difference is {found.largest:.2g}, of token {found.token}{text} at "
        f"position {found.position} of prompt and completion, whose log-probability is {found.learner:.4g} in the learner and "
        f"{found.engine:.4g} in the engine. They compute different models; likely causes: a field of config.json that only one of "
        "them reads, settings in vllm_extra_args, or weights that did not arrive (weight_sync_check_every=1 compares them)"
    )

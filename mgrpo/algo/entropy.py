"""Entropy as part of the objective: a bonus, a controller of its weight, and training on the tokens with the most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


def entropy_bonus(entropy: Tensor, loss_mask: Tensor, *, coef: float, num_trained_tokens: float | Tensor) -> Tensor:
    """coef x mean entropy of the trained tokens, a scalar to subtract from the loss, with a graph.

    The mean is over the tokens of the mini-batch on all ranks, whatever the aggregation of the loss, so that parts of a
    batch add up.

    Args:
        entropy: `[tokens]`; where the mask is 0 it is not read, NaN included.
        loss_mask: `[tokens]`; with a top-entropy mask, the loss mask times that one.
        num_trained_tokens: trained tokens of the mini-batch over all ranks; also with a top-entropy mask all of them,
            as in TRL.
    """
    total = torch.where(loss_mask != 0, entropy, 0.0).sum()
    count = num_trained_tokens.clamp(min=1) if isinstance(num_trained_tokens, Tensor) else max(num_trained_tokens, 1)
    return coef * total / count


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveEntropy:
    """Weight of the entropy bonus that holds the entropy near a target (Skywork-OR1, arXiv 2505.22312).

    After each optimizer step the weight moves by `delta`: up while the mean entropy is at most `target`, down
    otherwise. It is applied only while the last mean entropy was at most the target: not in the first step.
    """

    coef: float
    target: float
    delta: float
    coef_min: float
    coef_max: float
    last_entropy: float | None = None
    """Entropy of the last optimizer step, the mean per token over all ranks; None before the first step."""

    @property
    def applied(self) -> float:
        """`coef` of `entropy_bonus` in the next optimizer step."""
        return self.coef if self.last_entropy is not None and self.last_entropy <= self.target else 0.0

    def after(self, mean_entropy: float) -> AdaptiveEntropy:
        """The controller after an optimizer step; a step whose entropy is not finite changes nothing."""
        if not math.isfinite(mean_entropy):
            return self
        is_low = mean_entropy <= self.target
        coef = min(self.coef + self.delta, self.coef_max) if is_low else max(self.coef - self.delta, self.coef_min)
        return replace(self, coef=coef, last_entropy=float(mean_entropy))

    def state(self) -> dict[str, float | None]:
        """The state for a checkpoint."""
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def with_state(self, state: Mapping[str, Any]) -> AdaptiveEntropy:
        """The same settings, continued from the `state` in a checkpoint."""
        return replace(self, coef=state["coef"], last_entropy=state["last_entropy"])


def entropy_threshold(entropies: Tensor, *, top_entropy_quantile: float) -> Tensor:
    """The entropy that the `top_entropy_quantile` share of tokens with the highest entropy reaches (arXiv 2506.01939).

    The quantile at 1 - top_entropy_quantile, between two neighbours by linear interpolation.

    Args:
        entropies: `[tokens]` of the trained tokens only, gathered over all ranks.
    Returns:
        Scalar; -inf without tokens.
    """
    if not 0.0 < top_entropy_quantile <= 1.0:
        raise ValueError(f"top_entropy_quantile={top_entropy_quantile} must be above 0 and at most 1")
    if len(entropies) == 0:
        return entropies.new_full((), -torch.inf)
    # torch.quantile refuses more than 16 million values.
    ordered = entropies.detach().sort().values
    place = (1.0 - top_entropy_quantile) * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


def top_entropy_keep(entropy: Tensor, threshold: float | Tensor) -> Tensor:
    """Factor `keep` of `policy_loss`: 1 where the entropy reaches the threshold, else 0. `[tokens]`, no gradient."""
    return (entropy.detach() >= threshold).to(entropy.dtype)

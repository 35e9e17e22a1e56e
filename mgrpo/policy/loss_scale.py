"""The factor of the loss in float16, with which its gradients neither vanish nor overflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.parallel import backend
from mgrpo.policy.shards import chained

SMALLEST = 1.0
GROWTH_INTERVAL = 1000
"""Steps in a row with a finite gradient after which the scale doubles."""


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The scale of the next step; equal on all ranks.

    float16 has no numbers between 0 and 6e-8, nor above 65504. So the backward pass starts from a multiple of the loss,
    which halves after each overflow and doubles after many steps without one (Micikevicius et al. 2018, arXiv 1710.03740).
    """

    value: float = 2.0**16
    """A power of 2, by which nothing is rounded."""
    num_finite: int = 0
    """Steps with a finite gradient since the scale has moved."""

    @classmethod
    def of(cls, optimizer: MegatronOptimizer, config: TransformerConfig) -> Self:
        """Replace the scales of Megatron's optimizers, for backward passes of chunks with this `config`.

        Megatron's would be one each for dense and for expert parameters, and fails where FSDP leaves a rank no gradient.
        """
        scale = cls()
        config.grad_scale_func = scale.scaled
        for single in chained(optimizer):
            single.grad_scaler = None
        return scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, from which the backward pass starts."""
        return loss * self.value

    def unscale(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Divide this rank's gradients, float32, in place; return True if one of any rank is not finite.

        Collective over all learner ranks. The norm cannot replace it: of gradients that ranks share it counts one copy.
        """
        found = torch.zeros(1, device=backend.device())
        if gradients:
            factor = torch.full_like(found, 1 / self.value)
            torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, factor)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def follow(self, *, is_finite: bool) -> bool:
        """Choose the scale of the next step; return True if it has fallen, as above `SMALLEST` it does unless `is_finite`.

        Args:
            is_finite: all gradients and their norm are.
        """
        before = self.value
        self.num_finite = self.num_finite + 1 if is_finite else 0
        if not is_finite:
            self.value = max(self.value / 2, SMALLEST)
        elif self.num_finite == GROWTH_INTERVAL:
            self.value, self.num_finite = 2 * self.value, 0
        return self.value < before

    def state(self) -> dict[str, float]:
        """State in JSON."""
        return asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.value, self.num_finite = state["value"], state["num_finite"]

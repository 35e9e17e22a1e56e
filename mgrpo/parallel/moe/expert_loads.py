"""Load of an MoE layer's experts, which nothing balances in reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from mgrpo.parallel import backend


class ExpertLoads:
    """Counts of the choices of this rank's routers in training passes, also of tokens that only fill a pack up.

    Args:
        rows: for each chunk of the model on this rank, the places of its routers among those of the whole model.
        num_layers, num_experts: of the whole model.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], rows: Sequence[Sequence[int]], *, num_layers: int, num_experts: int
    ) -> None:
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=backend.device())
        for chunk, own in zip(chunks, rows, strict=True):
            routers = (module.router for module in chunk.modules() if isinstance(module, MoELayer))
            for row, router in zip(own, routers, strict=True):
                router.register_forward_hook(partial(self._count, row))

    def _count(
        self, row: int, router: torch.nn.Module, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        # Passes that only score record no graph; of a layer that is computed again only the second pass does.
        if torch.is_grad_enabled():
            self.counts[row] += outputs[1].sum(0)

    def take(self, group: dist.ProcessGroup) -> torch.Tensor:
        """`[MoE layers, experts]` int64: choices since the last call on all ranks. Every rank of `group`, which is on CPU, must call."""
        counts = self.counts.to("cpu", copy=True)
        self.counts.zero_()
        dist.all_reduce(counts, group=group)
        return counts


def load_metrics(counts: torch.Tensor) -> dict[str, float]:
    """Metrics by name, from `[MoE layers, experts]` choices; none where nothing was trained."""
    if not counts.any():
        return {}
    busiest = (counts.double() * counts.shape[1] / counts.sum(1, keepdim=True)).amax(1).tolist()
    return {
        "moe/idle_experts": float((counts == 0).double().mean()),
        **{f"moe/load_max/{layer}": load for layer, load in enumerate(busiest)},
    }

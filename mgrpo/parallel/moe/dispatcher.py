"""Tokens to experts and back: Megatron's exchange with the fewest reads of sizes from the device.

Sizes of an all-to-all are on the host. Megatron waits for them in each pass through a layer and takes the number of rows of
each local expert along, which goes back to the device at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.parallel.moe.choices import Choices

REBOUND: tuple[tuple[str, str, str], ...] = (
    # (module under megatron.core, name, why)
    (
        "transformer.moe.moe_layer",
        "MoEAlltoAllTokenDispatcher",
        "waits for sizes that the host knows, where a layer is computed again or its rows stay on this rank",
    ),
    (
        "transformer.moe.moe_layer",
        "MoEFlexTokenDispatcher",
        "keeps tensors of a pass whose graph holds the layer's input until the layer's next pass",
    ),
    (
        "transformer.moe.token_dispatcher",
        "_DeepepManager",
        "in `_indices_to_multihot` asks the device three times which of a row's places name an expert",
    ),
)
_SIZES = ("input_splits", "output_splits", "output_splits_tp", "num_out_tokens", "num_global_tokens_per_local_expert")


def install() -> None:
    """Replace Megatron's dispatchers, and a function of DeepEP's. May be called again."""
    moe_layer.MoEAlltoAllTokenDispatcher, moe_layer.MoEFlexTokenDispatcher = ExchangedTokens, SentTokens
    token_dispatcher._DeepepManager._indices_to_multihot = _multihot


def _multihot(manager: Any, indices: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Local experts of each row and their weights, both `[rows, local experts]`.

    Args:
        indices: `[rows, top_k]` int64 local experts, -1: none.
        probs: `[rows, top_k]` float32.
    """
    experts = manager.num_local_experts
    # Places without a local expert go to a column that is cut off.
    places = torch.where(indices < 0, experts, indices)
    chosen = torch.zeros(len(indices), experts + 1, dtype=torch.bool, device=indices.device).scatter(1, places, True)
    weights = probs.new_zeros(len(indices), experts + 1).scatter(1, places, probs)
    return chosen[:, :experts], weights[:, :experts]


class SentTokens(MoEFlexTokenDispatcher):
    """Tokens sent by DeepEP or HybridEP, of which nothing is kept once they are back."""

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        # Probabilities before and after the exchange, indices, maps and counts: each pass has its own.
        for name, value in vars(self._comm_manager).items():
            if isinstance(value, torch.Tensor):
                setattr(self._comm_manager, name, None)
        output: torch.Tensor = super().combine_postprocess(hidden_states)
        return output


class ExchangedTokens(MoEAlltoAllTokenDispatcher):
    """One wait in each forward pass where rows go to other ranks, no other."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self.choices: Choices | None = None
        """Choices of the layer's router; None: no pass is recomputed."""
        self._earlier: deque[dict[str, Any]] = deque()
        self.is_alone = self.ep_size * self.tp_size == 1
        if self.is_alone:
            # Rows are sorted by expert once. With this number they are not sorted again by the rank that they come from.
            self.num_local_experts = 1

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in the order of their experts, and their weights."""
        rows: tuple[torch.Tensor, torch.Tensor] = super().dispatch_preprocess(hidden_states, routing_map, probs)
        # Only its type is read again. Its graph would hold a recomputed layer's input, and the gradient of that, until the
        # layer's next pass.
        self.probs = probs.detach()
        return rows

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """The number of rows of each local expert, on the device; sizes of the exchange as attributes."""
        if self.is_alone or self.choices is None or not self.choices.is_repeated:
            return super().preprocess(routing_map)
        # The router chooses the same experts again.
        known = self._earlier.popleft()
        for name in _SIZES:
            setattr(self, name, known[name])
        return known["tokens_per_expert"]

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        is_known = self.choices is not None and self.choices.is_repeated
        if self.is_alone or is_known:
            return tokens_per_expert
        # Without them as its argument they stay on the device.
        super()._maybe_dtoh_and_synchronize(point)
        if point == self.cuda_sync_point and self.choices is not None and self.choices.will_repeat:
            sizes = {name: getattr(self, name) for name in _SIZES}
            self._earlier.append(sizes | {"tokens_per_expert": tokens_per_expert})
        return tokens_per_expert

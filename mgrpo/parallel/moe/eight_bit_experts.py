"""Experts whose products are Transformer Engine's, in 8 bits.

Their parameters are those of `GroupedExperts`: loading, sums, saves and the weight sync do not depend on the product.
Megatron's own layer of this kind has a parameter for each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

from mgrpo.parallel.moe.experts import GroupedExperts, GroupedLinear


class EightBitLinear(GroupedLinear):
    """`GroupedLinear` that can also multiply by Transformer Engine's module, which has no parameters here."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        from transformer_engine.pytorch import GroupedLinear as Engine

        outputs, inputs = len(self.weight) // self.experts, self.weight.shape[1]
        # Without the expert-tensor ranks: each rounds its own share, whose products are summed outside.
        self.engine = Engine(self.experts, inputs, outputs, bias=False, params_dtype=self.weight.dtype, device="meta")
        for number in range(self.experts):
            delattr(self.engine, f"weight{number}")
            setattr(self.engine, f"bias{number}", self.weight.detach().new_empty(0))
        # Megatron sets it before the first micro-batch of a pass; until then the rounded matrices are kept.
        self.is_first_microbatch = True

    def in_8_bits(self, rows: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """`[rows, inputs]` -> `[rows, outputs]`; expert i has the next `splits[i]` rows, as many as `Fp8Padding` makes them."""
        for number, matrix in enumerate(self.weight.view(self.experts, -1, rows.shape[1]).unbind(0)):
            setattr(self.engine, f"weight{number}", matrix)
        products: torch.Tensor = self.engine(rows, splits, is_first_microbatch=self.is_first_microbatch)
        self.is_first_microbatch = False
        return products


class EightBitExperts(GroupedExperts):
    """`GroupedExperts` with products in 8 bits. The host waits for the number of rows of each expert."""

    linear = EightBitLinear
    linear_fc1: EightBitLinear
    linear_fc2: EightBitLinear

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding

        experts = self.linear_fc1.experts
        self.padding, self.unpadding = Fp8Padding(experts), Fp8Unpadding(experts)

    def forward(
        self, rows: torch.Tensor, rows_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Output of each row's expert, see `GroupedExperts.forward`."""
        if len(rows) == 0:
            return super().forward(rows, rows_per_expert, weights)
        splits = rows_per_expert.tolist()
        padded, padded_splits = self.padding(rows, splits)
        padded_weights, _ = self.padding(weights[:, None], splits)
        gate_and_up = self.linear_fc1.in_8_bits(padded, padded_splits)
        hidden = weighted_bias_swiglu_impl(gate_and_up, None, padded_weights)
        return self.unpadding(self.linear_fc2.in_8_bits(hidden, padded_splits), splits), None

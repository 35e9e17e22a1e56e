"""The experts of gpt-oss: matrices as `[inputs, outputs]`, biases, and a gated activation that is clamped."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.parallel import backend
from mgrpo.parallel.moe.experts import ALIGNMENT, GroupedExperts, row_ends, without_idle

_ALPHA = 1.702
"""Factor with which `x * sigmoid(alpha * x)` is close to GELU (arXiv:1606.08415, section 2)."""


def clamped_swiglu(gate_and_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`gate * sigmoid(1.702 gate) * (up + 1)`, gate at most `limit` and up within it; `[rows, 2 ffn]` alternating -> `[rows, ffn]`."""
    gate, up = gate_and_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)


class GroupedAffine(torch.nn.Module):
    """Experts' matrices `[inputs, outputs]` one above the other in `weight [experts * inputs, outputs]`, and `bias [experts, outputs]`.

    Args:
        group: the expert-tensor ranks, which hold shares of every matrix.
        split_dim: of which dimension, as of a matrix `[outputs, inputs]`. Where they share the inputs their results are summed
            afterwards; the bias is then whole on all of them and is added by the first.
    """

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        config: TransformerConfig,
        group: dist.ProcessGroup,
        *,
        split_dim: int,
    ) -> None:
        super().__init__()
        sums = split_dim == 1
        self.experts, self.adds_bias = experts, not sums or group.rank() == 0
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": backend.device()}
        self.weight = torch.nn.Parameter(torch.empty(experts * inputs, outputs, **options))
        self.bias = torch.nn.Parameter(torch.empty(experts, outputs, **options))
        set_tensor_model_parallel_attributes(self.weight, True, 1 - split_dim, 1)
        if not sums or group.size() == 1:
            set_tensor_model_parallel_attributes(self.bias, True, 1, 1)
        for own in (self.weight, self.bias):
            # Megatron reduces gradients of parameters without this mark over ranks that hold other experts.
            marked: Any = own
            marked.allreduce = config.expert_model_parallel_size == 1

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` -> `[rows, outputs]`; expert i has the rows before `ends[i]`, `ends [experts]` int32."""
        matrices = self.weight.view(self.experts, rows.shape[1], -1)
        if rows.shape[0] == 0:
            return rows @ matrices[0] + self.bias[:0].sum(0)
        if matrices.requires_grad:
            matrices.register_hook(lambda gradient: without_idle(gradient, ends))
        # The bias has its gradient also where it is not added, equal on all ranks of the group.
        bias = self.bias if self.adds_bias else self.bias - self.bias.detach()
        return F.grouped_mm(rows, matrices, offs=ends) + _BiasOfRows.apply(bias, ends, len(rows))


class ClampedExperts(GroupedExperts):
    """Experts of one layer, in place of Megatron's; gate and up are alternate columns of the first product, as in checkpoints.

    Args:
        clamp: see `clamped_swiglu`.
    """

    linear = GroupedAffine

    def __init__(self, *args: Any, clamp: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clamp = clamp

    def forward(
        self, rows: torch.Tensor, rows_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Output of each row's expert, see `GroupedExperts.forward`."""
        ends = row_ends(rows_per_expert, rows)
        hidden = backend.compiled(clamped_swiglu)(self.linear_fc1(rows, ends), self.clamp)
        out = self.linear_fc2(hidden, ends)
        return (out * weights[:, None]).to(out.dtype), None


class _BiasOfRows(torch.autograd.Function):
    """`bias [experts, outputs]` -> `[rows, outputs]`, of each row's expert; the sums of the gradient are made by one grouped product."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, ends: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(ends)
        experts = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
        return bias.index_select(0, experts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        dy = gradients[0].contiguous()
        ones = dy.new_ones(len(dy), ALIGNMENT)
        return without_idle(F.grouped_mm(ones.T, dy, offs=ends), ends)[:, 0], None, None

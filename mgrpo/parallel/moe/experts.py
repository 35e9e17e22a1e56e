"""The experts that a rank holds, computed together: one grouped matrix product in place of one product an expert.

Megatron has the same only for the CUTLASS package `grouped_gemm` or Transformer Engine; torch's own needs neither.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import permute as megatron_permute
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.parallel import backend

REBOUND: tuple[tuple[str, str, str], ...] = (
    # (module under megatron.core, name, why)
    ("transformer.moe.token_dispatcher", "permute", "asks the device twice how many rows there are, which is known"),
)
ALIGNMENT = 8
"""Rows of a multiple of 16 bytes, which grouped products on CUDA need."""
_NO_PADDING = (None, None) if "align_size" in inspect.signature(megatron_permute).parameters else ()


def install() -> None:
    """Replace Megatron's permutation of rows where Transformer Engine does not fuse it. May be called again."""
    token_dispatcher.permute = permute


def permute(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **padding: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Rows sorted by expert, once for each expert that a row has chosen.

    Args:
        rows: `[rows, hidden]`.
        chosen: `[rows, experts]` bool; `num_out_tokens` of it are true.
        probs: `[rows, experts]`.
        padding: of each expert's rows, an option of megatron-core 0.19.
    Returns:
        `[num_out_tokens, hidden]`, the chosen probabilities `[num_out_tokens]`, and the number of each result's row; from
        megatron-core 0.19 on also the padding of the rows: none.
    """
    if fused or drop_and_pad or num_out_tokens is None or padding:
        return megatron_permute(rows, chosen, probs, num_out_tokens, fused, drop_and_pad, **padding)
    places = torch.nonzero_static(chosen.T.reshape(-1), size=num_out_tokens).squeeze(1)
    numbers = places % len(rows)
    kept = None if probs is None else probs.T.reshape(-1).index_select(0, places)
    return rows.index_select(0, numbers), kept, numbers, *_NO_PADDING


class GroupedLinear(torch.nn.Module):
    """Experts' matrices `[outputs, inputs]` one above the other in `weight [experts * outputs, inputs]`.

    Args:
        split_dim: dimension of a matrix of which the expert-tensor ranks, `group`, hold shares.
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
        self.experts, self.group, self.split_dim = experts, group, split_dim
        self.weight = torch.nn.Parameter(
            torch.empty(experts * outputs, inputs, dtype=config.params_dtype, device=backend.device())
        )
        set_tensor_model_parallel_attributes(self.weight, True, split_dim, 1)
        # Megatron reduces gradients of parameters without this mark over ranks that hold other experts.
        marked: Any = self.weight
        marked.allreduce = config.expert_model_parallel_size == 1

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` -> `[rows, outputs]`; expert i has the rows before `ends[i]`, `ends [experts]` int32."""
        return self._forward_impl(rows, ends=ends)

    def _forward_impl(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        matrices = self.weight.view(self.experts, -1, rows.shape[1])
        if rows.shape[0] == 0:
            return rows @ matrices[0].T
        if matrices.requires_grad:
            matrices.register_hook(lambda gradient: without_idle(gradient, ends))
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)


def without_idle(gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`gradient [experts, outputs, inputs]` with 0 for experts without rows.

    On Blackwell torch leaves earlier memory contents there (pytorch/pytorch#172439).
    """
    is_idle = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    return gradient.masked_fill(is_idle[:, None, None], 0)


class GroupedExperts(torch.nn.Module):
    """Gated experts of one layer, in place of Megatron's SequentialMLP and with its values.

    Their weights are two parameters, the experts' matrices one above the other. So they need no copy to be multiplied
    together, and gradient buffers, ZeRO's shards and the optimizer have two tensors a layer instead of two an expert.
    """

    linear: type[torch.nn.Module] = GroupedLinear

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        # Of the layer, for logs; megatron-core 0.19 gives it.
        name: str | None = None,
    ) -> None:
        super().__init__()
        install()
        assert config.activation_func is F.silu and config.gated_linear_unit
        group = pg_collection.expt_tp
        ffn = config.moe_ffn_hidden_size // group.size()
        self.linear_fc1 = self.linear(num_local_experts, 2 * ffn, config.hidden_size, config, group, split_dim=0)
        self.linear_fc2 = self.linear(num_local_experts, config.hidden_size, ffn, config, group, split_dim=1)

    def forward(
        self, rows: torch.Tensor, rows_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The output of each row's expert, and no bias.

        Args:
            rows: `[rows, hidden]`, sorted by expert.
            rows_per_expert: `[experts]` int64, on the device, or on the host, from DeepEP.
            weights: `[rows]` float32, by which the router weighs each row's result.
        """
        ends = row_ends(rows_per_expert, rows)
        gate_and_up = self.linear_fc1(rows, ends)
        hidden = weighted_bias_swiglu_impl(gate_and_up, None, weights[:, None])
        return self.linear_fc2(hidden, ends), None


def row_ends(rows_per_expert: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`[experts]` int32 on the device of the rows, which the host does not wait for: the first row after those of each expert."""
    if rows_per_expert.device != rows.device:
        rows_per_expert = backend.to_device(rows_per_expert.numpy(), np.int64)
    return rows_per_expert.cumsum(0, dtype=torch.int32)

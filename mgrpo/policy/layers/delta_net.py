"""Gated delta nets (arXiv:2412.06464) as a layer of Megatron's, in the place of self-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.models.shape import DeltaNet
from mgrpo.parallel import backend
from mgrpo.parallel.packed.context import heads_for_tokens, tokens_for_heads
from mgrpo.parallel.packed.delta_rule import Chunks, causal_convolution, gated_delta_rule
from mgrpo.parallel.packed.packs import PackedDocuments
from mgrpo.policy.layers.norms import GatedNorm


class GatedDeltaNet(MegatronModule):
    """Each tensor rank has whole key heads and their value heads; context-parallel ranks exchange tokens for heads.

    Parameters are named and laid out as in Megatron-core's module of this name, which takes neither packs nor CPUs.
    """

    def __init__(self, config: TransformerConfig, *, delta: DeltaNet, **unused: Any) -> None:
        super().__init__(config=config)
        tensor, self.context = parallel_state.get_tensor_model_parallel_world_size(), config.context_parallel_size
        assert delta.key_heads % (tensor * self.context) == 0, (delta.key_heads, tensor, self.context)
        self.key_dim, self.value_dim = delta.key_dim, delta.value_dim
        self.values_per_key = delta.value_heads // delta.key_heads
        keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
        heads = delta.value_heads // tensor
        self.mixed = [keys // tensor, keys // tensor, values // tensor]
        """Widths of this rank's queries, keys and values."""
        self.widths = [sum(self.mixed), values // tensor, heads, heads]
        common: dict[str, Any] = {"config": config, "bias": False, "init_method": config.init_method}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, sum(self.widths) * tensor, gather_output=False, skip_bias_add=False, **common
        )
        self.conv1d = torch.nn.ParameterDict({"weight": _own_heads(config, self.widths[0], delta.conv)})
        self.A_log, self.dt_bias = _own_heads(config, heads), _own_heads(config, heads)
        self.out_norm = GatedNorm(config, delta.value_dim, config.layernorm_epsilon)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **common
        )
        is_selective = config.recompute_granularity == "selective"
        self.recomputes = is_selective and "core_attn" in config.recompute_modules

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, packed_seq_params: PackedDocuments, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """`[local tokens, 1, hidden]` -> same, as Megatron's self-attention."""
        pack, chunks = packed_seq_params, packed_seq_params.chunks
        inputs, _ = self.in_proj(hidden_states)
        mixed, gate, beta, alpha = inputs.squeeze(1).split(self.widths, -1)
        operands: tuple[torch.Tensor, ...] = (mixed, beta, alpha, self.conv1d["weight"], self.A_log, self.dt_bias)
        if pack.gathered_rows is not None:
            operands = self._exchanged(*operands, gathered_rows=pack.gathered_rows)

        def core(*operands: torch.Tensor) -> torch.Tensor:
            return self._core(*operands, chunks=chunks)

        out = checkpoint(core, False, *operands) if self.recomputes and self.training else core(*operands)
        if pack.gathered_rows is not None:
            out = heads_for_tokens(out, pack.gathered_rows).transpose(0, 1).flatten(1, 2)
        out = backend.compiled(self.out_norm)(out, gate.unflatten(-1, (-1, self.value_dim)))
        output, _ = self.out_proj(out.flatten(1)[:, None])
        return output, None

    def _core(
        self,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        convolution: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        *,
        chunks: Chunks,
    ) -> torch.Tensor:
        """All tokens of some heads -> `[tokens, value heads, value_dim]`."""
        if chunks.copied is not None:
            mixed, beta, alpha = (x.index_select(0, chunks.copied) for x in (mixed, beta, alpha))
        mixed = backend.compiled(causal_convolution)(mixed, convolution, chunks.offsets)
        keys = len(A_log) // self.values_per_key
        query, key, value = mixed.split((keys * self.key_dim, keys * self.key_dim, len(A_log) * self.value_dim), -1)
        query, key = (
            x.unflatten(-1, (keys, self.key_dim)).repeat_interleave(self.values_per_key, 1) for x in (query, key)
        )
        decay = -A_log.float().exp() * F.softplus(alpha.float() + dt_bias.float())
        value = value.unflatten(-1, (-1, self.value_dim))
        out = gated_delta_rule(query, key, value, decay, beta.sigmoid(), chunks)
        return out if chunks.firsts is None else out.index_select(0, chunks.firsts)

    def _exchanged(
        self,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        convolution: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        *,
        gathered_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The operands of `_core` for all tokens and this context-parallel rank's heads, from its tokens and all heads."""
        rank = parallel_state.get_context_parallel_rank()
        sections = [*self.mixed, len(A_log), len(A_log)]
        by_rank = self._by_rank(torch.cat((mixed, beta, alpha), -1), sections)
        own = [sum(self.mixed) // self.context, *[len(A_log) // self.context] * 2]
        return (
            *tokens_for_heads(by_rank, gathered_rows).split(own, -1),
            self._by_rank(convolution.T, self.mixed)[rank].T,
            A_log.chunk(self.context)[rank],
            dt_bias.chunk(self.context)[rank],
        )

    def _by_rank(self, x: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
        """`[n, sum(sections)]` -> `[ranks, n, sum(sections) / ranks]`, an equal share of every section for each rank."""
        parts = [part.unflatten(-1, (self.context, -1)) for part in x.split(tuple(sections), -1)]
        return torch.cat(parts, -1).transpose(0, 1)


def _own_heads(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """A parameter of this tensor rank's heads."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter

"""Attention when context-parallel ranks share every document, each with the stretches of `packs.local_tokens`.

all_gather: every rank gathers all keys and values, for its own queries. a2a (DeepSpeed-Ulysses, arXiv:2309.14509): the
ranks exchange tokens for heads, so that each holds all tokens of some heads, and exchange back. Every token's output is
that of a single rank, and the loss covers whole documents (`whole_responses`), so tokens at the cuts are trained as well.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from mgrpo.parallel.packed.attention import PackedAttention
from mgrpo.parallel.packed.packs import PackedDocuments


class GatheredAttention(PackedAttention):
    """Local queries over all ranks' keys and values, whose gradients are summed on the rank that they came from."""

    def attend_over_context(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackedDocuments,
        gathered_rows: torch.Tensor,
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        gathered = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=group)
        key, value = gathered.index_select(0, gathered_rows).split((key.shape[-1], value.shape[-1]), dim=-1)
        return self.attend(query, key, value, pack, pack.local_queries, self.sinks)


class UlyssesAttention(PackedAttention):
    """All tokens, some of the heads: a tensor rank's heads and key-value heads must divide by the context size."""

    def attend_over_context(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack: PackedDocuments,
        gathered_rows: torch.Tensor,
    ) -> torch.Tensor:
        size = parallel_state.get_context_parallel_world_size()

        def all_tokens(x: torch.Tensor) -> torch.Tensor:
            return tokens_for_heads(x.unflatten(1, (size, -1)).transpose(0, 1), gathered_rows)

        sinks = None if self.sinks is None else self.sinks.view(size, -1)[parallel_state.get_context_parallel_rank()]
        out = self.attend(all_tokens(query), all_tokens(key), all_tokens(value), pack, pack.all_queries, sinks)
        return heads_for_tokens(out, gathered_rows).transpose(0, 1).flatten(1, 2)


def tokens_for_heads(x: torch.Tensor, gathered_rows: torch.Tensor) -> torch.Tensor:
    """The local tokens of all ranks' heads `[ranks, local, ...]` -> all tokens of this rank's heads `[tokens, ...]`.

    All context-parallel ranks must call.
    """
    group = parallel_state.get_context_parallel_group()
    return all_to_all(group, x.flatten(0, 1).contiguous()).index_select(0, gathered_rows)


def heads_for_tokens(x: torch.Tensor, gathered_rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `tokens_for_heads`."""
    group = parallel_state.get_context_parallel_group()
    tokens_by_rank = x.index_select(0, gathered_rows.argsort())
    return all_to_all(group, tokens_by_rank.contiguous()).unflatten(0, (group.size(), -1))


def core_attention(cp_comm_type: str) -> type[PackedAttention]:
    """The attention class for `cp_comm_type`; without context parallelism both are `PackedAttention`."""
    return {"all_gather": GatheredAttention, "a2a": UlyssesAttention}[cp_comm_type]


def whole_responses(values: torch.Tensor, indices: torch.Tensor, num_responses: int) -> torch.Tensor:
    """`[n, local responses]` -> `[n, num_responses]` on every context-parallel rank; gradients return to their own rank.

    Args:
        indices: `[local responses]` which of the responses these are.
    """
    whole = values.new_zeros(values.shape[0], num_responses).index_copy(1, indices, values)
    return reduce_from_tensor_model_parallel_region(whole, group=parallel_state.get_context_parallel_group())

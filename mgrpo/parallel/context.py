"""Attention when context-parallel ranks share every document, each with the stretches that `own_tokens` says.

all_gather: every rank gathers the keys and values of all, for its own queries. a2a (DeepSpeed-Ulysses, arXiv:2309.14509):
the ranks exchange, so that each holds all tokens of some heads, and exchange back. No token's output differs from one
rank's, and the loss sees whole documents (`whole_responses`), so that no boundary goes untrained.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from mgrpo.parallel.attention import PackedAttention, PackedDocuments


class GatheredAttention(PackedAttention):
    """Own queries over everyone's keys and values; the gradient of these is summed where they came from."""

    def attend_over_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        both = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=group)
        key, value = both.index_select(0, pack.gathered).unbind(1)
        return self.attend(query, key, value, pack, pack.share)


class UlyssesAttention(PackedAttention):
    """All tokens, a share of the heads: heads and key-value heads of a tensor rank must divide by the context size."""

    def attend_over_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: PackedDocuments
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        size = group.size()

        def all_tokens(x: torch.Tensor) -> torch.Tensor:
            parts = x.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
            return all_to_all(group, parts).index_select(0, pack.gathered)

        out = self.attend(all_tokens(query), all_tokens(key), all_tokens(value), pack, pack.whole)
        by_rank = out.index_select(0, pack.gathered.argsort())
        parts = all_to_all(group, by_rank.contiguous()).unflatten(0, (size, -1))
        return parts.transpose(0, 1).flatten(1, 2)


def core_attention(cp_comm_type: str) -> type[PackedAttention]:
    """The attention class for `cp_comm_type`; without context parallelism both are `PackedAttention`."""
    return {"all_gather": GatheredAttention, "a2a": UlyssesAttention}[cp_comm_type]


def whole_responses(values: torch.Tensor, places: torch.Tensor, num_responses: int) -> torch.Tensor:
    """`[n, own responses]` -> `[n, num_responses]` on every context-parallel rank; a gradient returns to its own rank.

    Args:
        places: `[own responses]` which of the responses these are.
    """
    everyones = values.new_zeros(values.shape[0], num_responses).index_copy(1, places, values)
    return reduce_from_tensor_model_parallel_region(everyones, group=parallel_state.get_context_parallel_group())

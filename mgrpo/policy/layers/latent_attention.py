"""Multi-head latent attention over packs (arXiv:2405.04434, section 2.1), in place of Megatron's self-attention.

Megatron-core's own rotates by the lengths of documents, which excludes branches, and on several tensor ranks loses a part
of the gradient of the rotated key, which all heads share.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo.models.shape import LatentAttention
from mgrpo.parallel import backend
from mgrpo.parallel.packed.attention import PackedAttention
from mgrpo.policy.layers.norms import RMSNorm
from mgrpo.policy.layers.rotary import turned_neighbours


class LatentSelfAttention(MegatronModule):
    """Attention whose queries, keys and values are made of latent vectors, which every tensor rank computes.

    From the latents on, each tensor rank has its own heads. With sequence parallelism the latents are of a rank's own tokens,
    and it is they that are gathered, not the wider hidden states.

    Args:
        core_attention: makes the attention over queries, keys and values from the configuration.
        rope: index of the layer's kind of angles, see `PackedRotary`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        *,
        latent: LatentAttention,
        core_attention: partial[PackedAttention],
        rope: int,
    ) -> None:
        super().__init__(config=config)
        self.latent, self.rope, self.group = latent, rope, pg_collection.tp
        heads, hidden = config.num_attention_heads, config.hidden_size
        query, key_value = latent.nope_dim + latent.rope_dim, latent.nope_dim + latent.v_dim
        column = partial(
            ColumnParallelLinear, config=config, init_method=config.init_method, bias=False, tp_group=self.group
        )
        if latent.q_rank is None:
            self.linear_q_proj = column(hidden, heads * query)
        else:
            self.linear_q_down_proj = ReplicatedLinear(hidden, latent.q_rank, config)
            self.q_layernorm = RMSNorm(config, latent.q_rank, latent.norm_eps)
            self.linear_q_up_proj = column(latent.q_rank, heads * query)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, latent.kv_rank + latent.rope_dim, config)
        self.kv_layernorm = RMSNorm(config, latent.kv_rank, latent.norm_eps)
        self.linear_kv_up_proj = column(latent.kv_rank, heads * key_value)
        self.core_attention: Any = core_attention(config)
        self.linear_proj = RowParallelLinear(
            heads * latent.v_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.group,
        )
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Hidden states `[tokens, 1, hidden]` -> same, and no bias. Collective over tensor and context ranks.

        Args:
            rotary_pos_emb: output of `PackedRotary`.
            kwargs: of Megatron's layer, the pack as `packed_seq_params` among them.
        """
        query, key, value = self.query_key_value(hidden_states, *rotary_pos_emb[self.rope])
        attend = partial(self.core_attention, packed_seq_params=kwargs["packed_seq_params"])
        if self.recomputes_core and self.training:
            out = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        return self.linear_proj(out[:, None])

    def query_key_value(
        self, hidden_states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and key `[tokens, heads/tp, nope_dim + rope_dim]`, turned, and value `[tokens, heads/tp, v_dim]`."""
        latent = self.latent
        if latent.q_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        down = self.linear_kv_down_proj(hidden_states)
        compressed, shared_key = down.split((latent.kv_rank, latent.rope_dim), dim=-1)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(compressed))
        # Each tensor rank has the gradient of its own heads alone: both mappings add them up on the way back, as the linear
        # layers above do for theirs.
        if self.config.sequence_parallel:
            shared_key = tensor_parallel.gather_from_sequence_parallel_region(shared_key, group=self.group)
        else:
            shared_key = tensor_parallel.copy_to_tensor_model_parallel_region(shared_key, group=self.group)
        return backend.compiled(_assembled)(
            query.squeeze(1).unflatten(-1, (-1, latent.nope_dim + latent.rope_dim)),
            key_value.squeeze(1).unflatten(-1, (-1, latent.nope_dim + latent.v_dim)),
            shared_key,
            cosines.squeeze(1),
            sines.squeeze(1),
            latent.nope_dim,
        )


def _assembled(
    query: torch.Tensor,
    key_value: torch.Tensor,
    shared_key: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    nope_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of each head; key_value has for each head a key that is not rotated and a value."""
    plain_query, rotated_query = query.tensor_split((nope_dim,), dim=-1)
    plain_key, value = key_value.tensor_split((nope_dim,), dim=-1)
    rotated_query = turned_neighbours(rotated_query, cosines, sines)
    rotated_key = turned_neighbours(shared_key, cosines, sines).expand(-1, query.shape[1], -1)
    return torch.cat((plain_query, rotated_query), -1), torch.cat((plain_key, rotated_key), -1), value


class ReplicatedLinear(torch.nn.Module):
    """`weight [outputs, inputs]`, whole on every tensor rank.

    With sequence parallelism a rank multiplies its own tokens, and Megatron adds the gradients of the weight up. Otherwise all
    ranks multiply the same, and the gradient of each must be whole.
    """

    tp_group = None
    """The weight is not sharded; Megatron's linear layers have their tensor group here."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=backend.device())
        )
        marked: Any = self.weight
        marked.sequence_parallel, marked.allreduce = config.sequence_parallel, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., inputs]` -> `[..., outputs]`."""
        return self._forward_impl(x)

    def _forward_impl(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

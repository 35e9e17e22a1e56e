"""Megatron's GPTModel for a shape and a layout, with the LM head applied to response rows only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mgrpo import ops
from mgrpo.layout import VOCAB_MULTIPLE, Layout
from mgrpo.models.family import ModelShape
from mgrpo.parallel import backend
from mgrpo.parallel.attention import PackedAttention, PackedDocuments, PackedRotary, RMSNorm


@dataclass(frozen=True, slots=True)
class ResponseRows:
    """Which outputs of a pack are scored, and against which tokens."""

    rows: torch.Tensor
    """`[responses]` int64."""
    targets: torch.Tensor
    """`[responses]` int64."""
    temperature: float


class ResponseModel(GPTModel):
    """GPTModel whose last stage returns log-probability and entropy of response tokens: `[2, responses]` float32.

    Without gradients, which is scoring, there is an entropy only if `scores_entropy`, else `[1, responses]`; it has a
    gradient only if `trains_entropy`, which costs time.

    Hidden rows are gathered before the LM head, so that prompts never reach the vocabulary, and the vocabulary shard is
    scored in place by `mgrpo.ops`; nothing of size `[tokens, vocab]` exists beyond the head's own output, and with
    `logits_chunk` > 0 not even that: the head runs on so many columns at a time.
    """

    def __init__(
        self, *args: Any, vocab: int, logits_chunk: int, trains_entropy: bool, scores_entropy: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.logits_chunk = logits_chunk
        self.trains_entropy, self.scores_entropy = trains_entropy, scores_entropy
        shard = self.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        self.vocab_start = shard * parallel_state.get_tensor_model_parallel_rank()
        self.valid_cols = min(max(vocab - self.vocab_start, 0), shard)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        documents: PackedDocuments,
        response: ResponseRows,
    ) -> torch.Tensor:
        """tokens and positions `[1, tokens]`; all ranks of a data-parallel slice call with the same pack."""
        self._response = response
        return super().forward(tokens, positions, None, packed_seq_params=documents)

    def _postprocess(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        head, response = self.output_layer, self._response
        sequence_parallel = head.sequence_parallel
        if sequence_parallel:
            # The head all-reduces its input gradient over tensor ranks; a gather that also reduces would count it tp times.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        hidden_states = hidden_states.index_select(0, response.rows)
        has_gradient = torch.is_grad_enabled()
        options = {
            "temperature": response.temperature,
            "vocab_start": self.vocab_start,
            "valid_cols": self.valid_cols,
            "group": parallel_state.get_tensor_model_parallel_group(),
            "with_entropy": has_gradient or self.scores_entropy,
        }
        if self.logits_chunk:
            logprobs, entropy = ops.linear_logprobs(
                hidden_states.squeeze(1),
                head.weight if weight is None else weight,
                response.targets,
                logits_chunk=self.logits_chunk,
                **options,
            )
        else:
            head.sequence_parallel = False
            logits, _ = head(hidden_states, weight=weight)
            head.sequence_parallel = sequence_parallel
            logprobs, entropy = ops.token_logprobs(logits.squeeze(1), response.targets, inplace=has_gradient, **options)
        if entropy is None:
            return logprobs[None]
        return torch.stack((logprobs, entropy if self.trains_entropy else entropy.detach()))


def _finalize_without_scaling(model: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """Sum gradients over the axes. The loss is already divided by its global denominator: no count divides it again."""
    finalize_model_grads(model, None, **kwargs)


def transformer_config(shape: ModelShape, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of the model on this layout."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence_parallel,
        # Packs differ in length: stages exchange shapes first.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize_without_scaling,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        autocast_dtype=None,
        enable_autocast=False,
        perform_initialization=False,
        **backend.transformer_settings(),
    )


def build(shape: ModelShape, layout: Layout, dtype: torch.dtype, **head: Any) -> ResponseModel:
    """The stage of the model that this rank holds, weights unset; `head` as in `ResponseModel`. Every rank must call."""
    config = transformer_config(shape, layout, dtype)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    model = ResponseModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * (shape.num_layers // layout.pipeline), layer_norm=RMSNorm),
        vocab_size=-(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        vocab=shape.vocab,
        **head,
    )
    model.rotary_pos_emb = PackedRotary(
        kv_channels=shape.head_dim,
        rotary_percent=1.0,
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling.factor if shape.rope_scaling else 8.0,
        use_cpu_initialization=True,
    )
    _mark_tensor_parallel(model)
    return model.to(backend.device())


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Say which weights are shards: Megatron does so only while it initialises them, and its gradient norm asks."""
    split_dim = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) in split_dim and weight is not None:
            set_tensor_model_parallel_attributes(weight, True, split_dim[type(module)], 1)

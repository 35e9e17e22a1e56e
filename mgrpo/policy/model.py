"""Megatron's GPTModel for a shape and a layout, with the LM head applied to response rows only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from megatron.core import parallel_state, tensor_parallel
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
from mgrpo.config.fused_kernels import uses_transformer_engine
from mgrpo.config.schema import Parallel
from mgrpo.layout import VOCAB_MULTIPLE, Layout
from mgrpo.models.shape import ModelShape
from mgrpo.parallel import backend
from mgrpo.parallel.packed.context import whole_responses
from mgrpo.parallel.packed.packs import PackedDocuments
from mgrpo.policy.layers import transformer_engine
from mgrpo.policy.layers.activation_offload import ActivationOffload
from mgrpo.policy.layers.architecture import adds_gradients, block, transformer_config
from mgrpo.policy.layers.rotary import PackedRotary, frequencies


@dataclass(frozen=True, slots=True)
class ResponseRows:
    """The outputs of a pack that this rank scores, and the tokens against which: those among its local tokens."""

    rows: torch.Tensor
    """`[local responses]` int64, among the local tokens."""
    targets: torch.Tensor
    """`[local responses]` int64."""
    temperature: float
    indices: torch.Tensor | None = None
    """`[local responses]` int64: which of the pack's responses these are; None: all of them, in order."""
    num_responses: int = 0
    """Number of responses of the whole pack; only with `indices`."""
    kept: ops.KeptSets | None = None
    """The tokens that each of the targets was sampled from; None: from the whole vocabulary."""
    num_likeliest: int = 0
    """The model's likeliest tokens that are wanted, in place of the entropy; only without gradients."""
    candidates: torch.Tensor | None = None
    """`[local responses, k]` int64, further tokens to score for each of the targets; -1: none."""


class HeadOptions(TypedDict):
    """Settings of the LM head, see `ResponseModel`."""

    logits_chunk: int
    fp32_logits: bool
    trains_entropy: bool
    scores_entropy: bool


class ResponseModel(GPTModel):
    """GPTModel whose last stage returns log-probability and entropy of response tokens: `[2, responses]` float32.

    With k candidates: also the log-probabilities of target and candidates: `[2 + 1 + k, responses]`.
    Where the k likeliest tokens are wanted: log-probability, those of the likeliest, and their ids, exact as float32 below
    2^24: `[1 + 2k, responses]`.

    Both are over the tokens that a response token was sampled from, where sampling cut the vocabulary.
    Context-parallel ranks, each of which holds some of the tokens, all return the values of all responses.

    Hidden rows are gathered before the LM head, so that prompts never reach the vocabulary, and the vocabulary shard is
    scored in place by `mgrpo.ops`; nothing of size `[tokens, vocab]` is materialised beyond the head's own output.

    Args:
        logits_chunk: above 0 the head runs on this many columns at a time, so that not even its own output is
            materialised.
        fp32_logits: its logits are those of its weight and input in fp32, without being rounded to their type.
        trains_entropy: the entropy has a gradient, which costs time.
        scores_entropy: scoring also returns the entropy, without gradients; otherwise the result is `[1, responses]`.
    """

    def __init__(
        self,
        *args: Any,
        shape: ModelShape,
        logits_chunk: int,
        fp32_logits: bool,
        trains_entropy: bool,
        scores_entropy: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if logits_chunk and shape.logit_softcap:
            raise ValueError(
                f"logits_chunk={logits_chunk} needs a model without final_logit_softcapping, this one has "
                f"{shape.logit_softcap:g}; use 0"
            )
        self.shape, self.logits_chunk, self.fp32_logits = shape, logits_chunk, fp32_logits
        # The head is called as a module in all cases: hooks before its forward pass make its weight ready.
        if logits_chunk and self.post_process:
            self.output_layer.forward = _call
        elif fp32_logits and self.post_process:
            self.output_layer.forward = ops.linear_logits
        # Rounded to the model's type, as in training of the models that have it.
        self.embedding_scale = torch.tensor(shape.embedding_scale, dtype=self.config.params_dtype, device="cpu").item()
        self.trains_entropy, self.scores_entropy = trains_entropy, scores_entropy
        shard = self.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        self.vocab_start = shard * parallel_state.get_tensor_model_parallel_rank()
        self.valid_cols = min(max(shape.vocab - self.vocab_start, 0), shard)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        documents: PackedDocuments,
        response: ResponseRows,
    ) -> torch.Tensor:
        """tokens and positions `[1, local tokens]`; all ranks of a data-parallel slice call with the same pack."""
        self._response = response
        return super().forward(tokens, positions, None, packed_seq_params=documents)

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        embeddings, *rest = super()._preprocess(*args, **kwargs)
        if self.embedding_scale != 1 and embeddings is not None:
            embeddings = embeddings * self.embedding_scale
        if embeddings is not None and torch.is_grad_enabled():
            # They need none themselves where only adapters are trained, and Megatron's recomputation makes gradients only
            # if its input needs one.
            embeddings.requires_grad_()
        return embeddings, *rest

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits, from those of its LM head."""
        cap = self.shape.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _postprocess(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        response = self._response
        if self.output_layer.sequence_parallel:
            # The head all-reduces its input gradient over tensor ranks; a gather that also reduces would count it tp times.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        hidden_states = hidden_states.index_select(0, response.rows)
        values = self._scores(hidden_states, weight, response)
        return values if response.indices is None else whole_responses(values, response.indices, response.num_responses)

    def _scores(self, hidden: torch.Tensor, weight: torch.Tensor | None, response: ResponseRows) -> torch.Tensor:
        """The values of the rows `[rows, 1, hidden]`; weight where the head shares the embedding's."""
        has_gradient = torch.is_grad_enabled()
        options = {
            "temperature": response.temperature,
            "vocab_start": self.vocab_start,
            "valid_cols": self.valid_cols,
            "group": parallel_state.get_tensor_model_parallel_group(),
            "kept": response.kept,
        }
        if k := response.num_likeliest:
            logprobs, ids, likeliest = self._head(
                hidden, weight, response.targets, k, whole=ops.token_likeliest, linear=ops.linear_likeliest, **options
            )
            return torch.cat((logprobs[None], likeliest.t(), ids.t().float()))
        options["with_entropy"] = has_gradient or self.scores_entropy
        n, targets = len(hidden), response.targets
        if response.candidates is not None:
            # A teacher may have more padding in its vocabulary.
            candidates = response.candidates.where(response.candidates < self.shape.vocab, -1)
            targets = torch.cat((targets[:, None], candidates), 1)
        logprobs, entropy = self._head(
            hidden,
            weight,
            targets,
            whole=partial(ops.token_logprobs, inplace=has_gradient),
            linear=ops.linear_logprobs,
            **options,
        )
        values = [logprobs if response.candidates is None else logprobs[:n, 0]]
        if entropy is not None:
            values.append((entropy if self.trains_entropy else entropy.detach())[:n])
        if response.candidates is not None:
            values += logprobs[-n:].unbind(1)
        return torch.stack(values)

    def _head(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        *args: Any,
        whole: Callable[..., Any],
        linear: Callable[..., Any],
        **options: Any,
    ) -> Any:
        """The head, and an op on its logits: `whole` takes them, `linear` their factors."""
        head = self.output_layer
        own_weight = head.weight if weight is None else weight
        if self.logits_chunk:
            chunks = {"logits_chunk": self.logits_chunk, "fp32_logits": self.fp32_logits}
            return head(hidden.squeeze(1), own_weight, *args, op=linear, **chunks, **options)
        if self.fp32_logits:
            logits = head(hidden.squeeze(1), own_weight, dtype=torch.float32, group=options["group"])
        else:
            sequence_parallel = head.sequence_parallel
            head.sequence_parallel = False
            logits = head(hidden, weight=weight)[0].squeeze(1)
            head.sequence_parallel = sequence_parallel
        return whole(self.capped(logits), *args, **options)


def _call(*args: Any, op: Callable[..., Any], **options: Any) -> Any:
    return op(*args, **options)


def build(
    shape: ModelShape,
    layout: Layout,
    dtype: torch.dtype,
    *,
    settings: Parallel | None = None,
    **head: Unpack[HeadOptions],
) -> list[ResponseModel]:
    """The chunks of the model that this rank holds, with uninitialised weights. Every rank must call.

    There is one chunk unless pipeline stages are interleaved.
    """
    config = transformer_config(shape, layout, dtype, settings)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = [
        _build_chunk(
            config,
            block(config, shape, layout.chunk_layers(shape.num_layers, stage, chunk), settings),
            shape,
            has_embedding=stage == 0 and chunk == 0,
            has_head=stage == layout.pipeline - 1 and chunk == layout.virtual_pipeline - 1,
            chunk=chunk if layout.virtual_pipeline > 1 else None,
            **head,
        )
        for chunk in range(layout.virtual_pipeline)
    ]
    settings = settings or Parallel()
    for chunk in chunks:
        if uses_transformer_engine(settings, has_cuda=backend.has_cuda()):
            transformer_engine.finish(chunk, accumulates=adds_gradients(settings, layout))
        if settings.activation_offloading:
            ActivationOffload(chunk.decoder)
    return chunks


def _build_chunk(
    config: TransformerConfig,
    layers: TransformerBlockSubmodules,
    shape: ModelShape,
    *,
    has_embedding: bool,
    has_head: bool,
    chunk: int | None,
    **head: Unpack[HeadOptions],
) -> ResponseModel:
    model = ResponseModel(
        config,
        layers,
        vocab_size=-(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        max_sequence_length=shape.max_positions,
        pre_process=has_embedding,
        post_process=has_head,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        vp_stage=chunk,
        shape=shape,
        **head,
    )
    turns = torch.stack([frequencies(rope, shape.rope_dim) for rope in shape.rope_kinds])
    factors = [rope.attention_factor for rope in shape.rope_kinds]
    model.rotary_pos_emb = PackedRotary(turns.to(backend.device()), factors, config.params_dtype)
    _mark_tensor_parallel(model)
    return model.to(backend.device())


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark which weights are shards, for the gradient norm: megatron-core 0.16 marks them only when it initialises them."""
    split_dim = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) in split_dim and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, split_dim[type(module)], 1)

"""Bytes that one learner rank sends in a training step, by axis, and the span of ranks that each axis connects.

Rings: an all-gather or reduce-scatter over n ranks sends (n - 1) / n of the whole from each rank, an all-reduce twice
that. Each axis sends (tokens: those of one rank's micro-batches, h = hidden):

    tensor     per layer 4 x tokens x h in a forward pass, 6 in a backward one (4 without sequence parallelism;
               2205.05198), of which latent attention has both latent vectors and the rotated part of the key in place of its
               input, and experts nothing but their shared one's half; on the first stage the embedding's sum and its
               gradient, on the last the LM head's input and the sum of that input's gradient, in fp32 where the head runs in
               chunks; once per optimizer step the sum of the fp32 gradients of weights of latent attention that each rank has
               whole, where sequence parallelism gives it a part of the tokens
    context    per layer keys and values of all other ranks, and their gradients back; or an exchange of q, k, v and the
               output. Gated delta nets always exchange: inputs of their convolution, rates and decays, and the output
    expert     per layer 2 x tokens x top_k x h in each direction
    pipeline   tokens x h for each chunk: to the next stage except from the last chunk of all, and back except from the
               first; a tied embedding's gradient
    data       gradients in fp32 and parameters, once per optimizer step; with ZeRO-2 gradients, and with ZeRO-3 the
               layers' parameters as well, in every micro-batch

Recomputation repeats the traffic of its forward pass. Left out are messages of a few bytes per token or parameter:
sums of log-probabilities, routing probabilities, gradients of norms, shapes, metrics, and of adapters their rank for each
token and matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape
from mgrpo.models.memory import FP32_BYTES, Elements, adapter_elements, holdings, stage_elements, stage_layers
from mgrpo.models.shape import ModelShape

AXES = ("tensor", "context", "expert", "pipeline", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank sends, by axis."""

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{axis: getattr(self, axis) + getattr(other, axis) for axis in AXES})

    def __mul__(self, times: float) -> Traffic:
        return Traffic(**{axis: getattr(self, axis) * times for axis in AXES})


def span_of(layout: Layout, axis: str) -> int:
    """Number of consecutive ranks that contain a group of this axis (rank order tp-cp-dp-pp)."""
    within_stage = layout.world_size // layout.pipeline
    return {
        "tensor": layout.tensor,
        "context": layout.tensor * layout.context,
        "expert": layout.expert * layout.expert_tensor,
        "data": within_stage,
        "pipeline": layout.world_size,
    }[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The tokens that pass through a pipeline stage: those of all micro-batches that one rank's context group has."""

    tokens: float
    responses: float
    """Tokens on which the LM head runs."""
    dtype_bytes: int
    fp32_logits: bool = False


def forward_traffic(shape: ModelShape, layout: Layout, settings: Parallel, passed: Passed, *, stage: int) -> Traffic:
    """Traffic of a forward pass."""
    layers = sum(_modules(shape, layout, settings, passed, stage=stage).values(), Traffic())
    stream = _stream(shape, layout, passed)
    tensor = 0.0
    if stage == 0:
        tensor += stream * (1 if layout.sequence_parallel else 2)
    if stage == layout.pipeline - 1 and layout.sequence_parallel:
        tensor += stream
    sends = layout.virtual_pipeline - (stage == layout.pipeline - 1)
    return layers + Traffic(tensor=_ring(layout.tensor) * tensor, pipeline=_messages(shape, layout, passed, sends))


def backward_traffic(
    shape: ModelShape, layout: Layout, settings: Parallel, passed: Passed, *, stage: int, logits_chunk: int
) -> Traffic:
    """Traffic of a backward pass and of recomputation in it."""
    repeated = _modules(shape, layout, settings, passed, stage=stage)
    layers = sum(_modules(shape, layout, settings, passed, stage=stage, is_backward=True).values(), Traffic())
    layers += sum((traffic for module, traffic in repeated.items() if settings.recomputes(module)), Traffic())
    tensor = 0.0
    if stage == 0 and layout.sequence_parallel:
        tensor += _stream(shape, layout, passed)
    if stage == layout.pipeline - 1:
        rows = passed.responses / layout.context
        tensor += 2 * rows * shape.hidden * (FP32_BYTES if logits_chunk or passed.fp32_logits else passed.dtype_bytes)
    sends = layout.virtual_pipeline - (stage == 0)
    return layers + Traffic(tensor=_ring(layout.tensor) * tensor, pipeline=_messages(shape, layout, passed, sends))


def _ring(ranks: int) -> float:
    """Share of the whole that each rank sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def _stream(shape: ModelShape, layout: Layout, passed: Passed) -> float:
    """Bytes of the residual stream of a rank's tokens, not split by sequence parallelism."""
    return passed.tokens / layout.context * shape.hidden * passed.dtype_bytes


def _messages(shape: ModelShape, layout: Layout, passed: Passed, sends: int) -> float:
    """Bytes of this many messages for each micro-batch to a neighbouring stage."""
    if layout.pipeline == 1:
        return 0.0
    return sends * _stream(shape, layout, passed) / (layout.tensor if layout.sequence_parallel else 1)


def _modules(
    shape: ModelShape, layout: Layout, settings: Parallel, passed: Passed, *, stage: int, is_backward: bool = False
) -> dict[str, Traffic]:
    """A pass through the layers of a stage, by the modules that selective recomputation can name."""
    layers = stage_layers(layout, shape.num_layers, stage)
    num_expert_layers = sum(shape.has_experts(layer) for layer in layers)
    own_tokens = passed.tokens / layout.context
    shared_mlp = _collectives(layout, shape.hidden, shape.hidden, is_backward=is_backward)
    gathered = _gathered_share(settings, passed.dtype_bytes)
    mlp = attention = _collectives(layout, shape.hidden, shape.hidden, gathered=gathered, is_backward=is_backward)
    if latent := shape.latent:
        projected = latent.kv_rank + (latent.q_rank or shape.hidden)
        attention = _collectives(layout, projected, shape.hidden, once=latent.rope_dim, is_backward=is_backward)
    of_tokens = _ring(layout.tensor) * own_tokens * passed.dtype_bytes
    expert, shared = 0.0, 0.0
    if shape.experts:
        split_tokens = own_tokens / layout.tensor if layout.sequence_parallel else own_tokens
        copies = split_tokens * shape.experts.top_k * shape.hidden * passed.dtype_bytes
        expert = 2 * num_expert_layers * (_ring(layout.expert) + layout.expert_tensor - 1) * copies
        shared = shared_mlp if shape.experts.shared_ffn else 0.0
    context = sum(_context_elements(shape, layout, settings, layer) for layer in layers) * own_tokens
    return {
        "projections": Traffic(tensor=len(layers) * attention * of_tokens),
        "core_attn": Traffic(context=context * passed.dtype_bytes),
        "mlp": Traffic(tensor=(len(layers) - num_expert_layers) * mlp * of_tokens),
        # In place of the MLP's collectives.
        "moe": Traffic(expert=expert, tensor=num_expert_layers * shared * of_tokens),
    }


def _gathered_share(settings: Parallel, dtype_bytes: int) -> tuple[float, float]:
    """Bytes gathered for products, relative to the model's type: of inputs, and of outputs' gradients.

    In 8 bits the latter are gathered for either direction of a product, unless a tensor has one scale.
    """
    if settings.fp8 == "none":
        return 1.0, 1.0
    a_number = (
        1 + {"tensorwise": 0, "blockwise": FP32_BYTES / 128, "mxfp8": 1 / 32}[settings.fp8_recipe]
    ) / dtype_bytes
    return a_number, a_number * (1 if settings.fp8_recipe == "tensorwise" else 2)


def _collectives(
    layout: Layout,
    inputs: int,
    outputs: int,
    *,
    once: int = 0,
    gathered: tuple[float, float] = (1.0, 1.0),
    is_backward: bool,
) -> float:
    """Elements per token of a pair of projections between which tensor ranks have parts of the width.

    With sequence parallelism their inputs are gathered, and again for the weights' gradients, and the inputs' gradients are
    scattered; outputs the other way round. Otherwise outputs are summed in a forward pass and the inputs' gradients in a backward
    one, and a sum counts twice.

    Args:
        once: width of inputs that no weight multiplies.
        gathered: see `_gathered_share`.
    """
    if layout.sequence_parallel:
        of_inputs, of_outputs = gathered
        if is_backward:
            return outputs * of_outputs + inputs * (1 + of_inputs) + once
        return outputs + inputs * of_inputs + once
    return 2 * (inputs + once) if is_backward else 2 * outputs


def _context_elements(shape: ModelShape, layout: Layout, settings: Parallel, layer: int) -> float:
    """Elements per token of a rank."""
    ring = _ring(layout.context)
    if shape.delta and not shape.has_attention(layer):
        delta = shape.delta
        mixed = 2 * delta.key_heads * delta.key_dim + delta.value_heads * (delta.value_dim + 2)
        return ring * (mixed + delta.value_heads * delta.value_dim) / layout.tensor
    key_value = max(shape.kv_heads // layout.tensor, 1) * (shape.head_dim + shape.v_dim)
    if settings.cp_comm_type == "all_gather":
        return (layout.context - 1) * key_value
    return ring * (shape.heads // layout.tensor * (shape.head_dim + shape.v_dim) + key_value)


def data_traffic(
    shape: ModelShape,
    layout: Layout,
    *,
    stage: int,
    dtype_bytes: int,
    num_micro_batches: int,
    lora: LoraShape | None = None,
) -> Traffic:
    """Traffic of one optimizer step, not the first, before which Megatron-FSDP gathers the parameters once more."""
    if lora is not None:
        shared = FP32_BYTES * _shared(adapter_elements(shape, layout, lora, stage=stage), layout)
        return Traffic(data=2 * shared)  # gradients and parameters, both float32
    held = stage_elements(shape, layout, stage=stage)
    gradients, parameters = FP32_BYTES * _shared(held, layout), dtype_bytes * _shared(held, layout)
    match layout.zero_stage:
        case 0:
            data = 2 * gradients
        case 1:
            data = gradients + parameters
        case 2:
            data = num_micro_batches * gradients + parameters
        case _:
            data = num_micro_batches * gradients + _replicas(held, layout)
            data += dtype_bytes * _gathered(shape, layout, stage=stage, num_micro_batches=num_micro_batches)
    is_tied_end = shape.tied and layout.pipeline > 1 and stage in (0, layout.pipeline - 1)
    embedding = holdings(shape, tensor=layout.tensor, expert=layout.expert).embedding
    # The two copies of the embedding sum their gradients: an all-reduce of two ranks.
    pipeline = FP32_BYTES * embedding if is_tied_end else 0.0
    tensor = 0.0
    if layout.sequence_parallel and (latent := shape.latent):
        whole = shape.hidden * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_dim)
        layers = len(stage_layers(layout, shape.num_layers, stage))
        tensor = 2 * _ring(layout.tensor) * FP32_BYTES * whole * layers
    return Traffic(data=data, pipeline=pipeline, tensor=tensor)


def _shared(held: Elements, layout: Layout) -> float:
    """Elements that a rank sends in an all-gather of all ranks' shares."""
    dense, experts = _shards(layout)
    return held.dense * _ring(dense) + held.experts * _ring(experts)


def _shards(layout: Layout) -> tuple[int, int]:
    """Ranks that share dense weights and gradients, and those that share experts."""
    dense, experts = layout.data * layout.context, layout.expert_data
    return (layout.num_shards, min(experts, layout.num_shards)) if layout.sharding == 3 else (dense, experts)


def _replicas(held: Elements, layout: Layout) -> float:
    """Bytes of the sum of a rank's share of the gradients over the replicas of HSDP."""
    dense, experts = _shards(layout)
    dense_ring, experts_ring = _ring(layout.data * layout.context // dense), _ring(layout.expert_data // experts)
    return 2 * FP32_BYTES * (held.dense / dense * dense_ring + held.experts / experts * experts_ring)


def _gathered(shape: ModelShape, layout: Layout, *, stage: int, num_micro_batches: int) -> float:
    """Elements of weights that a rank sends under ZeRO-3.

    In each micro-batch all layers for its forward and again for its backward pass, and one of them ahead at the turn
    between the two; embedding, final norm and head, which stay whole, only after the update.
    """
    held = holdings(shape, tensor=layout.tensor, expert=layout.expert)
    layers = [_shared(held.layers[layer], layout) for layer in stage_layers(layout, shape.num_layers, stage)]
    outside = _shared(stage_elements(shape, layout, stage=stage), layout) - sum(layers)
    return num_micro_batches * (2 * sum(layers) + max(layers)) + outside

"""Bytes that one learner rank sends in a training step, by axis, and the span of ranks that each axis connects.

Rings: an all-gather or reduce-scatter over n ranks sends (n - 1) / n of the whole from each rank, an all-reduce twice
that. Counted for a rank of the slowest pipeline stage. Per layer each axis sends (tokens: those of one rank's
micro-batches, h = hidden, k = kv heads x head_dim):

    tensor     4 x tokens x h in a forward pass, 6 in a backward one (4 without sequence parallelism; 2205.05198)
    context    keys and values of all other ranks, and their gradients back; or an exchange of q, k, v and the output
    expert     2 x tokens x top_k x h in each direction
    pipeline   tokens x h per stage boundary and direction, once per chunk
    data       gradients in fp32 and parameters, once per optimizer step; with ZeRO-2 gradients, and with ZeRO-3 both, in
               every micro-batch
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.memory import FP32_BYTES, Elements, stage_elements, stage_layers

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


def forward_traffic(
    shape: ModelShape, layout: Layout, settings: Parallel, *, stage: int, tokens: float, dtype_bytes: int
) -> Traffic:
    """Traffic of one forward pass over `tokens`, the tokens of the rank's context group."""
    layers = stage_layers(layout, shape.num_layers, stage)
    own_tokens = tokens / layout.context
    stream = own_tokens * shape.hidden * dtype_bytes
    num_expert_layers = sum(shape.has_experts(layer) for layer in layers)
    tensor = expert = 0.0
    if layout.tensor > 1:
        ring = (layout.tensor - 1) / layout.tensor * stream
        # Expert layers exchange tokens in place of the MLP's collectives.
        tensor = ring * (4 * len(layers) - 2 * num_expert_layers)
    split_tokens = own_tokens / layout.tensor if layout.sequence_parallel else own_tokens
    if shape.experts and num_expert_layers:
        copies = split_tokens * shape.experts.top_k * shape.hidden * dtype_bytes
        exchanged = (layout.expert - 1) / layout.expert * copies
        gathered = (layout.expert_tensor - 1) * copies
        expert = 2 * num_expert_layers * (exchanged + gathered)
    boundaries = layout.virtual_pipeline if layout.pipeline > 1 else 0
    return Traffic(
        tensor=tensor,
        context=len(layers) * _context_bytes(shape, layout, settings, own_tokens) * dtype_bytes,
        expert=expert,
        pipeline=boundaries * split_tokens * shape.hidden * dtype_bytes,
    )


def _context_bytes(shape: ModelShape, layout: Layout, settings: Parallel, own_tokens: float) -> float:
    """Elements per layer."""
    if layout.context == 1:
        return 0.0
    key = max(shape.kv_heads // layout.tensor, 1) * shape.head_dim
    if settings.cp_comm_type == "all_gather":
        return (layout.context - 1) * own_tokens * 2 * key
    query = shape.heads // layout.tensor * shape.head_dim
    return (layout.context - 1) / layout.context * own_tokens * (2 * query + 2 * key)


def backward_traffic(forward: Traffic, layout: Layout) -> Traffic:
    """Traffic of the backward pass; sequence parallelism gathers saved inputs again for the weights' gradients."""
    return replace(forward, tensor=forward.tensor * (1.5 if layout.sequence_parallel else 1))


def data_traffic(shape: ModelShape, layout: Layout, *, stage: int, dtype_bytes: int, num_micro_batches: int) -> Traffic:
    """Traffic of one optimizer step."""
    held = stage_elements(shape, layout, stage=stage)
    gradients = FP32_BYTES * _ring(held, layout)
    parameters = dtype_bytes * _ring(held, layout)
    match layout.zero_stage:
        case 0:
            return Traffic(data=2 * gradients)
        case 1:
            return Traffic(data=gradients + parameters)
        case 2:
            return Traffic(data=num_micro_batches * gradients + parameters)
        case _:
            return Traffic(data=num_micro_batches * (gradients + 2 * parameters))


def _ring(held: Elements, layout: Layout) -> float:
    """Elements that a rank sends in an all-gather of all ranks' shares."""
    dense, experts = layout.data * layout.context, layout.expert_data
    if layout.sharding == 3:
        dense, experts = layout.num_shards, min(experts, layout.num_shards)
    return held.dense * (dense - 1) / dense + held.experts * (experts - 1) / experts


def recompute_traffic(forward: Traffic, settings: Parallel) -> Traffic:
    """Traffic of repeated forward passes of whole layers; the modules of selective recomputation send nothing."""
    return replace(forward, pipeline=0.0) if settings.recompute_granularity == "full" else Traffic()

"""Memory of Transformer Engine's layers beyond the model, and their work in 8 bits. From its source, releases 2.9 to 2.11."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.memory import stage_layers
from mgrpo.models.shape import ModelShape

SCALED = {"tensorwise": 0.0, "blockwise": 4 / 128**2, "mxfp8": 1 / 32}
"""Bytes of scales for each number of a weight."""
GATHERING, SCATTERING = 8, 4
"""Userbuffers of tp_comm_overlap, each as long as a whole sequence; gathered tensors are in 8 bits with fp8."""


def engine_bytes(
    shape: ModelShape,
    layout: Layout,
    settings: Parallel,
    *,
    stage: int,
    dtype_bytes: int,
    untrained: Sequence[ModelShape] = (),
) -> int:
    """Bytes on one rank that stay there from its first micro-batch on.

    With fp8 two copies of each weight, one for either direction of a product; one in models that are not trained. For each shape of a
    weight a placeholder of its gradient, which is added to Megatron's buffer. Buffers of tp_comm_overlap.

    Args:
        untrained: the reference, and teachers on learners.
    """
    if settings.fp8 == "none" and not settings.tp_comm_overlap and settings.transformer_impl != "transformer_engine":
        return 0
    layers = [_products(shape, layout, layer) for layer in stage_layers(layout, shape.num_layers, stage)]
    dense = {size for layer in layers for module, sizes in layer.items() if module != "moe" for size in sizes}
    held = dtype_bytes * sum(map(prod, dense))
    if settings.fp8 != "none":
        copies = 2 * _elements(shape, layout, stage) + sum(_elements(other, layout, stage) for other in untrained)
        held += int(copies * (1 + SCALED[settings.fp8_recipe]))
    if settings.tp_comm_overlap:
        numbers = -(-settings.pack_length // layout.context) * shape.hidden
        gathered = dtype_bytes if settings.fp8 == "none" else 1
        held += numbers * (GATHERING * gathered + SCATTERING * dtype_bytes)
    return held


def _elements(shape: ModelShape, layout: Layout, stage: int) -> int:
    layers = stage_layers(layout, shape.num_layers, stage)
    return sum(prod(size) for layer in layers for sizes in _products(shape, layout, layer).values() for size in sizes)


def engine_flops(
    shape: ModelShape, layout: Layout, settings: Parallel, *, stage: int, tokens: float
) -> tuple[float, float]:
    """Operations of a rank's products in 8 bits: in a forward pass, and of those that its backward pass repeats.

    Args:
        tokens: of the rank's packs, of all context and tensor ranks.
    """
    own_tokens = tokens / layout.context
    forward = repeated = 0.0
    for layer in stage_layers(layout, shape.num_layers, stage):
        for module, matrices in _products(shape, layout, layer).items():
            rows = own_tokens
            if module == "moe":
                assert shape.experts is not None
                # Of each rank as many as it sends; the matrices of a rank are listed together.
                share = layout.expert_tensor / (layout.tensor if layout.sequence_parallel else 1)
                rows *= shape.experts.top_k * share / (shape.experts.count // layout.expert)
            flops = 2 * rows * sum(map(prod, matrices))
            forward += flops
            repeated += flops * settings.recomputes(module)
    return forward, repeated


def _products(shape: ModelShape, layout: Layout, layer: int) -> dict[str, list[tuple[int, int]]]:
    """Sizes of the matrices on a rank by module: not of latent attention, and not of gpt-oss's experts, which are in bfloat16."""
    found = {}
    if shape.latent is None and shape.has_attention(layer):
        heads, keys = shape.heads // layout.tensor, max(shape.kv_heads // layout.tensor, 1)
        width = heads * (1 + shape.gated_attention) * shape.head_dim + keys * (shape.head_dim + shape.v_dim)
        found["projections"] = [(width, shape.hidden), (shape.hidden, heads * shape.v_dim)]
    experts = shape.experts if shape.has_experts(layer) else None
    if experts is None:
        ffn = shape.ffn // layout.tensor
        found["mlp"] = [(2 * ffn, shape.hidden), (shape.hidden, ffn)]
    elif experts.clamp is None:
        # All of a layer together.
        found["moe"] = [(3 * (experts.ffn // layout.expert_tensor) * (experts.count // layout.expert), shape.hidden)]
    return found

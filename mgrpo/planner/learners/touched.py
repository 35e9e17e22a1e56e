"""Bytes that a learner's GPU reads and writes in work other than matrix products and attention.

Norms, residual sums, rotation, gates, routing, the order of tokens by expert and the loss compute little for each byte, and
take as long as memory needs for their operands and results. Each is one kernel that reads and writes everything once, as
Transformer Engine's and torch.compile's do; `Assumptions.elementwise_passes` is for those that are not fused. Elements for each
token and layer in a forward pass, with h = hidden, q and k the widths of queries and keys, f = ffn, t = top_k:

    norms             2h each, of which there are two or four
    residual sums     3h each
    rotation          2 (q + k), and again where queries and keys are normalised
    output gate       3q
    MLP               3f   (gate and up, their product)
    experts           3f t; and h (6 t + 2): tokens copied by expert, ordered before the products and back after them, summed
    router            4 floats for each expert
    delta rule        tensors between its projections, written and read
    LM head           the logits read and written
    fp8               4 bytes for each operand of a product: read, and written in two layouts of one byte

A backward pass touches twice as much: a gradient beside every tensor. It also makes a gradient of every weight, which is added to an
fp32 buffer once for each micro-batch, however few tokens that has (`Assumptions.gradient_bytes`). Products of Transformer Engine
do that while they compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.memory import FP32_BYTES, padded_vocab, stage_elements, stage_layers
from mgrpo.models.shape import ModelShape
from mgrpo.planner.traffic import Passed
from mgrpo.planner.work import fused_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Bytes of one rank, of all passes over its tokens."""

    forward: float
    repeated: float
    """Bytes that recomputation adds to a backward pass."""

    @property
    def backward(self) -> float:
        """Without recomputation."""
        return 2 * self.forward


def stage_touched(
    shape: ModelShape,
    layout: Layout,
    settings: Parallel,
    passed: Passed,
    *,
    stage: int,
    logits_chunk: int,
    in_8_bits: tuple[str, ...],
) -> Touched:
    """A rank of a pipeline stage.

    Args:
        in_8_bits: as in `Hardware`.
    """
    own = passed.tokens / layout.context
    forward = repeated = 0.0
    for layer in stage_layers(layout, shape.num_layers, stage):
        parts = _layer(shape, layout, layer, own, passed.dtype_bytes, in_8_bits)
        forward += sum(parts.values())
        repeated += sum(size for module, size in parts.items() if settings.recomputes(module))
    if stage == layout.pipeline - 1:
        logit_bytes = FP32_BYTES if passed.fp32_logits else passed.dtype_bytes
        head = 2 * passed.responses / layout.context * padded_vocab(shape) / layout.tensor * logit_bytes
        forward += head
        repeated += head * bool(logits_chunk)
    return Touched(forward=forward, repeated=repeated)


def unfused_weights(shape: ModelShape, layout: Layout, settings: Parallel, *, stage: int) -> int:
    """Weights of a rank whose gradients their products do not add to Megatron's buffer themselves.

    Transformer Engine's do, except under Megatron-FSDP and with offloaded weights.
    """
    total = stage_elements(shape, layout, stage=stage).total
    offloads = settings.activation_offloading and settings.recompute_granularity != "full"
    if settings.transformer_impl == "local" or layout.sharding >= 2 or offloads:
        return total
    return total - fused_in_stage(shape, layout, stage=stage)


def fused_in_stage(shape: ModelShape, layout: Layout, *, stage: int) -> int:
    """`fused_weights` of a rank of a stage."""
    fused = fused_weights(shape)
    return sum(fused[layer] for layer in stage_layers(layout, shape.num_layers, stage)) // layout.tensor


def _layer(
    shape: ModelShape, layout: Layout, layer: int, own: float, dtype_bytes: int, in_8_bits: tuple[str, ...]
) -> dict[str, float]:
    """Bytes by module that recomputation can name; `own` tokens of a rank before sequence parallelism splits them."""
    split = own / layout.tensor if layout.sequence_parallel else own
    sharded = own / layout.tensor
    hidden, experts = shape.hidden, shape.experts_of(layer)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    stream = split * hidden * (2 * (4 if shape.norms == "around" else 2) + 6)
    between, projections = 0.0, "own" if shape.latent else "dense"
    if shape.delta and not shape.has_attention(layer):
        delta, projections = shape.delta, "own"
        mixed = 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim
        values = delta.value_heads * delta.value_dim
        between = 2 * sharded * (mixed + values + 2 * delta.value_heads * delta.key_dim)
        turned = sharded * 3 * values
        operands = sharded * (mixed + values)
    else:
        rope = shape.ropes[layer].share * shape.rope_dim / shape.head_dim
        turned = sharded * 2 * (queries + keys) * (rope + (shape.qk_norm is not None))
        turned += sharded * 3 * queries * shape.gated_attention
        if latent := shape.latent:
            turned += split * 2 * (latent.kv_rank + (latent.q_rank or 0))
        operands = sharded * (queries + 2 * keys)
    if experts is None:
        rows, ffn = sharded, float(shape.ffn)
        routing = 0.0
    else:
        copies = split * experts.top_k
        rows, ffn = copies, experts.ffn / layout.expert_tensor
        routing = split * hidden * (6 * experts.top_k + 2) + copies * (hidden + 2 * ffn) * 2 * experts.biases
        routing += split * experts.count * 4 * FP32_BYTES / dtype_bytes
        routing += sharded * 3 * experts.shared_ffn
    mlp = routing + 3 * rows * ffn
    entering = split * hidden if experts is None else rows * hidden
    casts = {
        "projections": 4 * (split * hidden + operands) * (projections in in_8_bits),
        "mlp": 4 * (entering + rows * ffn * (2 if experts is None else 1)),
    }
    casts["mlp"] *= ("dense" if experts is None else "experts") in in_8_bits
    return {
        "projections": (stream + turned) * dtype_bytes + casts["projections"],
        "core_attn": between * dtype_bytes,
        "mlp" if experts is None else "moe": mlp * dtype_bytes + casts["mlp"],
    }

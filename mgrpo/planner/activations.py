"""Bytes that a forward pass keeps for its backward pass, on one learner rank.

The terms are those of Korthikanti et al. (arXiv:2205.05198, section 4) for the layers that are trained here: packs (one
sequence of `pack_length` tokens in place of sequence x micro-batch), grouped queries, flash attention, which keeps no
scores, SwiGLU, RMSNorm, experts, no dropout. Elements per token and layer, with q = heads x head_dim / tp,
k = kv_heads x head_dim / tp, f = ffn / tp, h = hidden:

    residual stream   2h   (inputs of the two norms)
    norms' outputs    2h   (inputs of the qkv projection and of the first MLP projection)
    attention         3q + 3k   (output of the qkv projection, rotated q and k, output)
    its output gate   2q   (beside the queries' projection, and the gated output), and its sigmoid in fp32
    without flash     4q        (padded queries, keys, values and output, where CUDA has no flash attention)
    latent attention  2 q_rank + 2 kv_rank + rope_dim   (both latent vectors before and after their norms)
                      2q + heads x (nope_dim + 2 v_dim) / tp   (queries and keys, both projections of the latent vector, output);
                      with v_dim other than head_dim 4q + heads x v_dim / tp: flash attention takes and gives padded values
    gated delta net   with k = key_heads x key_dim / tp, v = value_heads x value_dim / tp, n = value_heads / tp:
                      2k + 4v + 2n   (the input projection, the rule's output, the output of its gated norm)
                      2k + v + 2n x key_dim + 64n   (convolution; a key and a query for each value head; the rule's chunks)
    MLP               3f   (gate and up together 2f, their product f)

and once per pack and kind of RoPE, as many per token as are rotated: cosines and sines. The delta rule is that of
flash-linear-attention's kernels; in plain torch it keeps several times as much.

Sequence parallelism splits both `2h` and latent vectors over tensor ranks; context parallelism splits all tokens over context
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.memory import FP32_BYTES, LOGITS_CHUNK, padded_vocab, stage_layers
from mgrpo.models.shape import DeltaNet, LatentAttention, ModelShape
from mgrpo.planner.work import DELTA_CHUNK

INDEX_BYTES = 8
"""int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes that one layer keeps, by the parts that recomputation modules can drop."""

    stream: int
    """The layer's input and the input of its second half."""
    norms: int
    """Outputs of the two norms."""
    attention: int
    """Attention, or a gated delta net, and its projections, kept under any recomputation."""
    scores: int
    """Logarithms of attention's denominators, and its padded operands without flash attention; of a gated delta net all between
    its projections. Module core_attn."""
    mlp: int
    """Activations between the MLP's projections; module mlp, or moe for experts."""
    layer_input: int
    """The only part that full recomputation keeps."""

    @property
    def total(self) -> int:
        """Without recomputation."""
        return self.stream + self.norms + self.attention + self.scores + self.mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """Bytes of one rank of a pipeline stage in a training step.

    Activations kept for the backward pass are there throughout; the loss and the backward passes of the layers follow one
    another.
    """

    kept: int
    """Activations of all micro-batches in flight, without those that are offloaded."""
    kept_layer: int
    """The part of these that one layer keeps of one micro-batch."""
    buffers: int
    """Buffers into which Megatron gathers under sequence parallelism, and a message between stages."""
    loss: int
    """Forward and backward pass of the LM head, on the last stage."""
    layer: int
    """Backward pass of a layer: recomputed activations, and gradients."""
    in_flight: float
    """Micro-batches whose activations are kept at once, in units of the whole stage."""
    offloaded: int = 0
    """Activations of one micro-batch that wait in host memory (activation_offloading)."""

    @property
    def total(self) -> int:
        """Their peak."""
        return self.kept + self.buffers + max(self.loss, self.layer)

    @property
    def on_host(self) -> int:
        """Page-locked host memory of all micro-batches in flight; torch takes up to twice as much, whole powers of two."""
        return int(self.offloaded * self.in_flight)


@cache
def layer_activations(
    shape: ModelShape,
    layout: Layout,
    *,
    has_experts: bool,
    has_attention: bool = True,
    pack_length: int,
    dtype_bytes: int,
    settings: Parallel,
    fused: bool = True,
) -> LayerActivations:
    """One layer, one pack, one rank.

    Args:
        has_attention: and not a gated delta net.
        fused: norms and SwiGLU keep as much as CUDA's kernels and Megatron's fusions. On a CPU a norm keeps its input
            and its normalised input in fp32, and SwiGLU each of its factors, except that of experts.
    """
    tokens = -(-pack_length // layout.context)
    split_tokens = -(-tokens // layout.tensor) if layout.sequence_parallel else tokens
    padded = not (fused and _takes_flash(shape, dtype_bytes))
    stream = split_tokens * shape.hidden * dtype_bytes
    num_norms = 4 if shape.norms == "around" else 2
    if shape.delta and not has_attention:
        attention, scores = _delta_net(shape.delta, layout, tokens, dtype_bytes)
    else:
        attention = _attention(shape, layout, tokens, dtype_bytes, settings, fused=fused, padded=padded)
        scores = _scores(shape, layout, tokens, dtype_bytes, settings, fused=fused, padded=padded)
    if shape.latent:
        attention += _latent_vectors(shape.latent, split_tokens, dtype_bytes, fused)
    if has_experts:
        mlp = _experts(shape, layout, tokens, split_tokens, dtype_bytes, settings, fused=fused)
    else:
        mlp = _gated_mlp(tokens, shape.ffn // layout.tensor, dtype_bytes, fused)
    in_8_bits = 0
    if settings.fp8 != "none":
        # Products keep their inputs so; the router keeps that of experts, and attention its output, as they are.
        in_8_bits = (shape.latent is None and has_attention) + (not has_experts)
        mlp -= 0 if has_experts else tokens * (shape.ffn // layout.tensor) * (dtype_bytes - 1)
    return LayerActivations(
        stream=num_norms * _norm(split_tokens, shape.hidden, dtype_bytes, fused),
        norms=2 * stream - in_8_bits * split_tokens * shape.hidden * (dtype_bytes - 1),
        attention=attention,
        scores=scores,
        mlp=mlp,
        layer_input=stream,
    )


def _gated_mlp(tokens: int, ffn: int, dtype_bytes: int, fused: bool) -> int:
    """Activations between its projections."""
    return tokens * ffn * dtype_bytes * (3 if fused else 5)


def _norm(rows: int, width: int, dtype_bytes: int, fused: bool) -> int:
    """Input and one fp32 factor per row; on a CPU also the normalised input, both in fp32."""
    return rows * (width * dtype_bytes if fused else 2 * width * FP32_BYTES) + rows * FP32_BYTES


def _takes_flash(shape: ModelShape, dtype_bytes: int) -> bool:
    """True if CUDA has flash attention for these heads."""
    return dtype_bytes < FP32_BYTES and shape.head_dim % 8 == 0 and shape.head_dim <= 256


def _scores(
    shape: ModelShape, layout: Layout, tokens: int, dtype_bytes: int, settings: Parallel, *, fused: bool, padded: bool
) -> int:
    heads, kv_heads = _local_heads(shape, layout)
    kept = tokens * heads * FP32_BYTES
    if not padded:
        return kept
    # Copies of queries, keys, values and output, padded to documents of equal length; CUDA's kernel takes as many heads of
    # keys as of queries.
    keys_of = layout.context if settings.cp_comm_type == "all_gather" else 1
    copies = heads + (heads if fused else kv_heads) * keys_of
    return kept + tokens * copies * (shape.head_dim + shape.v_dim) * dtype_bytes


def _local_heads(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    return shape.heads // layout.tensor, max(shape.kv_heads // layout.tensor, 1)


def _attention(
    shape: ModelShape, layout: Layout, tokens: int, dtype_bytes: int, settings: Parallel, *, fused: bool, padded: bool
) -> int:
    heads, kv_heads = _local_heads(shape, layout)
    query, key = heads * shape.head_dim, kv_heads * shape.head_dim
    # Flash attention takes values as wide as keys and gives an output of that width, of which a part is copied.
    pads = shape.v_dim != shape.head_dim and not padded
    out = heads * shape.v_dim
    attended = query if pads else out
    value = key if pads else kv_heads * shape.v_dim
    if layout.context == 1:
        if pads:
            elements = 2 * query + value + attended + out
        elif shape.latent:
            # The values are a view of the latent vector's projection, which keeps keys without their rotated part alive.
            elements = 2 * query + heads * shape.latent.nope_dim + value + out
        else:
            # The same of the qkv projection's output.
            elements = 3 * query + 3 * key
    elif settings.cp_comm_type == "all_gather":
        # Keys and values of the whole pack: for flash attention once for the early and once for the late stretch of each
        # document, as far as these see them.
        seen = layout.context + 0.5 * (not padded)
        elements = query + attended + out * pads + int((key + value) * seen)
    else:
        # All tokens and a share of the heads; also the output after the exchange back.
        elements = query + attended + out + key + value
    if shape.qk_norm and layout.context > 1 and fused:
        # The keys' norm has a view of the qkv projection's output as its input.
        elements += query + 2 * key
    kept = tokens * elements * dtype_bytes
    if shape.gated_attention:
        # Part of the qkv projection's output where that is kept; its sigmoid, and the gated output.
        is_kept = layout.context == 1 or (shape.qk_norm is not None and fused)
        kept += tokens * query * (dtype_bytes * (1 + is_kept) + FP32_BYTES)
    if shape.qk_norm:
        norms = _norm(tokens * heads, shape.head_dim, dtype_bytes, fused)
        # Fused, the keys' input is part of the qkv projection's output, which is kept already.
        norms += tokens * kv_heads * FP32_BYTES if fused else _norm(tokens * kv_heads, shape.head_dim, 4, False)
        kept += norms
    return kept


def _latent_vectors(latent: LatentAttention, split_tokens: int, dtype_bytes: int, fused: bool) -> int:
    """Both latent vectors before and after their norms, and the rotated part of the key with one of them."""
    widths = (latent.kv_rank, latent.q_rank or 0)
    normed = sum(_norm(split_tokens, width, dtype_bytes, fused) for width in widths if width)
    return normed + split_tokens * (sum(widths) + latent.rope_dim) * dtype_bytes


def _delta_net(delta: DeltaNet, layout: Layout, tokens: int, dtype_bytes: int) -> tuple[int, int]:
    """Bytes of a gated delta net: those always kept, and those that recomputation of core_attn drops."""
    heads = delta.value_heads // layout.tensor
    keys, values = delta.key_heads * delta.key_dim // layout.tensor, heads * delta.value_dim
    mixed = 2 * keys + values
    # The gate keeps all of the input projection's output alive, in addition to the exchanged part.
    elements = mixed + values + 2 * heads + (mixed + 2 * heads) * (layout.context > 1)
    kept = tokens * ((elements + 2 * values) * dtype_bytes + heads * FP32_BYTES)
    # The values are a view of the convolution's output. Each value head has a query, a key and its rate; in fp32 the norms of query
    # and key, its decay, and the sum of that over a chunk.
    elements = mixed + heads * (2 * delta.key_dim + DELTA_CHUNK + 1)
    return kept, tokens * (elements * dtype_bytes + 4 * heads * FP32_BYTES)


def _experts(
    shape: ModelShape,
    layout: Layout,
    tokens: int,
    split_tokens: int,
    dtype_bytes: int,
    settings: Parallel,
    *,
    fused: bool,
) -> int:
    """Router, tokens sorted by expert, and the experts' SwiGLU; experts are assumed to get equal shares."""
    experts = shape.experts
    assert experts is not None
    copies = split_tokens * experts.top_k
    rows, ffn = _routed(shape, layout, split_tokens), experts.ffn // layout.expert_tensor
    # Probabilities and routing map of all experts; chosen experts with their scores, and positions of the copies.
    router = split_tokens * experts.count * (FP32_BYTES + 1) + copies * 2 * (FP32_BYTES + INDEX_BYTES)
    # With biases the router's weights multiply the output, which is kept for that.
    own = shape.hidden * (2 if experts.biases else 1) + 3 * ffn
    kept = router + rows * (own * dtype_bytes + FP32_BYTES)
    if settings.fp8 != "none" and experts.clamp is None:
        kept -= rows * (shape.hidden + ffn) * (dtype_bytes - 1)
    if experts.shared_ffn:
        kept += _gated_mlp(tokens, experts.shared_ffn // layout.tensor, dtype_bytes, fused)
        kept += split_tokens * shape.hidden * dtype_bytes * experts.shared_gate  # its output, for the gate
    return kept


def _routed(shape: ModelShape, layout: Layout, split_tokens: int) -> int:
    """Rows of a rank's experts: with tensor-parallel experts it has all ranks' tokens, and a share of the width."""
    return split_tokens * shape.experts.top_k * layout.expert_tensor if shape.experts else 0


def kept_bytes(layer: LayerActivations, *, has_experts: bool, settings: Parallel) -> int:
    """Bytes that one layer keeps between its forward and its backward pass."""
    kept = layer.total - dropped_bytes(layer, has_experts=has_experts, settings=settings)
    return kept or layer.layer_input


def dropped_bytes(layer: LayerActivations, *, has_experts: bool, settings: Parallel) -> int:
    """Bytes that one layer recomputes in its backward pass."""
    parts = {"core_attn": layer.scores, "moe" if has_experts else "mlp": layer.mlp}
    parts["projections"] = layer.total - sum(parts.values())
    return sum(nbytes for module, nbytes in parts.items() if settings.recomputes(module))


def chunks_in_flight(layout: Layout, *, stage: int, num_micro_batches: int) -> int:
    """Maximum number of a chunk's forward passes that wait for their backward pass.

    1F1B (arXiv:2104.04473, section 2.2): pipeline - stage. Interleaved (Megatron's schedule): twice the distance to the
    last stage, one round of all stages for each chunk except the last, and the current pass.
    """
    stages, chunks = layout.pipeline, layout.virtual_pipeline
    if chunks == 1:
        return min(stages - stage, num_micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, num_micro_batches * chunks)


def stage_activations(
    shape: ModelShape,
    layout: Layout,
    *,
    stage: int,
    pack_length: int,
    dtype_bytes: int,
    settings: Parallel,
    num_micro_batches: int,
    logits_chunk: int = 0,
    fp32_logits: bool = False,
    fused: bool = True,
) -> StageActivations:
    """Peak of one rank over a training step in which every token is a response, which none can exceed."""
    # By kind of layer: experts, attention.
    held = [
        (shape.has_experts(layer), shape.has_attention(layer))
        for layer in stage_layers(layout, shape.num_layers, stage)
    ]
    layers = {
        (has_experts, has_attention): layer_activations(
            shape,
            layout,
            has_experts=has_experts,
            has_attention=has_attention,
            pack_length=pack_length,
            dtype_bytes=dtype_bytes,
            settings=settings,
            fused=fused,
        )
        for has_experts, has_attention in set(held)
    }
    each = [kept_bytes(layers[kind], has_experts=kind[0], settings=settings) for kind in held]
    kept = sum(each)
    stream = next(iter(layers.values())).layer_input
    offloaded = _offloaded(each, stream, layout, shape.num_layers, stage) if settings.activation_offloading else 0
    in_flight = chunks_in_flight(layout, stage=stage, num_micro_batches=num_micro_batches) / layout.virtual_pipeline
    rows = -(-pack_length // layout.context)
    turned = shape.latent.rope_dim if shape.latent else shape.head_dim
    rotary = rows * sum(int(turned * rope.share) for rope in shape.rope_kinds) * dtype_bytes
    total = int((kept - offloaded + rotary * layout.virtual_pipeline) * in_flight)
    gathered = stream * (layout.tensor if layout.sequence_parallel else 1)
    is_last = stage == layout.pipeline - 1
    split_rows = rows // layout.tensor if layout.sequence_parallel else rows
    if is_last:
        # The final norm, and the LM head's input, which is not split.
        total += _norm(split_rows, shape.hidden, dtype_bytes, fused) + rows * shape.hidden * dtype_bytes
    else:
        total += int(stream * in_flight * layout.virtual_pipeline)  # messages to the next stage
    return StageActivations(
        kept=total,
        kept_layer=kept // len(held),
        buffers=gathered * layout.sequence_parallel + stream * (layout.pipeline > 1),
        loss=loss_bytes(
            rows,
            shape=shape,
            layout=layout,
            dtype_bytes=dtype_bytes,
            logits_chunk=logits_chunk,
            fp32_logits=fp32_logits,
        )
        if is_last
        else 0,
        # Of an offloaded layer before this one all is back already.
        layer=2 * stream
        + max(each) * bool(offloaded)
        + max(
            dropped_bytes(layer, has_experts=has_experts, settings=settings)
            + (
                # Tokens by expert before and after the exchange, and the experts' outputs one by one and together.
                4 * _routed(shape, layout, split_rows) * shape.hidden * dtype_bytes
                if has_experts
                else _mlp_backward(shape, layout, rows, gathered, dtype_bytes)
            )
            for (has_experts, _), layer in layers.items()
        ),
        in_flight=in_flight,
        offloaded=offloaded,
    )


def _offloaded(each: Sequence[int], stream: int, layout: Layout, num_layers: int, stage: int) -> int:
    """Bytes offloaded of each layer's: all but the last layer of a chunk, and its input from another stage, which the schedule holds."""
    total = first = 0
    for chunk in range(layout.virtual_pipeline):
        last = first + len(layout.chunk_layers(num_layers, stage, chunk)) - 1
        if last > first:
            total += sum(each[first:last]) - stream * (stage > 0 or chunk > 0)
        first = last + 1
    return total


def _mlp_backward(shape: ModelShape, layout: Layout, tokens: int, gathered: int, dtype_bytes: int) -> int:
    """Bytes of gradients within an MLP beyond the 3f that it keeps, at the fullest of three moments.

    The second projection: its input's gradient and its weights', which is added to the fp32 buffer only when it is
    complete. SwiGLU: its output's gradient in place of its output, two factors, and its input's gradient, 2f each;
    torch.compile may do without the factors. The first projection: its input's gradient and its weights'.
    """
    width = shape.ffn // layout.tensor
    f, weights = tokens * width * dtype_bytes, shape.hidden * width * dtype_bytes
    return max(f + weights + gathered * layout.sequence_parallel, 4 * f, 2 * weights + gathered - f)


def loss_bytes(
    rows: int, *, shape: ModelShape, layout: Layout, dtype_bytes: int, logits_chunk: int, fp32_logits: bool = False
) -> int:
    """The LM head on the last stage: logits, their product with its input, the weights' gradient, and the input's.

    Whole logits, which their gradient overwrites, or one chunk of columns, whose input's gradient is summed in fp32, as
    it is with fp32 logits; the gradient of these is rounded some columns at a time. A cap of the logits keeps their tanh
    and makes another gradient.
    """
    columns = padded_vocab(shape) // layout.tensor
    logit_bytes = FP32_BYTES if fp32_logits else dtype_bytes
    is_rounded, copies = logit_bytes > dtype_bytes, 1 if shape.logit_softcap is None else 3
    a_row = (min(logits_chunk, columns) if logits_chunk else copies * columns) * logit_bytes
    a_row += min(logits_chunk or LOGITS_CHUNK, columns) * dtype_bytes * is_rounded
    a_row += shape.hidden * (2 * FP32_BYTES if logits_chunk or is_rounded else dtype_bytes)
    return columns * shape.hidden * dtype_bytes + rows * a_row

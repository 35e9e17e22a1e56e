"""Memory of inference engines: their weights, and the cache, which gets the rest of vLLM's share of the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mgrpo.config.derived import infer_layout_of
from mgrpo.config.schema import Engine
from mgrpo.layout import InferLayout
from mgrpo.models.memory import FP32_BYTES, holdings, one_of_each_kind
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes
from mgrpo.planner.hardware import GIB, Hardware
from mgrpo.planner.work import seen_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCache:
    """Bytes that a worker of an engine keeps of a running sequence."""

    by_window: tuple[tuple[int | None, int], ...]
    """Window and bytes per token, for all layers with that window together; they cache no more tokens than it."""
    state: int
    """Bytes of gated delta nets, at any length."""

    @property
    def per_token(self) -> int:
        """Bytes of a token while all windows reach it."""
        return sum(size for _, size in self.by_window)

    def of(self, length: float) -> float:
        """Bytes of a sequence of this length."""
        return self.state + sum(size * min(length, window or length) for window, size in self.by_window)

    def read(self, start: float, end: float) -> float:
        """Bytes that decoding the tokens from `start` to `end` reads; a state is read and written for each of them."""
        pairs = (size * (seen_pairs(end, window) - seen_pairs(start, window)) for window, size in self.by_window)
        return sum(pairs) + 2 * self.state * (end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of one GPU of an engine, in bytes."""

    weights: int
    workspace: int
    cache: int
    """Cache for keys, values and states: the rest under vllm_gpu_memory_utilization, or with vllm_mode=colocate vllm_kv_cache_mb; if
    negative, the engine cannot start.
    """
    sequence: SequenceCache
    longest: int
    """Maximum tokens of a sequence."""

    def sequences_of(self, length: float) -> int:
        """Sequences of this length that fit at a time."""
        return int(max(self.cache, 0) / self.sequence.of(length))

    @property
    def longest_sequences(self) -> int:
        """Sequences of maximum length that fit at a time."""
        return self.sequences_of(self.longest)


@cache
def worker_weights(shape: ModelShape, layout: InferLayout) -> int:
    """Number of weights on the fullest of an engine's workers, by the rule table."""
    return _most(shape, layout, lambda box: box.size)


@cache
def worker_pieces(shape: ModelShape, layout: InferLayout) -> int:
    """Number of tensors of which an engine's worker has all or a part, at most."""
    return _most(shape, layout, lambda box: 1)


def _most(shape: ModelShape, layout: InferLayout, measure: Callable[[Box], int]) -> int:
    """The sum of a measure over the boxes of the worker that has most."""
    small, numbers = one_of_each_kind(shape)
    times = Counter(f"{small.prefix}layers.{number}." for number in numbers)

    def counted(box: Box) -> int:
        return measure(box) * next((count for layer, count in times.items() if box.name.startswith(layer)), 1)

    return max(sum(map(counted, boxes)) for boxes in engine_boxes(small, layout))


def head_weights(shape: ModelShape, layout: InferLayout) -> int:
    """Weights on a worker of a draft head: a layer like the last one, and the product that joins hidden state and embedding.

    Embedding and LM head are the model's own.
    """
    layer = holdings(shape, tensor=1, expert=1).layers[-1]
    return layer.dense // layout.tensor + layer.experts // layout.workers + 2 * shape.hidden**2


def sequence_cache(
    shape: ModelShape, *, workers: int, dtype_bytes: int, element_bytes: int, heads: int = 0
) -> SequenceCache:
    """Cache of a sequence on each worker of a copy of an engine's attention.

    Attention keeps keys and values of its own heads; with fewer key-value heads than workers, neighbours hold copies of one.
    Latent attention keeps the latent vector and the rotated part of the key, from which every head makes its keys and values
    (arXiv:2405.04434, section 2.1.3), so that every worker has them whole. A gated delta net keeps the state of its own heads,
    `key_dim x value_dim` each, which is assumed to be in float32, and the last inputs of its convolution.

    Args:
        workers: of the copy, which share out its heads.
        dtype_bytes: of the model's weights.
        element_bytes: of a cached number.
        heads: heads of speculative decoding, each with its own keys and values.
    """
    if shape.latent:
        layer = shape.latent.kv_rank + shape.latent.rope_dim
    else:
        layer = 2 * max(shape.kv_heads // workers, 1) * shape.head_dim
    by_window: dict[int | None, int] = {}
    for number, window in enumerate(shape.windows):
        if shape.has_attention(number):
            by_window[window] = by_window.get(window, 0) + layer * element_bytes
    if heads:
        by_window[None] = by_window.get(None, 0) + heads * layer * element_bytes
    state = 0
    if delta := shape.delta:
        conv = (2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim) * (delta.conv - 1)
        matrices = delta.value_heads * delta.key_dim * delta.value_dim
        state = len(delta.layers) * (matrices * FP32_BYTES + conv * dtype_bytes) // workers
    return SequenceCache(by_window=tuple(by_window.items()), state=state)


def engine_memory(
    shape: ModelShape, settings: Engine, hardware: Hardware, *, longest: int, dtype_bytes: int, adapters: int = 0
) -> EngineMemory:
    """Memory of one GPU of an engine.

    Args:
        adapters: elements that it holds of them besides the model's weights.
    """
    layout = infer_layout_of(settings)
    heads = shape.draft_layers if settings.vllm_speculative_method == "mtp" else 0
    weights = (worker_weights(shape, layout) + heads * head_weights(shape, layout) + adapters) * dtype_bytes
    workspace = int(hardware.assumed.engine_workspace_gib * GIB)
    element_bytes = dtype_bytes if settings.vllm_kv_cache_dtype == "auto" else 1
    left = int(hardware.gpu.memory_bytes * settings.vllm_gpu_memory_utilization) - weights - workspace
    return EngineMemory(
        weights=weights,
        workspace=workspace,
        cache=settings.vllm_kv_cache_mb << 20 if settings.shares_gpus else left,
        sequence=sequence_cache(
            shape, workers=layout.tensor, dtype_bytes=dtype_bytes, element_bytes=element_bytes, heads=heads
        ),
        longest=longest,
    )

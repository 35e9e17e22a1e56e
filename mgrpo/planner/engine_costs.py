"""Inference engines: their weights, their KV cache, the time of generation; those of teachers, and the time in which these read.

A decoding step reads the weights once and what is cached of every running sequence, so memory bandwidth limits generation
(Pope et al., arXiv:2211.05102). The cache gets what the weights leave of vLLM's share of the GPU. Rows are assumed to be shared
equally among teachers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from mgrpo.config.derived import infer_layout_of
from mgrpo.config.distillation import SELF
from mgrpo.config.schema import Config, Engine
from mgrpo.layout import InferLayout
from mgrpo.models.memory import FP32_BYTES, holdings, one_of_each_kind, padded_vocab
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import engine_boxes
from mgrpo.planner.hardware import GIB, Hardware
from mgrpo.planner.work import Workload, generation_flops, seen_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCache:
    """What a worker of an engine keeps of a running sequence, in bytes."""

    by_window: tuple[tuple[int | None, int], ...]
    """Of each token, for all layers that attend to so many tokens together; they keep no more of them."""
    state: int
    """Whatever the length: of gated delta nets."""

    @property
    def per_token(self) -> int:
        """Of a token while all windows reach it."""
        return sum(size for _, size in self.by_window)

    def of(self, length: float) -> float:
        """Of a sequence of this length."""
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
    """For keys, values and states: what vllm_gpu_memory_utilization leaves, or with vllm_mode=colocate vllm_kv_cache_mb; if
    negative, the engine cannot start."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTime:
    """Seconds of generating one batch, by cause."""

    prefill: float
    weights: float
    """Reading weights in decoding steps, or computing with them where that is slower."""
    cache: float
    """Reading keys, values and states."""
    exchange: float
    """All-reduces between an engine's workers."""
    overhead: float
    """Outside the model: `Assumptions.decode_step_ms`."""
    num_steps: int
    """Decoding steps of each engine."""
    running: float
    """Mean number of sequences in a step of an engine."""

    @property
    def total(self) -> float:
        """Their sum."""
        return self.prefill + self.weights + self.cache + self.exchange + self.overhead


@cache
def worker_weights(shape: ModelShape, layout: InferLayout) -> int:
    """Number of weights on the fullest of an engine's workers, by the rule table."""
    small, numbers = one_of_each_kind(shape)
    times = Counter(f"{small.prefix}layers.{number}." for number in numbers)

    def held(box: Box) -> int:
        return box.size * next((count for layer, count in times.items() if box.name.startswith(layer)), 1)

    return max(sum(map(held, boxes)) for boxes in engine_boxes(small, layout))


def sequence_cache(shape: ModelShape, *, workers: int, dtype_bytes: int, element_bytes: int) -> SequenceCache:
    """What each of an engine's workers keeps of a sequence.

    Attention keeps keys and values of its own heads; with fewer key-value heads than workers, neighbours hold copies of one.
    Latent attention keeps the latent vector and the rotated part of the key, from which every head makes its own
    (arXiv:2405.04434, section 2.1.3), so that every worker has them whole. A gated delta net keeps the state of its own heads,
    `key_dim x value_dim` each, which is assumed to be in float32, and the last inputs of its convolution.

    Args:
        dtype_bytes: of the model's weights.
        element_bytes: of what is cached of a token.
    """
    if shape.latent:
        layer = shape.latent.kv_rank + shape.latent.rope_dim
    else:
        layer = 2 * max(shape.kv_heads // workers, 1) * shape.head_dim
    by_window: dict[int | None, int] = {}
    for number, window in enumerate(shape.windows):
        if shape.has_attention(number):
            by_window[window] = by_window.get(window, 0) + layer * element_bytes
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
        adapters: elements that it holds of them beside the model's weights.
    """
    workers = settings.vllm_tensor_parallel_size
    weights = (worker_weights(shape, infer_layout_of(settings)) + adapters) * dtype_bytes
    workspace = int(hardware.assumed.engine_workspace_gib * GIB)
    element_bytes = dtype_bytes if settings.vllm_kv_cache_dtype == "auto" else 1
    left = int(hardware.gpu.memory_bytes * settings.vllm_gpu_memory_utilization) - weights - workspace
    return EngineMemory(
        weights=weights,
        workspace=workspace,
        cache=settings.vllm_kv_cache_mb << 20 if settings.shares_gpus else left,
        sequence=sequence_cache(shape, workers=workers, dtype_bytes=dtype_bytes, element_bytes=element_bytes),
        longest=longest,
    )


def generation_time(
    shape: ModelShape, settings: Engine, memory: EngineMemory, work: Workload, hardware: Hardware, *, dtype_bytes: int
) -> GenerationTime | None:
    """Generation of a whole batch on all engines in parallel; None where an engine cannot hold one sequence.

    As many sequences run at a time as the cache holds at their mean final length, at most vllm_max_num_seqs; the last
    ones are assumed to run to response_length.
    """
    assumed, workers = hardware.assumed, settings.vllm_tensor_parallel_size
    if memory.longest_sequences < 1:
        return None
    sequences = -(-work.sequences // settings.vllm_num_engines)
    slots = min(sequences, settings.vllm_max_num_seqs, max(memory.sequences_of(work.length), 1))
    tail = work.longest_response - work.response_tokens
    num_steps = sequences * work.response_tokens / slots + tail
    running = sequences * work.response_tokens / num_steps

    prompts = -(-sequences * work.prompts // work.sequences) if settings.vllm_enable_prefix_caching else sequences
    # The operations of a mean token are used both for prompts and for decoding.
    token = generation_flops(shape, work) * (1 / (work.sequences * work.length))
    prefill = hardware.compute_seconds(token * (prompts * work.prompt_tokens), gpus=workers)
    reading = _weights_read(shape, running) / workers * dtype_bytes / hardware.hbm_bytes_s
    computing = hardware.compute_seconds(token * running, gpus=workers)
    read = sequences * memory.sequence.read(work.prompt_tokens, work.length)
    exchanges = 2 * shape.num_layers * (workers > 1)
    moved = 2 * (workers - 1) / workers * running * shape.hidden * dtype_bytes
    exchange = exchanges * (assumed.allreduce_us * 1e-6 + moved / hardware.link_bytes_s(workers))
    return GenerationTime(
        prefill=prefill,
        weights=num_steps * max(reading, computing),
        cache=read / hardware.hbm_bytes_s,
        exchange=num_steps * exchange,
        overhead=num_steps * assumed.decode_step_ms * 1e-3,
        num_steps=int(num_steps),
        running=running,
    )


def _weights_read(shape: ModelShape, running: float) -> float:
    """Weights that a decoding step of `running` sequences reads: all except experts without a token."""
    held = holdings(shape, tensor=1, expert=1)
    hit = 1 - (1 - shape.experts.top_k / shape.experts.count) ** running if shape.experts else 0.0
    return sum(layer.dense + layer.experts * hit for layer in held.layers) + shape.hidden * padded_vocab(shape)


def num_teacher_workers(config: Config) -> int:
    """Workers of all teachers' engines that the run starts."""
    return config.distillation.num_engines * config.distillation.teacher_tensor_parallel_size


def num_teacher_gpus(config: Config, *, num_free: int) -> int:
    """GPUs of teachers' engines: one for each worker, or fewer where too few are free and several engines fit on one.

    Args:
        num_free: GPUs that neither learners nor the policy's engines take.
    """
    own, workers = config.distillation, num_teacher_workers(config)
    if not workers or config.engine.shares_gpus:
        return 0
    packed = workers if own.teacher_tensor_parallel_size > 1 else -(-workers // own.engines_per_gpu)
    return max(min(workers, num_free), packed)


def teaching_seconds(
    config: Config, shape: ModelShape, teachers: Sequence[ModelShape], work: Workload, hardware: Hardware, *, gpus: int
) -> float:
    """Seconds of one forward pass of the teachers over the batch; 0 without any, and for servers, whose GPUs are not the run's.

    Args:
        teachers: shapes of `Distillation.loaded_teachers`.
        gpus: of the learners, where these hold the teachers.
    """
    own = config.distillation
    if not own.distills or own.teacher_mode == "server":
        return 0.0
    loaded = iter(teachers)
    shapes = [shape if teacher.model == SELF else next(loaded) for teacher in own.teachers]
    each = [generation_flops(teacher, work) * (1 / len(shapes)) for teacher in shapes]
    if own.teacher_mode == "learner":
        return sum(hardware.compute_seconds(flops, gpus=gpus) for flops in each)
    workers = own.teacher_num_engines * own.teacher_tensor_parallel_size
    return max(hardware.compute_seconds(flops, gpus=workers) for flops in each)

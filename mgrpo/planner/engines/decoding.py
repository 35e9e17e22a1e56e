"""The time of generation: the cost of a decoding step at each number of running sequences, over the steps of a batch.

A decoding step reads the weights once and the cache of every running sequence, so memory bandwidth limits generation
(Pope et al., arXiv:2211.05102). Copies of an engine's attention (data parallelism) decode separate sequences in the same
steps; experts are then spread over all workers of the engine, whose tokens meet in an all-gather before the experts and return
in a reduce-scatter, as in vLLM's default backend.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from mgrpo.config.derived import infer_layout_of
from mgrpo.config.schema import Engine
from mgrpo.layout import InferLayout
from mgrpo.models.memory import holdings, padded_vocab
from mgrpo.models.shape import ModelShape
from mgrpo.planner.engines.answer_lengths import AnswerLengths
from mgrpo.planner.engines.engine_memory import EngineMemory
from mgrpo.planner.engines.kernels import fixed_s, sampled_bytes
from mgrpo.planner.engines.transfers import all_gather_s, all_reduce_s
from mgrpo.planner.hardware import Flops, Hardware
from mgrpo.planner.work import Workload, generation_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTime:
    """Seconds of generating one batch, by cause."""

    prefill: float
    weights: float
    """Reading weights in decoding steps, or computing with them where that is slower."""
    cache: float
    """Reading keys, values and states."""
    exchange: float
    """All-reduces between workers, and exchanges of tokens for experts."""
    kernels: float
    """Seconds of kernels besides their reads, see kernels.py."""
    overhead: float
    """Outside the model: sampling, and `Assumptions.decode_step_ms`."""
    num_steps: int
    """Decoding steps of each engine."""
    running: float
    """Mean number of sequences in a step of an engine."""

    @property
    def total(self) -> float:
        """Their sum."""
        return self.prefill + self.weights + self.cache + self.exchange + self.kernels + self.overhead


@dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    """An engine that generates its part of a batch."""

    shape: ModelShape
    layout: InferLayout
    hardware: Hardware
    lengths: AnswerLengths
    sequences: int
    """Sequences of each engine."""
    longest: float
    """The longest answer of all engines, which the slowest engine is taken to have."""
    prompt_tokens: float
    most: int
    """Sequences that an engine can decode at a time."""
    prefill_s: float
    cache_s: float
    """Seconds of reading the cache of a batch."""
    token: Flops
    """Operations of a token."""
    dtype_bytes: int

    def step_s(self, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of weights and of exchanges in a decoding step of so many sequences of an engine."""
        workers = self.layout.workers
        computing = self.hardware.compute_seconds(self.token, gpus=workers) * running
        reading = self._weights_read(running) * self.dtype_bytes / self.hardware.decode_bytes_s
        return np.maximum(reading, computing), np.array([self._exchange_s(number) for number in running])

    @cached_property
    def batch(self) -> GenerationTime:
        """A batch from its first prompt to its longest answer: fewer and fewer sequences run at its end."""
        lengths = self.lengths.of(self.sequences).copy()
        lengths[-1] = max(lengths[-1], self.longest)
        steps, running = _intervals(lengths, min(self.sequences, self.most))
        return self._time(steps, running)

    def stream(self, running: float) -> GenerationTime:
        """A batch while others are under way, so that always `running` sequences of an engine are decoded."""
        steps = np.array([self.sequences * self.lengths.mean / running])
        return self._time(steps, np.array([running]))

    def stream_s(self, running: np.ndarray) -> np.ndarray:
        """Seconds of `stream` at each of these numbers."""
        weights, exchange = self.step_s(running)
        outside = fixed_s(self.shape) + self._outside_s(running)
        steps = self.sequences * self.lengths.mean / running
        return self.prefill_s + self.cache_s + steps * (weights + exchange + outside)

    def again_s(self, running: np.ndarray) -> np.ndarray:
        """Seconds of recomputing the cache of so many sequences, in the middle of their answers."""
        under_way = self.prompt_tokens + self.lengths.squares() / self.lengths.mean / 2
        return self.hardware.compute_seconds(self.token * under_way, gpus=self.layout.workers) * running

    def _time(self, steps: np.ndarray, running: np.ndarray) -> GenerationTime:
        """Seconds of so many steps with so many sequences each."""
        num_steps = float(steps.sum())
        weights, exchange = self.step_s(running)
        return GenerationTime(
            prefill=self.prefill_s,
            weights=float(steps @ weights),
            cache=self.cache_s,
            exchange=float(steps @ exchange),
            kernels=num_steps * fixed_s(self.shape),
            overhead=float(steps @ self._outside_s(running)),
            num_steps=round(num_steps),
            running=float(steps @ running / num_steps),
        )

    def _outside_s(self, running: np.ndarray) -> np.ndarray:
        """Seconds of a step outside the model."""
        sampled = running / self.layout.data * sampled_bytes(self.shape) / self.hardware.decode_bytes_s
        return sampled + self.hardware.assumed.decode_step_ms * 1e-3

    def _weights_read(self, running: np.ndarray) -> np.ndarray:
        """Weights that a step reads on a worker: all except experts without a token."""
        shape, layout = self.shape, self.layout
        held = holdings(shape, tensor=1, expert=1)
        hit = 1 - (1 - shape.experts.top_k / shape.experts.count) ** running if shape.experts else np.zeros(1)
        dense = sum(layer.dense for layer in held.layers) + shape.hidden * padded_vocab(shape)
        experts = sum(layer.experts for layer in held.layers)
        whole = 0
        if latent := shape.latent:
            # Every worker makes the latent vectors itself.
            whole = shape.num_layers * shape.hidden * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_dim)
        return whole + (dense - whole) / layout.tensor + experts * hit / layout.workers

    def _exchange_s(self, running: float) -> float:
        """Sums over the workers of attention and MLP in each layer; between copies, tokens go to experts and back."""
        shape, layout, hardware = self.shape, self.layout, self.hardware
        token = shape.hidden * self.dtype_bytes
        spread = sum(map(shape.has_experts, range(shape.num_layers))) if layout.data > 1 else 0
        sums = 2 * shape.num_layers - spread
        own = all_reduce_s(running / layout.data * token, ranks=layout.tensor, hardware=hardware)
        return sums * own + 2 * spread * all_gather_s(running * token, ranks=layout.workers, hardware=hardware)


def _intervals(lengths: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Decoding steps between two ends of sequences, and the sequences running meanwhile.

    A free slot takes the next sequence, in an order that does not depend on its length.
    """
    order = np.random.default_rng(0).permutation(lengths) if len(lengths) > slots else lengths
    ends: list[float] = []
    free = [0.0] * min(slots, len(order))
    for length in order:
        end = heapq.heappop(free) + float(length)
        heapq.heappush(free, end)
        ends.append(end)
    at = np.sort(np.array(ends))
    waiting = np.maximum(len(order) - np.arange(len(order)), 0)
    return np.diff(at, prepend=0.0), np.minimum(waiting, slots).astype(float)


@cache
def decoder(
    shape: ModelShape, settings: Engine, memory: EngineMemory, work: Workload, hardware: Hardware, *, dtype_bytes: int
) -> Decoder | None:
    """One of the engines that generate a batch in parallel; None where it cannot hold one sequence.

    As many sequences run at a time as the cache holds at their mean final length, at most vllm_max_num_seqs, of each copy of
    its attention.
    """
    if memory.longest_sequences < 1:
        return None
    layout = infer_layout_of(settings)
    sequences = -(-work.sequences // settings.vllm_num_engines)
    of_copy = min(settings.vllm_max_num_seqs, max(memory.sequences_of(work.length), 1))
    prompts = -(-sequences * work.prompts // work.sequences) if settings.vllm_enable_prefix_caching else sequences
    # The operations of a mean token are used both for prompts and for decoding.
    token = generation_flops(shape, work) * (1 / (work.sequences * work.length))
    lengths = AnswerLengths(
        mean=work.response_tokens,
        longest=work.longest_response,
        spread=work.response_spread,
        recorded=work.response_lengths,
    )
    ends = work.prompt_tokens + lengths.of(min(sequences, 512))
    read = sequences / layout.data * float(np.mean([memory.sequence.read(work.prompt_tokens, end) for end in ends]))
    return Decoder(
        shape=shape,
        layout=layout,
        hardware=hardware,
        lengths=lengths,
        sequences=sequences,
        longest=lengths.longest_of(work.sequences),
        most=of_copy * layout.data,
        prompt_tokens=work.prompt_tokens,
        prefill_s=hardware.compute_seconds(token * (prompts * work.prompt_tokens), gpus=layout.workers),
        cache_s=read / hardware.decode_bytes_s,
        token=token,
        dtype_bytes=dtype_bytes,
    )


def generation_time(
    shape: ModelShape, settings: Engine, memory: EngineMemory, work: Workload, hardware: Hardware, *, dtype_bytes: int
) -> GenerationTime | None:
    """Generation of a whole batch on all engines in parallel; None where an engine cannot hold one sequence."""
    own = decoder(shape, settings, memory, work, hardware, dtype_bytes=dtype_bytes)
    return own.batch if own else None

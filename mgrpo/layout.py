"""The parallel axes of a training run and of the inference engines, and the shares of each rank. No torch, no processes.

Rank order is Megatron's default "tp-cp-ep-dp-pp": tensor-parallel ranks are neighbours, pipeline stages are farthest
from each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

VOCAB_MULTIPLE = 128
"""The vocabulary is padded up to a multiple of this in every layout, so that a checkpoint fits all of them."""

MOST_GROUPS = 8
"""Engines that a learner sends weights to. Each needs a separate communicator with its buffers, and they take turns."""
ALL_DIRECT = 32
"""Engines up to which learners send to each of them; beyond, some engines forward the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The training layout. `world_size` is the number of learner ranks."""

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: as many as a stage in the middle."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage; None: as many as a stage in the middle."""
    sequence_parallel: bool = False
    zero_stage: int = 1
    shard_size: int | None = None
    """ZeRO-3: the number of consecutive data x context ranks that share each parameter; None: all of them."""
    tokens_multiple_of: int = 1
    """A rank's share of a pack is a multiple of so many tokens."""

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def expert_tensor(self) -> int:
        """Ranks that split each expert's matrices; an expert stays whole where experts are distributed over ranks."""
        return self.tensor if self.expert == 1 else 1

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights; norms and other small tensors are held by more."""
        shards = self.num_shards if self.sharding >= 2 else 1
        held = Counter(
            (place.pipeline, place.tensor, place.expert, (place.data * self.context + place.context) % shards)
            for place in map(self.coordinate, range(self.world_size))
        )
        return math.gcd(*held.values())

    @property
    def num_shards(self) -> int:
        """Data x context ranks that share the state sharded by `zero_stage`."""
        return self.shard_size or self.data * self.context

    @property
    def sharding(self) -> int:
        """The ZeRO stage that runs: at most 1 in a group of one rank, where gradients of stages 2 and 3 are wrong."""
        return self.zero_stage if self.data * self.context > 1 else min(self.zero_stage, 1)

    @property
    def micro_batches_multiple_of(self) -> int:
        """Interleaved stages take micro-batches in rounds, one micro-batch per stage."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def document_multiple_of(self) -> int:
        """A context rank holds an early and a late stretch of every document, which evens out causal attention."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def pack_multiple_of(self) -> int:
        """Context ranks take equal shares of a pack, which sequence parallelism splits over the tensor ranks."""
        shares = self.context * (self.tensor if self.sequence_parallel else 1)
        return math.lcm(self.document_multiple_of, shares * self.tokens_multiple_of)

    def round_up(self, pack_length: int) -> int:
        """`pack_length` rounded up to `pack_multiple_of`, which is the only place where it is rounded."""
        return -(-pack_length // self.pack_multiple_of) * self.pack_multiple_of

    def coordinate(self, rank: int) -> Coordinate:
        """Place of `rank` on every axis."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        context, rest = rest % self.context, rest // self.context
        data, pipeline = rest % self.data, rest // self.data
        within_stage = rank % (self.world_size // self.pipeline)
        return Coordinate(
            tensor=tensor, context=context, data=data, pipeline=pipeline, expert=within_stage % self.expert
        )

    def holders(self, data: int) -> list[int]:
        """The ranks that train together on the packs of data-parallel rank `data`, ascending."""
        share, stage = self.tensor * self.context, self.world_size // self.pipeline
        return [first + data * share + place for first in range(0, self.world_size, stage) for place in range(share)]

    def chunk_layers(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """Layers of one chunk of a pipeline stage; chunk c of every stage comes before chunk c + 1 of any."""
        sizes, place = self.chunk_sizes(num_layers), chunk * self.pipeline + stage
        return range(sum(sizes[:place]), sum(sizes[: place + 1]))

    def chunk_sizes(self, num_layers: int) -> list[int]:
        """Layers of each chunk, in the order in which a token passes them.

        All are equal but the first chunk of the first stage and the last chunk of the last one, which make up for the
        layers that these stages have less.
        """
        sizes = self.stage_sizes(num_layers)
        if self.virtual_pipeline == 1:
            return sizes
        chunks = self.virtual_pipeline
        share = -(-max(sizes) // chunks) if self._ends else sizes[0] // chunks
        ends = [size - share * (chunks - 1) if self._ends else share for size in (sizes[0], sizes[-1])]
        return [ends[0], *[share] * (self.pipeline * chunks - 2), ends[1]]

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage."""
        first, last = self.first_stage_layers, self.last_stage_layers
        if self.pipeline == 1 or (first is None and last is None):
            return [num_layers // self.pipeline] * self.pipeline
        num_middle = self.pipeline - (first is not None) - (last is not None)
        middle = (num_layers - (first or 0) - (last or 0)) // max(num_middle, 1)
        return [*([] if first is None else [first]), *[middle] * num_middle, *([] if last is None else [last])]

    def problems(self) -> list[str]:
        """Reasons why this layout is impossible for any model, one sentence each."""
        found = []
        for flag, size in self._sizes().items():
            if size < 1:
                found.append(f"{flag}={size} must be at least 1")
        if found:
            return found
        model = self.tensor * self.pipeline * self.context
        if self.world_size % model:
            found.append(
                f"{self.world_size} learner rank{'s' * (self.world_size != 1)} cannot be split into tensor {self.tensor} x pipeline {self.pipeline} "
                f"x context {self.context} = {model}; start a multiple of {model} ranks: --nproc-per-node {model}"
            )
            return found
        if self.sequence_parallel and self.tensor == 1:
            found.append("sequence_parallel=true needs tensor_model_parallel_size > 1")
        return [*found, *self._pipeline_problems(), *self._sharing_problems()]

    def stage_problems(self, num_layers: int) -> Iterator[str]:
        """Reasons why the pipeline cannot split `num_layers` layers, one sentence each: all but its ends take equal shares."""
        stages, chunks, ends = self.pipeline, self.virtual_pipeline, self._ends
        if ends and stages > 1:
            found = list(self._end_problems(num_layers))
            yield from found or self._end_chunk_problems(num_layers)
        elif num_layers % stages:
            yield (
                f"pipeline_model_parallel_size={stages} does not divide num_hidden_layers={num_layers}; "
                f"{choose_from(divisors(num_layers))}"
            )
        elif num_layers // stages % chunks:
            yield (
                f"virtual_pipeline_model_parallel_size={chunks} does not divide the {num_layers // stages} layers of a "
                f"stage (num_hidden_layers={num_layers} / pipeline_model_parallel_size={stages}); "
                f"{choose_from(divisors(num_layers // stages))}"
            )

    def _end_problems(self, num_layers: int) -> Iterator[str]:
        flags, lengths = list(self._ends), list(self._ends.values())
        middle = self.pipeline - len(lengths)

        def fits(length: int) -> bool:
            """True if the stages in the middle can share the rest if the first of `lengths` is changed to this one."""
            rest = num_layers - length - sum(lengths[1:])
            return rest == 0 if middle == 0 else rest >= middle and rest % middle == 0

        if not fits(lengths[0]):
            nearest = sorted((n for n in range(1, num_layers) if fits(n)), key=lambda n: abs(n - lengths[0]))[:4]
            remedy = f"for {flags[0]} {choose_from(sorted(nearest))}" if nearest else "use fewer stages"
            others = f"the other {middle} stages, which need equal shares" if middle else "no other stage"
            yield (
                f"{' + '.join(f'{flag}={length}' for flag, length in self._ends.items())} leaves "
                f"{num_layers - sum(lengths)} of num_hidden_layers={num_layers} to {others}; {remedy}"
            )

    def _end_chunk_problems(self, num_layers: int) -> Iterator[str]:
        """Problems of interleaved stages whose sizes fit: the first and the last may lack layers of one chunk."""
        chunks, ends = self.virtual_pipeline, self._ends
        if chunks == 1:
            return
        whole = self._whole_stage(num_layers)
        if whole % chunks:
            flag, length = next(iter(ends.items()))

            def changed(length: int) -> Layout:
                if self.first_stage_layers is None:
                    return replace(self, last_stage_layers=length)
                return replace(self, first_stage_layers=length)

            others = [n for n in range(1, num_layers) if changed(n)._interleaves(num_layers)]
            nearest = sorted(sorted(others, key=lambda n: abs(n - length))[:4])
            remedy = f", or for {flag} from {{{', '.join(map(str, nearest))}}}" if nearest else ""
            yield (
                f"virtual_pipeline_model_parallel_size={chunks} does not divide the {whole} layers of each stage without a number of "
                f"its own ({', '.join(f'{name}={size}' for name, size in ends.items())}); "
                f"{choose_from(divisors(whole))}{remedy}"
            )
            return
        least = whole - whole // chunks
        for flag, size in ends.items():
            if not least <= size <= whole:
                yield (
                    f"{flag}={size} with virtual_pipeline_model_parallel_size={chunks} must be {least} to {whole}: a stage has "
                    f"{chunks} chunks of {whole // chunks} layers, of which the first and the last of the model may have fewer"
                )

    def _whole_stage(self, num_layers: int) -> int:
        """Layers of a stage that lacks none."""
        sizes = self.stage_sizes(num_layers)
        middle = sizes[1 if self.first_stage_layers else 0 : -1 if self.last_stage_layers else None]
        return middle[0] if middle else -(-max(sizes) // self.virtual_pipeline) * self.virtual_pipeline

    def _interleaves(self, num_layers: int) -> bool:
        """True if the sizes fit, also as chunks."""
        if any(self._end_problems(num_layers)):
            return False
        whole, chunks = self._whole_stage(num_layers), self.virtual_pipeline
        return whole % chunks == 0 and all(whole - whole // chunks <= size <= whole for size in self._ends.values())

    @property
    def _ends(self) -> dict[str, int]:
        """The settings of the first and the last stage that are given."""
        ends = {
            "num_layers_in_first_pipeline_stage": self.first_stage_layers,
            "num_layers_in_last_pipeline_stage": self.last_stage_layers,
        }
        return {flag: layers for flag, layers in ends.items() if layers is not None}

    def _pipeline_problems(self) -> Iterator[str]:
        for flag, layers in self._ends.items():
            if layers < 1:
                yield f"{flag}={layers} must be at least 1"
            elif self.pipeline == 1:
                yield f"{flag}={layers} needs pipeline_model_parallel_size > 1, got 1; use more stages, or leave it out"
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            yield (
                f"virtual_pipeline_model_parallel_size={self.virtual_pipeline} interleaves the stages of a pipeline; "
                "it needs pipeline_model_parallel_size > 1"
            )

    def _sharing_problems(self) -> Iterator[str]:
        """Problems of expert parallelism and of sharding over data-parallel ranks."""
        stage = self.world_size // self.pipeline
        if stage % self.expert:
            yield (
                f"expert_model_parallel_size={self.expert} does not divide the {stage} ranks of a pipeline stage; "
                f"{choose_from(divisors(stage))}"
            )
            return
        shared = self.data * self.context
        if self.zero_stage >= 2 and self.expert > 1 and self.expert_data == 1:
            yield (
                f"zero_stage={self.zero_stage} with expert_model_parallel_size={self.expert} leaves no two ranks with "
                f"the same experts, for which Megatron-FSDP computes wrong gradients; use zero_stage=1, "
                f"expert_model_parallel_size={self.expert // 2}, or twice as many ranks"
            )
        if self.shard_size is None:
            return
        legal = divisors(shared)[1:]
        choices = choose_from(legal) if legal else "leave it out"
        if self.zero_stage != 3:
            yield f"fsdp_shard_degree={self.shard_size} needs zero_stage=3, got {self.zero_stage}"
        elif self.shard_size < 2 or shared % self.shard_size:
            yield (
                f"fsdp_shard_degree={self.shard_size} must divide the {shared} data- and context-parallel ranks and be "
                f"at least 2; {choices}"
            )
        elif self.shard_size < shared and self.expert > 1:
            yield (
                f"fsdp_shard_degree={self.shard_size} cannot be combined with "
                f"expert_model_parallel_size={self.expert}; leave it out"
            )

    def _sizes(self) -> dict[str, int]:
        return {
            "world_size": self.world_size,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """A rank's place on each axis."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferLayout:
    """The inference layout: `engines` independent replicas, each over `tensor` x `data` workers, tensor ranks being neighbours."""

    engines: int = 1
    tensor: int = 1
    data: int = 1
    """Copies of an engine's attention, each with its own requests; more than one share the experts out among all workers."""
    expert_parallel: bool = False
    """A worker holds some of the experts, and those whole; otherwise it holds a part of every expert."""

    @property
    def workers(self) -> int:
        """Workers of an engine."""
        return self.tensor * self.data

    def experts(self, worker: int, count: int) -> range:
        """The experts that a worker holds whole, of the `count` of a layer: neighbours; the first workers hold one more if need be."""
        share, rest = divmod(count, self.workers)
        start = worker * share + min(worker, rest)
        return range(start, start + share + (worker < rest))


def divisors(number: int) -> list[int]:
    """Every size that divides `number`, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def choose_from(sizes: Iterable[int]) -> str:
    """The remedy that ends an error about a size."""
    return f"choose from {{{', '.join(map(str, sizes))}}}"


def least_loaded(holders: Iterable[int], load: Sequence[int]) -> int:
    """The holder with the least load, the first of equals: it spreads work over ranks that hold the same data."""
    return min(holders, key=lambda rank: (load[rank], rank))

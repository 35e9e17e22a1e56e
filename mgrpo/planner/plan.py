"""The plan of a run: GPUs of learners and engines, their memory, and the time of a step by phase and cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from mgrpo.config.derived import layout_of
from mgrpo.config.schema import Config, Parallel
from mgrpo.layout import Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.memory import (
    DTYPE_BYTES,
    FP32_BYTES,
    StateBytes,
    WholeGradients,
    adapter_elements,
    choose_logits_chunk,
    holdings,
    merged_bytes,
    num_parameters,
    state_bytes,
    whole_gradients,
)
from mgrpo.planner.activations import StageActivations, stage_activations
from mgrpo.planner.engine_costs import EngineMemory, GenerationTime, engine_memory, generation_time
from mgrpo.planner.hardware import GIB, Hardware
from mgrpo.planner.sharing import PhaseMemory, phase_memory, sent_bytes, turn_seconds
from mgrpo.planner.timing import LearnerTime, learner_time, num_micro_batches, sync_seconds
from mgrpo.planner.work import (
    Passes,
    Workload,
    forward_flops,
    generation_flops,
    has_reference,
    passes_of,
    workload_of,
)

MIB = 1 << 20
_SLOT_BYTES = 2 * 16 * MIB
"""A GPU's memory for messages between its worker and one learner, where learners and engines share GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplit:
    """Learners and engines have separate GPUs, or (vllm_mode=colocate) the same."""

    learners: int
    engines: int
    """GPUs of all engines."""
    idle: int
    """Negative: that many GPUs are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one learner rank of a pipeline stage, in bytes."""

    stage: int
    states: StateBytes
    activations: StageActivations
    gradients: WholeGradients
    built: int
    """Beyond `states` while the model is built and loaded, before there are activations; 0 where it takes less."""
    sync: int
    """Buckets in flight during a weight sync, and a merged weight, while there are no activations."""
    reserved: int
    waste: float
    """Share of what comes and goes with each micro-batch that the allocator wastes."""
    merged: int = 0
    """A layer's weight merged with its adapter, in a forward or backward pass."""

    @property
    def loss(self) -> int:
        """Beyond what waits for its backward pass: forward and backward pass of the LM head."""
        return self.activations.loss + self.gradients.head

    @property
    def layer(self) -> int:
        """Beyond what waits for its backward pass: the backward pass of a layer.

        Where whole gradients of two layers lie beside each other, one of them no longer keeps activations.
        """
        layer = self.gradients.layer
        whole = layer + max(layer - self.activations.kept_layer, 0)
        return self.activations.layer + whole + self.gradients.head

    @property
    def passes(self) -> int:
        """Peak of forward and backward passes."""
        return self.activations.kept + self.activations.buffers + max(self.loss, self.layer + self.merged)

    @property
    def fragmentation(self) -> int:
        """The allocator's waste while packs come and go."""
        return int(self.waste * self.passes)

    @property
    def training(self) -> int:
        """Allocated and freed with each micro-batch."""
        return self.passes + self.fragmentation

    @property
    def peak(self) -> int:
        """Peak of a training step, without the weight sync, the allocator's waste and reserved memory."""
        return self.states.total + self.passes

    @property
    def start(self) -> int:
        """Peak of a start, also of one that continues from a checkpoint."""
        return self.states.total + self.built

    @property
    def transient(self) -> int:
        """The larger of what never coexists: the start, forward and backward passes, a weight sync."""
        return max(self.built, self.training, self.sync)

    @property
    def total(self) -> int:
        """Peak of the rank."""
        return self.states.total + self.transient + self.reserved


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All estimates of a run before it starts."""

    config: Config
    shape: ModelShape
    layout: Layout
    hardware: Hardware
    split: GpuSplit
    work: Workload
    passes: Passes
    logits_chunk: int
    stages: tuple[StageMemory, ...]
    engine: EngineMemory
    learners: LearnerTime
    generation: GenerationTime | None
    """None where an engine cannot hold one sequence of maximum length."""
    sync_s: float
    """A step's share of a weight sync."""

    @cached_property
    def sharing(self) -> list[PhaseMemory]:
        """Memory by phase on the fullest GPU that learner and engine share; empty where they have their own."""
        worst = self.worst
        moment_bytes = _moment_bytes(self.config.parallel)
        return phase_memory(
            self.config.engine,
            self.engine,
            training=worst.total,
            sent=sent_bytes(worst.states, sharding=self.layout.sharding, moment_bytes=moment_bytes),
            reserved=worst.reserved,
            slots=worst.sync,
        )

    @property
    def turns_s(self) -> float:
        """Seconds of a step in which learners and engines on shared GPUs give up memory and take it again."""
        return turn_seconds(self.config.engine, self.worst.states, self.hardware)

    @cached_property
    def worst(self) -> StageMemory:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether learners and engines fit into their GPUs, and there are enough GPUs."""
        return not list(self.shortages())

    def shortages(self) -> Iterator[str]:
        """The parts that do not fit: one sentence each, which begins with the setting to change."""
        memory, shares = self.hardware.gpu.memory_bytes, self.config.engine.shares_gpus
        if shares and self.split.learners != self.split.engines:
            yield (
                f"num_learners_per_node: {self.split.learners} learners and vllm_num_engines x vllm_tensor_parallel_size = "
                f"{self.split.engines} workers share GPUs (vllm_mode=colocate); make them equally many"
            )
        if self.hardware.num_gpus < 2 and not shares:
            yield (
                "one GPU: learner and engine share it with --single_gpu_mode true --vllm_kv_cache_mb N; otherwise a run needs "
                "at least 2"
            )
        elif self.split.idle < 0:
            yield (
                f"num_learners_per_node and vllm_num_engines x vllm_tensor_parallel_size ask for "
                f"{self.split.learners} + {self.split.engines} GPUs, the cluster has {self.hardware.num_gpus}; "
                "use more nodes or fewer learners or engines"
            )
        for phase in self.sharing:
            if phase.total > memory:
                yield (
                    f"{phase.phase}: learner {phase.learner / GIB:.1f} + engine {phase.engine / GIB:.1f} of {memory / GIB:.0f} "
                    f"GiB on the GPU that they share; {_share_relief(phase, takes_turns=self.config.engine.takes_turns)}"
                )
        if self.worst.total > memory and not self.sharing:
            yield (
                f"learners: {self.worst.total / GIB:.1f} of {memory / GIB:.0f} GiB on each rank of stage "
                f"{self.worst.stage}; {self._relief()}"
            )
        if self.engine.longest_sequences < 1:
            yield (
                f"vllm_tensor_parallel_size={self.config.engine.vllm_tensor_parallel_size}: "
                f"weights of {self.engine.weights / GIB:.1f} GiB leave {max(self.engine.cache, 0) / GIB:.1f} GiB for the "
                f"KV cache, not enough for one sequence of {self.engine.longest} tokens; use more workers per engine"
            )

    def _relief(self) -> str:
        if self.worst.sync == self.worst.transient:
            megabytes = self.config.engine.weight_sync_bucket_mb
            return f"most of it is for the weight sync: lower weight_sync_bucket_mb={megabytes}"
        return "choose a layout that fits, or use more learners"

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step."""
        return {
            "generate": self.generation.total if self.generation else 0.0,
            "logprobs": sum(self.learners.logprobs.values()),
            "train": sum(self.learners.training.values()),
            "sync": self.sync_s,
            "turns": self.turns_s,
        }

    @property
    def step_s(self) -> float:
        """Seconds of a step: its phases run one after the other."""
        return sum(self.phases.values())

    @property
    def pace_s(self) -> float:
        """Seconds from one step to the next: with `async_steps` engines generate while learners train."""
        phases = self.phases
        beside = phases["generate"], phases["logprobs"] + phases["train"]
        return max(beside) + phases["sync"] if self.config.rollout.async_steps else self.step_s

    @property
    def causes(self) -> dict[tuple[str, str], float]:
        """Seconds by (phase, cause)."""
        causes = {("train", cause): seconds for cause, seconds in self.learners.training.items()}
        causes |= {("logprobs", cause): seconds for cause, seconds in self.learners.logprobs.items()}
        if self.generation:
            parts = ("prefill", "weights", "cache", "exchange", "overhead")
            causes |= {("generate", part): getattr(self.generation, part) for part in parts}
        return causes | {("sync", "weights"): self.sync_s, ("turns", "copies"): self.turns_s}

    @property
    def bottleneck(self) -> tuple[str, str]:
        """The longest phase and its largest cause."""
        phases = self.phases
        phase = max(phases, key=phases.__getitem__)
        causes = {key: seconds for key, seconds in self.causes.items() if key[0] == phase}
        return max(causes, key=causes.__getitem__)

    @property
    def training_flops(self) -> float:
        """Operations of training and logprob passes in a step, without what recomputation repeats."""
        return self.passes.in_forward * forward_flops(self.shape, self.work).total

    @property
    def generation_flops(self) -> float:
        """Operations of prefill and decoding in a step."""
        return generation_flops(self.shape, self.work).total

    @property
    def learner_utilisation(self) -> float:
        """Model FLOPs utilisation: operations of the learners over the peak of their GPUs in the same time."""
        return self.training_flops / self.learners.total / self.split.learners / (self.hardware.gpu.tflops * 1e12)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return DTYPE_BYTES[self.config.model.model_dtype]

    @property
    def model_bytes(self) -> int:
        """Bytes of all weights in the run's dtype."""
        return holdings(self.shape, tensor=1, expert=1).total * self.dtype_bytes


def _share_relief(phase: PhaseMemory, *, takes_turns: bool) -> str:
    if not takes_turns:
        return "let them take turns: vllm_enable_sleep_mode true"
    if phase.phase == "generate":
        return "lower vllm_kv_cache_mb, or use more workers per engine"
    return "choose a layout that fits, or use more learners"


def plan_run(config: Config, shape: ModelShape, hardware: Hardware, *, num_learners: int) -> RunPlan:
    """The plan of a valid `config` on `num_learners` learner ranks; `fits` tells whether it fits."""
    layout = layout_of(config, num_learners)
    work, passes = workload_of(config, hardware.assumed), passes_of(config)
    settings, engines = config.parallel, config.engine
    dtype_bytes = DTYPE_BYTES[config.model.model_dtype]
    logits_chunk = choose_logits_chunk(
        settings.logits_chunk,
        shape=shape,
        layout=layout,
        dtype_bytes=dtype_bytes,
        pack_length=settings.pack_length,
        has_reference=has_reference(config),
        device_bytes=hardware.gpu.memory_bytes,
        lora=config.adapter.lora,
        fp32_logits=config.model.cast_lm_head_to_fp32,
    )
    stages = tuple(
        stage_memory(config, shape, layout, hardware, work, stage=stage, logits_chunk=logits_chunk)
        for stage in range(layout.pipeline)
    )
    worst = max(stages, key=lambda stage: stage.total)
    engine = engine_memory(shape, engines, hardware, longest=config.max_model_length, dtype_bytes=dtype_bytes)
    num_engine_gpus = engines.vllm_num_engines * engines.vllm_tensor_parallel_size
    plan = RunPlan(
        config=config,
        shape=shape,
        layout=layout,
        hardware=hardware,
        split=GpuSplit(
            learners=num_learners,
            engines=num_engine_gpus,
            idle=hardware.num_gpus - num_learners - (0 if engines.shares_gpus else num_engine_gpus),
        ),
        work=work,
        passes=passes,
        logits_chunk=logits_chunk,
        stages=stages,
        engine=engine,
        learners=learner_time(
            config,
            shape,
            layout,
            work,
            passes,
            worst.states,
            hardware,
            logits_chunk=logits_chunk,
            dtype_bytes=dtype_bytes,
        ),
        generation=generation_time(shape, engines, engine, work, hardware, dtype_bytes=dtype_bytes),
        sync_s=0.0,
    )
    seconds = sync_seconds(
        plan.model_bytes,
        engines=engines.vllm_num_engines,
        workers=engines.vllm_tensor_parallel_size,
        learners=num_learners,
        hardware=hardware,
    )
    return replace(plan, sync_s=seconds / engines.weight_sync_steps)


def stage_memory(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    work: Workload,
    *,
    stage: int,
    logits_chunk: int,
) -> StageMemory:
    """Memory of one rank of a pipeline stage, by part."""
    settings, assumed = config.parallel, hardware.assumed
    dtype_bytes = DTYPE_BYTES[config.model.model_dtype]
    activations = stage_activations(
        shape,
        layout,
        stage=stage,
        pack_length=settings.pack_length,
        dtype_bytes=dtype_bytes,
        settings=settings,
        num_micro_batches=num_micro_batches(
            layout,
            work,
            pack_length=settings.pack_length,
            pack_fill=assumed.pack_fill,
            parts=config.algorithm.num_mini_batches,
        ),
        logits_chunk=logits_chunk,
        fp32_logits=config.model.cast_lm_head_to_fp32,
    )
    states = state_bytes(
        shape,
        layout,
        stage=stage,
        dtype_bytes=dtype_bytes,
        has_reference=has_reference(config),
        reference_moves=config.algorithm.ref_policy_update_freq is not None,
        moment_bytes=_moment_bytes(settings),
        offload_fraction=settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0,
        lora=config.adapter.lora,
    )
    merged = merged_bytes(shape, layout, config.adapter.lora, stage=stage, dtype_bytes=dtype_bytes)
    return StageMemory(
        stage=stage,
        states=states,
        built=max(_start(config, shape, layout, states, stage=stage, dtype_bytes=dtype_bytes) - states.total, 0),
        activations=activations,
        gradients=whole_gradients(shape, layout, stage=stage),
        merged=merged,
        sync=_sync_bytes(config, shape, layout, dtype_bytes) + merged,
        reserved=int(assumed.reserved_gib * GIB),
        waste=assumed.fragmentation,
    )


def _start(
    config: Config, shape: ModelShape, layout: Layout, states: StateBytes, *, stage: int, dtype_bytes: int
) -> int:
    """Whole weights, as a model is built with, and what they are moved into, before there is an optimizer.

    Up to ZeRO-1 that is Megatron's buffers of weights and gradients. Megatron-FSDP shards them in ZeRO-3, one layer or
    embedding after the other, and keeps them in ZeRO-2. Of adapters only they are moved.
    """
    if lora := config.adapter.lora:
        adapters = adapter_elements(shape, layout, lora, stage=stage).total * FP32_BYTES
        return states.parameters + adapters + states.gradients
    weights = num_parameters(shape, layout, stage=stage) * dtype_bytes
    if layout.sharding == 2:
        return states.total
    if layout.sharding == 3:
        held = holdings(shape, tensor=layout.tensor, expert=layout.expert)
        moved = max(held.embedding, *(layer.total for layer in held.layers))
        shards = moved * (dtype_bytes + FP32_BYTES) // layout.num_shards  # of weights and gradients
        return weights + moved * dtype_bytes + shards + states.reference
    return weights + states.parameters + states.gradients + states.reference


def _moment_bytes(settings: Parallel) -> int:
    """Bytes of Adam's two moments, per weight."""
    if settings.use_precision_aware_optimizer:
        return DTYPE_BYTES[settings.exp_avg_dtype] + DTYPE_BYTES[settings.exp_avg_sq_dtype]
    return 2 * FP32_BYTES


def _sync_bytes(config: Config, shape: ModelShape, layout: Layout, dtype_bytes: int) -> int:
    """An even share of two buckets for each worker, but never more than one of everything sent."""
    engines = config.engine
    if engines.shares_gpus:
        return layout.world_size * _SLOT_BYTES
    weights = holdings(shape, tensor=1, expert=1).total
    sent = weights * dtype_bytes * engines.vllm_num_engines
    num_workers = engines.vllm_num_engines * engines.vllm_tensor_parallel_size
    return min(2 * num_workers * engines.weight_sync_bucket_mb * MIB, sent) // layout.world_size

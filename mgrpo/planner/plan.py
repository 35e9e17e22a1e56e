"""The plan of a run: GPUs of learners and engines, their memory, and the time of a step by phase and cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mgrpo.config.derived import infer_layout_of, layout_of
from mgrpo.config.schema import Config
from mgrpo.layout import Layout
from mgrpo.models.memory import (
    DTYPE_BYTES,
    choose_logits_chunk,
    holdings,
)
from mgrpo.models.shape import ModelShape
from mgrpo.planner.engines.decoding import GenerationTime, decoder
from mgrpo.planner.engines.engine_memory import EngineMemory, engine_memory
from mgrpo.planner.engines.public_steps import PublicStep, public_step
from mgrpo.planner.engines.step_pace import Pace, pace
from mgrpo.planner.engines.teaching import num_teacher_gpus, num_teacher_workers, teaching_seconds
from mgrpo.planner.engines.transfers import direct_engines, shared_sync_seconds, sync_seconds
from mgrpo.planner.gpu_memory import (
    PhaseMemory,
    StageMemory,
    bytes_of_moments,
    engine_room,
    phase_memory,
    sent_bytes,
    stage_memory,
    synced_bytes,
    turn_seconds,
)
from mgrpo.planner.hardware import GIB, Hardware
from mgrpo.planner.learners.timing import LearnerTime, learner_time
from mgrpo.planner.work import (
    Passes,
    Workload,
    forward_flops,
    generation_flops,
    has_reference,
    passes_of,
    workload_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplit:
    """Learners and engines have separate GPUs, or (vllm_mode=colocate) the same."""

    learners: int
    engines: int
    """GPUs of all engines."""
    teachers: int
    """GPUs of teachers' engines; 0 where these are on GPUs that learners and engines share."""
    idle: int
    """Negative: that many GPUs are missing."""


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
    """None where an engine cannot hold one sequence of maximum length. With `async_steps` it is that of engines which always
    have sequences to decode."""
    ahead: Pace | None
    """Pace of a run whose engines generate while learners train; None where they take turns."""
    sync_s: float
    """A step's share of a weight sync."""
    teach_s: float
    """The teachers' forward pass."""
    teachers: tuple[ModelShape, ...] = ()
    """Shapes of `Distillation.loaded_teachers`."""

    @cached_property
    def sharing(self) -> list[PhaseMemory]:
        """Memory by phase on the fullest GPU that learner and engine share; empty where they have their own."""
        worst = self.worst
        moment_bytes = bytes_of_moments(self.config.parallel)
        return phase_memory(
            self.config.engine,
            self.engine,
            training=worst.total,
            sent=sent_bytes(worst.states, sharding=self.layout.sharding, moment_bytes=moment_bytes),
            reserved=worst.reserved,
            slots=worst.sync,
            teachers=self.shared_teachers,
        )

    @property
    def shared_teachers(self) -> int:
        """Bytes of teachers' engines on each GPU that learners and engines share; they never sleep."""
        workers, own = num_teacher_workers(self.config), self.config.distillation
        on_each = -(-workers // max(self.split.learners, 1))
        return int(on_each * own.teacher_gpu_memory_utilization * self.hardware.gpu.memory_bytes)

    @property
    def turns_s(self) -> float:
        """Seconds of a step in which learners and engines on shared GPUs free memory and restore it."""
        return turn_seconds(self.config.engine, self.worst.states, self.hardware)

    @cached_property
    def worst(self) -> StageMemory:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """True if learners and engines fit into their GPUs, and there are enough GPUs."""
        return not list(self.shortages())

    def shortages(self) -> Iterator[str]:
        """The parts that do not fit: one sentence each, which begins with the setting to change."""
        memory, shares = self.hardware.gpu.memory_bytes, self.config.engine.shares_gpus
        if shares and self.split.learners != self.split.engines:
            yield (
                f"num_learners_per_node: {self.split.learners} learners and vllm_num_engines x vllm_tensor_parallel_size = "
                f"{self.split.engines} workers share GPUs (vllm_mode=colocate); make them equally many"
            )
        own, a_node = self.config.engine.num_workers, self.hardware.gpus_per_node
        if shares and self.split.learners > a_node and a_node % own:
            yield (
                f"{self.config.engine.workers_asked}: {own} workers of an engine that shares the learners' GPUs are on one node of "
                f"{a_node} GPUs; use a number that divides these"
            )
        if self.hardware.num_gpus < 2 and not shares:
            yield (
                "one GPU: learner and engine share it with --single_gpu_mode true --vllm_kv_cache_mb N; otherwise a run needs "
                "at least 2"
            )
        elif self.split.idle < 0:
            yield (
                f"num_learners_per_node and vllm_num_engines x vllm_tensor_parallel_size{self._teachers_too} ask for "
                f"{self.split.learners} + {self.split.engines}{f' + {self.split.teachers}' if self.split.teachers else ''} GPUs, "
                f"the cluster has {self.hardware.num_gpus}; use more nodes or fewer learners or engines"
            )
        for phase in self.sharing:
            if phase.total > memory:
                yield (
                    f"{phase.phase}: learner {phase.learner / GIB:.1f} + engine {phase.engine / GIB:.1f}{_teachers(phase)} of {memory / GIB:.0f} "
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

    @property
    def _teachers_too(self) -> str:
        return " and teacher_num_engines x teacher_tensor_parallel_size" if self.split.teachers else ""

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
            "teach": self.teach_s,
            "logprobs": sum(self.learners.logprobs.values()),
            "train": sum(self.learners.training.values()),
            "sync": self.sync_s,
            "turns": self.turns_s,
        }

    @property
    def step_s(self) -> float:
        """Seconds of a step's phases one after the other."""
        return sum(self.phases.values())

    @property
    def pace_s(self) -> float:
        """Seconds from one step to the next: with `async_steps` engines generate while learners train."""
        return self.ahead.seconds if self.ahead else self.step_s

    @property
    def tokens_s_gpu(self) -> float:
        """Tokens of prompts and answers a second and GPU of the cluster."""
        return self.work.sequences * self.work.length / self.pace_s / self.hardware.num_gpus

    @property
    def public(self) -> PublicStep | None:
        """The best step that others have published for a model of this kind and size."""
        weights = self.model_bytes / self.dtype_bytes / 1e9
        return public_step(weights=weights, has_experts=self.shape.experts is not None, gpu=self.hardware.gpu.name)

    @property
    def causes(self) -> dict[tuple[str, str], float]:
        """Seconds by (phase, cause)."""
        causes = {("train", cause): seconds for cause, seconds in self.learners.training.items()}
        causes |= {("logprobs", cause): seconds for cause, seconds in self.learners.logprobs.items()}
        if self.generation:
            parts = ("prefill", "weights", "cache", "exchange", "kernels", "overhead")
            causes |= {("generate", part): getattr(self.generation, part) for part in parts}
        causes[("teach", "compute")] = self.teach_s
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
        """Operations of training and logprob passes in a step, without recomputation."""
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

    @property
    def sync_bytes(self) -> int:
        """Bytes that a weight sync sends to one engine."""
        return synced_bytes(self.config, self.shape, self.dtype_bytes)


def _teachers(phase: PhaseMemory) -> str:
    return f" + teachers {phase.teachers / GIB:.1f}" if phase.teachers else ""


def _share_relief(phase: PhaseMemory, *, takes_turns: bool) -> str:
    if not takes_turns:
        return "let them take turns: vllm_enable_sleep_mode true"
    if phase.phase == "generate":
        return "lower vllm_kv_cache_mb, or use more workers per engine"
    return "choose a layout that fits, or use more learners"


def plan_run(
    config: Config,
    shape: ModelShape,
    hardware: Hardware,
    *,
    num_learners: int,
    teachers: Sequence[ModelShape] = (),
) -> RunPlan:
    """The plan of a valid `config` on `num_learners` learner ranks; see `RunPlan.fits`.

    Args:
        teachers: shapes of `Distillation.loaded_teachers`.
    """
    layout = layout_of(config, num_learners)
    work, passes = workload_of(config, hardware.assumed), passes_of(config)
    settings, engines = config.parallel, config.engine
    dtype_bytes = DTYPE_BYTES[config.model.model_dtype]
    held = teachers if config.distillation.teacher_mode == "learner" else ()
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
        teachers=held,
        averages=config.distillation.averages,
    )
    stages = tuple(
        stage_memory(config, shape, layout, hardware, work, stage=stage, logits_chunk=logits_chunk, teachers=held)
        for stage in range(layout.pipeline)
    )
    worst = max(stages, key=lambda stage: stage.total)
    engine = engine_memory(
        shape,
        engines,
        hardware,
        longest=config.max_model_length,
        dtype_bytes=dtype_bytes,
        adapters=engine_room(config, shape),
    )
    infer = infer_layout_of(engines)
    num_engine_gpus = infer.engines * infer.workers
    num_free = hardware.num_gpus - num_learners - (0 if engines.shares_gpus else num_engine_gpus)
    num_teacher = num_teacher_gpus(config, num_free=num_free)
    learners = learner_time(
        config,
        shape,
        layout,
        work,
        passes,
        worst.states,
        hardware,
        logits_chunk=logits_chunk,
        dtype_bytes=dtype_bytes,
        offloaded=[stage.activations.offloaded for stage in stages],
    )
    teach_s = teaching_seconds(config, shape, teachers, work, hardware, gpus=num_learners)
    to_engine = synced_bytes(config, shape, dtype_bytes)
    if engines.shares_gpus and num_learners > hardware.gpus_per_node:
        synced = shared_sync_seconds(to_engine, shape, layout, infer, hardware=hardware)
    else:
        synced = sync_seconds(
            to_engine,
            shape,
            infer,
            learners=num_learners,
            cuts=layout.tensor,
            hardware=hardware,
            direct=None if engines.shares_gpus else direct_engines(layout, infer),
            bucket_bytes=engines.weight_sync_bucket_mb << 20,
        )
    sync_s = synced / engines.weight_sync_steps
    own = decoder(shape, engines, engine, work, hardware, dtype_bytes=dtype_bytes)
    ahead, generation = None, own.batch if own else None
    if own and config.rollout.async_steps:
        on_learners = config.distillation.teacher_mode == "learner"
        ahead = pace(config, own, learn_s=learners.total + teach_s * on_learners, sync_s=sync_s)
        generation = own.stream(ahead.running)
    return RunPlan(
        config=config,
        shape=shape,
        layout=layout,
        hardware=hardware,
        split=GpuSplit(
            learners=num_learners,
            engines=num_engine_gpus,
            teachers=num_teacher,
            idle=num_free - num_teacher,
        ),
        work=work,
        passes=passes,
        logits_chunk=logits_chunk,
        stages=stages,
        engine=engine,
        learners=learners,
        generation=generation,
        ahead=ahead,
        sync_s=sync_s,
        teach_s=teach_s,
        teachers=tuple(teachers),
    )

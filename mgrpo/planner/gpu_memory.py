"""Memory of a learner's GPU by part; and of one that a learner and an engine's worker share, phase by phase (vllm_mode=colocate)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgrpo.config.adapter import ADAPTER_RANKS
from mgrpo.config.derived import infer_layout_of
from mgrpo.config.schema import Config, Engine, Parallel
from mgrpo.layout import InferLayout, Layout
from mgrpo.models.adapters import LoraShape, are_apart, engine_adapter_boxes
from mgrpo.models.memory import (
    DTYPE_BYTES,
    FP32_BYTES,
    StateBytes,
    WholeGradients,
    adapter_elements,
    holdings,
    merged_bytes,
    num_parameters,
    state_bytes,
    whole_gradients,
)
from mgrpo.models.shape import ModelShape
from mgrpo.planner.activations import StageActivations, stage_activations
from mgrpo.planner.engines.engine_memory import EngineMemory, worker_weights
from mgrpo.planner.engines.transfers import direct_engines
from mgrpo.planner.hardware import GIB, Hardware
from mgrpo.planner.learners.engine_layers import engine_bytes
from mgrpo.planner.learners.timing import num_micro_batches
from mgrpo.planner.work import Workload, has_reference

MIB = 1 << 20
_SLOT_BYTES = 2 * 16 * MIB
"""A GPU's memory for messages between its worker and one learner, where learners and engines share GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one learner rank of a pipeline stage, in bytes."""

    stage: int
    states: StateBytes
    activations: StageActivations
    gradients: WholeGradients
    built: int
    """Bytes beyond `states` while the model is built and loaded, before there are activations; 0 where it takes less."""
    sync: int
    """Buckets in flight during a weight sync, and a merged weight, while there are no activations."""
    reserved: int
    waste: float
    """Share of each micro-batch's transient memory that the allocator wastes."""
    transformer_engine: int = 0
    """Its layers' bytes, from the first micro-batch on: copies of weights in 8 bits, placeholders and buffers."""
    merged: int = 0
    """A layer's weight merged with its adapter, in a forward or backward pass."""

    @property
    def loss(self) -> int:
        """Forward and backward pass of the LM head, beyond activations kept for the backward pass."""
        return self.activations.loss + self.gradients.head

    @property
    def layer(self) -> int:
        """Backward pass of a layer, beyond activations kept for the backward pass.

        Where whole gradients of two layers coexist, one of them no longer keeps activations.
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
        return self.states.total + self.transformer_engine + self.passes

    @property
    def start(self) -> int:
        """Peak of a start, also of one that continues from a checkpoint."""
        return self.states.total + self.built

    @property
    def transient(self) -> int:
        """The largest of the phases that never coexist: the start, forward and backward passes, a weight sync."""
        return max(self.built, self.training, self.sync)

    @property
    def total(self) -> int:
        """Peak of the rank."""
        return self.states.total + self.transformer_engine + self.transient + self.reserved


def stage_memory(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    work: Workload,
    *,
    stage: int,
    logits_chunk: int,
    teachers: Sequence[ModelShape] = (),
) -> StageMemory:
    """Memory of one rank of a pipeline stage, by part.

    Args:
        teachers: that learners hold.
    """
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
        moment_bytes=bytes_of_moments(settings),
        offload_fraction=settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0,
        lora=config.adapter.lora,
        teachers=teachers,
        averages=config.distillation.averages,
    )
    merged = merged_bytes(shape, layout, config.adapter.lora, stage=stage, dtype_bytes=dtype_bytes)
    return StageMemory(
        stage=stage,
        states=states,
        built=max(_start(config, shape, layout, states, stage=stage, dtype_bytes=dtype_bytes) - states.total, 0),
        activations=activations,
        gradients=whole_gradients(shape, layout, stage=stage),
        transformer_engine=engine_bytes(
            shape,
            layout,
            settings,
            stage=stage,
            dtype_bytes=dtype_bytes,
            untrained=[*teachers, *[shape] * (has_reference(config) + config.distillation.averages)],
        ),
        merged=merged,
        sync=_sync_bytes(config, shape, layout, dtype_bytes) + merged,
        reserved=int(assumed.reserved_gib * GIB),
        waste=assumed.fragmentation,
    )


def _start(
    config: Config, shape: ModelShape, layout: Layout, states: StateBytes, *, stage: int, dtype_bytes: int
) -> int:
    """Whole weights that a model is built with, and the buffers they are moved into, before there is an optimizer.

    Up to ZeRO-1 that is Megatron's buffers of weights and gradients. Megatron-FSDP shards them in ZeRO-3, one layer or
    embedding after the other, and keeps them in ZeRO-2. With adapters, only these are moved.
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
        return weights + moved * dtype_bytes + shards + states.reference + states.teachers
    return weights + states.parameters + states.gradients + states.reference + states.teachers


def bytes_of_moments(settings: Parallel) -> int:
    """Bytes of Adam's two moments, per weight."""
    if settings.use_precision_aware_optimizer:
        return DTYPE_BYTES[settings.exp_avg_dtype] + DTYPE_BYTES[settings.exp_avg_sq_dtype]
    return 2 * FP32_BYTES


def _sync_bytes(config: Config, shape: ModelShape, layout: Layout, dtype_bytes: int) -> int:
    """An even share of two buckets for each worker that learners send to, but never more than one of everything sent."""
    engines = config.engine
    if engines.shares_gpus:
        return layout.world_size * _SLOT_BYTES
    infer = infer_layout_of(engines)
    direct = direct_engines(layout, infer)
    sent = synced_bytes(config, shape, dtype_bytes) * direct
    num_workers = direct * infer.workers
    return min(2 * num_workers * engines.weight_sync_bucket_mb * MIB, sent) // layout.world_size


def synced_bytes(config: Config, shape: ModelShape, dtype_bytes: int) -> int:
    """Bytes of a weight sync to the workers of one engine; each A or B that is the same on several of them goes to each."""
    lora, engines = config.adapter.lora, config.engine
    infer = infer_layout_of(engines)
    if not are_apart(lora) and infer.data > 1:
        return worker_weights(shape, infer) * infer.workers * dtype_bytes
    if not are_apart(lora):
        return holdings(shape, tensor=1, expert=1).total * dtype_bytes
    return _engine_adapters(shape, lora, engines.vllm_tensor_parallel_size) * dtype_bytes


def engine_room(config: Config, shape: ModelShape) -> int:
    """Elements of adapters for which a worker of an engine has room; it has that for some ranks only."""
    lora, workers = config.adapter.lora, config.engine.vllm_tensor_parallel_size
    if not are_apart(lora):
        return 0
    room = min(rank for rank in ADAPTER_RANKS if rank >= lora.rank)
    return _engine_adapters(shape, replace(lora, rank=room), workers) // workers


def _engine_adapters(shape: ModelShape, lora: LoraShape, workers: int) -> int:
    """Elements of adapters that the workers of an engine hold together."""
    return sum(box.size for boxes in engine_adapter_boxes(shape, InferLayout(tensor=workers), lora) for box in boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory of a GPU in one phase of a step, in bytes."""

    phase: str
    """generate, train, or sync: in between, when the engine has its weights again and the learner those it sends."""
    learner: int
    engine: int
    teachers: int
    """Bytes of teachers' engines, in every phase."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.learner + self.engine + self.teachers


def phase_memory(
    settings: Engine, engine: EngineMemory, *, training: int, sent: int, reserved: int, slots: int, teachers: int = 0
) -> list[PhaseMemory]:
    """Each phase of a step; empty where learners and engines have separate GPUs.

    Args:
        training: the learner's peak.
        sent: weights that a sync reads.
        reserved: CUDA context and libraries of a learner whose memory is offloaded.
        slots: for messages between the worker and the learners.
        teachers: of teachers' engines.
    """
    if not settings.shares_gpus:
        return []
    asleep = engine.workspace + slots
    awake = asleep + engine.weights
    if not settings.takes_turns:
        return [PhaseMemory(phase="train", learner=training, engine=awake + engine.cache, teachers=teachers)]
    return [
        PhaseMemory(phase="generate", learner=reserved, engine=awake + engine.cache, teachers=teachers),
        PhaseMemory(phase="train", learner=training, engine=asleep, teachers=teachers),
        PhaseMemory(phase="sync", learner=reserved + sent, engine=awake, teachers=teachers),
    ]


def sent_bytes(states: StateBytes, *, sharding: int, moment_bytes: int) -> int:
    """Bytes that a sync reads on a rank: parameters, or from ZeRO-2 on float32 masters.

    Args:
        moment_bytes: of Adam's two moments, per weight.
    """
    if sharding < 2:
        return states.parameters
    return states.optimizer * FP32_BYTES // (FP32_BYTES + moment_bytes)


def turn_seconds(settings: Engine, states: StateBytes, hardware: Hardware) -> float:
    """Seconds of a step for copies of a learner's states to host memory and back; gradients are dropped."""
    copied = states.parameters + states.optimizer + states.reference + states.teachers
    return 2 * copied / (hardware.gpu.pcie_gb_s * 1e9) if settings.takes_turns else 0.0

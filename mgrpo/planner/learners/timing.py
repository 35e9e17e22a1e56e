"""Time of a training step from its operations, memory accesses and traffic: a sum of phases, each a sum of causes.

A GPU computes, waits for collectives of tensor, context and expert ranks, and does memory-bound work, one after another;
time beyond that in which the host starts all that is counted as the host's. Data-parallel traffic overlaps. A pipeline
adds `(p - 1) / (m x v)` of its time for m micro-batches on p stages of v chunks (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgrpo.config.schema import Config, Parallel
from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape
from mgrpo.models.memory import FP32_BYTES, StateBytes, adapter_holdings, stage_elements, stage_layers
from mgrpo.models.shape import ModelShape
from mgrpo.planner.hardware import Flops, Hardware
from mgrpo.planner.learners.links import Hidden, beside, data_seconds, link_seconds
from mgrpo.planner.learners.touched import stage_touched, unfused_weights
from mgrpo.planner.traffic import Passed, Traffic, backward_traffic, data_traffic, forward_traffic
from mgrpo.planner.work import Passes, Workload, stage_flops

FORWARD_SHARE = 0.36
"""Share of the host's operations of a layer that are of its forward pass: 402 of 1,163 with experts, 196 of 526 without (rehearsed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Seconds of a step on the slowest pipeline stage, by cause: compute, memory, gradients, recompute, host, offload, bubble, an axis, optimizer."""

    training: dict[str, float]
    logprobs: dict[str, float]
    """Forward passes for log-probabilities: of the reference model, and of the policy before its first update."""
    traffic: Traffic
    """Bytes that one rank sends per step."""
    num_micro_batches: int
    """Per data-parallel rank and optimizer step."""

    @property
    def total(self) -> float:
        """Training and logprob passes."""
        return sum(self.training.values()) + sum(self.logprobs.values())


def num_micro_batches(layout: Layout, work: Workload, *, pack_length: int, pack_fill: float, parts: int) -> int:
    """Packs per data-parallel rank and optimizer step, rounded up to whole rounds of interleaved stages."""
    packs = work.trained_tokens / parts / layout.data / (pack_length * pack_fill)
    rounds = layout.micro_batches_multiple_of
    return max(math.ceil(packs / rounds), 1) * rounds


def learner_time(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    passes: Passes,
    states: StateBytes,
    hardware: Hardware,
    *,
    logits_chunk: int,
    dtype_bytes: int,
    offloaded: Sequence[int] = (),
) -> LearnerTime:
    """Time of the learners in a training step: logprob passes, forward and backward passes, updates.

    Args:
        states: those of the fullest rank, for the optimizer's time.
        offloaded: bytes of a micro-batch's activations that wait in host memory, by pipeline stage; empty: none.
    """
    settings = config.parallel
    if settings.fp8 != "none":
        clamps = shape.experts is not None and shape.experts.clamp is not None
        hardware = replace(hardware, in_8_bits=("dense",) if clamps else ("dense", "experts"))
    parts = config.algorithm.num_mini_batches
    count = num_micro_batches(
        layout, work, pack_length=settings.pack_length, pack_fill=hardware.assumed.pack_fill, parts=parts
    )
    passed = Passed(
        tokens=work.trained_tokens / layout.data,
        responses=work.sequences * work.response_tokens / layout.data,
        dtype_bytes=dtype_bytes,
        fp32_logits=config.model.cast_lm_head_to_fp32,
    )
    lora = config.adapter.lora

    def of_stage(stage: int) -> _StageTime:
        return _stage_time(
            config,
            shape,
            layout,
            work,
            passes,
            passed,
            hardware,
            stage=stage,
            count=count * parts,
            logits_chunk=logits_chunk,
            offloaded=offloaded[stage] if offloaded else 0,
        )

    slowest = max(map(of_stage, _slow_stages(shape, layout, work, settings, logits_chunk)), key=lambda own: own.total)
    stage, training, logprobs = slowest.stage, slowest.training, slowest.logprobs
    bubble = (layout.pipeline - 1) / (count * layout.virtual_pipeline)
    training["bubble"] = bubble * sum(training.values())
    logprobs["bubble"] = bubble * sum(logprobs.values())

    update = data_traffic(shape, layout, stage=stage, dtype_bytes=dtype_bytes, num_micro_batches=count, lora=lora)
    update = update * passes.optimizer_steps
    held = stage_elements(shape, layout, stage=stage)
    training["data"] = data_seconds(
        update.data,
        layout,
        settings,
        hardware,
        _hidden(layout, shape, busy=sum(training.values()), count=count * parts * passes.train),
        expert_share=held.experts / held.total,
    )
    # Not sent by data-parallel ranks: copies of an embedding, gradients of weights that all tensor ranks have.
    rest = link_seconds(replace(update, data=0.0), layout, settings, hardware, None)
    training |= {axis: training.get(axis, 0.0) + spent for axis, spent in rest.items()}
    training["optimizer"] = passes.optimizer_steps * _optimizer_seconds(states, hardware)
    return LearnerTime(
        training={cause: seconds for cause, seconds in training.items() if seconds},
        logprobs={cause: seconds for cause, seconds in logprobs.items() if seconds},
        traffic=slowest.traffic + update,
        num_micro_batches=count,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageTime:
    """Seconds by cause of a stage that never waits for another one."""

    stage: int
    training: dict[str, float]
    logprobs: dict[str, float]
    traffic: Traffic

    @property
    def total(self) -> float:
        return sum(self.training.values()) + sum(self.logprobs.values())


def _stage_time(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    work: Workload,
    passes: Passes,
    passed: Passed,
    hardware: Hardware,
    *,
    stage: int,
    count: int,
    logits_chunk: int,
    offloaded: int,
) -> _StageTime:
    """Args: count: micro-batches of a step."""
    settings, dtype_bytes, lora = config.parallel, passed.dtype_bytes, config.adapter.lora
    gpus, in_8_bits = layout.world_size / layout.pipeline, hardware.in_8_bits
    flops = stage_flops(shape, layout, work, settings, stage=stage, logits_chunk=logits_chunk)
    touched = stage_touched(
        shape, layout, settings, passed, stage=stage, logits_chunk=logits_chunk, in_8_bits=in_8_bits
    )
    forward = forward_traffic(shape, layout, settings, passed, stage=stage)
    both_ways = forward + backward_traffic(shape, layout, settings, passed, stage=stage, logits_chunk=logits_chunk)
    merge = _merge_seconds(shape, layout, lora, hardware, stage=stage, dtype_bytes=dtype_bytes) * count
    host = _host_seconds(shape, layout, hardware, stage=stage) * count

    def products(work: Flops) -> float:
        return hardware.compute_seconds(work, gpus=gpus, dtype_bytes=dtype_bytes, in_8_bits=in_8_bits)

    def memory(touched: float) -> float:
        return touched * hardware.assumed.elementwise_passes / hardware.hbm_bytes_s

    def links(traffic: Traffic) -> dict[str, float]:
        return link_seconds(traffic, layout, settings, hardware, shape.experts)

    added = 0 if lora else count * unfused_weights(shape, layout, settings, stage=stage)
    training = {
        "compute": products(flops.forward * (1 + passes.backward)) * passes.train,
        "memory": memory(touched.forward + touched.backward) * passes.train,
        "gradients": added * hardware.assumed.gradient_bytes / hardware.hbm_bytes_s * passes.train,
        "recompute": (products(flops.repeated) + memory(touched.repeated)) * passes.train,
        "adapters": merge * passes.train * (3 if settings.recomputes("projections") else 2),
    }
    training |= links(both_ways * passes.train)
    if "expert" in training:
        window = sum(training[cause] for cause in ("compute", "memory", "gradients", "recompute"))
        training["expert"] = beside(training["expert"], window, hardware, exposed=hardware.assumed.expert_exposed)
    repeats = FORWARD_SHARE * settings.recomputes("projections")
    training["host"] = max(host * (1 + repeats) * passes.train - sum(training.values()), 0.0)
    forward_s = products(flops.forward) + memory(touched.forward) + sum(links(forward).values())
    copies = offloaded * passed.tokens / settings.pack_length / (hardware.gpu.pcie_gb_s * 1e9)
    training["offload"] = _exposed(copies * passes.train, forward_s * passes.train, sum(training.values()))
    num_forward = passes.reference + passes.old
    logprobs = {
        "compute": products(flops.forward * num_forward),
        "memory": memory(touched.forward) * num_forward,
        "adapters": merge * passes.old,  # the reference is the model without them
    }
    logprobs |= links(forward * num_forward)
    logprobs["host"] = max(host * FORWARD_SHARE * num_forward - sum(logprobs.values()), 0.0)
    return _StageTime(
        stage=stage,
        training=training,
        logprobs=logprobs,
        traffic=both_ways * passes.train + forward * num_forward,
    )


def _exposed(copies: float, forward: float, both: float) -> float:
    """Seconds of copies in each direction beyond the forward pass, which covers those to the host, and the backward pass."""
    return max(copies - forward, 0.0) + max(copies - (both - forward), 0.0)


def _host_seconds(shape: ModelShape, layout: Layout, hardware: Hardware, *, stage: int) -> float:
    """Seconds in which the host starts a stage's kernels for one micro-batch, forward and backward.

    The GPU waits for it where its own work is shorter.
    """
    held = stage_layers(layout, shape.num_layers, stage)
    num_experts = sum(shape.has_experts(layer) for layer in held)
    assumed = hardware.assumed
    return 1e-3 * (num_experts * assumed.host_experts_ms + (len(held) - num_experts) * assumed.host_layer_ms)


def _hidden(layout: Layout, shape: ModelShape, *, busy: float, count: int) -> Hidden:
    """Computation that hides data-parallel traffic: with ZeRO-2 and 3 every pass, else the last backward pass and the first forward one."""
    layers = len(stage_layers(layout, shape.num_layers, 0)) * layout.pipeline
    if layout.sharding >= 2:
        return Hidden(window=busy, edge=1 / layers)
    return Hidden(window=busy / count, edge=1 / layers)


def _merge_seconds(
    shape: ModelShape, layout: Layout, lora: LoraShape | None, hardware: Hardware, *, stage: int, dtype_bytes: int
) -> float:
    """Seconds in which a rank merges all its adapters once: 2 x rank operations a weight, which is read and written.

    Adapters that are not merged are rank wide, unlike the product with the weight, and count as no time.
    """
    if lora is None or not lora.is_merged:
        return 0.0
    held = adapter_holdings(shape, lora, tensor=layout.tensor, expert=layout.expert).adapted
    weights = sum(held[layer].total for layer in stage_layers(layout, shape.num_layers, stage))
    products = hardware.compute_seconds(Flops(2 * lora.rank * weights), gpus=1, dtype_bytes=dtype_bytes)
    return products + 2 * weights * dtype_bytes / hardware.hbm_bytes_s


def _slow_stages(shape: ModelShape, layout: Layout, work: Workload, settings: Parallel, logits_chunk: int) -> set[int]:
    """The stages of which one is the slowest: that with most operations, and both ends."""
    flops = {
        stage: stage_flops(shape, layout, work, settings, stage=stage, logits_chunk=logits_chunk)
        for stage in range(layout.pipeline)
    }
    most = max(flops, key=lambda stage: 3 * flops[stage].forward.total + flops[stage].repeated.total)
    return {0, most, layout.pipeline - 1}


def _optimizer_seconds(states: StateBytes, hardware: Hardware) -> float:
    """Seconds of one update: reads and writes states, reads gradients, writes parameters.

    Of parameters updated on the host, gradients cross PCIe and weights come back; the GPU and the link then wait for the host.
    """
    touched = 2 * states.optimizer + states.gradients
    on_host = states.host / (4 * FP32_BYTES)
    over_pcie = on_host * 2 * FP32_BYTES / (hardware.gpu.pcie_gb_s * 1e9)
    arithmetic = on_host / (hardware.assumed.host_adam_gweights_s * 1e9)
    return touched / hardware.hbm_bytes_s + over_pcie + arithmetic

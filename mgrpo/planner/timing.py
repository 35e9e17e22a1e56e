"""Time of a training step from what it computes and sends: a sum of phases, each a sum of causes.

The GPU is assumed to wait for all collectives except those of Megatron-FSDP, which overlap with computation. A pipeline
adds `(p - 1) / (m x v)` of its time for m micro-batches on p stages of v chunks (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mgrpo.config.schema import Config, Parallel
from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape
from mgrpo.models.memory import FP32_BYTES, StateBytes, adapter_holdings, stage_layers
from mgrpo.models.shape import ModelShape
from mgrpo.planner.hardware import Flops, Hardware
from mgrpo.planner.traffic import (
    AXES,
    Passed,
    Traffic,
    backward_traffic,
    data_traffic,
    forward_traffic,
    span_of,
)
from mgrpo.planner.work import Passes, StageFlops, Workload, stage_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Seconds of a step on the slowest pipeline stage, by cause: compute, recompute, bubble, an axis, optimizer."""

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
) -> LearnerTime:
    """Time of the learners in a training step: logprob passes, forward and backward passes, updates.

    Args:
        states: those of the fullest rank, for the optimizer's time.
    """
    settings = config.parallel
    parts = config.algorithm.num_mini_batches
    count = num_micro_batches(
        layout, work, pack_length=settings.pack_length, pack_fill=hardware.assumed.pack_fill, parts=parts
    )
    stage, flops = _slowest_stage(shape, layout, work, settings, logits_chunk)
    bubble = (layout.pipeline - 1) / (count * layout.virtual_pipeline)
    gpus = layout.world_size / layout.pipeline
    passed = Passed(
        tokens=work.trained_tokens / layout.data,
        responses=work.sequences * work.response_tokens / layout.data,
        dtype_bytes=dtype_bytes,
        fp32_logits=config.model.cast_lm_head_to_fp32,
    )
    forward = forward_traffic(shape, layout, settings, passed, stage=stage)
    both_ways = forward + backward_traffic(shape, layout, settings, passed, stage=stage, logits_chunk=logits_chunk)
    lora = config.adapter.lora
    update = data_traffic(shape, layout, stage=stage, dtype_bytes=dtype_bytes, num_micro_batches=count, lora=lora)
    merge = _merge_seconds(shape, layout, lora, hardware, stage=stage, dtype_bytes=dtype_bytes) * count * parts

    training = {
        "compute": hardware.compute_seconds(flops.forward * (1 + passes.backward) * passes.train, gpus=gpus),
        "recompute": hardware.compute_seconds(flops.repeated * passes.train, gpus=gpus),
    }
    training |= _link_seconds(both_ways * passes.train, layout, hardware)
    training["adapters"] = merge * passes.train * (3 if settings.recomputes("projections") else 2)
    training["bubble"] = bubble * sum(training.values())
    shared = _link_seconds(update * passes.optimizer_steps, layout, hardware).get("data", 0.0)
    # Megatron-FSDP (ZeRO-2 and 3) sends while it computes; only the excess over the computation costs time.
    hidden = training["compute"] + training["recompute"] if layout.sharding >= 2 else 0.0
    training["data"] = max(shared - hidden, 0.0)
    training["optimizer"] = passes.optimizer_steps * _optimizer_seconds(states, hardware)

    num_forward = passes.reference + passes.old
    logprobs = {"compute": hardware.compute_seconds(flops.forward * num_forward, gpus=gpus)}
    logprobs |= _link_seconds(forward * num_forward, layout, hardware)
    logprobs["adapters"] = merge * passes.old  # the reference is the model without them
    logprobs["bubble"] = bubble * sum(logprobs.values())
    return LearnerTime(
        training={cause: seconds for cause, seconds in training.items() if seconds},
        logprobs={cause: seconds for cause, seconds in logprobs.items() if seconds},
        traffic=both_ways * passes.train + forward * num_forward + update * passes.optimizer_steps,
        num_micro_batches=count,
    )


def _merge_seconds(
    shape: ModelShape, layout: Layout, lora: LoraShape | None, hardware: Hardware, *, stage: int, dtype_bytes: int
) -> float:
    """Seconds in which a rank merges all its adapters once: 2 x rank operations a weight, which is read and written.

    Adapters that are not merged are rank wide beside the product with the weight, and count as no time.
    """
    if lora is None or not lora.is_merged:
        return 0.0
    held = adapter_holdings(shape, lora, tensor=layout.tensor, expert=layout.expert).adapted
    weights = sum(held[layer].total for layer in stage_layers(layout, shape.num_layers, stage))
    products = hardware.compute_seconds(Flops(2 * lora.rank * weights), gpus=1)
    return products + 2 * weights * dtype_bytes / hardware.hbm_bytes_s


def _slowest_stage(
    shape: ModelShape, layout: Layout, work: Workload, settings: Parallel, logits_chunk: int
) -> tuple[int, StageFlops]:
    flops = {
        stage: stage_flops(shape, layout, work, settings, stage=stage, logits_chunk=logits_chunk)
        for stage in range(layout.pipeline)
    }
    return max(flops.items(), key=lambda item: 3 * item[1].forward.total + item[1].repeated.total)


def _link_seconds(traffic: Traffic, layout: Layout, hardware: Hardware) -> dict[str, float]:
    sent = {axis: getattr(traffic, axis) for axis in AXES}
    return {axis: bytes_ / hardware.link_bytes_s(span_of(layout, axis)) for axis, bytes_ in sent.items() if bytes_}


def _optimizer_seconds(states: StateBytes, hardware: Hardware) -> float:
    """Seconds of one update: reads and writes states, reads gradients, writes parameters.

    Of what the host updates, gradients cross PCIe and weights come back; then the GPU and the link wait for the host.
    """
    touched = 2 * states.optimizer + states.gradients
    on_host = states.host / (4 * FP32_BYTES)
    over_pcie = on_host * 2 * FP32_BYTES / (hardware.gpu.pcie_gb_s * 1e9)
    arithmetic = on_host / (hardware.assumed.host_adam_gweights_s * 1e9)
    return touched / hardware.hbm_bytes_s + over_pcie + arithmetic


def sync_seconds(sent_bytes: float, *, engines: int, workers: int, learners: int, hardware: Hardware) -> float:
    """Seconds of one weight sync: each worker receives its share once, each learner sends an even part of the total.

    Args:
        sent_bytes: to the workers of one engine together.
    """
    received = sent_bytes / workers
    sent = sent_bytes * engines / learners
    return max(received, sent) / hardware.link_bytes_s(hardware.num_gpus)

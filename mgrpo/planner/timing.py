"""How long a training step takes, from what it computes and sends: a sum of phases, each a sum of causes.

Collectives are counted as if the GPU waited for them, Megatron-FSDP's apart, which overlap with what is computed. A pipeline adds
`(p - 1) / (m x v)` of its own time for m micro-batches on p stages of v chunks (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mgrpo.config.schema import Config, Parallel
from mgrpo.layout import Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.memory import FP32_BYTES, StateBytes, stage_elements
from mgrpo.planner.hardware import Cluster
from mgrpo.planner.traffic import (
    AXES,
    Traffic,
    backward_traffic,
    data_traffic,
    forward_traffic,
    recompute_traffic,
    span_of,
)
from mgrpo.planner.work import Passes, StageFlops, Workload, stage_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTime:
    """Seconds of a training step on the learners, by cause: compute, recompute, bubble, an axis' name, optimizer.

    Of the slowest pipeline stage.
    """

    training: dict[str, float]
    scoring: dict[str, float]
    """Passes of the reference model, and of the policy before its first update."""
    traffic: Traffic
    """Bytes that one rank sends in the step."""
    num_micro_batches: int
    """Of each data-parallel rank and optimizer step."""

    @property
    def total(self) -> float:
        """Both."""
        return sum(self.training.values()) + sum(self.scoring.values())


def num_micro_batches(layout: Layout, work: Workload, *, pack_length: int, pack_fill: float, parts: int) -> int:
    """Packs of each data-parallel rank for one optimizer step; interleaved stages take them in rounds."""
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
    cluster: Cluster,
    *,
    logits_chunk: int,
    dtype_bytes: int,
) -> LearnerTime:
    """The learners' part of a training step: scores, forward and backward passes, updates.

    Args:
        states: of the fullest rank, for the optimizer's time.
    """
    settings = config.parallel
    parts = config.algorithm.num_mini_batches
    count = num_micro_batches(
        layout, work, pack_length=settings.pack_length, pack_fill=cluster.assumed.pack_fill, parts=parts
    )
    stage, flops = _slowest_stage(shape, layout, work, settings, logits_chunk)
    bubble = (layout.pipeline - 1) / (count * layout.virtual_pipeline)
    gpus = layout.world_size / layout.pipeline
    forward = forward_traffic(
        shape, layout, settings, stage=stage, tokens=work.trained_tokens / layout.data, dtype_bytes=dtype_bytes
    )
    both_ways = forward + backward_traffic(forward, layout) + recompute_traffic(forward, settings)
    update = data_traffic(shape, layout, stage=stage, dtype_bytes=dtype_bytes, num_micro_batches=count)

    training = {
        "compute": cluster.compute_seconds(flops.forward * 3 * passes.train, gpus=gpus),
        "recompute": cluster.compute_seconds(flops.repeated * passes.train, gpus=gpus),
    }
    training |= _link_seconds(both_ways * passes.train, layout, cluster)
    training["bubble"] = bubble * sum(training.values())
    shared = _link_seconds(update * passes.optimizer_steps, layout, cluster).get("data", 0.0)
    # Megatron-FSDP (ZeRO-2 and 3) sends while it computes; only what takes longer is waited for.
    hidden = training["compute"] + training["recompute"] if layout.sharding >= 2 else 0.0
    training["data"] = max(shared - hidden, 0.0)
    training["optimizer"] = passes.optimizer_steps * _optimizer_seconds(shape, layout, states, cluster, stage=stage)

    num_scores = passes.reference + passes.old
    scoring = {"compute": cluster.compute_seconds(flops.forward * num_scores, gpus=gpus)}
    scoring |= _link_seconds(forward * num_scores, layout, cluster)
    scoring["bubble"] = bubble * sum(scoring.values())
    return LearnerTime(
        training={cause: seconds for cause, seconds in training.items() if seconds},
        scoring={cause: seconds for cause, seconds in scoring.items() if seconds},
        traffic=both_ways * passes.train + forward * num_scores + update * passes.optimizer_steps,
        num_micro_batches=count,
    )


def _slowest_stage(
    shape: ModelShape, layout: Layout, work: Workload, settings: Parallel, logits_chunk: int
) -> tuple[int, StageFlops]:
    found = {
        stage: stage_flops(shape, layout, work, settings, stage=stage, logits_chunk=logits_chunk)
        for stage in range(layout.pipeline)
    }
    return max(found.items(), key=lambda item: 3 * item[1].forward.total + item[1].repeated.total)


def _link_seconds(traffic: Traffic, layout: Layout, cluster: Cluster) -> dict[str, float]:
    sent = {axis: getattr(traffic, axis) for axis in AXES}
    return {axis: bytes_ / cluster.link_bytes_s(span_of(layout, axis)) for axis, bytes_ in sent.items() if bytes_}


def _optimizer_seconds(shape: ModelShape, layout: Layout, states: StateBytes, cluster: Cluster, *, stage: int) -> float:
    """One update: reads and writes the states, reads gradients and writes parameters; over PCIe what lies in host memory.

    The host's own arithmetic is taken to be hidden behind PCIe, which is optimistic for few cores a GPU.
    """
    touched = 2 * states.optimizer + states.gradients
    held = stage_elements(shape, layout, stage=stage).total
    offloaded = states.host / max(states.host + states.optimizer, 1)
    shared = held / max(layout.num_shards if layout.zero_stage else 1, 1)
    over_pcie = shared * offloaded * 2 * FP32_BYTES  # gradients there, weights back
    return touched / cluster.hbm_bytes_s + over_pcie / (cluster.gpu.pcie_gb_s * 1e9)


def sync_seconds(shape_bytes: float, *, engines: int, workers: int, learners: int, cluster: Cluster) -> float:
    """One weight sync: every worker receives its share once, every learner sends an even part of all of them.

    Args:
        shape_bytes: of all weights, in the engines' dtype.
    """
    received = shape_bytes / workers
    sent = shape_bytes * engines / learners
    return max(received, sent) / cluster.link_bytes_s(cluster.num_gpus)

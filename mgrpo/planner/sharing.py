"""Memory of a GPU that a learner and an engine's worker share, phase by phase (vllm_mode=colocate)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgrpo.models.memory import FP32_BYTES

if TYPE_CHECKING:
    from mgrpo.planner.plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """What lies on the GPU in one phase of a step, in bytes."""

    phase: str
    """generate, train, or sync: in between, when the engine has its weights again and the learner what it sends."""
    learner: int
    engine: int

    @property
    def total(self) -> int:
        """Both."""
        return self.learner + self.engine


def phase_memory(plan: RunPlan) -> list[PhaseMemory]:
    """Each phase on the GPU that needs most; empty where learners and engines have GPUs of their own."""
    settings, worst, engine = plan.config.engine, plan.worst, plan.engine
    if not settings.shares_gpus:
        return []
    # A process that gives up its memory keeps its CUDA context, libraries and slots for messages.
    asleep = engine.workspace + worst.sync
    awake = asleep + engine.weights
    training = worst.states.total + max(worst.built, worst.training) + worst.reserved
    if not settings.takes_turns:
        return [PhaseMemory(phase="train", learner=training, engine=awake + engine.cache)]
    return [
        PhaseMemory(phase="generate", learner=worst.reserved, engine=awake + engine.cache),
        PhaseMemory(phase="train", learner=training, engine=asleep),
        PhaseMemory(phase="sync", learner=worst.reserved + _sent(plan), engine=awake),
    ]


def _sent(plan: RunPlan) -> int:
    """What a sync reads: parameters, or from ZeRO-2 on float32 masters."""
    states = plan.worst.states
    if plan.layout.sharding < 2:
        return states.parameters
    return states.optimizer * FP32_BYTES // (FP32_BYTES + plan.moment_bytes)


def turn_seconds(plan: RunPlan) -> float:
    """Of a step, for copies of the learners' states to host memory and back; they keep gradients nowhere."""
    states = plan.worst.states
    copied = states.parameters + states.optimizer + states.reference
    return 2 * copied / (plan.hardware.gpu.pcie_gb_s * 1e9) if plan.config.engine.takes_turns else 0.0

"""Memory of a GPU that a learner and an engine's worker share, phase by phase (vllm_mode=colocate)."""

from __future__ import annotations

from dataclasses import dataclass

from mgrpo.config.schema import Engine
from mgrpo.models.memory import FP32_BYTES, StateBytes
from mgrpo.planner.engine_costs import EngineMemory
from mgrpo.planner.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Memory of a GPU in one phase of a step, in bytes."""

    phase: str
    """generate, train, or sync: in between, when the engine has its weights again and the learner what it sends."""
    learner: int
    engine: int
    teachers: int
    """Of teachers' engines, which are there in every phase."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.learner + self.engine + self.teachers


def phase_memory(
    settings: Engine, engine: EngineMemory, *, training: int, sent: int, reserved: int, slots: int, teachers: int = 0
) -> list[PhaseMemory]:
    """Each phase of a step; empty where learners and engines have GPUs of their own.

    Args:
        training: the learner's peak.
        sent: what a weight sync reads.
        reserved: what a learner without memory keeps, its CUDA context and libraries.
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

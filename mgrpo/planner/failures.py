"""What failures cost a planned run: how often they come, how often it saves, and how often it should."""

from __future__ import annotations

from mgrpo.config.checkpoint import MANY_GPUS, best_interval_s, lost_share, mtbf_s
from mgrpo.config.derived import num_gpus_of, seconds_between_saves
from mgrpo.models.memory import training_state_bytes
from mgrpo.planner.plan import RunPlan

WRITTEN_GB_S = 1.0
"""Of a learner that writes its part of a state while training waits: what one thread hashes and a shared file system takes."""
RESTART_S = 900.0
"""From a failure to the first step that goes on, where nothing better is known."""


def failures(plan: RunPlan) -> str:
    """A sentence about failures and saves; empty for small runs."""
    config, learners = plan.config, plan.layout.world_size
    num_gpus = num_gpus_of(config, learners)
    if num_gpus < MANY_GPUS:
        return ""
    mtbf, every_s = mtbf_s(num_gpus), seconds_between_saves(config, plan.pace_s, num_gpus)
    # A copy to host memory reaches half of the bus's rate where several GPUs share it.
    rate = plan.hardware.gpu.pcie_gb_s / 2 if config.checkpoint.checkpoint_async else WRITTEN_GB_S
    save_s = state_bytes(plan) / learners / (rate * 1e9)
    best_s = max(best_interval_s(save_s, mtbf), plan.pace_s)
    told = [f"every {_hours(every_s)}, {_lost(every_s, save_s, mtbf)}"] if every_s else ["no states are saved"]
    if not every_s or not 0.5 < every_s / best_s < 2:
        told.append(f"the least is lost with one every {_hours(best_s)}, {_lost(best_s, save_s, mtbf)}")
    return (
        f"failures: one every {mtbf / 3600:,.0f} hours on {num_gpus} GPUs; states and the share of the time that is lost: "
        + "; ".join(told)
    )


def state_bytes(plan: RunPlan) -> int:
    """Bytes of a training state."""
    config = plan.config
    return training_state_bytes(
        plan.shape,
        reference_moves=config.algorithm.ref_policy_update_freq is not None,
        lora=config.adapter.lora,
        averages=config.distillation.averages,
    )


def _lost(every_s: float, save_s: float, mtbf: float) -> str:
    return f"{lost_share(every_s, save_s=save_s, restart_s=RESTART_S, mtbf_s=mtbf):.2%}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"

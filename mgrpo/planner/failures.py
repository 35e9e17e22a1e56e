"""Start time of a planned run, and the cost of failures: their rate, and the run's and the best interval between saves."""

from __future__ import annotations

from dataclasses import dataclass

from mgrpo.config.checkpoint import MANY_GPUS, best_interval_s, lost_share, mtbf_s
from mgrpo.config.derived import num_gpus_of, seconds_between_saves
from mgrpo.models.adapters import are_apart
from mgrpo.models.memory import holdings, training_state_bytes
from mgrpo.planner.plan import RunPlan

WRITTEN_GB_S = 1.0
"""1e9 bytes a second of a learner that writes its part of a state while training waits, by one hashing thread and a shared file system."""
HASHED_GB_S = 5.0
"""1e9 bytes a second of a learner that compares its files with their checksums, in four threads."""
MAPPED_GB_S = 1.5
"""1e9 bytes a second of a learner that copies its share of a model from mapped files to its device, in one thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Seconds of the phases that no layout decides. Assumed, not measured."""

    checks_s: float = 5.0
    """Interpreters, configuration, data that are tokenized already."""
    ray_s: float = 5.0
    import_s: float = 15.0
    meet_s: float = 10.0
    """The store of all ranks and the first process group."""
    engines_s: float = 45.0
    """Engines with empty weights, their memory profiled and their graphs captured; learners load meanwhile."""
    groups_s: float = 15.0
    """Communicators of learners and engines, the plan of the weight sync."""
    storage_gb_s: float = 50.0
    """The storage that all nodes share."""

    @property
    def processes_s(self) -> float:
        """Seconds until every rank of the learners has started and joined the others."""
        return self.checks_s + self.ray_s + self.import_s + self.meet_s


def start_phases(plan: RunPlan, times: StartTimes = StartTimes()) -> dict[str, float]:
    """Seconds from the command to the first sample by phase, under the names of the metrics `time/start/...`.

    Learners read each weight once (`ShardedParameters.load`) and send it to the ranks that hold the same over a ring, at the network's rate.
    Engines start at the same time; only those that are given adapters read the model.
    """
    layout, hardware, config = plan.layout, plan.hardware, plan.config
    # A reference reads the policy's files again.
    read = plan.model_bytes * (2 if plan.passes.reference and not config.adapter.lora else 1) / 1e9
    share = read / layout.world_size
    held = holdings(plan.shape, tensor=layout.tensor, expert=layout.expert).total / layout.pipeline
    weights_s = max(read / times.storage_gb_s, share / MAPPED_GB_S)
    if layout.data * layout.context > 1:
        models = read / (plan.model_bytes / 1e9)
        weights_s += models * held * plan.dtype_bytes / hardware.link_bytes_s(layout.world_size)
    engines_s = times.engines_s
    if are_apart(config.adapter.lora):
        engines_s += config.engine.vllm_num_engines * plan.model_bytes / 1e9 / times.storage_gb_s
    beside_s = times.import_s + times.meet_s + weights_s
    steps = max(plan.generation.num_steps, 1) if plan.generation else 1
    return {
        "checks": times.checks_s,
        "processes": times.ray_s,
        "import": times.import_s,
        "meet": times.meet_s,
        "weights": weights_s,
        "engines": max(engines_s - beside_s, 0.0),
        "sync": times.groups_s + plan.sync_s * config.engine.weight_sync_steps,
        # An answer of the mean length, when all decode at once.
        "sample": plan.generation.total * min(plan.work.response_tokens / steps, 1.0) if plan.generation else 0.0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTimes(StartTimes):
    """Start times of a run that restarts after the loss of a node, and the times before that."""

    notice_s: float = 30.0
    """Seconds until the other machines detect the loss: the limit of the kernel's unanswered probes."""
    end_s: float = 10.0
    """Seconds until the processes of the run have ended."""
    node_s: float = 20.0
    """Seconds until the scheduler has provided a spare node and started the launcher: without one the run waits for it."""
    disk_gb_s: float = 12.0
    """A node's disks, all together."""


def restart_phases(plan: RunPlan, times: RestartTimes = RestartTimes()) -> dict[str, float]:
    """Seconds from the loss of a node to the first step that goes on, phase by phase; engines and learners start side by side."""
    learners, hardware = plan.layout.world_size, plan.hardware
    own = state_bytes(plan) / learners / 1e9
    on_node = min(learners, hardware.gpus_per_node)
    if plan.config.checkpoint.checkpoint_local_dir:
        # Every node compares two copies with their checksums, and the spare one fetches its own from its partner.
        reading_s = max(2 * own * on_node / times.disk_gb_s, 2 * own / HASHED_GB_S)
        reading_s += own / (hardware.network_gbps / 8 * hardware.assumed.link_efficiency)
    else:
        reading_s = max(own * learners / times.storage_gb_s, own / WRITTEN_GB_S) + own / HASHED_GB_S
    weights_s = max(times.engines_s, reading_s)
    return {
        "noticed": times.notice_s,
        "ended": times.end_s,
        "a spare node": times.node_s,
        "processes": times.processes_s,
        "the state read, engines beside it": weights_s,
        "connected": times.groups_s,
        "weights sent": plan.sync_s,
    }


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
    phases = restart_phases(plan)
    restart_s = sum(phases.values())

    def lost(seconds: float) -> str:
        return f"{_hours(seconds)}, {lost_share(seconds, save_s=save_s, restart_s=restart_s, mtbf_s=mtbf):.2%}"

    told = [f"every {lost(every_s)}"] if every_s else ["no states are saved"]
    if not every_s or not 0.5 < every_s / best_s < 2:
        told.append(f"the least is lost with one every {lost(best_s)}")
    return (
        f"failures: one every {mtbf / 3600:,.0f} hours on {num_gpus} GPUs; states and the share of the time that is lost: "
        f"{'; '.join(told)}; a restart takes about {restart_s:.0f} s: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in phases.items())
    )


def start_sentence(plan: RunPlan) -> str:
    """A sentence about the time from the command to the first sample."""
    phases = start_phases(plan)
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in phases.items())
    return f"start: about {sum(phases.values()):.0f} s to the first sample: {parts}"


def state_bytes(plan: RunPlan) -> int:
    """Bytes of a training state."""
    config = plan.config
    return training_state_bytes(
        plan.shape,
        reference_moves=config.algorithm.ref_policy_update_freq is not None,
        lora=config.adapter.lora,
        averages=config.distillation.averages,
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"

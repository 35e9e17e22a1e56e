"""Metrics of a training step from rank 0's batch, the learners' results and the clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mgrpo.config import Config
from mgrpo.telemetry.metrics.batch import batch_metrics, staleness
from mgrpo.types import RewardScale

if TYPE_CHECKING:
    from mgrpo.run.records import Batch, Learned
    from mgrpo.run.report.throughput import Throughput


class Clock:
    """Seconds between the splits of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def split(self, name: str) -> None:
        """Record the time since the previous split as `name`."""
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now


def step_metrics(
    config: Config,
    batch: Batch,
    learned: Learned,
    *,
    step: int,
    version: int,
    sync_bytes: int,
    clock: Clock,
    scale: RewardScale | None,
    throughput: Throughput | None,
) -> dict[str, float | list[int]]:
    """Metrics of a step by name, described in docs/metrics.md.

    Args:
        version: version of the weights after the step.
        clock: has the splits "wait" (for the batch), "train", "drain" (of the engines) and "sync".
        scale, throughput: as for `Reporter`.
    """
    rollouts, results, seconds = batch.rollouts, learned.results, clock.seconds
    assert rollouts is not None and batch.lengths is not None
    total = sum(seconds.values())
    return {
        "policy_version": version,
        "episode": step * config.batch_size,
        **batch_metrics(
            rollouts.groups,
            rollouts.dropped,
            samples=batch.samples,
            packs=batch.lengths,
            batch_size=config.batch_size,
            policy_version=batch.policy_version,
            num_excluded_prompts=rollouts.num_excluded,
            engine_s=rollouts.engine_s,
            scale=scale,
        ),
        **asynchrony(config, batch, clock),
        **rollouts.replay_metrics,
        **rollouts.engine_metrics,
        **rollouts.reward_metrics,
        **rollouts.teacher_metrics,
        **learned.metrics,
        "val/num_step_tokens": batch.lengths.tokens,
        "optim/grad_norm": results[-1].grad_norm if results else 0.0,
        "lr": learned.learning_rate,
        "optim/steps": len(results),
        "optim/skipped_steps": sum(not result.is_finite for result in results),
        **({"policy/loss_scale": factor} if (factor := results and results[-1].loss_scale) else {}),
        "sync/bytes": sync_bytes,
        "time/learner_tokens_per_second_step": batch.lengths.responses / total,
        "time/generate": rollouts.generate_s,
        "time/score": rollouts.score_s,
        "time/train": seconds["train"] + seconds["wait"] - rollouts.generate_s - rollouts.score_s - rollouts.teach_s,
        "time/sync": seconds["sync"],
        "time/total": total,
        **(throughput.metrics(batch.lengths, seconds["train"]) if throughput and results else {}),
        "time/unix": time.time(),
    }


def asynchrony(config: Config, batch: Batch, clock: Clock) -> dict[str, float]:
    """Age of the groups, and waits of learners and engines; empty if `max_age` is 0."""
    rollouts, seconds = batch.rollouts, clock.seconds
    if rollouts is None or not config.max_age:
        return {}
    return {
        **staleness(rollouts.groups, policy_version=batch.policy_version),
        "async/admitted": rollouts.num_admitted,
        "async/learner_waited_s": seconds["wait"],
        "async/engine_idle_share": max(0.0, 1 - rollouts.engine_s / sum(seconds.values())),
        "time/drain": seconds["drain"],
    }

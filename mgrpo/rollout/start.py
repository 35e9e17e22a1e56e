"""The door to the engines: what runs them is chosen here and nowhere above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mgrpo.config.schema import Config
from mgrpo.rollout.fleet import Fleet
from mgrpo.rollout.heartbeat import Heartbeat
from mgrpo.rollout.vllm.arguments import machine_problems, serving_gpus
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.node import RayNode

__all__ = ["RayNode", "machine_problems", "serving_gpus", "started_fleet"]


@contextmanager
def started_fleet(config: Config, *, num_local_learners: int) -> Iterator[Fleet]:
    """Start the configuration's engines, without waiting for them; they end with the context.

    Call on rank 0, from the main thread, to which the engines' processes are tied, and before Megatron is imported: engines take
    longest to start.
    """
    cluster = Cluster(config, num_local_learners=num_local_learners)
    try:
        fleet = Fleet(
            cluster.engines,
            config.engine,
            seed=config.experiment.seed,
            seeds_prompts=cluster.on_gpu,
            pauses=config.rollout.inflight_kv if config.rollout.inflight_updates else "drain",
            meeting_host=cluster.address,
            keep_logs=cluster.keep_logs,
            start=cluster.start,
            max_restarts=config.engine.engine_max_restarts,
        )
        cluster.on_failure = fleet.fail
        heartbeat = Heartbeat(fleet.roster, patience_s=config.engine.engine_heartbeat_timeout)
        heartbeat.start()
        try:
            yield fleet
        finally:
            heartbeat.close()
            fleet.roster.close()
    finally:
        cluster.close()

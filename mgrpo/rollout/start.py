"""The door to the engines: what runs them is chosen here and nowhere above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mgrpo.config import Config, ConfigError
from mgrpo.processes.background import announced
from mgrpo.rollout.engine import Pause
from mgrpo.rollout.fleet import Fleet
from mgrpo.rollout.heartbeat import Heartbeat
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.engine_arguments import machine_problems, serving_gpus
from mgrpo.rollout.vllm.node import RayNode
from mgrpo.rollout.vllm.server_facts import host_elsewhere, meeting_host

__all__ = ["RayNode", "engines_are_local", "machine_problems", "serving_gpus", "started_fleet"]


def engines_are_local(config: Config) -> bool:
    """Whether all engines run on rank 0's machine."""
    if config.engine.vllm_mode == "server":
        return host_elsewhere(config) is None
    return config.engine.ray_address is None


@contextmanager
def started_fleet(config: Config, *, num_local_learners: int) -> Iterator[Fleet]:
    """Start the configuration's engines, without waiting for them; they end with the context.

    Call on rank 0, from the main thread, to which the engines' processes are tied, and before Megatron is imported: engines take
    longest to start.
    """
    if config.engine.vllm_mode == "server":
        with _connected_fleet(config) as fleet:
            yield fleet
        return
    cluster = Cluster(config, num_local_learners=num_local_learners)
    try:
        fleet = Fleet(
            cluster.engines,
            config.engine,
            seed=config.experiment.seed,
            seeds_prompts=cluster.on_gpu,
            pauses=_pauses(config),
            meeting_host=cluster.address,
            keep_logs=cluster.keep_logs,
            start=cluster.start,
            # One that starts beside a learner would find no room on its GPU.
            max_restarts=0 if config.engine.shares_gpus else config.engine.engine_max_restarts,
        )
        cluster.on_failure = fleet.fail
        with _watched(fleet):
            yield fleet
    finally:
        cluster.close()


@contextmanager
def _watched(fleet: Fleet) -> Iterator[None]:
    """The engines are asked for signs of life; none is missed after the context."""
    heartbeat = Heartbeat(fleet.roster, patience_s=fleet.settings.engine_heartbeat_timeout)
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.close()
        fleet.roster.close()


@contextmanager
def _connected_fleet(config: Config) -> Iterator[Fleet]:
    """Servers that run already, when all of them are ready; they go on after the context.

    Raises:
        ConfigError: what is wrong with any of them.
    """
    from mgrpo.rollout.vllm.http_engine import HttpEngine
    from mgrpo.rollout.vllm.server_calls import ServerError

    settings = config.engine
    engines: list[HttpEngine] = []

    def again(number: int) -> HttpEngine:
        if number >= len(settings.vllm_server_base_url):
            raise RuntimeError("a run's servers are those of vllm_server_base_url")
        url = settings.vllm_server_base_url[number]
        before = next(engine for engine in reversed(engines) if engine.url == url)
        engines.append(HttpEngine(url, config, before=before))
        return engines[-1]

    try:
        engines.extend(HttpEngine(url, config) for url in settings.vllm_server_base_url)
        with announced("the servers", f"vllm_server_timeout={settings.vllm_server_timeout:g} s"):
            failures = [failure for engine in engines if (failure := engine.ready.exception()) is not None]
        problems: list[str] = []
        for failure in failures:
            problems += failure.problems if isinstance(failure, ServerError) else [str(failure)]
        if problems:
            raise ConfigError(problems)
        fleet = Fleet(
            engines,
            settings,
            seed=config.experiment.seed,
            # A server queues prompts in the order in which they happen to arrive.
            seeds_prompts=True,
            pauses=_pauses(config),
            meeting_host=meeting_host(config),
            start=again,
            # Others start it again, or do not.
            max_restarts=None,
        )
        with _watched(fleet):
            yield fleet
    finally:
        for engine in engines:
            engine.close()


def _pauses(config: Config) -> Pause:
    return config.rollout.inflight_kv if config.rollout.inflight_updates else "drain"

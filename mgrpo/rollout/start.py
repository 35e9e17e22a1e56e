"""The door to the engines: Ray or servers are chosen here, and nothing above knows which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from mgrpo.config import Config, ConfigError
from mgrpo.processes.background import announced
from mgrpo.rollout.engine import Pause
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.heartbeat import Heartbeat
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.engine_arguments import machine_problems, serving_gpus
from mgrpo.rollout.vllm.ray_processes.node import RayNode
from mgrpo.rollout.vllm.server.server_facts import host_elsewhere, meeting_host

__all__ = ["RayNode", "engines_are_local", "machine_problems", "serving_gpus", "started_fleet"]


def engines_are_local(config: Config) -> bool:
    """Whether all engines run on rank 0's machine."""
    if config.engine.vllm_mode == "server":
        return host_elsewhere(config) is None
    return config.engine.ray_address is None


@contextmanager
def started_fleet(
    config: Config, *, num_local_learners: int, on_failure: Callable[[str], object] | None
) -> Iterator[Fleet]:
    """Start the configuration's engines, without waiting for them; they end with the context.

    Call on rank 0, from the main thread, to which the engines' processes are tied, and before Megatron is imported: engines take
    longest to start.

    Args:
        on_failure: called once, from a thread, with the reason when Ray itself has failed and no call can succeed any longer. None: all
            waiting is for calls of engines, which fail then.
    """
    if config.engine.vllm_mode == "server":
        with _connected_fleet(config) as fleet:
            yield fleet
        return
    cluster = Cluster(config, num_local_learners=num_local_learners)
    try:
        roster = Roster(
            cluster.engines,
            config.engine,
            keep_logs=cluster.keep_logs,
            start=cluster.start,
            # One that starts beside a learner would find no room on its GPU.
            max_restarts=0 if config.engine.shares_gpus else config.engine.engine_max_restarts,
        )

        def failed(failure: Future[str]) -> None:
            roster.end(f"{failure.result()}{cluster.keep_logs()}")
            if on_failure is not None:
                on_failure(str(roster.failure))

        cluster.failure.add_done_callback(failed)
        with _watched(roster):
            yield Fleet(
                roster,
                seed=config.experiment.seed,
                seeds_prompts=cluster.on_gpu,
                pauses=_pauses(config),
                meeting_host=cluster.address,
            )
    finally:
        cluster.close()


@contextmanager
def _watched(roster: Roster) -> Iterator[None]:
    """The engines are asked for signs of life within the context; after it none is missed."""
    heartbeat = Heartbeat(roster, patience_s=roster.settings.engine_heartbeat_timeout)
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.close()
        roster.close()


@contextmanager
def _connected_fleet(config: Config) -> Iterator[Fleet]:
    """Servers that run already, when all of them are ready; they go on after the context.

    Raises:
        ConfigError: with every problem of each.
    """
    from mgrpo.rollout.vllm.server.http_engine import HttpEngine
    from mgrpo.rollout.vllm.server.server_calls import ServerError

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
        # Others start a server again, or do not.
        roster = Roster(engines, settings, start=again, max_restarts=None)
        with _watched(roster):
            yield Fleet(
                roster,
                seed=config.experiment.seed,
                # A server queues prompts in the order in which they happen to arrive.
                seeds_prompts=True,
                pauses=_pauses(config),
                meeting_host=meeting_host(config),
            )
    finally:
        for engine in engines:
            engine.close()


def _pauses(config: Config) -> Pause:
    return config.rollout.inflight_kv if config.rollout.inflight_updates else "drain"

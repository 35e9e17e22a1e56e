"""Entry point to the engines: chooses between Ray and servers, on which no caller depends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import most_tokens, reads_text
from mgrpo.config.distillation import Distillation, Teacher
from mgrpo.models.hf_config import HfConfig, read_hf_config
from mgrpo.processes.background import announced
from mgrpo.rollout.engine import Pause
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.heartbeat import Heartbeat
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.process_limits import limit_problems
from mgrpo.rollout.requests import RequestBounds
from mgrpo.rollout.teachers import Teachers, Teaching
from mgrpo.rollout.vllm import engine_arguments
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.engine_arguments import policy_kind, serving_gpus
from mgrpo.rollout.vllm.ray_processes.node import RayNode
from mgrpo.rollout.vllm.server.server_facts import TextSample, host_elsewhere, meeting_host
from mgrpo.rollout.vllm.teacher_engine import teacher_kinds, teacher_machine_problems

if TYPE_CHECKING:
    from mgrpo.rollout.vllm.server.http_engine import HttpEngine
    from mgrpo.rollout.vllm.server.server_calls import ServerCalls

__all__ = [
    "Engines",
    "RayNode",
    "TextSample",
    "engines_are_local",
    "machine_problems",
    "most_tokens",
    "request_bounds",
    "serving_gpus",
    "started_engines",
    "started_fleet",
]


def machine_problems(
    config: Config, *, num_local_learners: int, hf_config: HfConfig, starts_engines: bool
) -> list[str]:
    """See `engine_arguments.machine_problems`; includes the teachers' engines, which an evaluation (no learners) does not start."""
    found = engine_arguments.machine_problems(
        config, num_local_learners=num_local_learners, hf_config=hf_config, starts_engines=starts_engines
    )
    if starts_engines:
        has_ray = config.engine.vllm_mode != "server" or bool(config.distillation.num_engines)
        found += limit_problems(num_learners=num_local_learners, starts_ray=has_ray)
    if starts_engines and num_local_learners:
        found += teacher_machine_problems(config, num_local_learners=num_local_learners)
    return found


def engines_are_local(config: Config) -> bool:
    """True if all engines run on rank 0's machine."""
    if config.engine.vllm_mode == "server":
        return host_elsewhere(config) is None
    return config.engine.ray_address is None


def request_bounds(config: Config) -> RequestBounds:
    """Bounds of requests to the policy's engines, with the stop strings of `config`."""
    return RequestBounds(
        max_model_len=config.max_model_length,
        vocab=read_hf_config(config.model_path)["vocab_size"],
        has_tokenizer=reads_text(config),
        has_masks=config.rollout.needs_masks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a run."""

    fleet: Fleet
    """Engines that sample from the policy."""
    teachers: Teachers | None
    """Teachers on engines or servers of their own; None: none."""


@contextmanager
def started_fleet(
    config: Config, *, num_local_learners: int, on_failure: Callable[[str], object] | None
) -> Iterator[Fleet]:
    """`started_engines` for the policy alone."""
    alone = replace(config, distillation=Distillation())
    with started_engines(alone, num_local_learners=num_local_learners, on_failure=on_failure) as engines:
        yield engines.fleet


@contextmanager
def started_engines(
    config: Config,
    *,
    num_local_learners: int,
    on_failure: Callable[[str], object] | None,
    sample: TextSample | None = None,
) -> Iterator[Engines]:
    """Start the configuration's engines, without waiting for them; they end with the context.

    Call on rank 0, from the main thread, to which the engines' processes are tied, and before the import of Megatron: engines take
    longest to start.

    Args:
        on_failure: called once, from a thread, with the reason when Ray itself has failed and no call can succeed any longer. None: the
            caller waits only for calls of engines, which fail then.
        sample: see `TeacherServer`.
    """
    with ExitStack() as stack:
        cluster = None
        if config.engine.vllm_mode != "server" or config.distillation.num_engines:
            cluster = Cluster(config, num_local_learners=num_local_learners)
            stack.callback(cluster.close)
        rosters: list[Roster] = []
        if config.engine.vllm_mode == "server":
            fleet = stack.enter_context(_connected_fleet(config))
        else:
            assert cluster is not None
            rosters.append(_policy_roster(config, cluster, num_local_learners))
            stack.enter_context(_watched(rosters[0]))
            fleet = Fleet(
                rosters[0],
                seed=config.experiment.seed,
                seeds_prompts=cluster.on_gpu,
                pauses=_pauses(config),
                meeting_host=cluster.address,
            )
        teachers: list[Teaching] = []
        if cluster is not None and config.distillation.num_engines:
            teachers = _started_teachers(config, cluster, num_local_learners)
            for teacher in teachers:
                rosters.append(teacher.fleet.roster)
                stack.enter_context(_watched(teacher.fleet.roster))
        elif config.distillation.teacher_server_base_url:
            teachers = stack.enter_context(_connected_teachers(config, sample))
        fleet.roster.beside = list(dict.fromkeys(teacher.fleet.roster for teacher in teachers))
        if cluster is not None:
            _end_with(cluster, rosters, on_failure)
        yield Engines(fleet=fleet, teachers=_teachers(config, teachers) if teachers else None)


def _policy_roster(config: Config, cluster: Cluster, num_local_learners: int) -> Roster:
    started = cluster.start_engines(policy_kind(config, on_gpu=cluster.on_gpu, num_local_learners=num_local_learners))
    return Roster(
        started.engines,
        config.engine,
        keep_logs=cluster.keep_logs,
        start=started.start,
        # A restarted engine would find no room on a learner's GPU.
        max_restarts=0 if config.engine.shares_gpus else config.engine.engine_max_restarts,
    )


def _started_teachers(config: Config, cluster: Cluster, num_local_learners: int) -> list[Teaching]:
    own, settings = config.distillation, replace(config.engine, min_engines=1)
    kinds = teacher_kinds(
        config, on_gpu=cluster.on_gpu, num_gpus=cluster.num_gpus, num_local_learners=num_local_learners
    )
    found = []
    for teacher, kind in zip(own.teachers, kinds, strict=True):
        started = cluster.start_engines(kind)
        roster = Roster(
            started.engines,
            settings,
            keep_logs=cluster.keep_logs,
            start=started.start,
            max_restarts=0 if kind.gpus else settings.engine_max_restarts,
            owner=_owner(teacher),
        )
        fleet = Fleet(roster, seed=config.experiment.seed)
        found.append(Teaching(fleet=fleet, most_tokens=most_tokens(config, config.teacher_path(teacher))))
    return found


def _owner(teacher: Teacher) -> str:
    return f"the teacher {teacher.name}".rstrip()


def _teachers(config: Config, teachers: Sequence[Teaching]) -> Teachers:
    vocab = read_hf_config(config.model_path)["vocab_size"]
    return Teachers(teachers, num_likeliest=config.distillation.num_likeliest, vocab=vocab)


def _end_with(cluster: Cluster, rosters: Sequence[Roster], on_failure: Callable[[str], object] | None) -> None:
    """End the run when Ray itself fails."""

    def failed(failure: Future[str]) -> None:
        for roster in rosters:
            roster.end(f"{failure.result()}{cluster.keep_logs()}")
        if on_failure is not None:
            on_failure(str(rosters[0].failure))

    cluster.failure.add_done_callback(failed)


@contextmanager
def _watched(roster: Roster) -> Iterator[None]:
    """Ping the engines within the context; ignore their end after it."""
    heartbeat = Heartbeat(roster, patience_s=roster.settings.engine_heartbeat_timeout)
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.close()
        roster.close()


@contextmanager
def _connected_fleet(config: Config) -> Iterator[Fleet]:
    """Connect to the policy's running servers, which keep running after the context.

    Raises:
        ConfigError: with every problem of each.
    """
    from mgrpo.rollout.vllm.server.policy_server import PolicyServer

    with _connected(config, config.engine.vllm_server_base_url, PolicyServer) as (engines, again):
        # Others start a server again, or do not.
        roster = Roster(engines, config.engine, start=again, max_restarts=None)
        with _watched(roster):
            yield Fleet(
                roster,
                seed=config.experiment.seed,
                # A server queues prompts in the order in which they happen to arrive.
                seeds_prompts=True,
                pauses=_pauses(config),
                meeting_host=meeting_host(config),
            )


@contextmanager
def _connected_teachers(config: Config, sample: TextSample | None = None) -> Iterator[list[Teaching]]:
    """The teachers' servers, by the names of their models; teachers of one model share its servers.

    Raises:
        ConfigError: with every problem of each.
    """
    from mgrpo.rollout.vllm.server.teacher_server import TeacherServer

    own, settings = config.distillation, replace(config.engine, min_engines=1)
    found: dict[str, Teaching] = {}
    make = partial(TeacherServer, sample=sample)
    with _connected(config, own.teacher_server_base_url, make) as (engines, again), ExitStack() as stack:
        calls = [engine.calls for engine in engines if isinstance(engine.calls, TeacherServer)]
        for teacher in own.teachers:
            numbers = [number for number, server in enumerate(calls) if server.model == teacher.model]
            if not numbers:
                have = ", ".join(f"{server.model} at {server.url}" for server in calls)
                raise ConfigError(
                    [
                        f"teacher_model_name_or_path={teacher.model}: no server of teacher_server_base_url has it; they have {have}"
                    ]
                )
            if teacher.model not in found:
                roster = Roster(
                    [engines[number] for number in numbers],
                    settings,
                    start=partial(_again, again, numbers),
                    max_restarts=None,
                    owner=_owner(teacher),
                )
                stack.enter_context(_watched(roster))
                found[teacher.model] = Teaching(
                    fleet=Fleet(roster, seed=config.experiment.seed),
                    most_tokens=min(calls[number].most_tokens for number in numbers),
                )
        yield [found[teacher.model] for teacher in own.teachers]


def _again(again: Callable[[int], HttpEngine], numbers: Sequence[int], number: int) -> HttpEngine:
    """Restart engine `number` of one teacher, whose engines have these `numbers` among all."""
    return again(numbers[number])


@contextmanager
def _connected(
    config: Config, urls: Sequence[str], make: Callable[[str], ServerCalls]
) -> Iterator[tuple[list[HttpEngine], Callable[[int], HttpEngine]]]:
    """Connect to running servers; yields their engines once all are ready, and a function that reconnects a failed one.

    Raises:
        ConfigError: every problem of each server.
    """
    from mgrpo.rollout.vllm.server.http_engine import HttpEngine
    from mgrpo.rollout.vllm.server.server_calls import ServerError

    engines: list[HttpEngine] = []

    def again(number: int) -> HttpEngine:
        if number >= len(urls):
            raise RuntimeError("a run's servers are those of vllm_server_base_url")
        before = next(engine for engine in reversed(engines) if engine.url == urls[number])
        engines.append(HttpEngine(urls[number], config, before=before, make=make))
        return engines[-1]

    try:
        engines.extend(HttpEngine(url, config, make=make) for url in urls)
        with announced("the servers", f"vllm_server_timeout={config.engine.vllm_server_timeout:g} s"):
            failures = [failure for engine in engines if (failure := engine.ready.exception()) is not None]
        problems: list[str] = []
        for failure in failures:
            problems += failure.problems if isinstance(failure, ServerError) else [str(failure)]
        if problems:
            raise ConfigError(problems)
        yield list(engines), again
    finally:
        for engine in engines:
            engine.close()


def _pauses(config: Config) -> Pause:
    return config.rollout.inflight_kv if config.rollout.inflight_updates else "drain"

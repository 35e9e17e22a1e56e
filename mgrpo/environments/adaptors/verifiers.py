"""Environments of the library `verifiers`, 0.4 and later: a taskset whose harnesses call a trajectory's endpoint.

Its eval client forwards a harness's requests in the harness's protocol; the endpoint records tokens. Tasksets in the
library: Harbor, NeMo Gym, OpenEnv and TextArena. It is imported in the worker, whose interpreter differs from the trainer's.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from mgrpo.environments.offered.agent import FunctionAgent

MODEL = "policy"
_OLDEST = (0, 4)
_REMEDY = "pip install 'verifiers>=0.4' into an environment of its own, and name its interpreter as env_python (docs/programs.md)"


class Verifiers(FunctionAgent):
    """Episodes of one taskset."""

    def __init__(self, **settings: Any) -> None:
        """Settings: see `play`."""
        super().__init__(play, **settings)

    def setup(self) -> None:
        """Raises ValueError where the library is missing or too old."""
        if importlib.util.find_spec("verifiers") is None:
            raise ValueError(f"verifiers is not installed for the interpreter of the environments; {_REMEDY}")
        try:
            version = importlib.metadata.version("verifiers")
        except importlib.metadata.PackageNotFoundError:
            return  # a checkout on the path
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < _OLDEST:
            raise ValueError(
                f"verifiers {version} is installed for the interpreter of the environments, and 0.4 or later is needed; {_REMEDY}"
            )


async def play(
    row: Mapping[str, Any],
    endpoint: Any,
    *,
    taskset: str,
    args: Mapping[str, Any] | None = None,
    env: str = "",
    harness: str | Mapping[str, Any] | None = None,
    runtime: str | Mapping[str, Any] = "subprocess",
    seats: Mapping[str, Mapping[str, Any]] | None = None,
) -> float:
    """Play the task that the row names by its place in the taskset, `example_id`.

    Args:
        endpoint: the trajectory's.
        taskset: the id of a taskset that is installed for this interpreter.
        args: further settings of the taskset.
        env: the id of an environment; "": the taskset's own, or one agent alone.
        harness: the id of the agents' harness, or its settings; None: the taskset's own, or bash.
        runtime: where harnesses run, a type of the library's runtimes or its settings.
        seats: settings of single agents by their names, above those of all.
    Returns:
        The mean reward of the agents that are trained, as a rule one.
    Raises:
        ValueError: the library or one of these is missing.
        RuntimeError: an agent or the environment failed, for reasons other than the policy.
    """
    settings = {"taskset": taskset, "args": args, "env": env, "harness": harness, "runtime": runtime, "seats": seats}
    environment = _environment(json.dumps(settings, sort_keys=True))
    task = await environment.task(row)
    with _key_variable(endpoint.api_key) as variable:
        episode = await environment.episode(task, base_url=f"{endpoint.base_url}/v1", key_variable=variable)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        why = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it says no reason"
        raise RuntimeError(f"the environment {taskset} failed: {why:.1000}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not trained:
        raise RuntimeError(f"the environment {taskset} has trained none of its agents")
    for trace in trained:
        endpoint.metrics.update({name: value for name, value in trace.metrics.items() if value is not None})
    return sum(trace.reward for trace in trained) / len(trained)


class _Environment:
    """One environment, which serves all trajectories of a worker at the same time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        try:
            from verifiers.v1.clients import EvalClientConfig, ModelContext
            from verifiers.v1.configs.agent import AgentConfig
            from verifiers.v1.types import SamplingConfig
            from verifiers.v1.utils import loaders
        except ImportError as err:
            raise ValueError(f"{err.name} is not installed for the interpreter of the environments; {_REMEDY}") from err
        self._client, self._context, self._sampling = EvalClientConfig, ModelContext, SamplingConfig
        taskset, args = settings["taskset"], settings["args"] or {}
        fields = loaders.env_config_type(taskset, settings["env"]).model_fields
        seats = [name for name, field in fields.items() if isinstance(field.default, AgentConfig)]
        if unknown := sorted(set(settings["seats"] or {}) - set(seats)):
            raise ValueError(f"seats names {', '.join(unknown)}, but the agents of {taskset} are {', '.join(seats)}")
        common = {"runtime": _named(settings["runtime"], "type")}
        if settings["harness"] is not None:
            common["harness"] = _named(settings["harness"], "id")
        own = {name: {**common, **(settings["seats"] or {}).get(name, {})} for name in seats}
        config = {"id": settings["env"], "taskset": {"id": taskset, **args}, **own}
        self._environment = loaders.load_environment(loaders.resolve_env_config(config))
        self._stack, self._lock = AsyncExitStack(), asyncio.Lock()
        self._is_serving = False
        self._coming: Iterator[Any] = iter(self._environment.taskset)
        self._tasks: list[Any] = []

    async def task(self, row: Mapping[str, Any]) -> Any:
        """The task that a row names."""
        place = row.get("example_id")
        if not isinstance(place, int) or isinstance(place, bool) or place < 0:
            raise ValueError(f"the row's example_id={place!r} must be the place of a task in the taskset, from 0")
        async with self._lock:
            missing = itertools.islice(self._coming, max(0, place + 1 - len(self._tasks)))
            self._tasks += await asyncio.to_thread(list, missing)
        if place >= len(self._tasks):
            raise ValueError(f"the row's example_id={place} is beyond the taskset's {len(self._tasks)} tasks")
        return self._tasks[place]

    async def episode(self, task: Any, *, base_url: str, key_variable: str) -> Any:
        """One episode; every agent without a separate client is the policy."""
        async with self._lock:
            if not self._is_serving:
                await self._stack.enter_async_context(self._environment.serving())
                self._is_serving = True
        client = self._client(base_url=base_url, api_key_var=key_variable)
        return await self._environment.run_episode(
            task, self._context(model=MODEL, client=client, sampling=self._sampling())
        )


@functools.cache
def _environment(settings: str) -> _Environment:
    """The environment of these settings, one per process: its servers run until the process ends."""
    return _Environment(json.loads(settings))


def _named(value: str | Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: value} if isinstance(value, str) else dict(value)


@contextmanager
def _key_variable(key: str) -> Iterator[str]:
    """An environment variable with the key, in which alone the library reads keys; its own programs do not get such names."""
    name = f"MGRPO_{secrets.token_hex(8).upper()}_API_KEY"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]

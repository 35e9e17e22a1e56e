"""Open Instruct's environments and tools (`RLEnvironment`, `TextRLEnvironment`, `Tool`), recognized by their methods.

They receive the settings of a row's `env_config`. The result of `reset` is not shown: Open Instruct's prompts contain it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.environments.offered.calling import called
from mgrpo.environments.offered.functions import failure

_METHODS = ("reset", "step", "get_tool_definitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCall:
    """A call in the form of these environments."""

    id: str
    name: str
    args: Mapping[str, Any]


def is_open_instruct(found: Any) -> bool:
    """True for such a class, or the configuration of one."""
    target = getattr(found, "tool_class", found)
    return inspect.isclass(target) and all(callable(getattr(target, name, None)) for name in _METHODS)


class OpenInstruct(Environment):
    """One such environment, made from its class or its configuration."""

    def __init__(self, found: Any, *, call_name: str, is_repeatable: bool = False, **settings: Any) -> None:
        target = getattr(found, "tool_class", found)
        if target is not found:
            settings = dataclasses.asdict(found(**settings))
            settings.pop("pool_size", None)
        self.name = call_name or getattr(target, "config_name", "") or target.__name__
        self.is_repeatable = is_repeatable
        self._takes_text = callable(getattr(target, "text_step", None))
        self._inner = target(**_with_call_name(target, settings, self.name))
        self._tools: tuple[Tool, ...] = ()
        self._num_calls = 0

    async def setup(self) -> None:
        await called(getattr(self._inner, "setup", _nothing))
        if self._takes_text:
            return
        definitions = await called(self._inner.get_tool_definitions)
        self._tools = tuple(_tool(definition["function"]) for definition in definitions)
        if not self._tools:
            raise ValueError("its get_tool_definitions returns none; return what the model may call")

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation:
        self._num_calls = 0
        await called(self._inner.reset, **row.get("env_config", {}))
        return Observation(metrics=await self._metrics())

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        observations: list[Observation] = []
        for call in calls:
            if observations and observations[-1].done:
                observations.append(Observation(text="not called: the episode is over", done=True))
            else:
                observations.append(await self._answer(call))
        return observations

    async def close(self) -> None:
        await called(getattr(self._inner, "close", _nothing))

    async def _answer(self, call: Call) -> Observation:
        self._num_calls += 1
        name = self.name if self._takes_text else call.name
        env_call = EnvCall(id=str(self._num_calls), name=name, args=dict(call.arguments))
        try:
            answer = await called(self._inner.step, env_call)
        # The user's code may raise anything; the model receives the error.
        except (Exception, SystemExit) as err:
            return failure(err)
        about = getattr(answer, "metadata", None) or {}
        return Observation(
            text=answer.result,
            reward=float(answer.reward or 0.0),
            done=bool(answer.done),
            failed=bool(about.get("error") or about.get("timeout")),
            metrics=await self._metrics(),
        )

    async def _metrics(self) -> dict[str, float]:
        metrics = await called(getattr(self._inner, "get_metrics", _no_metrics))
        return {name: float(value) for name, value in metrics.items()}


def _nothing() -> None:
    return None


def _no_metrics() -> dict[str, float]:
    return {}


def _tool(function: Mapping[str, Any]) -> Tool:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(name=function["name"], description=function.get("description", ""), parameters=parameters)


def _with_call_name(target: type, settings: Mapping[str, Any], call_name: str) -> dict[str, Any]:
    """The settings with the call name, if the class takes one: its tools are called by it."""
    parameters = inspect.signature(target).parameters
    takes = "call_name" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {**settings, "call_name": call_name} if takes else dict(settings)

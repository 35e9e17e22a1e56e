"""Classes in the form of TRL's `environment_factory`: public methods are the tools, `get_reward` scores a trajectory."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.environments.offered.functions import FunctionTool, finished

_OURS = ("reset", "get_reward")


class Trl(Environment):
    """One instance of such a class, or of another callable's result."""

    def __init__(self, factory: Callable[[], Any], *, is_repeatable: bool = False) -> None:
        self._instance = factory()
        self.name = type(self._instance).__name__
        self.is_repeatable = is_repeatable
        self.gives_reward = callable(getattr(self._instance, "get_reward", None))
        if not callable(getattr(self._instance, "reset", None)):
            raise ValueError(
                f"{self.name} has no method reset; TRL's environments begin a trajectory with reset(**columns)"
            )
        self._methods = {name: FunctionTool(method) for name, method in _public_methods(self._instance).items()}
        if not self._methods:
            raise ValueError(f"{self.name} has no public method besides {' and '.join(_OURS)} that could be a tool")

    def tools(self) -> Sequence[Tool]:
        return [method.tool for method in self._methods.values()]

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation | Awaitable[Observation]:
        for method in self._methods.values():
            method.trajectory = self.trajectory
            method.reset(row, seed=seed)
        columns = {name: value for name, value in row.items() if name != "env_config"} | row.get("env_config", {})
        opening = self._instance.reset(**_accepted(self._instance.reset, columns))
        return self._awaited(opening) if inspect.isawaitable(opening) else self._opening(opening)

    def step(self, calls: Sequence[Call]) -> Sequence[Observation] | Awaitable[Sequence[Observation]]:
        return finished([self._methods[call.name].begun(call) for call in calls])

    def reward(self) -> Any:
        return self._instance.get_reward() if self.gives_reward else None

    def snapshot(self) -> dict[str, Any]:
        """The instance for reward functions, as it stays in its process: its public attributes that JSON can hold."""
        found = {}
        for name in dir(self._instance):
            if name.startswith("_"):
                continue
            try:
                found[name] = json.loads(json.dumps(getattr(self._instance, name)))
            # Not JSON, or a property that raises.
            except Exception:
                continue
        return found

    async def _awaited(self, opening: Awaitable[Any]) -> Observation:
        return self._opening(await opening)

    def _opening(self, opening: Any) -> Observation:
        if not isinstance(opening, str | None):
            raise TypeError(f"{self.name}.reset returned {opening!r:.80}; it may return text or None")
        return Observation(text=opening or "")


def _public_methods(instance: Any) -> dict[str, Callable[..., Any]]:
    """Public methods by name, without reading properties, which may need a trajectory."""
    found = inspect.getmembers_static(instance)
    names = [name for name, value in found if callable(value) or isinstance(value, classmethod)]
    members = {name: getattr(instance, name) for name in names if not name.startswith("_") and name not in _OURS}
    return {name: member for name, member in members.items() if inspect.ismethod(member)}


def _accepted(reset: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that `reset` takes: all of them with **kwargs."""
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}

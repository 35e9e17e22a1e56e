"""One environment of a toolbox. Its code is the user's: plain methods run in threads, and whatever comes is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.environments.offered.call_arguments import coerced
from mgrpo.environments.offered.calling import called
from mgrpo.environments.offered.description import ACT, Offer
from mgrpo.environments.offered.functions import failure
from mgrpo.environments.offered.program import Program


class OfferedEnvironment:
    """An environment under the names that it has in a run."""

    def __init__(
        self, environment: Environment, *, name: str, entry: str, call_name: str = "", is_alternative: bool = False
    ) -> None:
        """
        Args:
            call_name: of its tool, when it has only one.
        """
        self.environment = environment
        self.name = name
        self.entry = entry
        self._call_name = call_name
        self._is_alternative = is_alternative
        self._tools: dict[str, Tool] = {}
        """Its tools as it knows them, by their call names."""

        self.offer = self._described()
        """Without tools before `set_up`."""

    async def set_up(self) -> None:
        try:
            await called(self.environment.setup)
            tools = self.environment.tools()
        except (Exception, SystemExit) as err:
            raise ValueError(f"{self.entry} cannot be set up: {type(err).__name__}: {err}") from err
        is_renamed = self._call_name and len(tools) == 1
        self._tools = {self._call_name if is_renamed else tool.name: tool for tool in tools}
        self.offer = self._described()

    async def begin(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Observation:
        self.environment.trajectory = trajectory
        if self._is_alternative:
            row = {name: value for name, value in row.items() if name != "environment"}
        begun = await called(self.environment.reset, row, seed=seed)
        if begun is not None and not _is_observation(begun):
            raise TypeError(f"{self.entry}: reset returned {begun!r:.80}, expected an Observation or None")
        if begun is not None and (begun.done or begun.reward):
            raise ValueError(
                f"{self.entry}: reset returned done={begun.done}, reward={begun.reward}; a trajectory begins with a text and "
                "metrics, and only a step may reward or end it"
            )
        return self._with_own_metrics(begun or Observation())

    def readable(self, call: Call) -> Call:
        """The call as the environment knows it; ArgumentError where its arguments do not fit."""
        if call.name == ACT and not self._tools:
            return call
        tool = self._tools[call.name]
        return replace(call, name=tool.name, arguments=coerced(replace(tool, name=call.name), call.arguments))

    async def answers(self, calls: Sequence[Call]) -> list[Observation]:
        """One for each call, also where the environment fails."""
        try:
            observations = list(await called(self.environment.step, calls))
            if len(observations) != len(calls) or not all(map(_is_observation, observations)):
                raise TypeError(f"{self.entry}: step returned {observations!r:.80}, expected {len(calls)} Observations")
            return [self._with_own_metrics(observation) for observation in observations]
        except (Exception, SystemExit) as err:
            return [failure(err)] * len(calls)

    async def reward(self) -> float | None:
        reward = await called(self.environment.reward) if self.offer.gives_reward else None
        return None if reward is None else float(reward)

    def snapshot(self) -> Mapping[str, Any]:
        show = getattr(self.environment, "snapshot", None)
        return {} if show is None else show()

    @property
    def ends(self) -> bool:
        """Whether it lets go of anything at the end of a trajectory."""
        return type(self.environment).end is not Environment.end

    async def end(self) -> None:
        await called(self.environment.end)

    async def close(self) -> None:
        await called(self.environment.close)

    def _described(self) -> Offer:
        own_reward = type(self.environment).reward is not Environment.reward
        return Offer(
            name=self.name,
            entry=self.entry,
            tools=tuple(replace(tool, name=name) for name, tool in self._tools.items()),
            is_repeatable=self.environment.is_repeatable,
            gives_reward=getattr(self.environment, "gives_reward", own_reward),
            is_alternative=self._is_alternative,
            is_program=isinstance(self.environment, Program),
        )

    def _with_own_metrics(self, observation: Observation) -> Observation:
        metrics = {f"{self.name}/{name}": float(value) for name, value in observation.metrics.items()}
        return replace(observation, metrics=metrics)


def _is_observation(value: Any) -> bool:
    return isinstance(value, Observation) and isinstance(value.text, str)

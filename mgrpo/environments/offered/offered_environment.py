"""One environment of a toolbox. Its code is the user's: plain methods run in threads, and everything that it returns is checked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgrpo.environments.environment import Answered, Call, Environment, Observation, Tool
from mgrpo.environments.offered.agent import Agent
from mgrpo.environments.offered.call_arguments import ArgumentError, coerced
from mgrpo.environments.offered.calling import Late, NumberRefused, TimedCalls, called, number, written
from mgrpo.environments.offered.description import ACT, Offer, checked_tools
from mgrpo.environments.offered.functions import failure
from mgrpo.environments.offered.program import Program


class OfferedEnvironment:
    """An environment under the names that it has in a run."""

    def __init__(
        self,
        environment: Environment,
        *,
        name: str,
        entry: str,
        call_name: str = "",
        is_alternative: bool = False,
        calls: TimedCalls | None = None,
    ) -> None:
        """
        Args:
            call_name: the name of its tool, when it has only one.
            calls: makes its steps, within their limits; default: the usual ones.
        """
        self.environment = environment
        self.name = name
        self.entry = entry
        self._calls = calls or TimedCalls()
        self._call_name = call_name
        self._is_alternative = is_alternative
        self._tools: dict[str, Tool] = {}
        """Tools under their original names, by call name."""

        self.offer = self._described()
        """The offer, without tools before `set_up`."""

    @property
    def is_stuck(self) -> bool:
        """True while an earlier call continues and cannot be ended. Valid between turns only: within one, calls may go on."""
        return self._calls.is_stuck

    async def set_up(self) -> None:
        try:
            await called(self.environment.setup)
            tools = checked_tools([*self.environment.tools()])
        except (Exception, SystemExit) as err:
            raise ValueError(f"{self.entry} cannot be set up: {type(err).__name__}: {written(err)}") from err
        is_renamed = self._call_name and len(tools) == 1
        self._tools = {self._call_name if is_renamed else tool.name: tool for tool in tools}
        self.offer = self._described()

    async def begin(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Observation:
        self.environment.trajectory = trajectory
        if self._is_alternative:
            row = {name: value for name, value in row.items() if name != "environment"}
        begun = await called(self.environment.reset, row, seed=seed)
        if begun is not None and not _is_observation(begun):
            raise TypeError(f"{self.entry}: reset returned {written(begun, repr):.80}, expected an Observation or None")
        if begun is not None and (begun.done or begun.reward):
            raise ValueError(
                f"{self.entry}: reset returned done={begun.done}, reward={begun.reward}; a trajectory begins with a text and "
                "metrics, and only a step may reward or end it"
            )
        begun = begun or Observation()
        return replace(begun, metrics=self._own_metrics(begun))

    async def answers(self, calls: Sequence[Call]) -> list[Answered]:
        """One answer for each call, also where the environment fails or is late.

        Raises:
            NumberRefused: it gave a reward or a metric that is no number which float32 holds.
        """
        began, is_late = time.monotonic(), False
        asked: dict[int, Call] = {}
        observations: dict[int, Observation] = {}
        for place, call in enumerate(calls):
            try:
                asked[place] = self._readable(call)
            except ArgumentError as err:
                observations[place] = self.refused(str(err))
        try:
            if asked:
                limit_s = self._calls.limits.tool_timeout_s * len(calls)
                found = await self._calls.within(limit_s, self._step, [*asked.values()])
                observations |= zip(asked, found, strict=True)
        except Late as err:
            is_late = True
            observations = dict.fromkeys(range(len(calls)), failure(TimeoutError(str(err))))
        except NumberRefused:
            raise
        except Exception as err:
            observations |= dict.fromkeys(asked, self.refused(failure(err).text))
        seconds = (time.monotonic() - began) / len(calls)
        return [
            Answered(observation=observations[place], seconds=seconds, timed_out=is_late) for place in range(len(calls))
        ]

    async def _step(self, calls: Sequence[Call]) -> list[Observation]:
        found = await called(self.environment.step, calls)
        if isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping | Iterator):
            found = list(found)
        if not isinstance(found, list | tuple) or len(found) != len(calls) or not all(map(_is_observation, found)):
            raise TypeError(
                f"{self.entry}: step returned {written(found, repr):.80}, expected a list of {len(calls)} Observations"
            )
        return [self._checked(each) for each in found]

    def refused(self, text: str) -> Observation:
        """The answer to a call that cannot be made, or that failed."""
        return Observation(text=shortened(text, self._calls.limits.output_bytes), failed=True)

    def _readable(self, call: Call) -> Call:
        """The call in the environment's own names and types; ArgumentError where its arguments do not fit."""
        if call.name == ACT and not self._tools:
            return call
        tool = self._tools[call.name]
        return replace(call, name=tool.name, arguments=coerced(replace(tool, name=call.name), call.arguments))

    async def reward(self) -> float | None:
        reward = await called(self.environment.reward) if self.offer.gives_reward else None
        return None if reward is None else number(reward, f"{self.name}: the trajectory's reward")

    def snapshot(self) -> Mapping[str, Any]:
        show = getattr(self.environment, "snapshot", None)
        return {} if show is None else show()

    @property
    def ends(self) -> bool:
        """True if its class overrides `end`."""
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
            is_agent=isinstance(self.environment, Agent),
            remarks=self.environment.remarks if isinstance(self.environment, Agent) else (),
        )

    def _checked(self, observation: Observation) -> Observation:
        return Observation(
            text=shortened(observation.text, self._calls.limits.output_bytes),
            reward=number(observation.reward, f"{self.name}: the reward of a step"),
            done=bool(observation.done),
            failed=bool(observation.failed),
            metrics=self._own_metrics(observation),
        )

    def _own_metrics(self, observation: Observation) -> dict[str, float]:
        return {
            f"{self.name}/{name}": number(value, f"{self.name}: the metric {name}")
            for name, value in observation.metrics.items()
        }


def _is_observation(value: Any) -> bool:
    return isinstance(value, Observation) and isinstance(value.text, str)


def shortened(text: Any, limit: int) -> str:
    """A text of at most about `limit` bytes: a longer one loses its middle. Lone surrogates become question marks."""
    data = str(text).encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    head, tail = data[: limit // 2], data[len(data) - limit // 2 :]
    cut = len(data) - len(head) - len(tail)
    return f"{head.decode(errors='ignore')}\n... {cut} bytes left out ...\n{tail.decode(errors='ignore')}"

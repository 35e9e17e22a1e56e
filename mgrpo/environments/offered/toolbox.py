"""Several tools and environments as one: which of them answers which call of a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.offered.agent import Agent
from mgrpo.environments.offered.description import ACT, Description
from mgrpo.environments.offered.functions import failure
from mgrpo.environments.offered.offered_environment import OfferedEnvironment
from mgrpo.environments.offered.program import Program

T = TypeVar("T")


class Toolbox:
    """Environments under their names. Their tools are known after `setup`; `active` and `acts` after `reset`."""

    def __init__(self, environments: Sequence[OfferedEnvironment]) -> None:
        self._environments = {each.name: each for each in environments}
        self._description = Description(offers=tuple(each.offer for each in environments))
        self._description.refuse_clashes()
        self._playing: tuple[OfferedEnvironment, ...] = ()
        self._routes: dict[str, OfferedEnvironment] = {}
        self.active: frozenset[str] = frozenset()
        """Names of the tools that the trajectory may call."""
        self.acts = False
        """True if each turn of the trajectory is the call `ACT`."""

    async def setup(self) -> None:
        await _all_ended(each.set_up() for each in self._environments.values())
        self._description = Description(offers=tuple(each.offer for each in self._environments.values()))
        self._description.refuse_clashes()

    def describe(self) -> Description:
        return self._description

    @property
    def program(self) -> Program:
        """The program that drives the model, if the description has one."""
        (only,) = self._environments.values()
        assert isinstance(only.environment, Program)
        return only.environment

    @property
    def agent(self) -> Agent:
        """The agent that drives the model, if the description has one."""
        (only,) = self._environments.values()
        assert isinstance(only.environment, Agent)
        return only.environment

    async def reset(self, row: Mapping[str, Any], *, seed: int, trajectory: str = "") -> Observation:
        """Begin a trajectory with the environments that its row asks for.

        Raises:
            ValueError: see `Description.choice`.
        """
        choice = self._description.choice(row)
        self._playing = tuple(self._environments[name] for name in choice.playing)
        self._routes = {
            tool.name: each for each in self._playing for tool in each.offer.tools if tool.name in choice.active
        }
        self.active, self.acts = choice.active, choice.actor is not None
        if choice.actor is not None:
            self._routes[ACT] = self._environments[choice.actor]
        own = choice.settings.settings
        begun = await _all_ended(
            each.begin(
                row if self._description.is_driven else {**row, "env_config": own.get(each.name, {})},
                seed=seed,
                trajectory=trajectory,
            )
            for each in self._playing
        )
        return Observation(
            text="\n".join(each.text for each in begun if each.text),
            metrics={name: value for each in begun for name, value in each.metrics.items()},
        )

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        """Answers to all calls of a turn. Environments go on together, each with its own calls in their order.

        Raises:
            NumberRefused: one of them gave a reward or a metric that is no number which float32 holds.
        """
        if any(each.is_stuck for each in self._playing):
            stuck = failure(RuntimeError("an earlier call is still running"))
            return [Answered(observation=stuck, seconds=0.0)] * len(calls)
        parts: dict[OfferedEnvironment | None, list[int]] = {}
        for place, call in enumerate(calls):
            parts.setdefault(self._routes.get(call.name), []).append(place)
        answers = {place: self._unknown(calls[place]) for place in parts.pop(None, ())}
        known = {each: places for each, places in parts.items() if each is not None}
        found = await _all_ended(each.answers([calls[place] for place in places]) for each, places in known.items())
        for places, some in zip(known.values(), found, strict=True):
            answers |= zip(places, some, strict=True)
        return [answers[place] for place in range(len(calls))]

    @property
    def tells(self) -> bool:
        """True if this trajectory ends with a reward or a snapshot."""
        return any(each.offer.gives_reward or hasattr(each.environment, "snapshot") for each in self._playing)

    async def reward(self) -> float | None:
        rewards = await _all_ended(each.reward() for each in self._playing)
        return next((reward for reward in rewards if reward is not None), None)

    def snapshot(self) -> dict[str, Any]:
        """The public attributes of those environments that show theirs, as JSON."""
        return {name: value for each in self._playing for name, value in each.snapshot().items()}

    @property
    def ends(self) -> bool:
        """True if `end` does anything after this trajectory."""
        return any(each.ends for each in self._playing)

    async def end(self) -> None:
        await _all_ended(each.end() for each in self._playing)

    async def close(self) -> None:
        await _all_ended(each.close() for each in self._environments.values())

    def _unknown(self, call: Call) -> Answered:
        name = f"{call.name:.80}".encode(errors="replace").decode()
        tools = f"tools: {', '.join(sorted(self.active))}" if self.active else "there are no tools"
        return Answered(observation=Observation(text=f"unknown tool {name}; {tools}", failed=True), seconds=0.0)


async def _all_ended(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first error, once all have ended."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]

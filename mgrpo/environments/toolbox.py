"""Several tools and environments as one: who answers which call, and what a row lets a trajectory call.

Plain methods of its members run in threads, so that an asyncio loop can hold many toolboxes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mgrpo.environments.arguments import ArgumentError, coerced
from mgrpo.environments.environment import Call, Environment, Observation, Tool
from mgrpo.environments.functions import FunctionTool, failure
from mgrpo.environments.rows import RowSettings, row_settings

ACT = "act"
"""The call that a turn as a whole is, for an environment without tools; its argument is "text"."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One environment of a toolbox."""

    name: str
    """In metrics, and in rows."""
    entry: str
    """What the user called it, for errors."""
    environment: Environment
    call_name: str = ""
    """What its tool is called instead, when it has only one."""
    is_alternative: bool = False
    """A row's column `environment` chooses one of these members."""

    def offers(self) -> dict[str, Tool]:
        """Its tools by their call names."""
        tools = self.environment.tools()
        if self.call_name and len(tools) == 1:
            return {self.call_name: tools[0]}
        return {tool.name: tool for tool in tools}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a toolbox offers."""

    tools: tuple[Tool, ...]
    names: tuple[str, ...]
    """What rows may name: tools and environments."""
    not_repeatable: tuple[str, ...]
    """Environments whose observations may differ between equal runs."""
    acts: bool
    """Whether there is an environment that takes a turn as a whole as one action."""

    @property
    def is_repeatable(self) -> bool:
        return not self.not_repeatable

    def to_json(self) -> dict[str, Any]:
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "returns": tool.returns}
            for tool in self.tools
        ]
        return {"tools": tools, "names": self.names, "not_repeatable": self.not_repeatable, "acts": self.acts}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Description:
        return cls(
            tools=tuple(Tool(**tool) for tool in values["tools"]),
            names=tuple(values["names"]),
            not_repeatable=tuple(values["not_repeatable"]),
            acts=values["acts"],
        )


class Toolbox(Environment):
    """Its tools are known after `setup`; `active` and `acts` after `reset`."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        for member in members:
            if len(same := [other for other in members if other.name == member.name]) > 1:
                raise ValueError(_both(same, member.name))
        self.is_repeatable = all(member.environment.is_repeatable for member in members)
        self._offers: dict[str, dict[str, Tool]] = {}
        """What each member offers, by its name."""
        self._tools: dict[str, Tool] = {}
        self._playing: tuple[Member, ...] = ()
        self._routes: dict[str, tuple[Member, Tool]] = {}
        self.active: frozenset[str] = frozenset()
        """What the trajectory may call."""
        self.acts = False
        """Whether each turn of the trajectory is the call `ACT`."""

    async def setup(self) -> None:
        await _together(self._set_up(member) for member in self._members)
        for member in self._members:
            for name, tool in self._offers[member.name].items():
                self._add(member, replace(tool, name=name))

    def tools(self) -> Sequence[Tool]:
        return tuple(self._tools.values())

    def describe(self) -> Description:
        return Description(
            tools=tuple(self.tools()),
            names=tuple(sorted(self._names())),
            not_repeatable=tuple(member.name for member in self._members if not member.environment.is_repeatable),
            acts=not all(self._offers.values()),
        )

    async def reset(self, row: Mapping[str, Any], *, seed: int, trajectory: str = "") -> Observation:
        """Begin a trajectory with the members that its row asks for.

        Raises:
            ValueError: the row names what does not exist, or its members cannot play together.
        """
        settings = row_settings(row)
        self._choose(settings)
        begun = await _together(
            self._begin(member, row, settings, seed=seed, trajectory=trajectory) for member in self._playing
        )
        return Observation(
            text="\n".join(each.text for each in begun if each.text),
            reward=sum(each.reward for each in begun),
            done=any(each.done for each in begun),
            metrics={name: value for each in begun for name, value in each.metrics.items()},
        )

    async def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        """Members go on together, each with its own calls in their order; none of them makes this raise."""
        answers: dict[int, Observation] = {}
        routed: dict[str, dict[int, Call]] = {}
        for place, call in enumerate(calls):
            try:
                member, own_call = self._route(call)
            except ArgumentError as err:
                answers[place] = Observation(text=str(err), failed=True)
            else:
                routed.setdefault(member.name, {})[place] = own_call
        members = [member for member in self._playing if member.name in routed]
        found = await _together(self._answers(member, [*routed[member.name].values()]) for member in members)
        for member, observations in zip(members, found, strict=True):
            answers.update(zip(routed[member.name], observations, strict=True))
        return [answers[place] for place in range(len(calls))]

    def apart(self, calls: Sequence[Call]) -> list[list[int]]:
        """Places of the calls of a turn by who answers them: `step` may be asked each part alone."""
        parts: dict[str, list[int]] = {}
        for place, call in enumerate(calls):
            member = self._routes[call.name][0].name if call.name in self._routes else ""
            parts.setdefault(member, []).append(place)
        return list(parts.values())

    @property
    def tells(self) -> bool:
        """Whether there is a reward or a snapshot at the end of this trajectory."""
        return any(_gives_reward(member) or hasattr(member.environment, "snapshot") for member in self._playing)

    async def reward(self) -> float | None:
        rewards = [await _run(member.environment.reward) for member in self._playing if _gives_reward(member)]
        return None if not rewards or rewards[0] is None else float(rewards[0])

    def snapshot(self) -> dict[str, Any]:
        """Public attributes of the members that show theirs, as JSON holds them."""
        shown = [getattr(member.environment, "snapshot", None) for member in self._playing]
        return {name: value for show in shown if show is not None for name, value in show().items()}

    async def close(self) -> None:
        await _together(_run(member.environment.close) for member in self._members)

    async def _set_up(self, member: Member) -> None:
        try:
            await _run(member.environment.setup)
            self._offers[member.name] = member.offers()
        # Its code is the user's, and may raise anything.
        except (Exception, SystemExit) as err:
            raise ValueError(f"{member.entry} cannot be set up: {type(err).__name__}: {err}") from err

    def _add(self, member: Member, tool: Tool) -> None:
        """Add to the tools; alternatives may share one, since no trajectory has both."""
        others = [other for other in self._members if tool.name in self._offers[other.name] and other is not member]
        is_shared = member.is_alternative and all(other.is_alternative for other in others)
        if others and not (is_shared and self._tools.get(tool.name, tool) == tool):
            raise ValueError(_both([member, *others], tool.name))
        if tool.name == ACT and not all(self._offers.values()):
            raise ValueError(
                f"{member.entry}: {ACT} is a turn as a whole of the environment without tools; rename the tool"
            )
        self._tools[tool.name] = tool

    def _names(self) -> set[str]:
        return {member.name for member in self._members} | self._tools.keys()

    def _choose(self, settings: RowSettings) -> None:
        """Decide who plays, and what may be called."""
        if unknown := settings.names - self._names():
            expected = ", ".join(sorted(self._names()))
            raise ValueError(f"the row names {', '.join(sorted(unknown))}; the tools and environments are {expected}")
        self._playing = self._chosen(settings)
        silent = [member for member in self._playing if not self._offers[member.name]]
        if len(silent) > 1:
            raise ValueError(f"{_listed(silent)} each take a turn as a whole; name one of them in the row's env_config")
        if len(rewarding := [member for member in self._playing if _gives_reward(member)]) > 1:
            raise ValueError(
                f"{_listed(rewarding)} each give the reward of a trajectory; name one of them in the row's tools"
            )
        self._routes = {
            name: (member, tool)
            for member in self._playing
            for name, tool in self._offers[member.name].items()
            if settings.tools is None or name in settings.tools or {member.name} & settings.names
        }
        self.acts = bool(silent)
        self.active = frozenset(self._routes)
        if self.acts:
            self._routes[ACT] = (silent[0], Tool(name=ACT, description="", parameters={"type": "object"}))

    def _chosen(self, settings: RowSettings) -> tuple[Member, ...]:
        alternatives = {member.name for member in self._members if member.is_alternative}
        if alternatives and settings.environment not in alternatives:
            raise ValueError(
                f"the row's environment is {settings.environment!r}, which is none of {', '.join(sorted(alternatives))}"
            )
        named_silent = {name for name in settings.settings if not self._offers.get(name, True)}

        def plays(member: Member) -> bool:
            offers = self._offers[member.name]
            if member.is_alternative:
                return member.name == settings.environment
            if not offers and named_silent:
                return member.name in named_silent
            return settings.tools is None or bool(settings.names & {member.name, *offers})

        return tuple(filter(plays, self._members))

    async def _begin(
        self, member: Member, row: Mapping[str, Any], settings: RowSettings, *, seed: int, trajectory: str
    ) -> Observation:
        environment = member.environment
        if isinstance(environment, FunctionTool):
            environment.trajectory = trajectory
        dropped = "environment" if member.is_alternative else ""
        own_row = {name: value for name, value in row.items() if name != dropped}
        own_row["env_config"] = dict(settings.settings.get(member.name, {}))
        begun = await _run(environment.reset, own_row, seed=seed)
        if begun is None:
            return Observation()
        if not isinstance(begun, Observation):
            raise TypeError(f"{member.entry}: reset returned {begun!r:.80}; return an Observation or None")
        return _with_own_metrics(begun, member)

    def _route(self, call: Call) -> tuple[Member, Call]:
        """Who answers the call, as it knows it."""
        if call.name not in self._routes:
            tools = f"tools: {', '.join(sorted(self.active))}" if self.active else "there are no tools"
            raise ArgumentError(f"unknown tool {call.name}; {tools}")
        member, tool = self._routes[call.name]
        arguments = coerced(replace(tool, name=call.name), call.arguments)
        return member, replace(call, name=tool.name, arguments=arguments)

    async def _answers(self, member: Member, calls: Sequence[Call]) -> list[Observation]:
        try:
            observations = list(await _run(member.environment.step, calls))
            if len(observations) != len(calls) or not all(isinstance(each, Observation) for each in observations):
                raise TypeError(f"{member.entry}: step must return one Observation for each of {len(calls)} calls")
        except (Exception, SystemExit) as err:
            observations = [failure(err)] * len(calls)
        return [_with_own_metrics(observation, member) for observation in observations]


async def _run(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a method: a coroutine's in the loop, any other's in a thread, which may give something to await."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **named)
    result, err = await asyncio.to_thread(_outcome, method, arguments, named)
    if err is not None:
        raise err
    return await result if inspect.isawaitable(result) else result


def _outcome(method: Callable[..., Any], arguments: Any, named: Any) -> tuple[Any, BaseException | None]:
    """The result or what was raised, apart: asyncio never ends a future with a StopIteration."""
    try:
        return method(*arguments, **named), None
    except BaseException as err:
        return None, err


async def _together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, once all have ended; or the first error."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _gives_reward(member: Member) -> bool:
    environment = member.environment
    return getattr(environment, "gives_reward", type(environment).reward is not Environment.reward)


def _with_own_metrics(observation: Observation, member: Member) -> Observation:
    metrics = {f"{member.name}/{name}": value for name, value in observation.metrics.items()}
    return replace(observation, metrics=metrics)


def _both(members: Sequence[Member], name: str) -> str:
    return f"{_listed(members)} are both called {name}; give them different call names"


def _listed(members: Sequence[Member]) -> str:
    return " and ".join(member.entry for member in members)

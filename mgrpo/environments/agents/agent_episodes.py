"""Trajectories of agents: each has a session at an endpoint, and consists of the turns that its agent requests there.

An agent may request several turns at a time; each is sampled on arrival, so that no run repeats to the bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mgrpo.environments.agents.endpoint_link import Endpoints, Session, Wish
from mgrpo.environments.agents.recorded_tree import RecordedTree
from mgrpo.environments.loop.conversation import Chats
from mgrpo.environments.loop.episodes import EpisodeBounds, Episodes, Task, together
from mgrpo.environments.loop.gathering import Ask, Gathering
from mgrpo.environments.loop.instance import Environments, Instance
from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.loop.trajectory import Trajectory
from mgrpo.environments.offered.agent import masked
from mgrpo.environments.offered.row_columns import sendable
from mgrpo.types import AgentRecord, Completion, Prompt, RolloutGroup

_NOTHING: Mapping[str, Any] = {"turns": (), "counts": {}}
"""The report of an endpoint that is gone."""
_MOST_GONE = 3
"""Workers lost with one task before it is abandoned: the task may be the cause."""
_MOST_SAID = 300
"""Characters of an agent's output that are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBounds:
    """Limits and settings of every agent."""

    limit_s: float
    """Seconds that it may take with all its turns."""
    sets_reward: bool
    """True if a reward that the agent reports counts."""
    are_remote: bool
    """True if remote workers request the tasks."""
    hidden: Sequence[str] = field(default=(), repr=False)
    """Values of variables to mask in its recorded output."""


class Agents(Episodes):
    """All trajectories of a run, played by agents."""

    def __init__(
        self,
        gathering: Gathering,
        environments: Environments,
        language: Chats,
        bounds: EpisodeBounds,
        *,
        endpoints: Endpoints,
        own: AgentBounds,
    ) -> None:
        super().__init__(gathering, environments, language, bounds)
        self.chats, self.endpoints, self.own = language, endpoints, own

    async def start(self) -> None:
        await self.endpoints.start()

    async def close(self) -> None:
        await self.endpoints.close()

    async def run(self, task: Task) -> RolloutGroup:
        """All trajectories of one prompt."""
        plays = [_Play(self, task, sample) for sample in range(task.num_samples)]
        try:
            await together(play.run() for play in plays)
        finally:
            self.gathering.leave()
        prompt = self._common(task, plays)
        return RolloutGroup(prompt=prompt, completions=tuple(play.completion(prompt) for play in plays))

    def _common(self, task: Task, plays: Sequence[_Play]) -> Prompt:
        """The first context of all samples, if they have one in common; else the row's prompt."""
        firsts = [play.first_context for play in plays if play.first_context is not None]
        if not firsts or any(not np.array_equal(first, firsts[0]) for first in firsts):
            return task.prompt
        if np.array_equal(firsts[0], task.prompt.tokens):
            return task.prompt
        return replace(task.prompt, tokens=firsts[0], text=self.chats.written(firsts[0].tolist()))


class _Play:
    """One trajectory under way."""

    def __init__(self, agents: Agents, task: Task, sample: int) -> None:
        self.agents, self.task, self.sample = agents, task, sample
        self.name = f"{task.name}/{sample}"
        self.tree = RecordedTree()
        self.report = _NOTHING
        self.num_gone = 0
        """Remote workers that have left its task."""
        self.session: Session | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a turn cannot be sampled, which no trajectory survives."""
        self.trajectory = Trajectory(context=task.prompt.tokens, ended_by="error")
        self.reward: float | None = None
        self.record = AgentRecord(ended="lost", status=None, output="", seconds=0.0)

    @property
    def first_context(self) -> np.ndarray | None:
        """`[len]` int32, the context of its first turn; None: no turns."""
        if not self.trajectory.turns:
            return None
        branches = self.trajectory.branches
        return branches[0].prompt_tokens if branches else self.trajectory.context

    async def run(self) -> None:
        """Run the trajectory from the agent's start to its end."""
        instance = None
        if not self.agents.own.are_remote:
            instance = await self.agents._acquire(self.task.row, self.task.seed, self.name)
            if instance is None:
                return
        began = time.monotonic()
        outcome: Mapping[str, Any] = {"ended": "lost"}
        try:
            outcome = await self._whole(instance)
        except EnvironmentLost as err:
            outcome = {"ended": "lost", "output": str(err)}
        finally:
            if self.failure.done() and not self.failure.cancelled():
                self.failure.exception()  # Retrieved: it has been raised, or an earlier error has.
            if instance is not None:
                await instance.release(broken=outcome["ended"] == "lost")
        self._judge(outcome, self.report, time.monotonic() - began)

    async def _whole(self, instance: Instance | None) -> Mapping[str, Any]:
        """Run the agent, again if its worker is gone; the outcome of the last attempt."""
        while (outcome := await self._attempt(instance))["ended"] == "gone":
            # Turns of the lost attempt are not trained.
            self.tree, self.report = RecordedTree(), _NOTHING
            self.num_gone += 1
            if self.num_gone == _MOST_GONE:
                return {"ended": "lost", "output": f"{_MOST_GONE} workers that had its task have gone"}
        return outcome

    async def _attempt(self, instance: Instance | None) -> Mapping[str, Any]:
        session = self.session = await self.agents.endpoints.open(self._bounds(), self._sample)
        try:
            return await self._played(session, instance)
        finally:
            # Also when cancelled: the session's keys must not stay valid.
            self.report = await session.end()

    def completion(self, prompt: Prompt) -> Completion:
        """The completion of a group with this prompt."""
        trajectory, first = self.trajectory, self.first_context
        trajectory.has_own_context = first is not None and not np.array_equal(first, prompt.tokens)
        found = trajectory.completion(
            text_of=self.agents.language.text, scored_text=self.agents.bounds.scored_text, reward=self.reward
        )
        assert found.trajectory is not None
        return replace(found, trajectory=replace(found.trajectory, agent=self.record))

    def _bounds(self) -> dict[str, Any]:
        task, bounds = self.task, self.agents.bounds
        own = self.agents.own
        return {
            "max_tokens": task.max_tokens,
            "max_model_length": bounds.longest(task),
            "per_turn_max_tokens": bounds.per_turn_max_tokens,
            # That of a remote agent begins when a worker takes its task.
            "deadline_s": own.limit_s,
            "sampling": task.sampling,
            "task": sendable(task.row) if own.are_remote else None,
            "sets_reward": own.sets_reward,
        }

    async def _played(self, session: Session, instance: Instance | None) -> Mapping[str, Any]:
        """Wait for the agent's end; its outcome.

        Raises:
            EnvironmentLost: its process or its endpoint is gone.
        """
        playing = asyncio.ensure_future(self._play(session, instance))
        try:
            ends: set[asyncio.Future[Any]] = {playing, session.lost, self.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result()
            if not playing.done():
                raise EnvironmentLost(f"the endpoint of agents {session.lost.result()}")
            return playing.result()
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)

    async def _play(self, session: Session, instance: Instance | None) -> Mapping[str, Any]:
        if instance is None:
            return await session.wait()
        own = self.agents.own
        endpoint = {
            "base_url": session.base_url,
            "api_key": session.api_key,
            "reward_key": session.reward_key if own.sets_reward else None,
            "trajectory": self.name,
            "seed": self.task.seed,
        }
        return await instance.run_agent(endpoint, truth=dict(self.task.truth), limit_s=own.limit_s)

    async def _sample(self, wish: Wish) -> None:
        """Sample a turn for the agent, and send it."""
        session, number = self.session, wish["number"]
        assert session is not None
        context = self.tree.ask(number, wish["parent"], wish["added"], wish["rewrites"])
        room = self.agents.bounds.longest(self.task) - len(context)
        ask = Ask(
            prompt=self.task.prompt,
            place=self.task.place,
            sample=self.sample,
            # 0 is a turn that all samples share.
            turn=number + 1,
            tokens=context,
            num_samples=1,
            max_tokens=min(wish["max_tokens"], room),
            stop=tuple(wish["stop"]),
            answer=asyncio.get_running_loop().create_future(),
        )
        try:
            assert room > 0, "the endpoint knows the length of contexts"
            (turn,) = await self.agents.gathering.sample(ask)
            self.tree.sampled(number, turn)
            await session.answer(number, turn)
        except EnvironmentLost:
            return  # Raised by its session as well.
        except Exception as err:
            if not self.failure.done():
                self.failure.set_exception(err)
            await session.refuse(number, f"{type(err).__name__}: {err}")

    def _judge(self, outcome: Mapping[str, Any], report: Mapping[str, Any], seconds: float) -> None:
        """Set the trajectory, its reward and its record."""
        trajectory = self.trajectory = self.tree.trajectory(report)
        # A traceback of a function may hold its arguments.
        output = masked(str(outcome.get("output", "")), self.agents.own.hidden)
        ended = "silent" if outcome["ended"] == "ended" and not trajectory.turns else outcome["ended"]
        said = report.get("reward") if self.agents.own.sets_reward else None
        reward = outcome["reward"] if outcome.get("reward") is not None else said
        has_score = ended == "ended" or (ended == "crashed" and reward is not None and bool(trajectory.turns))
        trajectory.metrics.update(outcome.get("metrics", {}))
        trajectory.metrics.update({f"agent/{name}": value for name, value in report.get("metrics", {}).items()})
        if has_score:
            self.reward = reward
        else:
            trajectory.ended_by = "error"
            why = _last_lines(output)
            self.agents.losses.say(f"agent {ended}", f"{self.name} has no score, because its agent {_HOW[ended]}{why}")
        self.record = AgentRecord(
            ended=ended,
            status=outcome.get("status"),
            output=output,
            seconds=seconds,
            counts=_flat(dict(report["counts"], workers_gone=self.num_gone)),
        )
        if difference := report.get("first_difference"):
            self.agents.losses.say("difference", f"{self.name}: {difference}")


_HOW = {
    "crashed": "has crashed",
    "late": "took too long",
    "silent": "has read no turn of the model",
    "lost": "is lost",
}


def _last_lines(output: str) -> str:
    """The last lines of a text, whole if they are short."""
    text = output.strip()
    if len(text) > _MOST_SAID:
        text = text[-_MOST_SAID:]
        text = text.partition("\n")[2] or text
    return f": {text}" if text else ""


def _flat(counts: Mapping[str, Any]) -> dict[str, float]:
    """Counts under their names, those of several kinds as name/kind."""
    found: dict[str, float] = {}
    for name, value in counts.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{kind}": float(count) for kind, count in value.items()}
        else:
            found[name] = float(value)
    return found

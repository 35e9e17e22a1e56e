"""Trajectories driven by a user program: it requests turns, and its messages become the text between them.

The first turns of all samples of a prompt are one request, as they are with environments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mgrpo.environments.loop.conversation import Chats, Conversation, Step
from mgrpo.environments.loop.episodes import EpisodeBounds, Episodes, Task, together
from mgrpo.environments.loop.gathering import Gathering
from mgrpo.environments.loop.instance import Environments, Instance
from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.loop.trajectory import Sampled, Trajectory
from mgrpo.types import Completion, Prompt, RolloutGroup

_MOST_REFUSALS = 10
"""Most refusals in one trajectory: a program that repeats a request which cannot be met would never end."""


class ContextFull(ValueError):
    """No room for a further token."""


class Driven(Episodes):
    """All trajectories of a run, driven by a program."""

    def __init__(
        self, gathering: Gathering, environments: Environments, language: Chats, bounds: EpisodeBounds
    ) -> None:
        super().__init__(gathering, environments, language, bounds)
        self.chats = language

    async def run(self, task: Task) -> RolloutGroup:
        """Run all trajectories of one prompt. The caller has entered it in the gathering, as one.

        Raises:
            ValueError: the program begins the samples of one prompt with different messages.
        """
        names = [f"{task.name}/{sample}" for sample in range(task.num_samples)]
        drives: list[_Drive] = []
        try:
            try:
                instances = await together(self._acquire(task.row, task.seed, name) for name in names)
                drives += [
                    _Drive(self, task, sample, *each) for sample, each in enumerate(zip(names, instances, strict=True))
                ]
                await together(drive.begin() for drive in drives)
                prompt, limit = self._first(task, [drive for drive in drives if drive.trajectory.ended_by is None])
                ask = self.ask(task, prompt, Trajectory(context=prompt.tokens), 0, task.num_samples)
                first = await self.gathering.sample(replace(ask, max_tokens=min(ask.max_tokens, limit)))
            except BaseException:
                self.gathering.leave()
                raise
            self.gathering.enter(task.num_samples - 1)
            completions = await together(drive.run(prompt, turn) for drive, turn in zip(drives, first, strict=True))
        finally:
            await asyncio.gather(*(drive.release() for drive in drives))
        return RolloutGroup(prompt=prompt, completions=tuple(completions))

    def _first(self, task: Task, asking: Sequence[_Drive]) -> tuple[Prompt, int]:
        """The common beginning of all samples, and the most tokens of their first turn."""
        if not asking:
            # A completion has at least one token; these are not trained on.
            return task.prompt, 1
        if len({(tuple(drive.talk.opening), drive.max_tokens) for drive in asking}) > 1:
            raise ValueError(
                f"the program begins the samples of prompt {task.prompt.id} with different messages, tools or max_tokens, so "
                "their rewards cannot be compared; its first chat must depend on its row and model.seed alone"
            )
        ids, limit = asking[0].talk.opening, asking[0].max_tokens
        if ids == task.prompt.tokens.tolist():
            return task.prompt, limit
        return replace(task.prompt, tokens=np.array(ids, np.int32), text=self.chats.written(ids)), limit


class _Drive:
    """One trajectory under way."""

    def __init__(self, driven: Driven, task: Task, sample: int, name: str, instance: Instance | None) -> None:
        self.driven, self.task, self.sample, self.name, self.instance = driven, task, sample, name, instance
        self.trajectory = Trajectory(context=task.prompt.tokens, has_tools=False)
        self.talk = Conversation(driven.chats, self.trajectory, task.prompt.tokens.tolist())
        self.max_tokens = 0
        """Most tokens of the requested turn."""
        self.reward: float | None = None
        self.shown: Mapping[str, object] = {}
        self.num_refusals = 0
        self.is_full = False
        self.began_at = time.monotonic()

    async def begin(self) -> None:
        """Run the program until its first sampling request."""
        if self.instance is None:
            self.trajectory.ended_by = "error"
            return
        await self._go_on(self.instance, {"begin": self.talk.opening})
        if self.trajectory.ended_by not in (None, "error"):
            self._fail("it has ended without a turn of the model")

    async def run(self, prompt: Prompt, turn: Sampled) -> Completion:
        """Run the trajectory to its end; its first turn has been sampled."""
        trajectory, gathering = self.trajectory, self.driven.gathering
        trajectory.context = prompt.tokens
        try:
            if trajectory.ended_by is not None or self.instance is None:
                trajectory.add_sampled(turn)
            while trajectory.ended_by is None and self.instance is not None:
                await self._go_on(self.instance, self.talk.heard(turn))
                if trajectory.ended_by is None:
                    ask = self.driven.ask(self.task, prompt, trajectory, self.sample, 1)
                    (turn,) = await gathering.sample(replace(ask, max_tokens=min(ask.max_tokens, self.max_tokens)))
        finally:
            gathering.leave()
        return trajectory.completion(
            text_of=self.driven.language.text,
            scored_text=self.driven.bounds.scored_text,
            reward=self.reward,
            snapshot=self.shown,
        )

    async def release(self) -> None:
        """Release the instance; the program must not continue in it."""
        if self.instance is not None:
            await self.instance.release(broken=self.trajectory.ended_by in (None, "error"))

    async def _go_on(self, instance: Instance, answer: Mapping[str, Any]) -> None:
        """Run the program until its next request that can be met, or its end."""
        began, trajectory = time.monotonic(), self.trajectory
        try:
            while True:
                said = await instance.resume(dict(answer))
                if "returned" in said:
                    self.reward, self.shown = said["returned"], said["shown"]
                    trajectory.metrics.update(said["metrics"])
                    was_cut = self.is_full or (trajectory.parts and trajectory.parts[-1].finish_reason != "stop")
                    trajectory.ended_by = "length" if was_cut else "stop"
                    return
                limit = self.driven.bounds.trajectory_timeout_s
                if limit is not None and time.monotonic() - self.began_at > limit:
                    raise EnvironmentLost(f"it took longer than trajectory_timeout={limit:g} s")
                refusal = self._refusal(said["wish"])
                if refusal is None:
                    return
                answer = refusal
        except EnvironmentLost as err:
            self._fail(err)
        finally:
            self._note_seconds(time.monotonic() - began)

    def _refusal(self, wish: Mapping[str, Any]) -> dict[str, str] | None:
        """Append the program's request to the trajectory, or return the refusal to send back."""
        try:
            step = self.talk.step(wish)
            self.max_tokens = self._room_after(step)
        except ContextFull as err:
            self.is_full, refusal = True, {"no_room": str(err)}
        except ValueError as err:
            refusal = {"refused": str(err)}
        else:
            self.talk.take(step)
            return None
        self.num_refusals += 1
        if self.num_refusals > _MOST_REFUSALS:
            (why,) = refusal.values()
            raise EnvironmentLost(f"it has asked {self.num_refusals} times for what it cannot have: {why}")
        return refusal

    def _room_after(self, step: Step) -> int:
        """Most tokens of the next turn."""
        longest = self.driven.bounds.longest(self.task)
        if not self.trajectory.parts:
            whole = f"the first chat has {len(step.ids)} tokens, and the engines take sequences of {longest}"
            room = longest - len(step.ids)
        else:
            room = self._room() - len(step.ids)
            whole = (
                f"{len(step.ids)} tokens follow the model's last turn, and the trajectory has room for {self._room()} with "
                "another turn; raise response_length for longer ones"
            )
        if room < 1:
            raise ContextFull(whole)
        return room if step.max_tokens is None else min(room, step.max_tokens)

    def _room(self) -> int:
        whole = min(self.task.max_tokens, self.driven.bounds.longest(self.task) - len(self.talk.opening))
        return whole - self.trajectory.num_tokens

    def _fail(self, why: object) -> None:
        self.trajectory.ended_by, self.reward = "error", None
        self.driven.losses.say("program", f"{self.name} has no score, because its program has failed: {why}")

    def _note_seconds(self, seconds: float) -> None:
        """Record the program's time for the calls of the last turn, which share it equally."""
        if turns := self.trajectory.turns:
            calls = len(turns[-1].calls)
            turns[-1] = replace(turns[-1], seconds=(seconds / max(calls, 1),) * calls)

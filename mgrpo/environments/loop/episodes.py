"""The loop of a trajectory: sample a turn, let the environment answer its calls, append the text around the answers, repeat.

Pure asyncio: no engine, no tokenizer, no process. Every token that is trained was sampled after exactly the tokens that precede
it in the sample, or in its branch; an answer is appended only if another token may follow it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.loop.gathering import Ask, Gathering
from mgrpo.environments.loop.instance import Ending, Environments, Instance
from mgrpo.environments.loop.losses import AcquireTimeout, EnvironmentLost, Losses, ResetFailed, TrajectoryTimeout
from mgrpo.environments.loop.trajectory import EndedBy, Sampled, ScoredText, Trajectory
from mgrpo.environments.offered.description import ACT
from mgrpo.environments.offered.row_columns import row_settings
from mgrpo.types import Completion, Prompt, RolloutGroup

T = TypeVar("T")


class Said(Protocol):
    """A turn's text, read."""

    @property
    def content(self) -> str:
        """The text without calls and thinking."""

    @property
    def calls(self) -> Sequence[Call]:
        """The calls that can be read, in order."""

    @property
    def unreadable(self) -> Sequence[str]:
        """For each unreadable call, an error text for the model."""


class Language(Protocol):
    """Reader of the model's turns, and writer of the answers to them."""

    def read(self, turn: Sampled, *, calls: bool) -> Said:
        """A turn, read with its calls or as a whole."""

    def after_calls(self, answers: Sequence[tuple[str, str]], turn: Sampled) -> list[int]:
        """Ids between this turn and the next one, for the name and the answer of each call."""

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        """The same where a turn is an action."""

    def afresh(self, answer: str, turn: Sampled, before: np.ndarray) -> np.ndarray | None:
        """The whole context of the next turn, where this one, an action sampled after `before`, is rewritten; else None."""

    def text(self, tokens: Sequence[np.ndarray]) -> list[str]:
        """Each `[len]` as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBounds:
    """The limits of a trajectory."""

    max_model_length: int
    """Tokens that the engines take, prompt included."""
    max_prompt_length: int | None = None
    """Tokens of the longest prompt that packs have room for beside a completion; None: packs hold all that engines take."""
    max_calls: int
    """A row's `env_config` may set another limit, as `max_steps`."""
    max_calling_turns: int | None = None
    per_turn_max_tokens: int | None = None
    trajectory_timeout_s: float | None = None
    """A trajectory that takes longer gets no further turn, and no score."""
    scored_text: ScoredText = "final"

    def longest(self, task: Task) -> int:
        """Most tokens of a context plus its completion. An evaluation's completions may be longer than those of packs."""
        if self.max_prompt_length is None:
            return self.max_model_length
        return min(self.max_model_length, self.max_prompt_length + task.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt for which trajectories begin."""

    prompt: Prompt
    name: str
    """The prompt's name, for tools and messages: unique among those under way."""
    place: int
    """The prompt's number among all that were ever begun."""
    num_samples: int
    max_tokens: int
    """Most tokens after the prompt."""
    row: Mapping[str, Any]
    """The prompt's columns, as environments may see them."""
    seed: int
    """The environments' seed, the same for all samples."""
    opened: Callable[[str], Prompt]
    """The prompt with its environments' opening text."""
    truth: Mapping[str, Any] = field(default_factory=dict)
    """The columns that environments must not see, for a check after the end."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of its turns, by the names of the settings."""


class Episodes:
    """All trajectories of a run. For one event loop."""

    def __init__(
        self,
        gathering: Gathering,
        environments: Environments,
        language: Language,
        bounds: EpisodeBounds,
    ) -> None:
        self.gathering, self.environments, self.language, self.bounds = gathering, environments, language, bounds
        self.losses = Losses()

    async def start(self) -> None:
        """Open the resources that trajectories need besides their environments; ValueError if they cannot be opened."""

    async def close(self) -> None:
        """Close it."""

    async def run(self, task: Task) -> RolloutGroup:
        """Run all trajectories of one prompt. The caller has entered it in the gathering, as one.

        Raises:
            ValueError: the row cannot be read, or the environment shows the samples of one prompt different texts, or one that
                is too long.
        """
        names = [f"{task.name}/{sample}" for sample in range(task.num_samples)]
        instances: list[Instance | None] = []
        try:
            instances = await together(self._acquire(task.row, task.seed, name) for name in names)
            prompt = self._prompt(task, instances)
            trajectory = Trajectory(context=prompt.tokens)
            first = await self.gathering.sample(self.ask(task, prompt, trajectory, 0, task.num_samples))
        except BaseException:
            self.gathering.leave()
            await asyncio.gather(*(instance.release() for instance in instances if instance))
            raise
        self.gathering.enter(task.num_samples - 1)
        episodes = [_Episode(self, task, prompt, sample, instance) for sample, instance in enumerate(instances)]
        completions = await together(episode.run(turn) for episode, turn in zip(episodes, first, strict=True))
        return RolloutGroup(prompt=prompt, completions=tuple(completions))

    async def _acquire(self, row: Mapping[str, Any], seed: int, name: str) -> Instance | None:
        try:
            return await self.environments.acquire(row, seed=seed, trajectory=name)
        except (EnvironmentLost, AcquireTimeout, ResetFailed) as err:
            self.lost(name, err)
            return None

    def lost(self, name: str, err: Exception) -> None:
        """Log that the trajectory has no score."""
        self.losses.say(type(err).__name__, f"{name} has no score: {err}")

    def _prompt(self, task: Task, instances: Sequence[Instance | None]) -> Prompt:
        openings = {instance.opening for instance in instances if instance}
        if len(openings) > 1:
            texts = " and ".join(repr(text[:60]) for text in sorted(openings)[:2])
            raise ValueError(
                f"the environment begins the samples of prompt {task.prompt.id} with different texts ({texts}), whose rewards "
                "cannot be compared; reset must depend on its row and seed alone"
            )
        opening = openings.pop() if openings else ""
        prompt = task.opened(opening) if opening else task.prompt
        longest = self.bounds.longest(task)
        if len(prompt.tokens) >= longest:
            raise ValueError(
                f"with the environment's text prompt {task.prompt.id} has {len(prompt.tokens)} tokens, and there is room for "
                f"sequences of {longest}; raise max_prompt_token_length or shorten the text"
            )
        return prompt

    def ask(self, task: Task, prompt: Prompt, trajectory: Trajectory, sample: int, num_samples: int) -> Ask:
        """The request for a trajectory's next turn."""
        limit = self.room(task, trajectory.num_tokens, trajectory.num_preceding)
        per_turn = self.bounds.per_turn_max_tokens
        return Ask(
            prompt=prompt,
            place=task.place,
            sample=sample,
            turn=len(trajectory.turns),
            tokens=trajectory.preceding,
            num_samples=num_samples,
            max_tokens=limit if per_turn is None else min(limit, per_turn),
            answer=asyncio.get_running_loop().create_future(),
        )

    def room(self, task: Task, num_tokens: int, num_preceding: int) -> int:
        """Tokens that may still follow `num_tokens` of the trajectory, if they are sampled after `num_preceding`."""
        return min(task.max_tokens - num_tokens, self.bounds.longest(task) - num_preceding)


class _Episode:
    """One trajectory under way."""

    def __init__(
        self, all_of_them: Episodes, task: Task, prompt: Prompt, sample: int, instance: Instance | None
    ) -> None:
        self.episodes, self.task, self.prompt, self.sample, self.instance = all_of_them, task, prompt, sample, instance
        self.language, self.bounds = all_of_them.language, all_of_them.bounds
        self.trajectory = Trajectory(context=prompt.tokens, metrics=dict(instance.metrics) if instance else {})
        self.max_calls = row_settings(task.row).max_calls or self.bounds.max_calls
        self.began_at = time.monotonic()

    async def run(self, turn: Sampled) -> Completion:
        """Run the trajectory to its end; its first turn has been sampled."""
        trajectory, gathering = self.trajectory, self.episodes.gathering
        ending = Ending()
        try:
            while True:
                trajectory.add_sampled(turn)
                trajectory.ended_by = await self._answer(turn)
                if trajectory.ended_by is not None:
                    break
                ask = self.episodes.ask(self.task, self.prompt, trajectory, self.sample, 1)
                (turn,) = await gathering.sample(ask)
            if self.instance is not None and trajectory.ended_by != "error":
                ending = await self.instance.ending()
        except EnvironmentLost as err:
            self.episodes.lost(f"{self.task.name}/{self.sample}", err)
            trajectory.ended_by = "error"
        finally:
            gathering.leave()
            if self.instance is not None:
                await self.instance.release()
        return trajectory.completion(
            text_of=self.language.text,
            scored_text=self.bounds.scored_text,
            reward=ending.reward,
            snapshot=ending.snapshot,
        )

    async def _answer(self, turn: Sampled) -> EndedBy | None:
        """Let the environment answer the turn, and append the answer; returns why there is no other turn, or None."""
        if self.instance is None:
            self._say(self.language.read(turn, calls=False))
            return "error"
        if self.instance.acts:
            return await self._answer_act(turn, self.instance)
        return await self._answer_calls(turn, self.instance)

    async def _answer_act(self, turn: Sampled, instance: Instance) -> EndedBy | None:
        trajectory = self.trajectory
        said = self.language.read(turn, calls=False)
        self._say(said)
        room = self.episodes.room(self.task, trajectory.num_tokens, trajectory.num_preceding)
        if turn.finish_reason != "stop" and (self.bounds.per_turn_max_tokens is None or not room):
            return "length"
        (answered,) = await instance.step([Call(name=ACT, arguments={"text": said.content})])
        self._note([Call(name=ACT, arguments={})], [answered])
        text = answered.observation.text
        if answered.observation.done:
            return "done"
        if trajectory.num_calls >= self.max_calls:
            return "max_calls"
        trajectory.messages.append({"role": "user", "content": text})
        before = trajectory.preceding[: trajectory.num_preceding - len(turn.tokens)]
        return self._go_on(self.language.after_act(text, turn), self.language.afresh(text, turn, before))

    async def _answer_calls(self, turn: Sampled, instance: Instance) -> EndedBy | None:
        trajectory, may_call = self.trajectory, self._may_call
        said = self.language.read(turn, calls=True)
        self._say(said)
        wants = bool(said.calls or said.unreadable)
        if turn.finish_reason != "stop":
            return "length"
        if not wants:
            return "stop"
        if not may_call:
            return "max_calls"
        known = [call for call in said.calls if call.name in instance.active]
        allowed = known[: self.max_calls - trajectory.num_calls]
        answers = iter(await instance.step(allowed)) if allowed else iter(())
        results: list[tuple[Call, Answered]] = []
        num_unknown = 0
        for call in said.calls:
            if call.name not in instance.active:
                num_unknown += 1
                results.append(
                    (call, _failed(f"unknown tool {call.name!r}; the tools are: {_listed(instance.active)}"))
                )
            elif len(results) - num_unknown < len(allowed):
                results.append((call, next(answers)))
            else:
                results.append((call, _failed(f"not called: the limit of {self.max_calls} calls is reached")))
        results += [(Call(name="", arguments={}), _failed(text)) for text in said.unreadable]
        self._note([call for call, _ in results], [answered for _, answered in results])
        trajectory.num_calling_turns += 1
        trajectory.turns[-1] = replace(
            trajectory.turns[-1], num_unknown=num_unknown, num_unreadable=len(said.unreadable)
        )
        for call, answered in results:
            name, text = call.name, answered.observation.text
            trajectory.messages.append({"role": "tool", "name": name, "tool_call_id": call.id, "content": text})
        if any(answered.observation.done for _, answered in results):
            return "done"
        return self._go_on(
            self.language.after_calls([(call.name, answered.observation.text) for call, answered in results], turn)
        )

    @property
    def _may_call(self) -> bool:
        """True if the turn may call. After its last call a model has one more turn, for its answer."""
        most = self.bounds.max_calling_turns
        trajectory = self.trajectory
        return trajectory.num_calls < self.max_calls and (most is None or trajectory.num_calling_turns < most)

    def _go_on(self, bridge: Sequence[int], context: np.ndarray | None = None) -> EndedBy | None:
        """Append the answer, if another token may follow it; the next turn is sampled after `context`, if that is given."""
        trajectory = self.trajectory
        limit = self.bounds.trajectory_timeout_s
        if limit is not None and time.monotonic() - self.began_at > limit:
            raise TrajectoryTimeout(f"it took longer than trajectory_timeout={limit:g} s")
        num_preceding = trajectory.num_preceding + len(bridge) if context is None else len(context)
        if self.episodes.room(self.task, trajectory.num_tokens + len(bridge), num_preceding) < 1:
            return "length"
        trajectory.add_bridge(bridge)
        if context is not None:
            trajectory.begin_branch(context)
        return None

    def _say(self, said: Said) -> None:
        self.trajectory.last_content = said.content
        self.trajectory.is_calling = bool(said.calls or said.unreadable)
        message: dict[str, object] = {"role": "assistant", "content": said.content}
        if said.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in said.calls
            ]
        self.trajectory.messages.append(message)

    def _note(self, calls: Sequence[Call], answers: Sequence[Answered]) -> None:
        """Record the calls of the last turn in it; every one counts, also those that could not be made."""
        trajectory = self.trajectory
        trajectory.num_calls += len(calls)
        names = {ACT} if self.instance is None or self.instance.acts else self.instance.active
        observations = [answered.observation for answered in answers]
        for observation in observations:
            trajectory.metrics.update(observation.metrics)
        trajectory.turns[-1] = replace(
            trajectory.turns[-1],
            calls=tuple(call.name if call.name in names else "" for call in calls),
            failed=tuple(observation.failed for observation in observations),
            seconds=tuple(answered.seconds for answered in answers),
            reward=sum(observation.reward for observation in observations),
        )


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; at the first error the others are cancelled, and have ended before it is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _failed(text: str) -> Answered:
    return Answered(observation=Observation(text=text, failed=True), seconds=0.0)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"

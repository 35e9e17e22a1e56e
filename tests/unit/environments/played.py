"""Trajectories for the tests of their loop: a scripted engine, environments, and what holds for every completion."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.loop.episodes import EpisodeBounds, Episodes, Task
from mgrpo.environments.loop.gathering import Ask, Gathering
from mgrpo.environments.loop.instance import Ending
from mgrpo.environments.loop.losses import AcquireTimeout, EnvironmentLost
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.types import Completion, Prompt, RolloutGroup
from tests.builders import branch, prompt

END, CALL, UNKNOWN, UNREADABLE, BETWEEN = 1, 2, 3, 4, 9
BOUNDS = EpisodeBounds(max_model_length=1000, max_calls=5)


@dataclass(frozen=True)
class Said:
    content: str
    calls: Sequence[Call]
    unreadable: Sequence[str]


class Digits:
    """A language in which some ids are calls; an answer is as many ids as it has characters, between two others."""

    def read(self, turn: Sampled, *, calls: bool) -> Said:
        ids = turn.tokens.tolist()
        found = [
            Call(name={CALL: "add", UNKNOWN: "sub"}[i], arguments={}) for i in ids if calls and i in (CALL, UNKNOWN)
        ]
        content = "".join(str(i) for i in ids if i not in (END, CALL, UNKNOWN, UNREADABLE))
        return Said(content, found, ["not readable"] * (ids.count(UNREADABLE) if calls else 0))

    def after_calls(self, answers: Sequence[tuple[str, str]], turn: Sampled) -> list[int]:
        return [BETWEEN, *itertools.chain.from_iterable([8] * len(text) for _, text in answers), BETWEEN]

    def after_act(self, answer: str, turn: Sampled) -> list[int]:
        return [BETWEEN, *[8] * len(answer)]

    def afresh(self, answer: str, turn: Sampled, before: np.ndarray) -> np.ndarray | None:
        return None

    def text(self, tokens: Sequence[np.ndarray]) -> list[str]:
        return ["".join(map(str, ids.tolist())) for ids in tokens]


THOUGHT = 7


class Forgetful(Digits):
    """Leaves thoughts out of turns that were answered."""

    def afresh(self, answer: str, turn: Sampled, before: np.ndarray) -> np.ndarray | None:
        if THOUGHT not in turn.tokens:
            return None
        said = turn.tokens[turn.tokens != THOUGHT]
        return np.concatenate([before, said, self.after_act(answer, turn)]).astype(np.int32)


class Scripted:
    """Answers asks with turns from a list, or with turns that depend on nothing but the tokens before them."""

    def __init__(self, *turns: Sequence[int], version: int = 0, end: int = END) -> None:
        self.turns, self.version, self.end = list(turns), version, end
        self.asks: list[Ask] = []
        self.batches: list[list[tuple[int, int, int]]] = []

    def send(self, asks: Sequence[Ask]) -> None:
        self.batches.append([(ask.place, ask.sample, ask.turn) for ask in asks])
        for ask in asks:
            self.asks.append(ask)
            asyncio.get_running_loop().call_soon(
                ask.answer.set_result, [self._turn(ask, i) for i in range(ask.num_samples)]
            )

    def _turn(self, ask: Ask, sample: int) -> Sampled:
        assert ask.max_tokens >= 1
        if self.turns:
            tokens = list(self.turns.pop(0))
        else:
            rng = random.Random(f"{ask.tokens.tolist()} {ask.sample + sample}")
            tokens = [rng.choice((CALL, UNKNOWN, UNREADABLE, 5, 6, 7)) for _ in range(rng.randint(0, 6))] + [END]
        tokens = tokens[: ask.max_tokens]
        return Sampled(
            tokens=np.array(tokens, np.int32),
            logprobs=np.arange(-len(tokens), 0, dtype=np.float32),
            policy_versions=np.full(len(tokens), self.version, np.int32),
            finish_reason="stop" if tokens[-1] == self.end else "length",
        )


@dataclass
class Adder:
    """An instance that answers from a list, or with "ok"."""

    answers: list[Observation] = field(default_factory=list)
    opening: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    acts: bool = False
    active: frozenset[str] = frozenset({"add"})
    delay_s: float = 0.0
    lost: bool = False
    reward: float | None = None
    asked: list[list[str]] = field(default_factory=list)
    num_released: int = 0

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        self.asked.append([str(call.arguments.get("text", call.name)) for call in calls])
        await asyncio.sleep(self.delay_s)
        if self.lost:
            raise EnvironmentLost("its worker has ended")
        found = [self.answers.pop(0) if self.answers else Observation(text="ok") for _ in calls]
        return [Answered(observation=observation, seconds=0.5) for observation in found]

    async def ending(self) -> Ending:
        return Ending(reward=self.reward, snapshot={"calls": len(self.asked)})

    async def release(self, broken: bool = False) -> None:
        self.num_released += 1


class Shelf:
    """Gives out these instances in order; None: there is none."""

    def __init__(self, *instances: Adder | None) -> None:
        self.instances = list(instances)
        self.asked: list[tuple[Mapping[str, object], int, str]] = []

    async def acquire(self, row: Mapping[str, object], *, seed: int, trajectory: str) -> Adder:
        self.asked.append((row, seed, trajectory))
        instance = self.instances.pop(0)
        if instance is None:
            raise AcquireTimeout("none became free")
        return instance


def opened(asked: Prompt, text: str) -> Prompt:
    return replace(asked, tokens=np.append(asked.tokens, [7] * len(text)).astype(np.int32))


def play(
    engine: Scripted,
    *instances: Adder | None,
    bounds: EpisodeBounds = BOUNDS,
    asked: Prompt | None = None,
    max_tokens: int = 100,
    in_rounds: bool = True,
    language: Digits | None = None,
) -> RolloutGroup:
    """One group, with a sample for each instance."""

    async def run() -> RolloutGroup:
        gathering = Gathering(engine.send, lambda ask: None, in_rounds=in_rounds)
        episodes = Episodes(gathering, Shelf(*instances), language or Digits(), bounds)
        gathering.enter(1)
        task = Task(
            prompt=asked or prompt([10, 11], id=(0, 3)),
            name="0/3",
            place=0,
            num_samples=len(instances),
            max_tokens=max_tokens,
            row=(asked or prompt([10, 11], id=(0, 3))).columns,
            seed=5,
            opened=partial(opened, asked or prompt([10, 11], id=(0, 3))),
        )
        group = await asyncio.wait_for(episodes.run(task), 10)
        assert gathering.alive == 0
        return group

    return asyncio.run(run())


def one(engine: Scripted, instance: Adder | None = None, **settings) -> Completion:
    return play(engine, instance or Adder(), **settings).completions[0]


def check(found: Completion, *, prompt_length: int, bounds: EpisodeBounds, max_tokens: int) -> None:
    """What holds for every trajectory."""
    record = found.trajectory
    assert record is not None
    length = len(found.tokens)
    assert length == len(found.logprobs) == len(found.policy_versions) == len(found.loss_mask) <= max_tokens
    parts = record.branches or [branch(0, length, range(prompt_length))]
    assert all(len(part.prompt_tokens) + part.end - part.start <= bounds.max_model_length for part in parts)
    assert (parts[0].start, parts[-1].end) == (0, length)
    held = [turn for part in parts for turn in record.turns if part.start <= turn.start and turn.end <= part.end]
    assert held == list(record.turns)
    assert found.loss_mask[-1], "it ends in a token that was not sampled"
    assert sum(turn.end - turn.start for turn in record.turns) == found.loss_mask.sum()
    assert not found.logprobs[~found.loss_mask].any() and (found.policy_versions[~found.loss_mask] == -1).all()
    assert all(found.loss_mask[turn.start : turn.end].all() for turn in record.turns)
    assert found.finish_reason == ("stop" if record.ended_by == "done" else record.ended_by)

"""A producer and an evaluator with scripted engines and rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgrpo.config import Config
from mgrpo.data.sampler import Sampler
from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.teachers import Teachers
from mgrpo.run.produce.evaluator import Evaluator
from mgrpo.run.produce.lessons import Lessons
from mgrpo.run.produce.producer import Producer
from mgrpo.run.produce.saved_rollouts import PromptOf
from mgrpo.run.records import Rollouts
from mgrpo.types import Prompt, PromptId, RewardContext, RewardScale, RolloutGroup, Score, ScoredBatch, ScoredGroup
from tests import builders
from tests.scripted_engine import ScriptedEngine


class ScriptedRewarder:
    """Every group gets `rewards(index of its prompt)`; remembers the contexts."""

    weights: dict[str, float] = {}  # noqa: RUF012
    functions: tuple[str, ...] = ()
    scale = RewardScale(max_possible_score=1.0, verification_reward=1.0, format_reward=0.0)

    def __init__(self, rewards: Callable[[int], Sequence[float]]) -> None:
        self.rewards = rewards
        self.contexts: list[RewardContext] = []

    def score(self, groups: Sequence[RolloutGroup], context: RewardContext) -> ScoredBatch:
        self.contexts.append(context)
        scored = [
            ScoredGroup(group=group, scores=tuple(Score(reward=reward) for reward in self.rewards(group.prompt.id[1])))
            for group in groups
        ]
        return ScoredBatch(groups=scored, logged={"calls": [float(len(self.contexts))]})

    def metrics(self) -> dict[str, float]:
        return {"judge/requests": 2.0}


def prompt_of(prompt_id: PromptId, opening: str = "") -> Prompt:
    return builders.prompt(id=prompt_id, verifiers=["integer"], opening=opening)


def config(**settings) -> Config:
    """Four prompts per step, two samples each."""
    return from_values(
        {
            "num_unique_prompts_rollout": 4,
            "num_samples_per_prompt_rollout": 2,
            "verification_reward": 1.0,
            "total_episodes": 800,
        }
        | settings
    )


def dispatcher(own: Config, engine: ScriptedEngine | None = None) -> Dispatcher:
    fleet = Fleet(Roster([engine or ScriptedEngine()], own.engine), seed=own.experiment.seed)
    return Dispatcher(
        fleet, own.rollout, run_seed=own.experiment.seed, decode=lambda tokens: ["" for _ in tokens], stop_token_ids=()
    )


def producer(
    rewards: Callable[[int], Sequence[float]] = lambda index: (0.0, 1.0),
    *,
    engine: ScriptedEngine | None = None,
    prompt: PromptOf = prompt_of,
    lessons: Lessons | None = None,
    teachers: Teachers | None = None,
    **settings,
) -> Producer:
    """Of 20 prompts in the order of their numbers."""
    own = config(**settings)
    return Producer(
        own,
        Sampler(20, own.experiment.seed, shuffle=False),
        prompt=prompt,
        dispatcher=dispatcher(own, engine),
        rewarder=ScriptedRewarder(rewards),
        lessons=lessons,
        teachers=teachers,
    )


def collect(own: Producer, *, prepare: bool = False) -> Rollouts:
    """The groups of the next step, which are handed over."""
    rollouts = own.dispatcher.wait(own.take())
    own.hand_over(prepare=prepare)
    return rollouts


def evaluator(**settings) -> Evaluator:
    """Of three held-out prompts."""
    own = config(**settings)
    return Evaluator(
        own,
        [prompt_of((0, index)) for index in range(3)],
        sources=["a", "a", "b"],
        dispatcher=dispatcher(own),
        rewarder=ScriptedRewarder(lambda index: (1.0,)),
    )

"""Prompts, completions and their scores: from data through rollout and rewards to the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mgrpo.types.per_token import KeptTokens, Routes, TeacherScores

PromptId = tuple[int, int]
"""(epoch, index of the row in the dataset): unique within a run and stable across restarts."""


class Criterion(NamedTuple):
    """One criterion of a rubric."""

    description: str
    weight: float
    """Its share; below 0 for a fault."""
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One dataset row, ready to be sampled from."""

    id: PromptId
    tokens: np.ndarray
    """`[len]` int32, the templated prompt."""
    text: str
    """The prompt as passed to the tokenizer."""
    verifiers: tuple[str, ...]
    """Names of the verifiers that score its completions."""
    ground_truths: tuple[object, ...]
    """One JSON value per verifier."""
    opening: str = ""
    """The text that an environment has added to the user's last message."""
    query: str = ""
    """The prompt without its template, for judges: "role: content" lines, or the text itself."""
    source: str | tuple[dict[str, str], ...] = ""
    """The row's own `prompt`, for reward functions: text, or messages."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """The row's other columns, for reward functions."""
    teacher: int = -1
    """Index of its teacher in `Distillation.teachers`; -1: no teacher."""
    criteria: tuple[Criterion, ...] | None = None
    """The criteria that have evolved so far, besides those of its rubric; None: no evolving rubric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a trajectory: a run of sampled tokens, and the calls and reward that followed."""

    start: int
    end: int
    """Its tokens in the completion, end excluded."""
    calls: tuple[str, ...] = ()
    """Names of the tools that were called, in order; "" for a call that cannot be parsed or names no tool."""
    failed: tuple[bool, ...] = ()
    """True for each call that failed."""
    seconds: tuple[float, ...] = ()
    """Seconds that each call took."""
    num_unreadable: int = 0
    """Calls that were begun and could not be parsed."""
    num_unknown: int = 0
    """Calls of tools that do not exist."""
    reward: float = 0.0
    """Reward of the step that it led to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Turns of a trajectory that were sampled from another context than all that precedes them."""

    prompt_tokens: np.ndarray
    """`[prompt]` int32, that context."""
    start: int
    end: int
    """Its tokens in the completion, end excluded."""
    parent: int = -1
    after: int = -1
    """The branch that it goes on from, and the turn of the trajectory; -1: none, its context was written afresh."""
    messages: tuple[Mapping[str, object], ...] = ()
    """Its own messages, after those of its parent; of the first branch without those of the prompt, if it follows the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """End of a trajectory's agent ("ended", "crashed", "late", "silent" or "lost"), and the last part of its `output`."""

    ended: str
    status: int | None
    output: str
    seconds: float
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    """The record of a completion of several turns, besides its tokens."""

    is_sampled: np.ndarray
    """`[len]` bool. Other tokens have logprob 0 and policy version -1, and are inputs only."""
    turns: tuple[Turn, ...]
    messages: tuple[Mapping[str, object], ...]
    """The messages after the prompt, as a chat: roles assistant (with `tool_calls`), tool and user."""
    ended_by: str
    """"stop", "length", "max_calls", "done" or "error"."""
    scored_text: str
    """The text for verifiers, by the setting of this name."""
    sampled_text: str
    """Every turn as it was sampled, with thinking and calls; between two a line break."""
    reward: float | None = None
    """The environment's reward of the whole trajectory; None: it gives none."""
    has_tools: bool = True
    """True if the model could call tools."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`{environment}/{metric}`."""
    snapshot: Mapping[str, object] = field(default_factory=dict)
    """Attributes of the environment that JSON can hold, for reward functions."""
    branches: tuple[Branch, ...] = ()
    """In order, each turn in one of them; tokens between two branches are in none. Empty: every turn follows all before it."""
    agent: AgentRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion; token ids are those the engine sampled, never re-tokenised; a sampled stop token is kept."""

    tokens: np.ndarray
    """`[len]` int32."""
    logprobs: np.ndarray
    """`[len]` float32, log-probability at sampling time under temperature-scaled logits."""
    policy_versions: np.ndarray
    """`[len]` int32, version of the weights that sampled each token."""
    finish_reason: str
    """"stop" or "length", as the engine reports it."""
    text: str
    """Decoded once, without special tokens."""
    trajectory: TrajectoryRecord | None = None
    """None: one turn, all of whose tokens were sampled."""
    kept: KeptTokens | None = None
    """The set that each token was sampled from, over which its logprob is normalised. None: the whole vocabulary."""
    taught: TeacherScores | None = None
    """Teacher log-probabilities; None: no teacher, or not queried yet."""
    routes: tuple[Routes, ...] = ()
    """For each branch, or for the whole completion: the experts of the context's tokens and its own, except the last. Empty: unknown."""

    @property
    def loss_mask(self) -> np.ndarray:
        """`[len]` bool: the tokens that were sampled; the others stand between turns."""
        return np.ones(len(self.tokens), np.bool_) if self.trajectory is None else self.trajectory.is_sampled

    @property
    def num_sampled(self) -> int:
        """The number of tokens that were sampled."""
        return len(self.tokens) if self.trajectory is None else int(np.count_nonzero(self.trajectory.is_sampled))

    @property
    def scored_text(self) -> str:
        """The text for verifiers and reward functions."""
        return self.text if self.trajectory is None else self.trajectory.scored_text

    @property
    def sampled_text(self) -> str:
        """The text that the model wrote, without the answers to it."""
        return self.text if self.trajectory is None else self.trajectory.sampled_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt, in sample order."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one completion."""

    reward: float
    """Final scalar; NaN means no score could be given, and the sample leaves the group's statistics."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named ingredients for metrics, for example {"integer": 1.0, "format": 0.0}."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """Records of reward functions about it, for the tables of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Teacher prompt of a completion or branch."""

    prompt: np.ndarray | None
    """`[len]` int32, the policy's own array where both read the same. None: the teacher is not queried."""
    untaught: str = ""
    """Reason for no teacher prompt: no_answer, no_feedback, no_column, too_long or branch; "": nothing was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRubric:
    """The rubric that a group was scored by, with the verdict on each completion by each criterion."""

    question: str
    criteria: tuple[Criterion, ...]
    """The persistent ones, which are the row's, then the active ones, then the new ones."""
    num_persistent: int
    num_new: int | None
    """New ones, proposed by a judge for the group; None: its reply failed or could not be parsed."""
    verdicts: tuple[tuple[float, ...], ...] = ()
    """For each completion and criterion from 0 to 1, NaN without a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A rollout group with one score per completion: input of filters, advantages and metrics."""

    group: RolloutGroup
    scores: tuple[Score, ...]
    lessons: tuple[tuple[Lesson, ...], ...] = ()
    """For each completion one per branch, or one. Empty: the prompt has no teacher."""
    rubric: JudgedRubric | None = None
    """The rubric behind the scores, where it evolves."""

    @property
    def rewards(self) -> np.ndarray:
        """`[group]` float64."""
        return np.array([score.reward for score in self.scores], dtype=np.float64)

    @property
    def is_taught(self) -> bool:
        return any(lesson.prompt is not None for lessons in self.lessons for lesson in lessons)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """The occasion of scoring a batch of completions: a training step or an evaluation."""

    step: int
    """Training steps done before the completions were sampled."""
    seed: int
    """Seeds the random numbers of the reward functions, at least 0: equal seeds give equal numbers."""
    max_tokens: int
    """Tokens that a completion may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """The result of scoring one batch of completions."""

    groups: list[ScoredGroup]
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Values that reward functions logged, by name: one mean for each call, so that batches are merged by joining the lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScale:
    """The scale of rewards from verifiers and format; a user's own functions have no such scale."""

    max_possible_score: float
    """Highest reward of a completion with one verifier."""
    verification_reward: float
    """Reward for the full score of one verifier; 0 when verifiers are off."""
    format_reward: float
    """Reward for the format, as configured, also when it is off."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of a verifier whose weight is not 1."""

    def highest(self, group: ScoredGroup) -> float:
        """Highest reward of this prompt's completions: each verifier earns its weight's share."""
        verifiers = group.group.prompt.verifiers
        weight = sum(self.weights.get(name.lower(), 1.0) for name in verifiers) if verifiers else 1.0
        return self.max_possible_score + self.verification_reward * (weight - 1)

    def shares(self, group: ScoredGroup) -> np.ndarray:
        """`[group]`: rewards divided by the highest one; NaN without a score, or where the highest is not above 0.

        The penalty for length is left out: it rises smoothly, and would leave almost every long answer unsolved.
        """
        penalties = np.array([score.parts.get("overlong", 0.0) for score in group.scores])
        highest = self.highest(group)
        return (group.rewards - penalties) / (highest if highest > 0 else np.nan)

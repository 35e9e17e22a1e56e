"""One trajectory as it grows: sampled turns, and between them the environment's answers with the text around them.

It is one list of token ids from the first turn to the last; no part of it is ever rendered or tokenised again. A turn that
is sampled after another context than the prompt and this list begins a branch. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from mgrpo.types import Branch, Completion, KeptTokens, Routes, TrajectoryRecord, Turn, lengthened

ScoredText = Literal["final", "assistant", "all"]
EndedBy = Literal["stop", "done", "length", "max_calls", "error"]
BETWEEN = -1
"""Policy version of tokens that were not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One turn, as an engine sampled it; or a bridge."""

    tokens: np.ndarray
    """`[len]` int32."""
    logprobs: np.ndarray
    """`[len]` float32."""
    policy_versions: np.ndarray
    """`[len]` int32."""
    finish_reason: str
    """"stop": by itself, or at a stop string."""
    kept: KeptTokens | None = None
    """One entry for each token, see `Completion.kept`."""
    routes: Routes | None = None
    """Routes of its context and of its tokens except the last, see `Completion.routes`."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """Everything after one prompt."""

    context: np.ndarray
    """`[len]` int32: the context of the present branch, at first the prompt."""
    start: int = 0
    """The place in the list where the present branch begins."""
    branches: list[Branch] = field(default_factory=list)
    """Branches that have ended."""
    routes: list[Routes | None] = field(default_factory=list)
    """Routes of the branches that have ended."""
    routed: Routes | None = None
    """Routes of the present branch; for each token those of the turn that read it first, which sampled the tokens after it."""
    parent: int = -1
    after: int = -1
    """Position of the present branch, see `Branch`."""
    branch_messages: tuple[Mapping[str, object], ...] = ()
    """Messages of the present branch, see `Branch`."""
    num_opening: int = 0
    """Messages of the first branch within its first context."""
    has_own_context: bool = False
    """True if the first branch's context may differ from the prompt: it is then recorded even if it is the only one."""
    parts: list[Sampled] = field(default_factory=list)
    """Turns and bridges by turns; a bridge has the finish reason ""."""
    turns: list[Turn] = field(default_factory=list)
    messages: list[Mapping[str, object]] = field(default_factory=list)
    num_tokens: int = 0
    num_calls: int = 0
    num_calling_turns: int = 0
    ended_by: EndedBy | None = None
    last_content: str = ""
    """The last turn without its calls and thinking."""
    is_calling: bool = False
    """True if the last turn calls a tool, or tries to."""
    has_tools: bool = True
    """True if the model could call tools."""
    metrics: dict[str, float] = field(default_factory=dict)

    def add_sampled(self, sampled: Sampled) -> None:
        """Append a turn that the model has sampled."""
        if sampled.routes is not None:
            num_read = self.num_preceding + len(sampled.tokens) - 1
            assert len(sampled.routes) == num_read, f"routes of {len(sampled.routes)} tokens, the turn read {num_read}"
            known = sampled.routes[:0] if self.routed is None else self.routed
            self.routed = np.concatenate([known, sampled.routes[len(known) :]])
        self._add(sampled)
        self.turns.append(Turn(start=self.num_tokens - len(sampled.tokens), end=self.num_tokens))

    def add_bridge(self, tokens: Sequence[int]) -> None:
        """Append the tokens between the last turn and the next one."""
        length = len(tokens)
        self._add(
            Sampled(
                tokens=np.array(tokens, np.int32),
                logprobs=np.zeros(length, np.float32),
                policy_versions=np.full(length, BETWEEN, np.int32),
                finish_reason="",
            )
        )

    def _add(self, part: Sampled) -> None:
        self.parts.append(part)
        self.num_tokens += len(part.tokens)

    @property
    def tokens(self) -> np.ndarray:
        """`[len]` int32."""
        return np.concatenate([self.context[:0], *(part.tokens for part in self.parts)])

    @property
    def sampled(self) -> list[np.ndarray]:
        """The tokens of each turn."""
        return [part.tokens for part in self.parts if part.finish_reason]

    def begin_branch(
        self,
        context: np.ndarray,
        *,
        parent: int | None = None,
        after: int | None = None,
        messages: Sequence[Mapping[str, object]] = (),
    ) -> None:
        """Begin a branch: the next turn is sampled after this context, `[len]` int32, alone.

        Args:
            parent, after, messages: see `Branch`; None: the present branch, and its last turn.
        """
        if self.turns:
            self.branches.append(self._branch())
            self.routes.append(self.routed)
        self.routed = None
        self.parent = len(self.branches) - 1 if parent is None else parent
        self.after = len(self.turns) - 1 if after is None else after
        self.context, self.start, self.branch_messages = context, self.num_tokens, tuple(messages)

    def _branch(self) -> Branch:
        return Branch(
            prompt_tokens=self.context,
            start=self.start,
            end=self.turns[-1].end,
            parent=self.parent,
            after=self.after,
            messages=self.branch_messages,
        )

    @property
    def num_preceding(self) -> int:
        """Tokens before the next turn."""
        return len(self.context) + self.num_tokens - self.start

    @property
    def preceding(self) -> np.ndarray:
        """The tokens before the next turn, `[num_preceding]` int32."""
        return np.concatenate([self.context, self.tokens[self.start :]])

    def completion(
        self,
        *,
        text_of: Callable[[Sequence[np.ndarray]], list[str]],
        scored_text: ScoredText,
        reward: float | None = None,
        snapshot: Mapping[str, object] | None = None,
    ) -> Completion:
        """The completion, once the trajectory has ended.

        Args:
            text_of: each array of tokens as text.
            scored_text: the text to score: the last turn, if the trajectory ended with an answer; all sampled; or all.
            reward: see `TrajectoryRecord`.
        """
        assert self.ended_by is not None, "a trajectory that goes on"
        assert not self.parts or self.parts[-1].finish_reason, "a trajectory ends with a turn"
        text, *turns = text_of([self.tokens, *self.sampled])
        scored = {"final": self._answer(), "assistant": self._said(), "all": text}[scored_text]
        return Completion(
            tokens=self.tokens,
            logprobs=_joined([part.logprobs for part in self.parts], np.float32),
            policy_versions=_joined([part.policy_versions for part in self.parts], np.int32),
            finish_reason="stop" if self.ended_by == "done" else self.ended_by,
            text=text,
            kept=self._kept(),
            routes=self._routes(),
            trajectory=TrajectoryRecord(
                is_sampled=_joined([np.full(len(p.tokens), bool(p.finish_reason)) for p in self.parts], np.bool_),
                turns=tuple(self.turns),
                messages=tuple(self.messages),
                ended_by=self.ended_by,
                scored_text=scored,
                sampled_text="\n".join(turns),
                reward=reward,
                has_tools=self.has_tools,
                metrics=self.metrics,
                snapshot=snapshot or {},
                branches=self._branches(),
            ),
        )

    def _branches(self) -> tuple[Branch, ...]:
        if not self.branches and not (self.has_own_context and self.turns):
            return ()
        first, *others = *self.branches, self._branch()
        if not self.has_own_context:
            first = replace(first, messages=first.messages[self.num_opening :])
        return (first, *others)

    def _routes(self) -> tuple[Routes, ...]:
        """Routes of all branches, or of the only one."""
        found = [*self.routes, self.routed]
        known = next((routes for routes in found if routes is not None), None)
        if known is None or not self.turns:
            return ()
        branches = [*self.branches, self._branch()]
        lengths = [len(branch.prompt_tokens) + branch.end - branch.start - 1 for branch in branches]
        return tuple(
            lengthened(known[:0] if routes is None else routes, length)
            for routes, length in zip(found, lengths, strict=True)
        )

    def _kept(self) -> KeptTokens | None:
        """The kept sets of all tokens: those between turns have none."""
        if all(part.kept is None for part in self.parts):
            return None
        return KeptTokens.joined([part.kept or KeptTokens.none(len(part.tokens)) for part in self.parts])

    def _answer(self) -> str:
        """The last turn's text if the trajectory ended with an answer; else ""."""
        is_answer = self.ended_by in ("stop", "done") or (self.ended_by == "length" and not self.is_calling)
        return self.last_content if is_answer else ""

    def _said(self) -> str:
        return "\n".join(str(message["content"]) for message in self.messages if message["role"] == "assistant")


def _joined(parts: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """Arrays end to end, possibly none."""
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

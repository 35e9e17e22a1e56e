"""A trajectory's own environment, which lives in a worker process, and what it answers."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgrpo.environments.environment import Call, Observation
from mgrpo.environments.offered.functions import failure
from mgrpo.environments.workers.errors import EnvironmentLost, Frozen
from mgrpo.environments.workers.limits import WorkerLimits
from mgrpo.environments.workers.plain import is_plain
from mgrpo.processes.json_lines import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of one call."""

    observation: Observation
    seconds: float
    """How long it took; calls of one turn that the same environment answers share the time equally."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What an environment says of a trajectory that is over."""

    reward: float | None = None
    """Of the whole trajectory; None: it leaves that to others."""
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    """Its public attributes that JSON can hold."""


class Instance:
    """An environment while it serves one trajectory. Always `release` it."""

    opening: str
    """Text for the prompt's last user message; "": nothing."""
    metrics: Mapping[str, float]
    """Of the beginning."""
    active: frozenset[str]
    """Names that this trajectory may call."""
    acts: bool
    """Whether a turn as a whole is one action: the call "act" with the argument "text"."""

    def __init__(
        self,
        opened: Message,
        limits: WorkerLimits,
        *,
        ask: Callable[[Message, float], Awaitable[Message]],
        give_back: Callable[..., None],
    ) -> None:
        """Made by the pool, from what the worker answered to its reset; `give_back` is told whether it is broken."""
        self.opening, self.metrics, self.acts = opened["opening"], opened["metrics"], opened["acts"]
        self.active = frozenset(opened["active"])
        self._tells = opened["tells"]
        self._limits, self._ask, self._give_back = limits, ask, give_back
        self._is_released = False
        self._is_asked = False
        self._has_timed_out = False
        self._is_stuck = False

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        """Answers to all calls of one turn, in their order.

        A call that fails, or takes longer than its limit, has a failed observation, which tells the model why. When a call
        hangs and cannot be ended, those after it fail as well.

        Raises:
            EnvironmentLost: the worker process ended, not through a call of this trajectory.
        """
        can_be_sent = [is_plain(call.arguments) for call in calls]
        sent = list(itertools.compress(calls, can_be_sent))
        answers = iter(await self._answered(sent) if sent else ())
        refusal = failure(ValueError("the arguments are nested too deeply, or are no JSON"))
        return [next(answers) if can else Answered(observation=refusal, seconds=0.0) for can in can_be_sent]

    async def _answered(self, calls: Sequence[Call]) -> list[Answered]:
        began = time.monotonic()
        question = {"ask": "step", "calls": [dataclasses.asdict(call) for call in calls]}
        try:
            answer = await self._answer(question, self._limits.tool_timeout_s * len(calls))
        except Frozen as err:
            self._has_timed_out = self._is_stuck = True
            return _all_failed(calls, str(err), (time.monotonic() - began) / len(calls), timed_out=True)
        except EnvironmentLost:
            if not self._is_stuck:
                raise
            return _all_failed(calls, "tools are not available after a call that did not end", 0.0)
        answered = [
            Answered(observation=Observation(**observation), seconds=seconds, timed_out=timed_out)
            for observation, seconds, timed_out in answer["answers"]
        ]
        self._has_timed_out |= any(each.timed_out for each in answered)
        return answered

    async def resume(self, answer: Message) -> Message:
        """Have the trajectory's program go on: what it wants next, or has returned, see `Program.resume`.

        Raises:
            EnvironmentLost: it has failed, or was late.
        """
        return await self._answer({"ask": "resume", "answer": answer}, self._limits.tool_timeout_s)

    async def ending(self) -> Ending:
        """The reward and the state at the end; to be asked once, after the last step.

        Raises:
            EnvironmentLost: there is no answer, although there would have been a reward or a state.
        """
        if not self._tells:
            return Ending()
        answer = await self._answer({"ask": "ending"}, self._limits.reset_timeout_s)
        return Ending(reward=answer["reward"], snapshot=answer["snapshot"])

    async def release(self, broken: bool = False) -> None:
        """Give it back; never raises, and may be called twice.

        Args:
            broken: it must not serve another trajectory.
        """
        if not self._is_released:
            self._is_released = True
            self._give_back(broken=broken or self._is_asked or self._has_timed_out)

    async def _answer(self, question: Message, limit_s: float) -> Message:
        if self._is_asked or self._is_released:
            raise EnvironmentLost("it was asked before, and the answer was not waited for")
        # It stays so if the caller is cancelled.
        self._is_asked = True
        try:
            answer = await self._ask(question, limit_s)
        except EnvironmentLost:
            self._is_asked = False
            raise
        self._is_asked = False
        self._is_stuck = answer["is_stuck"]
        if "error" in answer:
            self._has_timed_out |= answer["timed_out"]
            raise EnvironmentLost(answer["error"])
        return answer


def _all_failed(calls: Sequence[Call], text: str, seconds: float, *, timed_out: bool = False) -> list[Answered]:
    err: Exception = TimeoutError(text) if timed_out else RuntimeError(text)
    answered = Answered(observation=failure(err), seconds=seconds, timed_out=timed_out)
    return [answered] * len(calls)

"""A trajectory's own environment in a worker process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Answered, Call, Observation
from mgrpo.environments.loop.instance import Ending
from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.offered.agent import ENDING_S
from mgrpo.environments.offered.calling import WorkerLimits
from mgrpo.environments.offered.functions import failure
from mgrpo.environments.offered.row_columns import is_plain, sendable
from mgrpo.environments.workers.host import Host
from mgrpo.environments.workers.link import Frozen
from mgrpo.processes.json_lines import Message


class WorkerInstance:
    """Implements `environments.loop.instance.Instance`. Made by the pool, in a place that is reserved for the trajectory."""

    opening: str
    metrics: Mapping[str, float]
    active: frozenset[str]
    acts: bool

    def __init__(self, host: Host, number: int, limits: WorkerLimits) -> None:
        """Always `release` it; `begin` comes first."""
        self._host, self._number, self._limits = host, number, limits
        self._tells = self._ends = False
        self._is_released = False
        self._is_asked = False
        self._has_timed_out = False
        self._is_stuck = False

    async def begin(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> None:
        """Reset it.

        Raises:
            EnvironmentLost: it cannot begin; the text is the reason.
        """
        question = {"ask": "reset", "row": sendable(row), "seed": seed, "trajectory": trajectory}
        opened = await self._ask(question, self._limits.reset_timeout_s)
        self.opening, self.metrics, self.acts = opened["opening"], opened["metrics"], opened["acts"]
        self.active = frozenset(opened["active"])
        self._tells, self._ends = opened["tells"], opened["ends"]

    async def step(self, calls: Sequence[Call]) -> list[Answered]:
        """Answers to all calls of one turn, in their order; those that JSON does not hold are not sent."""
        is_sent = [is_plain(call.arguments) for call in calls]
        sent = list(itertools.compress(calls, is_sent))
        began, answers = time.monotonic(), []
        question = {"ask": "step", "calls": [dataclasses.asdict(call) for call in sent]}
        try:
            if sent:
                answers = (await self._ask(question, self._limits.tool_timeout_s * len(sent)))["answers"]
            found = [Answered(**each | {"observation": Observation(**each["observation"])}) for each in answers]
            self._has_timed_out |= any(each.timed_out for each in found)
        except Frozen as err:
            self._has_timed_out = self._is_stuck = True
            seconds = (time.monotonic() - began) / len(sent)
            found = [_failed(TimeoutError(str(err)), seconds, timed_out=True)] * len(sent)
        except EnvironmentLost:
            if not self._is_stuck:
                raise
            found = [_failed(RuntimeError("tools are not available after a call that did not end"))] * len(sent)
        if len(sent) == len(calls):
            return found
        refusal = _failed(ValueError("the arguments are nested too deeply, or are no JSON"))
        rest = iter(found)
        return [next(rest) if was_sent else refusal for was_sent in is_sent]

    async def resume(self, answer: Message) -> Message:
        """Resume the trajectory's program: its next sampling request, or its result."""
        return await self._ask({"ask": "resume", "answer": answer}, self._limits.tool_timeout_s)

    async def run_agent(self, endpoint: Message, *, truth: Message, limit_s: float) -> Message:
        """Run the trajectory's agent to its end, see `Instance.run_agent`."""
        question = {"ask": "run", "endpoint": endpoint, "truth": sendable(truth), "limit_s": limit_s}
        return await self._ask(question, limit_s + ENDING_S)

    async def ending(self) -> Ending:
        """The reward and the state at the end."""
        if not self._tells:
            return Ending()
        answer = await self._ask({"ask": "ending"}, self._limits.reset_timeout_s)
        return Ending(reward=answer["reward"], snapshot=answer["snapshot"])

    async def release(self, broken: bool = False) -> None:
        """Give it back."""
        if not self._is_released:
            self._is_released = True
            is_broken = broken or self._is_asked or self._has_timed_out
            self._host.give_back(self._number, broken=is_broken, ends=self._ends)

    async def _ask(self, question: Message, limit_s: float) -> Message:
        """The worker's answer, unless that is an error."""
        if self._is_asked or self._is_released:
            raise EnvironmentLost("it was asked before, and the answer was not waited for")
        host, tally = self._host, self._host.tally
        # It stays so if the caller is cancelled.
        self._is_asked = True
        try:
            # An agent that plays waits for the model, not the run for it.
            is_play = question["ask"] == "run"
            with contextlib.nullcontext() if is_play else tally.asked(is_step=question["ask"] in ("step", "resume")):
                answer = await host.link.ask(question | {"instance": self._number}, limit_s)
        except EnvironmentLost as err:
            self._is_asked = False
            if isinstance(err, Frozen):
                if host.stuck - {self._number}:
                    raise EnvironmentLost("another trajectory's call froze the environment's worker") from err
                tally.num_late += 1
            raise
        self._is_asked = False
        if host.is_closed:
            raise EnvironmentLost("the environments are closed")
        self._is_stuck = answer["is_stuck"]
        host.note(self._number, is_stuck=self._is_stuck)
        tally.num_late += sum(each["timed_out"] for each in answer.get("answers", ())) + answer.get("timed_out", False)
        if "error" in answer:
            self._has_timed_out |= answer["timed_out"]
            raise EnvironmentLost(answer["error"])
        return answer


def _failed(err: Exception, seconds: float = 0.0, *, timed_out: bool = False) -> Answered:
    return Answered(observation=failure(err), seconds=seconds, timed_out=timed_out)

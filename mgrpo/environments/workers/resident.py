"""An environment in its worker process: one question at a time, under limits of time and length."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from mgrpo.environments.environment import Call, Observation
from mgrpo.environments.offered.catalog import Description, Spec, Toolbox, built
from mgrpo.environments.offered.functions import failure
from mgrpo.environments.workers.limits import WorkerLimits
from mgrpo.environments.workers.threads import OwnedThreads
from mgrpo.processes.json_lines import Message

T = TypeVar("T")

_CANCEL_S = 1.0
"""For which a coroutine may go on after it was cancelled."""
_MAX_SNAPSHOT_BYTES = 1 << 22
_MAX_ERROR_CHARS = 1000


class Failed(Exception):
    """The environment did not answer; the text says why."""


class Late(Failed):
    """There was no answer in time."""


class Resident:
    """One environment. What of it cannot be ended, `is_stuck` tells."""

    def __init__(self, number: int, specs: Sequence[Spec], limits: WorkerLimits, threads: OwnedThreads) -> None:
        self._number, self._specs, self._limits, self._threads = number, specs, limits, threads
        self._toolbox: Toolbox | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._was_cut = False

    @property
    def is_stuck(self) -> bool:
        """Whether a call that was cut off goes on: a thread, or a coroutine that ignores being cancelled."""
        return self._was_cut and (bool(self._tasks) or self._threads.is_busy(self._number))

    async def description(self, limit_s: float) -> Description:
        """What it offers, of a new environment.

        Raises:
            Failed: it cannot be built or set up.
        """
        try:
            return (await self._within(limit_s, self._ready())).describe()
        except Late as err:
            entries = " or ".join(spec.entry for spec in self._specs)
            raise Late(f"{entries} is not set up after {limit_s:g} s") from err

    async def reset(self, row: Mapping[str, Any], *, seed: int, trajectory: str) -> Message:
        async def begin() -> Message:
            toolbox = await self._ready()
            opening = await toolbox.reset(row, seed=seed, trajectory=trajectory)
            return {
                "opening": shortened(opening.text, self._limits.output_bytes),
                "metrics": dict(opening.metrics),
                "active": sorted(toolbox.active),
                "acts": toolbox.acts,
                "tells": toolbox.tells,
                "ends": toolbox.ends,
            }

        return await self._within(self._limits.reset_timeout_s, begin())

    async def step(self, calls: Sequence[Call]) -> Message:
        """The answers of one turn: (observation, seconds, timed_out) of each call."""
        assert self._toolbox is not None
        if self.is_stuck:
            refused = failure(RuntimeError("an earlier call is still running"))
            return {"answers": [(dataclasses.asdict(refused), 0.0, False) for _ in calls]}
        parts = self._toolbox.apart(calls)
        answered = await asyncio.gather(*(self._answers([calls[place] for place in part]) for part in parts))
        answers = {
            place: answer
            for part, found in zip(parts, answered, strict=True)
            for place, answer in zip(part, found, strict=True)
        }
        return {"answers": [answers[place] for place in range(len(calls))]}

    async def resume(self, answer: Message) -> Message:
        """What a program wants next, or has returned, see `Program`."""

        async def go_on() -> Message:
            assert self._toolbox is not None
            said = await self._toolbox.program.resume(answer)
            if said.get("returned") is not None:
                said["returned"] = finite(said["returned"])
            return said

        if self.is_stuck:
            raise Failed("a call is still running")
        return await self._within(self._limits.tool_timeout_s, go_on())

    async def ending(self) -> Message:
        async def ask() -> Message:
            assert self._toolbox is not None
            reward = await self._toolbox.reward()
            snapshot = await asyncio.to_thread(self._toolbox.snapshot)
            if len(json.dumps(snapshot)) > _MAX_SNAPSHOT_BYTES:
                raise ValueError(
                    f"the environment's public attributes take more than {_MAX_SNAPSHOT_BYTES >> 20} MiB as JSON; "
                    "begin the names of those that no reward function needs with _"
                )
            return {"reward": None if reward is None else finite(reward), "snapshot": snapshot}

        if self.is_stuck:
            raise Failed("a call is still running")
        return await self._within(self._limits.reset_timeout_s, ask())

    async def end(self, limit_s: float) -> Message:
        assert self._toolbox is not None
        await self._within(limit_s, self._toolbox.end())
        return {}

    async def close(self, limit_s: float) -> None:
        """Cancel what goes on, and close the environment unless that goes on nevertheless.

        Raises:
            Failed: it could not be closed.
        """
        await self._cancel(self._tasks)
        if self._toolbox is not None and not self.is_stuck:
            await self._within(limit_s, self._toolbox.close())

    async def _ready(self) -> Toolbox:
        if self._toolbox is None:
            toolbox = await asyncio.to_thread(built, self._specs)
            await toolbox.setup()
            self._toolbox = toolbox
        return self._toolbox

    async def _answers(self, calls: Sequence[Call]) -> list[tuple[Message, float, bool]]:
        """The answers of one part of a turn; a failed one for each call if there are none in time."""
        assert self._toolbox is not None
        began, is_late = time.monotonic(), False
        try:
            found = await self._within(self._limits.tool_timeout_s * len(calls), self._toolbox.step(calls))
            observations = [self._checked(observation) for observation in found]
        except Late as err:
            is_late = True
            observations = [failure(TimeoutError(str(err)))] * len(calls)
        except Exception as err:
            observations = [failure(err)] * len(calls)
        seconds = (time.monotonic() - began) / len(calls)
        return [(dataclasses.asdict(observation), seconds, is_late) for observation in observations]

    def _checked(self, observation: Observation) -> Observation:
        return Observation(
            text=shortened(observation.text, self._limits.output_bytes),
            reward=finite(observation.reward),
            done=bool(observation.done),
            failed=bool(observation.failed),
            metrics={str(name): float(value) for name, value in observation.metrics.items()},
        )

    async def _within(self, limit_s: float, work: Awaitable[T]) -> T:
        """The result of `work`; after `limit_s` it is cancelled, or `is_stuck`.

        Raises:
            Failed: it raised anything.
        """
        task = asyncio.create_task(_outcome(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            await self._cancel({task})
            raise Late(f"no answer within {limit_s:g} s")
        result, err = task.result()
        if err is not None:
            raise Failed(said(err)) from err
        return result

    async def _cancel(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            self._was_cut = True
            await asyncio.wait(tasks, timeout=_CANCEL_S)


async def _outcome(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """The result, or what was raised: whatever that is, it must not end the worker's loop."""
    try:
        return await work, None
    except BaseException as err:
        return None, err


def said(err: BaseException) -> str:
    """An exception in a few words, whatever its own methods do."""
    try:
        text = str(err)
    except Exception:
        text = "its text cannot be read"
    text = text.encode(errors="replace").decode()[:_MAX_ERROR_CHARS]
    # The toolbox names the entry itself.
    return text if type(err) is ValueError else f"{type(err).__name__}: {text}"


def finite(value: Any) -> float:
    """A reward as a number.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the environment gave the reward {number}")
    return number


def shortened(text: Any, limit: int) -> str:
    """A text of at most about `limit` bytes: a longer one loses its middle. Lone surrogates become question marks."""
    data = str(text).encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    head, tail = data[: limit // 2], data[len(data) - limit // 2 :]
    cut = len(data) - len(head) - len(tail)
    return f"{head.decode(errors='ignore')}\n... {cut} bytes left out ...\n{tail.decode(errors='ignore')}"

"""Queue of sampling requests between the endpoint's sessions and the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mgrpo.environments.endpoint.messages import Fault

_MOST_IDS = 1 << 22
"""Ids after which no further request is put into a line, whose length the learner bounds."""
Name = tuple[str, int]
"""A session, and the number of a turn in it."""


class SampledTurn(NamedTuple):
    """A sampled turn."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


class Wishes:
    """Sampling requests that the learner has not taken, or not answered. Belongs to one event loop."""

    def __init__(self) -> None:
        self._new: dict[Name, dict[str, Any]] = {}
        self._open: dict[Name, asyncio.Future[SampledTurn]] = {}
        self._cancelled: list[Name] = []
        self._changed = asyncio.Event()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def sample(self, session: str, number: int, wish: Mapping[str, Any]) -> SampledTurn:
        """Request a turn from the learner. Cancellation is reported to the learner if it has taken the request.

        Raises:
            Fault: 503, it could not be sampled.
        """
        name = (session, number)
        future = self._open[name] = asyncio.get_running_loop().create_future()
        self._new[name] = {"session": session, "number": number, **wish}
        self._changed.set()
        try:
            return await future
        finally:
            del self._open[name]
            if self._new.pop(name, None) is None and future.cancelled():
                self._cancelled.append(name)
                self._changed.set()

    async def take(self) -> dict[str, Any]:
        """New requests, as many as one line may hold, and cancelled ones; waits until there are any. Requests that were
        cancelled before they were taken are in neither."""
        while not self._new and not self._cancelled:
            self._changed.clear()
            await self._changed.wait()
        wishes, num_ids = [], 0
        for name in list(self._new):
            if num_ids < _MOST_IDS:
                wishes.append(self._new.pop(name))
                num_ids += len(wishes[-1]["added"])
        cancelled = [list(name) for name in self._cancelled]
        self._cancelled.clear()
        return {"wishes": wishes, "cancelled": cancelled}

    def settle(
        self,
        session: str,
        number: int,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        finish_reason: str = "",
        error: str | None = None,
        is_over: bool = False,
    ) -> None:
        """Answer a request; the answer to a cancelled one is dropped.

        Args:
            error: the reason why it could not be sampled.
            is_over: nothing will be sampled any more.
        """
        future = self._open.get((session, number))
        if future is None or future.done():
            return
        if error is None:
            future.set_result(SampledTurn(list(tokens), list(logprobs), finish_reason))
        else:
            code = "run_over" if is_over else "engine_unavailable"
            future.set_exception(Fault(503, "server_error", f"this turn could not be sampled: {error}", code))

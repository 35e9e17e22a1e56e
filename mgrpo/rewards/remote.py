"""Verifiers that ask a server: one event loop in a thread, many calls under way at once, a time limit on each.

Nothing of an answer is run or evaluated here; it is only sent on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Sequence

from mgrpo.config.schema import Reward
from mgrpo.rewards.catalog import find
from mgrpo.rewards.pool import NO_SCORE, Item
from mgrpo.rewards.verifier import Answer, RemoteVerifier

_log = logging.getLogger(__name__)
_LOGGED_PER_VERIFIER = 3


class RemoteScorer:
    """Scores items by servers; a failure of any kind is no score."""

    errors: Counter[str]
    """Items without a score since the start, by verifier."""

    def __init__(self, settings: Reward) -> None:
        self.errors = Counter()
        self._settings = settings
        self._verifiers: dict[str, RemoteVerifier] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def verify_many(self, items: Sequence[Item]) -> list[float]:
        """The score of every item, in order; NaN where none could be given, which `errors` counts."""
        if not items:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="remote-verifiers", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._score_all(items), self._loop).result()

    def metrics(self) -> dict[str, float]:
        """What each verifier has summed since the start, for example objective/{verifier}_cost."""
        return {
            f"objective/{name}_{key}": value
            for name, verifier in self._verifiers.items()
            for key, value in verifier.metrics().items()
        }

    def close(self) -> None:
        """Give back connections and end the thread; the scorer may be used again."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(self._close_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)

    async def _score_all(self, items: Sequence[Item]) -> list[float]:
        slots = asyncio.Semaphore(self._settings.remote_verifier_concurrency)
        return list(await asyncio.gather(*(self._score(item, slots) for item in items)))

    async def _score(self, item: Item, slots: asyncio.Semaphore) -> float:
        name, *rest = item
        name = name.lower()
        if name not in self._verifiers:
            self._verifiers[name] = find(name)(self._settings)
        async with slots:
            try:
                score = await self._verifiers[name].score(Answer(**dict(zip(Item._fields[1:], rest, strict=True))))
                if not math.isfinite(score):
                    raise ValueError(f"the score is {score}")
            except Exception as err:
                self.errors[name] += 1
                if self.errors[name] <= _LOGGED_PER_VERIFIER:
                    _log.warning("verifier %s gave no score for %.60r...: %r", name, item.completion, err)
                return NO_SCORE
        return float(score)

    async def _close_all(self) -> None:
        for verifier in self._verifiers.values():
            await verifier.close()
        self._verifiers.clear()

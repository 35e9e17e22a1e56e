"""Verifiers and other callers of a server: one event loop in a thread, many calls under way at once.

Nothing of an answer is run or evaluated here; it is only sent on. Each verifier bounds its own calls, and
`RemoteVerifier.limit_s` bounds them all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import find
from mgrpo.rewards.verifier import Answer, Item, RemoteVerifier, check_score
from mgrpo.rewards.worker_pool import NO_SCORE

_log = logging.getLogger(__name__)
_LOGGED_PER_VERIFIER = 3


T = TypeVar("T")


class Asks(Protocol):
    """A caller of a server. Like a `RemoteVerifier`, it counts the cost of its calls and holds connections to close."""

    name: ClassVar[str]

    def __init__(self, settings: Reward) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


A = TypeVar("A", bound=Asks)


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread


class RemoteScorer:
    """Scores items by servers; a failure of any kind means no score. Safe to use from any number of threads."""

    errors: Counter[str]
    """Items without a score since the start, by verifier."""

    def __init__(self, settings: Reward) -> None:
        self.errors = Counter()
        self._settings = settings
        self._running: _Running | None = None
        self._verifiers: dict[str, RemoteVerifier] = {}
        self._askers: dict[str, Asks] = {}
        self._own_process()

    def verify_many(self, items: Sequence[Item]) -> list[float]:
        """The score of every item, in order; NaN where none could be given, which `errors` counts.

        Raises:
            ValueError: a verifier that cannot be called at all, for lack of a model or an address.
            RuntimeError: the scorer was closed meanwhile.
        """
        return self._run(partial(self._score_all, items)) if items else []

    def ask(self, kind: type[A], work: Callable[[A], Coroutine[Any, Any, T]]) -> T:
        """Call `work` with the one object of its kind and return the result; errors as for `verify_many`, and those of `work`."""

        async def asked() -> T:
            asker = self._askers.get(kind.name)
            if not isinstance(asker, kind):
                asker = self._askers[kind.name] = kind(self._settings)
            return await work(asker)

        return self._run(asked)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._pid != os.getpid():  # the loop belongs to the parent
            self._own_process()
        with self._lock:
            loop = self._running_loop()
            future = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the verifiers were closed while they were asked") from None

    def metrics(self) -> dict[str, float]:
        """The sums of each verifier and asker since the start, for example objective/{verifier}_requests."""
        return {
            f"objective/{name}_{key}": value
            for name, asker in [*self._verifiers.items(), *self._askers.items()]
            for key, value in asker.metrics().items()
        }

    def close(self) -> None:
        """Cancel running calls, close connections and end the thread; the scorer may be used again."""
        if self._pid != os.getpid():  # the loop belongs to the parent
            self._own_process()
            return
        with self._lock:
            running, self._running = self._running, None
            if running is None:
                return
            asyncio.run_coroutine_threadsafe(self._close_all(), running.loop).result()
            running.loop.call_soon_threadsafe(running.loop.stop)
            running.thread.join()
            running.loop.close()

    def _own_process(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._running = None
        self._verifiers, self._askers = {}, {}

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._running is None:
            self._slots = asyncio.Semaphore(self._settings.remote_verifier_concurrency)
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="remote-verifiers", daemon=True)
            thread.start()
            self._running = _Running(loop, thread)
        return self._running.loop

    async def _score_all(self, items: Sequence[Item]) -> list[float]:
        for name in {item.verifier.lower() for item in items} - self._verifiers.keys():
            verifier = find(name)(self._settings)
            assert isinstance(verifier, RemoteVerifier)  # the pool has the others
            self._verifiers[name] = verifier
        return list(await asyncio.gather(*(self._score(item) for item in items)))

    async def _score(self, item: Item) -> float:
        name = item.verifier.lower()
        verifier = self._verifiers[name]
        async with self._slots:
            try:
                score = float(await asyncio.wait_for(_asked(verifier, item.answer), verifier.limit_s))
                check_score(score)
            except Exception as err:
                self.errors[name] += 1
                if self.errors[name] <= _LOGGED_PER_VERIFIER:
                    _log.warning("verifier %s gave no score for %.60r...: %r", name, item.answer.completion, err)
                return NO_SCORE
        return score

    async def _close_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for asker in (*self._verifiers.values(), *self._askers.values()):
            await asker.close()
        self._verifiers.clear()
        self._askers.clear()


async def _asked(verifier: RemoteVerifier, answer: Answer) -> float:
    try:
        return await verifier.score(answer)
    except SystemExit as err:  # it would end the thread that serves all calls
        raise RuntimeError(f"the verifier tried to exit: {err}") from err

"""Verifier processes and their limits: who is running, who hangs, who is started anew.

A worker (`worker`) answers in order, so when it hangs or dies the first unanswered item is the culprit: that one has no
score, the worker is replaced, and the items behind it are asked again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from mgrpo.config.schema import Reward
from mgrpo.rewards.catalog import find, module_folders
from mgrpo.rewards.process import Item, Worker

_log = logging.getLogger(__name__)

# Items a worker holds beyond the one it works on: enough that it never waits for us, few enough that one that hangs does
# not keep them from the other workers for long.
_ITEMS_AHEAD = 16
# A worker that is not ready after this long will not be; slow network disks are the reason that it is long.
_START_LIMIT_S = 120.0
_STARTS_BEFORE_GIVING_UP = 3
_LOGGED_PER_VERIFIER = 3
_LONGEST_WAIT_S = 0.2
"""How late it may be noticed that the pool is being closed."""

NO_SCORE = float("nan")


class VerifierPool:
    """Scores items in worker processes; one thread at a time is served, the others wait."""

    errors: Counter[str]
    """Items without a score since the start, by verifier."""

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        memory_mb: int = 2048,
        *,
        verifiers: Sequence[str] = (),
        settings: Reward | None = None,
    ) -> None:
        """Nothing is started yet. `verifiers` are loaded at the start; others when they are first asked for."""
        if num_workers < 1:
            raise ValueError(f"verifier_workers={num_workers}; at least 1 is needed")
        if not timeout_s > 0:
            raise ValueError(f"verifier_timeout={timeout_s}; it must be greater than 0 seconds")
        for name in verifiers:
            find(name)
        self.errors = Counter()
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._memory_mb = memory_mb
        self._settings = dataclasses.asdict(settings or Reward())
        self._verifiers = list(dict.fromkeys(name.lower() for name in verifiers))
        self._own_process()

    def start(self) -> None:
        """Start the workers that are not running, without waiting for their imports."""
        self._forget_parent_process()
        with self._lock:
            self._start()

    def verify_many(self, items: Sequence[Item]) -> list[float]:
        """The score of every item, in order; NaN where none could be given, which `errors` counts."""
        for name in {item.verifier for item in items}:
            find(name)
        self._forget_parent_process()
        with self._lock:
            try:
                return self._verify_many(items)
            except BaseException:
                # Workers may still hold questions of this call: their answers must not meet the next one.
                self._kill_all()
                raise

    def close(self) -> None:
        """End the workers, also those that are at work: whoever waits for them gets a RuntimeError.

        The pool may be used again, and then starts new ones.
        """
        self._forget_parent_process()
        self._is_closing = True
        with self._lock:
            self._is_closing = False
            self._kill_all()
            self._spawner.shutdown()
            self._spawner = _new_spawner()

    def __enter__(self) -> VerifierPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def _own_process(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._failed_starts = 0
        self._is_closing = False
        # The kernel ends a worker when the thread that started it ends (`lifetime`), so they all come from one thread
        # that lives as long as the pool, whoever calls.
        self._spawner = _new_spawner()

    def _forget_parent_process(self) -> None:
        """After a fork the workers belong to the parent: this process starts its own."""
        if self._pid != os.getpid():
            for worker in self._workers:
                worker.close_pipes()
            self._own_process()

    def _start(self) -> None:
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            worker.end()
            self._workers.remove(worker)
        while len(self._workers) < self._num_workers:
            self._workers.append(self._spawn())

    def _spawn(self) -> Worker:
        worker = self._spawner.submit(Worker, module_folders(self._settings["verifier_modules"])).result()
        worker.load(self._verifiers, self._settings, memory_mb=self._memory_mb)
        return worker

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _verify_many(self, items: Sequence[Item]) -> list[float]:
        if not items:
            return []
        new = sorted({item.verifier.lower() for item in items} - set(self._verifiers))
        self._verifiers += new
        if new:
            for worker in self._workers:
                worker.load(new, self._settings)
        self._start()
        batch = _Batch(items)
        with selectors.DefaultSelector() as selector:
            while batch.num_missing:
                for worker in self._workers:
                    batch.top_up(worker)
                    _watch(selector, worker)
                if self._is_closing:
                    raise RuntimeError("the verifiers were closed while they were asked")
                for key, _ in selector.select(self._wait_s()):
                    worker = key.data
                    worker.exchange()
                    self._take_answers(worker, batch)
                now = time.monotonic()
                for place, worker in enumerate(self._workers):
                    if worker.is_over or now > self._deadline(worker):
                        _unwatch(selector, worker)
                        self._bury(worker, batch)
                        self._workers[place] = self._spawn()
        return batch.scores

    def _bury(self, worker: Worker, batch: _Batch) -> None:
        """End a worker that hangs or is dead: its first unanswered item has no score, the others wait again."""
        timed_out = not worker.is_over
        worker.end()
        self._take_answers(worker, batch)
        if worker.num_loading:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS_BEFORE_GIVING_UP:
                raise RuntimeError(self._start_failure(worker, timed_out))
        elif worker.asked:
            culprit = worker.asked.popleft()
            why = f"took longer than {self._timeout_s:g} s" if timed_out else f"the worker {worker.ending}"
            batch.set(culprit, self._no_score(batch.items[culprit], why))
        batch.take_back(worker)

    def _take_answers(self, worker: Worker, batch: _Batch) -> None:
        for answer in worker.answers():
            if "ready" in answer:
                worker.num_loading -= 1
                self._failed_starts = 0
                self._refuse(answer["failed"])
                continue
            index = worker.asked.popleft()
            assert index == answer["id"], f"a worker answered {answer['id']}, asked was {index}"
            score = answer.get("score")
            batch.set(index, self._no_score(batch.items[index], answer["error"]) if score is None else score)

    def _refuse(self, failed: Mapping[str, str]) -> None:
        """Raise what kept verifiers from being loaded; the next call may ask others."""
        self._verifiers = [name for name in self._verifiers if name not in failed]
        for name, why in failed.items():
            raise RuntimeError(f"verifier {name} cannot be loaded (memory limit {self._memory_mb} MiB): {why}")

    def _no_score(self, item: Item, why: str) -> float:
        name = item.verifier.lower()
        self.errors[name] += 1
        if self.errors[name] <= _LOGGED_PER_VERIFIER:
            last = "; further ones are only counted" if self.errors[name] == _LOGGED_PER_VERIFIER else ""
            _log.warning("verifier %s gave no score for %.60r...: %s%s", name, item.completion, why, last)
        return NO_SCORE

    def _deadline(self, worker: Worker) -> float:
        """When the worker must have said something."""
        if worker.num_loading:
            return worker.heard_at + _START_LIMIT_S
        return worker.heard_at + self._timeout_s if worker.asked else float("inf")

    def _wait_s(self) -> float:
        first = min(self._deadline(worker) for worker in self._workers)
        return min(max(0.0, first - time.monotonic()) + 0.001, _LONGEST_WAIT_S)

    def _start_failure(self, worker: Worker, timed_out: bool) -> str:
        how = f"was not ready after {_START_LIMIT_S:g} s" if timed_out else f"{worker.ending} before it was ready"
        return (
            f"a verifier worker {how}, {_STARTS_BEFORE_GIVING_UP} times in a row "
            f"(verifiers {', '.join(self._verifiers)}; memory limit {self._memory_mb} MiB); its message is on stderr"
        )


class _Batch:
    """The items of one call: which wait, which are scored."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.scores = [NO_SCORE] * len(items)
        self.num_missing = len(items)
        self._waiting = deque(range(len(items)))

    def top_up(self, worker: Worker) -> None:
        """Ask the worker as many items as it may hold; refilled by halves, to write seldom."""
        if len(worker.asked) > _ITEMS_AHEAD // 2 or not self._waiting:
            return
        indices = [self._waiting.popleft() for _ in range(min(_ITEMS_AHEAD - len(worker.asked), len(self._waiting)))]
        worker.ask([(index, self.items[index]) for index in indices])

    def take_back(self, worker: Worker) -> None:
        """What the worker did not get to is asked again, first."""
        self._waiting.extendleft(reversed(worker.asked))
        worker.asked.clear()

    def set(self, index: int, score: float) -> None:
        self.scores[index] = score
        self.num_missing -= 1


def _watch(selector: selectors.BaseSelector, worker: Worker) -> None:
    """Have the selector wait for what the worker's pipes have to do now."""
    for descriptor, events in worker.events().items():
        watched = descriptor in selector.get_map()
        if events and not watched:
            selector.register(descriptor, events, worker)
        elif watched and not events:
            selector.unregister(descriptor)


def _unwatch(selector: selectors.BaseSelector, worker: Worker) -> None:
    for descriptor in worker.events():
        if descriptor in selector.get_map():
            selector.unregister(descriptor)


def _new_spawner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifier-spawner")

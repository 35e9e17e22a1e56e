"""Verifiers in worker processes, under limits of time and memory: a worker that hangs or dies is replaced.

A worker (`verifier_worker`) answers in order, so when it hangs or dies its first unanswered item is the culprit: that item has no
score, and the items behind it are sent again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.config.schema import Reward
from mgrpo.processes.json_lines import Child, exchange
from mgrpo.processes.visible import without_secrets
from mgrpo.rewards.registry import find, module_folders
from mgrpo.rewards.verifier import Answer, Item

_log = logging.getLogger(__name__)

# Items a worker holds beyond the one it works on: enough that it never waits for this process, few enough that a worker
# that hangs does not keep them from the others for long.
_ITEMS_AHEAD = 16
# Long, because imports from a slow network disk take long.
_START_LIMIT_S = 120.0
_STARTS_BEFORE_GIVING_UP = 3
_LOGGED_PER_VERIFIER = 3
# Bounds the time in which `close` takes effect.
_LONGEST_WAIT_S = 0.2
_MAX_ANSWER_BYTES = 1 << 20
_ANSWER_FIELDS = tuple(field.name for field in dataclasses.fields(Answer))

NO_SCORE = float("nan")


class VerifierPool:
    """Scores items in worker processes; one thread at a time is served, the others wait."""

    errors: Counter[str]
    """Items without a score since the start, by verifier."""

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        *,
        verifiers: Sequence[str] = (),
        settings: Reward | None = None,
    ) -> None:
        """Starts nothing. `verifiers` are loaded at the start; others on first use."""
        if num_workers < 1:
            raise ValueError(f"verifier_workers={num_workers}; at least 1 is needed")
        if not timeout_s > 0:
            raise ValueError(f"verifier_timeout={timeout_s}; it must be greater than 0 seconds")
        for name in verifiers:
            find(name)
        self.errors = Counter()
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        settings = settings or Reward()
        self._memory_mb = settings.verifier_memory_mb
        self._settings = dataclasses.asdict(settings)
        self._verifiers = list(dict.fromkeys(name.lower() for name in verifiers))
        self._own_process()

    def start(self) -> None:
        """Start the workers that are not running, without waiting for their imports."""
        self._forget_parent_process()
        with self._lock:
            self._start()

    def verify_many(self, items: Sequence[Item]) -> list[float]:
        """The score of every item, in order; NaN where none could be given, which `errors` counts.

        Raises:
            RuntimeError: a verifier cannot be loaded, no worker starts, or the pool is closed meanwhile.
        """
        for name in {item.verifier for item in items}:
            find(name)
        self._forget_parent_process()
        with self._lock:
            try:
                return self._verify_many(items)
            except BaseException:
                # Workers may still hold questions of this call: their answers must not be taken for those of the next.
                self._end_all()
                raise

    def close(self) -> None:
        """End the workers, also while they work: a thread that waits for scores gets a RuntimeError.

        The pool may be used again, and then starts new ones.
        """
        self._forget_parent_process()
        self._is_closing = True
        with self._lock:
            self._is_closing = False
            self._end_all()

    def __enter__(self) -> VerifierPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.child.process.pid for worker in self._workers]

    def _own_process(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._is_closing = False

    def _forget_parent_process(self) -> None:
        """Drop the parent's workers after a fork: this process starts its own."""
        if self._pid != os.getpid():
            for worker in self._workers:
                worker.child.close_pipes()
            self._own_process()

    def _start(self) -> None:
        for worker in [worker for worker in self._workers if worker.child.process.poll() is not None]:
            worker.child.end()
            self._workers.remove(worker)
        while len(self._workers) < self._num_workers:
            self._workers.append(self._new_worker())

    def _new_worker(self) -> _Worker:
        worker = _Worker(module_folders(self._settings["verifier_modules"]))
        worker.load(self._verifiers, self._settings, memory_mb=self._memory_mb)
        return worker

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.child.end()
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
        while batch.num_missing:
            for worker in self._workers:
                batch.top_up(worker)
            if self._is_closing:
                raise RuntimeError("the verifiers were closed while they were asked")
            exchange([worker.child for worker in self._workers], self._wait_s())
            for place, worker in enumerate(self._workers):
                self._take_answers(worker, batch)
                if worker.child.is_over or time.monotonic() > self._deadline(worker):
                    self._give_up(worker, batch)
                    self._workers[place] = self._new_worker()
        return batch.scores

    def _give_up(self, worker: _Worker, batch: _Batch) -> None:
        """End a worker that hangs or is dead: its first unanswered item has no score, the others are sent again."""
        timed_out = not worker.child.is_over
        worker.child.end()
        self._take_answers(worker, batch)
        if worker.num_loading:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS_BEFORE_GIVING_UP:
                raise RuntimeError(self._start_failure(worker, timed_out))
        elif worker.asked:
            culprit = worker.asked.popleft()
            why = f"took longer than {self._timeout_s:g} s" if timed_out else f"the worker {worker.child.how_it_ended}"
            batch.set(culprit, self._no_score(batch.items[culprit], why))
        batch.take_back(worker)

    def _take_answers(self, worker: _Worker, batch: _Batch) -> None:
        for answer in worker.child.answers():
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
        """RuntimeError for verifiers that cannot be loaded; the next call may use others."""
        self._verifiers = [name for name in self._verifiers if name not in failed]
        for name, why in failed.items():
            raise RuntimeError(f"verifier {name} cannot be loaded (memory limit {self._memory_mb} MiB): {why}")

    def _no_score(self, item: Item, why: str) -> float:
        name = item.verifier.lower()
        self.errors[name] += 1
        if self.errors[name] <= _LOGGED_PER_VERIFIER:
            last = "; further ones are only counted" if self.errors[name] == _LOGGED_PER_VERIFIER else ""
            _log.warning("verifier %s gave no score for %.60r...: %s%s", name, item.answer.completion, why, last)
        return NO_SCORE

    def _deadline(self, worker: _Worker) -> float:
        """The time by which the worker must have answered."""
        if worker.num_loading:
            return worker.child.heard_at + _START_LIMIT_S
        return worker.child.heard_at + self._timeout_s if worker.asked else float("inf")

    def _wait_s(self) -> float:
        first = min(self._deadline(worker) for worker in self._workers)
        return min(max(0.0, first - time.monotonic()), _LONGEST_WAIT_S)

    def _start_failure(self, worker: _Worker, timed_out: bool) -> str:
        how = (
            f"was not ready after {_START_LIMIT_S:g} s"
            if timed_out
            else f"{worker.child.how_it_ended} before it was ready"
        )
        return (
            f"a verifier worker {how}, {_STARTS_BEFORE_GIVING_UP} times in a row "
            f"(verifiers {', '.join(self._verifiers)}; memory limit {self._memory_mb} MiB); its message is on stderr"
        )


class _Worker:
    """One worker process and its unanswered items."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.child = Child(
            "mgrpo.rewards.verifier_worker",
            # Without the run's secrets: its input is untrusted.
            environment=without_secrets("MGRPO_VERIFIER_"),
            folders=folders,
            max_line_bytes=_MAX_ANSWER_BYTES,
        )
        self.asked: deque[int] = deque()
        """Indices of the items without an answer, in the order in which they were sent."""
        self.num_loading = 0
        """Load requests without an answer."""

    def load(self, verifiers: Sequence[str], settings: Mapping[str, Any], *, memory_mb: int | None = None) -> None:
        self.child.send([{"verifiers": list(verifiers), "settings": settings, "memory_mb": memory_mb}])
        self.num_loading += 1

    def ask(self, items: Sequence[tuple[int, Item]]) -> None:
        self.child.send(
            {
                "id": index,
                "verifier": item.verifier.lower(),
                "answer": {name: getattr(item.answer, name) for name in _ANSWER_FIELDS},
            }
            for index, item in items
        )
        self.asked.extend(index for index, _ in items)


class _Batch:
    """The items of one call: which wait, which are scored."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.scores = [NO_SCORE] * len(items)
        self.num_missing = len(items)
        self._waiting = deque(range(len(items)))

    def top_up(self, worker: _Worker) -> None:
        """Send the worker as many items as it may hold; refilled by halves, so that writes are few."""
        if len(worker.asked) > _ITEMS_AHEAD // 2 or not self._waiting:
            return
        indices = [self._waiting.popleft() for _ in range(min(_ITEMS_AHEAD - len(worker.asked), len(self._waiting)))]
        worker.ask([(index, self.items[index]) for index in indices])

    def take_back(self, worker: _Worker) -> None:
        """Requeue the worker's unanswered items at the front."""
        self._waiting.extendleft(reversed(worker.asked))
        worker.asked.clear()

    def set(self, index: int, score: float) -> None:
        self.scores[index] = score
        self.num_missing -= 1

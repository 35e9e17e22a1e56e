"""The connection of one loop to a worker process: any number of requests at a time, and one end."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence

from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.processes.distant import Distant
from mgrpo.processes.json_lines import Child, Message
from mgrpo.processes.visible import TOOL_VARIABLES, without_secrets

PROGRAM = "mgrpo.environments.workers.worker"
PATIENCE_S = 10.0
"""Seconds beyond a request's limit, which the worker keeps itself; one that is later is frozen."""
_MAX_ANSWER_BYTES = 1 << 26
_MALFORMED = "gave an answer that does not fit the question, as if a tool had changed its modules, and was killed"


def new_child(folders: Sequence[str], python: str | None, variables: Collection[str] = ()) -> Child:
    """Start a worker process without the secrets of this one, as its tools read untrusted text.

    Args:
        variables: names of those that it receives all the same.
    """
    named = {name: os.environ[name] for name in variables if name in os.environ}
    return Child(
        PROGRAM,
        environment=without_secrets(TOOL_VARIABLES) | named,
        folders=folders,
        python=python,
        max_line_bytes=_MAX_ANSWER_BYTES,
    )


class Frozen(EnvironmentLost):
    """The worker did not answer this request in time, and is killed."""


class Link:
    """One worker process, here or on another machine. Always `end` it."""

    def __init__(
        self,
        child: Child | Distant,
        when_over: Callable[[str], None],
        *,
        fits: Callable[[Message, Message], bool] = lambda question, answer: True,
    ) -> None:
        """
        Args:
            fits: True if an answer is valid for a request; a process that sends an invalid one is killed.
            when_over: called once with the way it ended, unless `end` was called.
        """
        self._child, self._when_over, self._fits = child, when_over, fits
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count()
        self._watched: dict[int, int] = {}
        self._ending: asyncio.Task[None] | None = None
        self._end_lock = threading.Lock()
        self.is_over = False
        """True once it accepts no more requests."""
        self._watch()

    @property
    def pid(self) -> int:
        """Process id of a child; not for distant workers."""
        assert isinstance(self._child, Child)
        return self._child.process.pid

    async def ask(self, question: Message, limit_s: float) -> Message:
        """The answer of the worker, which keeps the limit itself. It may be an error.

        Raises:
            EnvironmentLost: the worker has ended or ends; `Frozen` for the request that it answered late.
        """
        if self.is_over:
            raise EnvironmentLost("the environment's worker has ended")
        number = next(self._numbers)
        self._child.send([question | {"id": number}])
        asked_at = time.monotonic()
        future = self._waiting[number] = self._loop.create_future()
        self._watch()
        try:
            while not future.done():
                # It may have been busy with others, whom it answered meanwhile.
                since = max(asked_at, self._child.heard_at)
                left = since + limit_s + PATIENCE_S - time.monotonic()
                if self.is_over:
                    # Another question was the late one; this one is answered by the end.
                    await asyncio.wait({future})
                elif left <= 0:
                    self.stop(f"did not answer for {limit_s + PATIENCE_S:g} s and was killed")
                    raise Frozen(f"no answer within {limit_s:g} s")
                else:
                    await asyncio.wait({future}, timeout=left)
            answer = future.result()
            if not self._fits(question, answer):
                self.stop(_MALFORMED)
                raise EnvironmentLost(f"the environment's worker {_MALFORMED}")
            return answer
        finally:
            future.cancel()

    def stop(self, why: str) -> None:
        """Kill the process and everything that it has started; all open requests raise EnvironmentLost."""
        if not self.is_over:
            self.is_over = True
            self._unwatch()
            self._ending = self._loop.create_task(self._stop(why))

    def end(self) -> None:
        """Kill it at once, without a call of `when_over`. Blocks for milliseconds."""
        self.is_over = True
        self._unwatch()
        if self._ending is not None:
            self._ending.cancel()
        self._end_child()
        self._fail("the environments were closed")

    async def _stop(self, why: str) -> None:
        await asyncio.to_thread(self._end_child)
        self._take_answers()
        why = why or self._child.how_it_ended
        self._fail(f"the environment's worker {why}")
        self._when_over(why)

    def _end_child(self) -> None:
        with self._end_lock:
            self._child.end()

    def _fail(self, text: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EnvironmentLost(text))
        self._waiting.clear()

    def _pump(self) -> None:
        self._child.pump()
        self._take_answers()
        if self._child.is_over:
            self.stop("")
        self._watch()

    def _take_answers(self) -> None:
        for answer in self._child.answers():
            future = self._waiting.pop(answer.get("id", -1), None)
            if future is None:
                self.stop("answered what it was not asked")
            elif not future.done():
                future.set_result(answer)

    def _watch(self) -> None:
        """Register callbacks with the loop for ready pipes."""
        wanted = {} if self.is_over else self._child.events()
        for pipe in self._watched.keys() - wanted.keys():
            self._remove(pipe)
        for pipe in wanted.keys() - self._watched.keys():
            add = self._loop.add_reader if wanted[pipe] == select.POLLIN else self._loop.add_writer
            add(pipe, self._pump)
        self._watched = wanted

    def _unwatch(self) -> None:
        for pipe in list(self._watched):
            self._remove(pipe)
        self._watched = {}

    def _remove(self, pipe: int) -> None:
        self._loop.remove_reader(pipe)
        self._loop.remove_writer(pipe)

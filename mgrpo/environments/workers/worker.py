"""The program that holds environments: `python -m mgrpo.environments.workers.worker`, asked in JSON lines by `link`.

Every request has a number "id", which its answer repeats; answers come in any order. Requests and their answers:

    load    instance, specs, limits, arguments, limit_s  ->  description: the first environment is built and set up
    reset   instance, row, seed, trajectory   ->  opening, metrics, active, acts: a new instance is built and set up before
    step    instance, calls                   ->  answers: an observation, seconds and timed_out for each call
    resume  instance, answer                  ->  wish, or returned and metrics: a program is resumed
    run     instance, endpoint, truth, limit_s  ->  ended, status, output, reward, metrics: an agent plays
    ending  instance                          ->  reward, snapshot
    end     instance, limit_s                 ->  the trajectory's resources are released
    close   instance, limit_s                 ->  running calls of it are cancelled
    stuck                                     ->  stuck: the instances with a call that cannot be ended

An answer may be {"error": text, "timed_out": bool} instead; an answer about an instance that exists has the flag "is_stuck".
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import json
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

from mgrpo.environments.environment import Call
from mgrpo.environments.offered.calling import Failed, Late, WorkerLimits, said
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.resident import Resident
from mgrpo.processes.guarded import go_on_guarded
from mgrpo.processes.json_lines import Message, take_standard_streams

_MAX_QUESTION_BYTES = 1 << 30
# A thread is started only where none is idle; this is more than there are calls at a time.
_MOST_THREADS = 1 << 14
_OWNER: contextvars.ContextVar[int | None] = contextvars.ContextVar("_OWNER", default=None)
"""The instance for which the current task works."""


def main() -> None:
    go_on_guarded()
    questions, answers = take_standard_streams()
    asyncio.run(_EnvironmentWorker(answers).serve(questions))


class _EnvironmentWorker:
    """All environments of the process."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._threads = _OwnedThreads()
        self._specs: Sequence[Spec] = ()
        self._limits = WorkerLimits()
        self._residents: dict[int, Resident] = {}

    async def serve(self, questions: BinaryIO) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        reader = asyncio.StreamReader(limit=_MAX_QUESTION_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
        tasks = set()
        while line := await reader.readline():
            task = asyncio.create_task(self._serve(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        # An orderly end would wait for threads that hang.
        os._exit(0)

    async def _serve(self, question: Message) -> None:
        """Answer one request, also if it fails."""
        number = question.get("instance", -1)
        _OWNER.set(number)
        answer: Message = {}
        try:
            match question["ask"]:
                case "load":
                    self._specs = [Spec.from_json(spec) for spec in question["specs"]]
                    self._limits = WorkerLimits(**question["limits"])
                    # A tool in the user's script may be imported by code that reads the script's arguments.
                    sys.argv = question["arguments"]
                    description = await self._resident(number).description(question["limit_s"])
                    answer = {"description": description.to_json()}
                case "reset":
                    row, seed, trajectory = question["row"], question["seed"], question["trajectory"]
                    answer = await self._resident(number).reset(row, seed=seed, trajectory=trajectory)
                case "step":
                    calls = [Call(**call) for call in question["calls"]]
                    found = await self._resident(number).toolbox.step(calls)
                    answer = {"answers": [dataclasses.asdict(each) for each in found]}
                case "resume":
                    answer = await self._resident(number).resume(question["answer"])
                case "run":
                    given = {name: question[name] for name in ("truth", "limit_s")}
                    answer = await self._resident(number).run_agent(question["endpoint"], **given)
                case "ending":
                    answer = await self._resident(number).ending()
                case "end":
                    await self._resident(number).end(question["limit_s"])
                case "close":
                    await self._close(number, question["limit_s"])
                case "stuck":
                    answer = {"stuck": [each for each, resident in self._residents.items() if resident.is_stuck]}
                case other:
                    raise AssertionError(other)
        except Failed as err:
            answer = {"error": str(err), "timed_out": isinstance(err, Late)}
        except (Exception, SystemExit) as err:
            answer = {"error": said(err), "timed_out": False}
        if (resident := self._residents.get(number)) is not None:
            answer["is_stuck"] = resident.is_stuck
        # An answer that cannot be written would be waited for: the process ends, and the error is on stderr.
        try:
            data = json.dumps(answer | {"id": question["id"]}).encode() + b"\n"
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        while data:
            data = data[os.write(self._answers, data) :]

    def _resident(self, number: int) -> Resident:
        if number not in self._residents:
            is_busy = functools.partial(self._threads.is_busy, number)
            self._residents[number] = Resident(self._specs, self._limits, is_in_thread=is_busy)
        return self._residents[number]

    async def _close(self, number: int, limit_s: float) -> None:
        resident = self._residents[number]
        try:
            await resident.close(limit_s)
        finally:
            # A stuck one is asked about later.
            if not resident.is_stuck:
                del self._residents[number]


class _OwnedThreads(ThreadPoolExecutor):
    """Threads counted by the instance for which they run: one that hangs cannot be ended, only reported.

    As a loop's default executor it counts everything that runs by `asyncio.to_thread`.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=_MOST_THREADS, thread_name_prefix="environment")
        self._running: Counter[int | None] = Counter()
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        owner = _OWNER.get()
        self._count(owner, 1)
        future = super().submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: self._count(owner, -1))
        return future

    def is_busy(self, owner: int) -> bool:
        """True while a thread runs for `owner`."""
        with self._lock:
            return self._running[owner] > 0

    def _count(self, owner: int | None, change: int) -> None:
        with self._lock:
            self._running[owner] += change
            if not self._running[owner]:
                del self._running[owner]


if __name__ == "__main__":
    main()

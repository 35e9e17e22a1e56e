"""Processes that prepare large data: `python -m mgrpo.data.worker`, one task and one answer a line, JSON both ways.

Neither forked (rank 0 has threads) nor multiprocessing's, which would run a user's script again in each of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from mgrpo.processes.lifetime import ending, start_program

Answer = dict[str, Any]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def do_all(
    tasks: Sequence[Mapping[str, Any]],
    *,
    here: Callable[[Any], Answer],
    kind: str,
    num_workers: int,
    setup: Mapping[str, Any] | None = None,
    advance: Callable[[Answer], None],
) -> list[Answer]:
    """The answers to all tasks, in their order: of `here` with one worker, else of processes.

    Args:
        kind: what `worker` calls such a task.
        setup: what each process is told first.
        advance: called for each answer as it comes.
    """
    if num_workers > 1:
        with Workers(num_workers, setup=setup) as workers:
            return workers.map([{kind: task} for task in tasks], advance)
    answers = []
    for task in tasks:
        answers.append(here(task))
        advance(answers[-1])
    return answers


class Workers:
    """A pool; always `close` it, from the thread that made it."""

    def __init__(self, num_workers: int, *, setup: Mapping[str, Any] | None = None) -> None:
        """Start the processes. `setup` is the first thing each is told, and must be answered."""
        self._processes = [_start() for _ in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="data-worker")
        self._is_closing = False
        self._setup = setup

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def map(self, tasks: Sequence[Mapping[str, Any]], advance: Callable[[Answer], None]) -> list[Answer]:
        """The answers to all tasks, in their order; `advance` is called for each as it comes, from any thread.

        A ValueError of a worker is raised here; any other error, and a worker's death, is a RuntimeError.
        """
        numbers, lock = iter(range(len(tasks))), threading.Lock()
        answers: list[Answer] = [{} for _ in tasks]

        def work(process: subprocess.Popen) -> None:
            if self._setup is not None:
                _ask(process, self._setup)
            while not self._is_closing:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                answers[number] = _ask(process, tasks[number])
                with lock:
                    advance(answers[number])

        running = [self._threads.submit(work, process) for process in self._processes]
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return answers

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._is_closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                # What was still to be written has nobody to read it.
                with contextlib.suppress(OSError):
                    stream.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


def _start() -> subprocess.Popen:
    settings = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return start_program("mgrpo.data.worker", environment=os.environ, settings=settings)


def _ask(process: subprocess.Popen, question: Mapping[str, Any]) -> Answer:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except (BrokenPipeError, ValueError):  # ValueError: `close` has closed the pipe
        line = b""
    if not line.endswith(b"\n"):
        raise RuntimeError(
            f"a process that prepares data {ending(process.wait())}; if the machine ran out of memory, set "
            "dataset_num_proc to fewer"
        )
    answer = json.loads(line)
    if "refused" in answer:
        raise ValueError(answer["refused"])
    if "failed" in answer:
        raise RuntimeError(f"a process that prepares data failed:\n{answer['failed']}")
    return answer

"""Programs of this package as child processes: one JSON object per line each way, over their standard pipes.

`Child` is the parent's side, `serve` the program's; `AskingEnd` is the former without a process. Every question gets one answer, in
order. Nothing is pickled, and the parent, which has threads, is not forked.
"""

from __future__ import annotations

import functools
import json
import math
import os
import resource
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, BinaryIO

from mgrpo.processes.lifetime import die_with_parent, ending, kill_descendants, start_program

Message = dict[str, Any]

_CHUNK = 1 << 16
_EXIT_LIMIT_S = 5.0
"""Seconds that a process may take to exit after the end of its output."""


class ChildError(RuntimeError):
    """The process ended, or broke the protocol."""


class AskingEnd:
    """The asking end of two pipes. They never block it, whatever the other end does."""

    def __init__(self, questions: IO[bytes], answers: IO[bytes], *, max_line_bytes: int) -> None:
        """
        Args:
            questions, answers: written and read by their descriptors, which are made non-blocking.
            max_line_bytes: length of the longest answer; a longer one counts as the end.
        """
        self._questions, self._replies = questions, answers
        for pipe in (questions, answers):
            os.set_blocking(pipe.fileno(), False)
        self.is_over = False
        """True if no further answer will come."""
        self.heard_at = time.monotonic()
        """Time of its last answer, or of a request while idle."""
        self.fault = ""
        """Protocol error of the other end; the predicate of a sentence about it."""
        self._max_line_bytes = max_line_bytes
        self._num_unanswered = 0
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._answers: deque[Message] = deque()

    def send(self, questions: Iterable[Message]) -> None:
        """Queue the questions, and write as much as the pipe takes now."""
        if not self._num_unanswered:
            self.heard_at = time.monotonic()
        for question in questions:
            self._outgoing += json.dumps(question).encode() + b"\n"
            self._num_unanswered += 1
        self._write()

    def answers(self) -> list[Message]:
        """The answers that have arrived since the last call."""
        arrived = list(self._answers)
        self._answers.clear()
        return arrived

    def close_pipes(self) -> None:
        """Close the pipes without ending the process, which belongs to the parent of this forked one."""
        self.is_over = True
        self._questions.close()
        self._replies.close()

    def events(self) -> dict[int, int]:
        """The events to wait for on each of its pipes, as `select.poll` takes them; then call `pump`."""
        if self.is_over:
            return {}
        reading = {self._replies.fileno(): select.POLLIN}
        return reading | {self._questions.fileno(): select.POLLOUT} if self._outgoing else reading

    def pump(self) -> None:
        """Write and read as much as the pipes take and hold now."""
        self._write()
        self._read()

    def _write(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._questions.fileno(), self._outgoing[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            # It died, as the end of its output shows.
            self._outgoing.clear()

    def _read(self) -> bool:
        """Read one chunk of its output; False if there is none now."""
        try:
            chunk = os.read(self._replies.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # of a connection that has broken
            chunk = b""
        if not chunk:
            self.is_over = True
            return False
        self._incoming += chunk
        if b"\n" in chunk:
            *lines, self._incoming = self._incoming.split(b"\n")
            for line in lines:
                self._take(line)
        if len(self._incoming) > self._max_line_bytes:
            self._break(f"wrote a line of more than {self._max_line_bytes} bytes")
        return True

    def _take(self, line: bytearray) -> None:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self._break(f"wrote {bytes(line[:40])!r}, which is not a JSON object")
        elif not self._num_unanswered:
            self._break("answered more than it was asked")
        elif not self.is_over:
            self._num_unanswered -= 1
            self.heard_at = time.monotonic()
            self._answers.append(answer)

    def _break(self, fault: str) -> None:
        self.fault = self.fault or fault
        self.is_over = True


class Child(AskingEnd):
    """One child process. Always `end` it."""

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str] = os.environ,
        settings: Mapping[str, str] | None = None,
        folders: Sequence[str] = (),
        python: str | None = None,
        max_line_bytes: int = 1 << 24,
    ) -> None:
        """Start `python -m module`, which calls `serve`; any thread may, and the child outlives the thread.

        Args:
            environment: the environment variables that the program may see; `settings` are added to them.
            folders: further folders in which it finds modules.
            python: its interpreter; None: this one.
            max_line_bytes: length of the longest answer; a longer one counts as the end of the process.
        """
        start = functools.partial(
            start_program, module, environment=environment, settings=settings or {}, folders=folders, python=python
        )
        self.process = _spawner(os.getpid()).submit(start).result()
        assert self.process.stdin is not None and self.process.stdout is not None
        super().__init__(self.process.stdin, self.process.stdout, max_line_bytes=max_line_bytes)

    @property
    def how_it_ended(self) -> str:
        """Predicate of a sentence about the process: its exit status or its fault."""
        if self.fault:
            return self.fault
        try:
            return ending(self.process.wait(_EXIT_LIMIT_S))
        except subprocess.TimeoutExpired:
            return "closed its output"

    def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for the next answer.

        Raises:
            ChildError: the process ended, or broke the protocol.
            TimeoutError: there is no answer after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._answers:
            if self.is_over:
                raise ChildError(self.how_it_ended)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no answer after {timeout_s:g} s")
            exchange([self], left)
        return self._answers.popleft()

    def kill(self) -> None:
        """Kill the process; a thread in `receive` gets a ChildError. Any thread may call."""
        self.process.kill()

    def end(self) -> None:
        """Kill the process with everything it started, and read the answers that it gave before."""
        if self._replies.closed:
            return
        # It has not been waited for, so its number cannot belong to another process.
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGSTOP)
            kill_descendants(self.process.pid)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while not self.is_over and self._read():
            pass
        self.close_pipes()


def exchange(children: Sequence[Child], timeout_s: float | None) -> None:
    """Wait until a pipe of any of the children is ready, then write and read as much as the pipes take and hold."""
    poll = select.poll()
    by_pipe: dict[int, Child] = {}
    for child in children:
        for pipe, events in child.events().items():
            poll.register(pipe, events)
            by_pipe[pipe] = child
    ready = poll.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))
    for child in {by_pipe[pipe] for pipe, _ in ready}:
        child.pump()


def serve(answer: Callable[[Message], Message]) -> None:
    """Answer the parent's questions until it closes the pipe; the process dies with its parent.

    Everything else that is printed goes to stderr, and standard input is empty.
    """
    die_with_parent()
    questions, answers = take_standard_streams()
    for line in questions:
        data = json.dumps(answer(json.loads(line))).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]


def limit_memory(mebibytes: int) -> None:
    """Make allocations of this process fail beyond so much address space."""
    limit = mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def take_standard_streams() -> tuple[BinaryIO, int]:
    """The pipes for questions and answers; other prints go to stderr from now on, and stdin is empty."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return questions, answers


# The kernel ends a child when the thread that started it ends (`lifetime`), so one thread per process starts all of them.
# A forked process has none of its parent's threads and needs its own.
@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="child-spawner")

"""Tasks of remote agents: the queue of sessions until a worker takes them."""

from __future__ import annotations

import asyncio
import hmac
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgrpo.environments.endpoint.messages import BadRequest, Fault

ASK_S = 10.0
"""Longest wait of a worker's request for a task, in seconds; it then asks again, or asks the next endpoint."""
_NOTICE_S = 30.0
_MOST_OUTPUT_CHARS = 1 << 14
_MOST_STATUS = 1 << 32
BY_WORKERS = ("late", "lost", "gone")
"""Endings that remove the score or repeat the trajectory, which only a worker may report."""
_ENDINGS = ("ended", "crashed", *BY_WORKERS)
Task = dict[str, Any]


class Tasks:
    """Tasks of the open sessions, in order. Belongs to one event loop."""

    def __init__(
        self,
        worker_key: str,
        *,
        url: str,
        begin: Callable[[str], None],
        lose: Callable[[str, str], None],
        silence_s: float,
        patience_s: float = 600.0,
    ) -> None:
        """
        Args:
            worker_key: key of the workers.
            url: address for workers, in a message to the user.
            begin: called with a session whose task was received: its time starts.
            lose: called with a session for which no worker has come, "lost", or whose worker is silent, "gone".
            silence_s: see `EndpointLimits.worker_silence_s`.
            patience_s: seconds that a task waits without a request of any worker.
        """
        self._worker_key, self._url = worker_key.encode(), url
        self._begin, self._lose = begin, lose
        self._silence_s, self._patience_s = silence_s, patience_s
        self._waiting: dict[str, tuple[Task, float]] = {}
        """Tasks with the start of their wait, by session."""
        self._taken: dict[str, Task] = {}
        self._look_s = min(_NOTICE_S, patience_s / 4, silence_s / 4)
        self._silent_s: dict[str, float] = {}
        """Seconds since the last heartbeat, by session; only for workers that send them."""
        self._news = asyncio.Event()
        self.was_asked = asyncio.Event()
        """Set once a worker has asked for a task."""
        self._asked_at = time.monotonic()
        self._watch: asyncio.TimerHandle | None = None
        self._has_said = False

    def add(self, session: str, task: Task) -> None:
        """Queue a session's task for a worker."""
        self._waiting[session] = task, time.monotonic()
        self._news.set()
        self._look_later()

    def remove(self, session: str) -> None:
        """Forget the task of a session that has ended; its worker detects that by itself."""
        for known in (self._waiting, self._taken, self._silent_s):
            known.pop(session, None)

    def put_back(self, session: str) -> None:
        """Put an undelivered task back at the head of the queue."""
        if (task := self._taken.pop(session, None)) is not None:
            self._waiting = {session: (task, time.monotonic()), **self._waiting}
            self._news.set()

    async def next(self, worker_key: str | None, wait_s: float = ASK_S) -> tuple[str, Task] | None:
        """The session and the task that has waited longest, once there is one; None: there was none within `wait_s` seconds.

        Raises:
            Fault: 401, this is not the key of workers.
        """
        if not hmac.compare_digest((worker_key or "").encode(errors="replace"), self._worker_key):
            raise Fault(
                401, "authentication_error", "This is not the key of this run's agent workers.", "invalid_api_key"
            )
        self._asked_at = time.monotonic()
        self.was_asked.set()
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None
        session, (task, _) = next(iter(self._waiting.items()))
        del self._waiting[session]
        self._taken[session] = task
        return session, task

    def begun(self, session: str, *, says_alive: bool) -> None:
        """Start a session, whose task a worker has received.

        Args:
            says_alive: True if the worker will send heartbeats.
        """
        if self._taken.pop(session, None) is None:
            return
        self._begin(session)
        if says_alive:
            self._silent_s[session] = 0.0
            self._look_later()

    def alive(self, session: str) -> None:
        """Record a heartbeat of a session's worker."""
        if session in self._silent_s:
            self._silent_s[session] = 0.0

    def _look_later(self) -> None:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        """Abandon tasks that no worker requests, and tasks of silent workers."""
        self._watch = None
        now = time.monotonic()
        for session, silent_s in list(self._silent_s.items()):
            # Not by the clock: where this process was stopped itself, it has not listened.
            self._silent_s[session] = silent_s + self._look_s
            if silent_s >= self._silence_s:
                del self._silent_s[session]
                self._lose(session, "gone")
        alone_s = {session: now - max(since, self._asked_at) for session, (_, since) in self._waiting.items()}
        if not self._has_said and max(alone_s.values(), default=0.0) >= _NOTICE_S:
            self._has_said = True
            sys.stderr.write(
                f"mgrpo: {len(alone_s)} trajectories wait for agent workers, and none has asked for a task in the last "
                f"{_NOTICE_S:g} s; start some with: mgrpo agent-worker --url {self._url} --agent COMMAND\n"
            )
        for session in [session for session, waited_s in alone_s.items() if waited_s >= self._patience_s]:
            del self._waiting[session]
            self._lose(session, "lost")
        if self._waiting or self._silent_s:
            self._look_later()


def left_by(body: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's report on its agent: {"ended", "status": exit status, "output": its last part}, all optional; "gone": the
    worker has to stop, and returns the task.

    Raises:
        BadRequest: it is something else.
    """
    ended, status, output = body.get("ended", "ended"), body.get("status"), body.get("output", "")
    if ended not in _ENDINGS:
        raise BadRequest(f"ended={ended!r:.80} must be one of {', '.join(_ENDINGS)}", "invalid_value", "ended")
    if status is not None and (type(status) is not int or abs(status) > _MOST_STATUS):
        raise BadRequest(f"status={status!r:.80} must be an exit status", "invalid_value", "status")
    if not isinstance(output, str):
        raise BadRequest(f"output={output!r:.80} must be a text", "invalid_value", "output")
    return {"ended": ended, "status": status, "output": output.encode(errors="replace").decode()[-_MOST_OUTPUT_CHARS:]}

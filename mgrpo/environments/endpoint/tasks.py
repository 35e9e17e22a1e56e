"""Tasks of agents that run elsewhere: sessions wait here until a worker asks for one."""

from __future__ import annotations

import asyncio
import hmac
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mgrpo.environments.endpoint.messages import BadRequest, Fault

ASK_S = 10.0
"""How long a worker is kept waiting for a task; then it asks again, perhaps another endpoint."""
_NOTICE_S = 30.0
_MOST_OUTPUT_CHARS = 1 << 14
_MOST_STATUS = 1 << 32
BY_WORKERS = ("late", "lost", "gone")
"""Endings that take the score away or have the trajectory played again, which no agent may say of itself."""
_ENDINGS = ("ended", "crashed", *BY_WORKERS)
Task = dict[str, Any]


class Tasks:
    """Those of the open sessions, in their order. Belongs to one event loop."""

    def __init__(
        self,
        worker_key: str,
        *,
        begin: Callable[[str], None],
        lose: Callable[[str, str], None],
        silence_s: float,
        patience_s: float = 600.0,
        ask_s: float = ASK_S,
    ) -> None:
        """
        Args:
            worker_key: the key of those who may take tasks.
            begin: called with a session whose task was taken: its time runs from now on.
            lose: called with one for which no worker has come, "lost", or whose worker is silent, "gone".
            silence_s: see `EndpointLimits.worker_silence_s`.
            patience_s: time that a task waits while no worker asks for any.
        """
        self._worker_key = worker_key.encode()
        self._begin, self._lose = begin, lose
        self._silence_s, self._patience_s, self._ask_s = silence_s, patience_s, ask_s
        self._waiting: dict[str, tuple[Task, float]] = {}
        """By session, with the time since when."""
        self._taken: dict[str, Task] = {}
        self._look_s = min(_NOTICE_S, patience_s / 4, silence_s / 4)
        self._silent_s: dict[str, float] = {}
        """How long the worker of a session has not said that it is alive; of those that say it."""
        self._news = asyncio.Event()
        self._asked_at = time.monotonic()
        self._watch: asyncio.TimerHandle | None = None
        self._has_said = False

    @property
    def has_waiting(self) -> bool:
        """True if a worker that asks gets a task at once."""
        return bool(self._waiting)

    def add(self, session: str, task: Task) -> None:
        """Have a worker play a session."""
        self._waiting[session] = task, time.monotonic()
        self._news.set()
        self._look_later()

    def remove(self, session: str) -> None:
        """The session has ended; one that is played sees that by itself."""
        for known in (self._waiting, self._taken, self._silent_s):
            known.pop(session, None)

    def put_back(self, session: str) -> None:
        """Whoever has taken the task did not get it. It goes before all others."""
        if (task := self._taken.pop(session, None)) is not None:
            self._waiting = {session: (task, time.monotonic()), **self._waiting}
            self._news.set()

    async def next(self, worker_key: str | None) -> tuple[str, Task] | None:
        """The session and the task that has waited longest, once there is one; None: ask again.

        Raises:
            Fault: 401, this is not the key of workers.
        """
        if not hmac.compare_digest((worker_key or "").encode(errors="replace"), self._worker_key):
            raise Fault(
                401, "authentication_error", "This is not the key of this run's agent workers.", "invalid_api_key"
            )
        self._asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self._ask_s):
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
        """The worker has the task.

        Args:
            says_alive: whether it will say that it is alive.
        """
        if self._taken.pop(session, None) is None:
            return
        self._begin(session)
        if says_alive:
            self._silent_s[session] = 0.0
            self._look_later()

    def alive(self, session: str) -> None:
        """The worker of a session says so."""
        if session in self._silent_s:
            self._silent_s[session] = 0.0

    def _look_later(self) -> None:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        """Give up tasks for which no worker asks, and take those of workers that are silent."""
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
                f"{_NOTICE_S:g} s; start some with: mgrpo agent-worker --url URL --agent COMMAND\n"
            )
        for session in [session for session, waited_s in alone_s.items() if waited_s >= self._patience_s]:
            del self._waiting[session]
            self._lose(session, "lost")
        if self._waiting or self._silent_s:
            self._look_later()


def left_by(body: Mapping[str, Any]) -> dict[str, Any]:
    """How a worker says that its agent ended: {"ended", "status": exit status, "output": the last part of it}, all optional; "gone": the
    worker has to stop, and gives the task back.

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

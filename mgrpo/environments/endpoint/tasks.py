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
_ENDINGS = ("ended", "crashed", "late", "lost")
Task = dict[str, Any]


class Tasks:
    """Those of the open sessions, in their order. Belongs to one event loop."""

    def __init__(
        self,
        worker_key: str,
        *,
        begin: Callable[[str], None],
        lose: Callable[[str], None],
        patience_s: float = 600.0,
        ask_s: float = ASK_S,
    ) -> None:
        """
        Args:
            worker_key: the key of those who may take tasks.
            begin: called with a session whose task was taken: its time runs from now on.
            lose: called with one for which no worker has come.
            patience_s: time that a task waits while no worker asks for any.
        """
        self._worker_key = worker_key.encode()
        self._begin, self._lose = begin, lose
        self._patience_s, self._ask_s = patience_s, ask_s
        self._waiting: dict[str, tuple[Task, float]] = {}
        """By session, with the time since when."""
        self._taken: dict[str, Task] = {}
        self._news = asyncio.Event()
        self._asked_at = time.monotonic()
        self._watch: asyncio.TimerHandle | None = None
        self._has_said = False

    def add(self, session: str, task: Task) -> None:
        """Have a worker play a session."""
        self._waiting[session] = task, time.monotonic()
        self._news.set()
        if self._watch is None:
            self._look_later()

    def remove(self, session: str) -> None:
        """The session has ended; one that is played sees that by itself."""
        self._waiting.pop(session, None)
        self._taken.pop(session, None)

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

    def begun(self, session: str) -> None:
        """The worker has the task."""
        if self._taken.pop(session, None) is not None:
            self._begin(session)

    def _look_later(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(min(_NOTICE_S, self._patience_s / 4), self._look)

    def _look(self) -> None:
        """Give up tasks for which no worker asks."""
        self._watch = None
        now = time.monotonic()
        alone_s = {session: now - max(since, self._asked_at) for session, (_, since) in self._waiting.items()}
        if not self._has_said and max(alone_s.values(), default=0.0) >= _NOTICE_S:
            self._has_said = True
            sys.stderr.write(
                f"mgrpo: {len(alone_s)} trajectories wait for agent workers, and none has asked for a task in the last "
                f"{_NOTICE_S:g} s; start some with: mgrpo agent-worker --url URL --agent COMMAND\n"
            )
        for session in [session for session, waited_s in alone_s.items() if waited_s >= self._patience_s]:
            del self._waiting[session]
            self._lose(session)
        if self._waiting:
            self._look_later()


def left_by(body: Mapping[str, Any]) -> dict[str, Any]:
    """How a worker says that its agent ended: {"ended", "status": exit status, "output": the last part of it}, all optional.

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

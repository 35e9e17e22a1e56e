"""The HTTP calls of one session: the number of open ones, the call that a retry repeats, and the end of abandoned ones.

A client library that lost its connection, or timed out, sends the same body again, marked as a retry: it receives the turn of
the first call, also one that is still being sampled. Equal calls without that mark are separate samples, and so are the
retries of calls that were refused. A call without a client is cancelled at the engine when no retry has arrived within
`EndpointLimits.retry_s`; its sampled tokens are discarded.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from mgrpo.environments.endpoint.messages import Fault
from mgrpo.environments.endpoint.session import Session, Turned, over

Kind = Literal["new", "retry", "same"]
"""A request for a new turn; a retry of an earlier one, which may have been refused; the same as an earlier one."""


class AgentCall:
    """One turn requested by a client, in one or more requests."""

    def __init__(self, task: asyncio.Task[Turned]) -> None:
        self.task = task
        self.num_clients = 0
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_lost(self) -> bool:
        """True if no client has received its turn, and none waits for it."""
        return not self.num_clients and not (
            self.task.done() and self._turned is not None and self._turned.node.delivered
        )

    @property
    def _turned(self) -> Turned | None:
        return None if self.task.cancelled() or self.task.exception() is not None else self.task.result()

    @property
    def turned(self) -> Turned:
        """Its turn, once the task is done.

        Raises:
            Fault: it failed or was cancelled.
        """
        if self.task.cancelled():
            raise over("it has ended")
        return self.task.result()


class Calls:
    """The calls of one session. Belongs to one event loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._num_requests = 0
        self._num_refused = 0
        """Refused requests, whose retries are new turns."""
        self._known: dict[bytes, list[AgentCall]] = {}
        """Calls by their name, except those that failed."""
        self._running: set[AgentCall] = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request from its head to the end of its answer.

        Raises:
            Fault: 429, too many are open.
        """
        left = sum(not call.num_clients for call in self._running)
        if self._num_requests + left >= self._session.limits.max_open_calls:
            self._num_refused += 1
            raise Fault(
                429,
                "rate_limit_error",
                f"{self._session.limits.max_open_calls} calls of this trajectory are open; wait until one has been answered",
                "rate_limit_exceeded",
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    @contextmanager
    def call(self, name: bytes, kind: Kind, turn: Callable[[], Coroutine[None, None, Turned]]) -> Iterator[AgentCall]:
        """The call that a request asks for: a new one, unless it repeats an earlier one. It may go on after the request.

        Args:
            turn: begins the turn of a new one.
        """
        call = None if kind == "new" else self._earlier(name, kind)
        if call is None:
            call = self._begin(name, turn())
        else:
            self._session.counts.plain["retries"] += 1
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        call.num_clients += 1
        try:
            yield call
        finally:
            call.num_clients -= 1
            if not call.num_clients and not call.task.done():
                call.timer = asyncio.get_running_loop().call_later(self._session.limits.retry_s, self._give_up, call)

    def cancel(self) -> None:
        """Cancel all turns that are being sampled."""
        for call in list(self._running):
            call.task.cancel()

    def _earlier(self, name: bytes, kind: Kind) -> AgentCall | None:
        """The call that a request repeats: the newest lost one, else the newest; None if it retries a refused request."""
        calls = self._known.get(name, ())
        found = max(enumerate(calls), key=lambda each: (each[1].is_lost, each[0]), default=(0, None))[1]
        if kind == "retry" and self._num_refused and (found is None or not found.is_lost):
            self._num_refused -= 1
            return None
        return found

    def _begin(self, name: bytes, turn: Coroutine[None, None, Turned]) -> AgentCall:
        call = AgentCall(asyncio.create_task(turn))
        self._known.setdefault(name, []).append(call)
        self._running.add(call)
        call.task.add_done_callback(lambda task: self._end(name, call))
        return call

    def _end(self, name: bytes, call: AgentCall) -> None:
        self._running.discard(call)
        if call.timer is not None:
            call.timer.cancel()
        # Retrieves the exception of a task without clients.
        if call.task.cancelled() or call.task.exception() is not None:
            self._num_refused += call.num_clients
            self._known[name].remove(call)
            if not self._known[name]:
                del self._known[name]

    def _give_up(self, call: AgentCall) -> None:
        self._session.counts.plain["abandoned"] += 1
        call.task.cancel()


def name_of(path: str, body: bytes, headers: Mapping[bytes, bytes]) -> tuple[bytes, Kind]:
    """A request's name, shared by equal requests, and its relation to an earlier one by its headers."""
    key = headers.get(b"idempotency-key", b"")
    number = headers.get(b"x-stainless-retry-count", b"0")
    is_retry = number.isdigit() and bool(number.strip(b"0"))
    name = hashlib.blake2b(b"\0".join((path.encode(), key, body)), digest_size=16).digest()
    if key:
        return name, "same"
    return name, "retry" if is_retry else "new"

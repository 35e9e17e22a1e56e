"""One process under a time limit, seen from its parent: what it says, when it ends, and whether it takes too much."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from enum import Enum

_CHECK_S = 0.05


class Event(Enum):
    DATA = "it has said something, or closed its mouth"
    ENDED = "it has ended"
    LATE = "its time is over"
    GREEDY = "it takes too much"


class Watch:
    """Watches a child process; on exit from the context the process is dead."""

    def __init__(self, pid: int, limit_s: float, is_greedy: Callable[[], bool]) -> None:
        self._pid, self._is_greedy = pid, is_greedy
        self._started = time.monotonic()
        self._deadline = self._started + limit_s
        self._handle = os.pidfd_open(pid)
        self._status: int | None = None
        self.last = Event.DATA
        """What the latest `wait` returned."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.exit_code()
        os.close(self._handle)

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile does not count against the process."""
        began = time.monotonic()
        yield
        waited = time.monotonic() - began
        self._started += waited
        self._deadline += waited

    def wait(self, source: int | None) -> Event:
        """Until `source` can be read or something ends the wait."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if source is not None:
            poll.register(source, select.POLLIN)
        while True:
            left_s = self.left_s
            # What has come by the time that we look came in time: it is not the process that was kept from running.
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, min(left_s, _CHECK_S)) * 1000)]
            if ready:
                self.last = Event.DATA if source in ready else Event.ENDED
            elif left_s <= 0:
                self.last = Event.LATE
            elif self._is_greedy():
                self.last = Event.GREEDY
            else:
                continue
            return self.last

    def hear(self, channel: socket.socket, size: int) -> bytes:
        """So many bytes; fewer when it ends before that, or has to be ended."""
        data = b""
        while len(data) < size and self.wait(channel.fileno()) is Event.DATA:
            try:
                piece = channel.recv(size - len(data))
            except ConnectionError:
                break
            if not piece:
                break
            data += piece
        return data

    def collect(self, source: int, limit: int) -> bytes | None:
        """All it writes until it ends; None when it has to be ended, or writes more than `limit` bytes."""
        data = bytearray()
        listening: int | None = source
        while len(data) <= limit:
            event = self.wait(listening)
            if event is Event.ENDED:
                return bytes(data)
            if event is not Event.DATA:
                return None
            piece = os.read(source, 2**16)
            data += piece
            if not piece:
                listening = None
        return None

    def exit_code(self) -> int:
        """Waits for the end. Negative: the signal that ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._status

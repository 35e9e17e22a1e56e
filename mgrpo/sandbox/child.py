"""A child process under limits of time and memory: its output and its end."""

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
    """Reason why a wait ended."""

    DATA = "the process has written or closed its output"
    ENDED = "the process has ended"
    TIMEOUT = "its time is over"
    OVER_MEMORY = "it uses too much memory"


class ChildWatch:
    """Watches a child process; on exit from the context the process has ended."""

    def __init__(self, pid: int, limit_s: float, exceeds_memory: Callable[[], bool]) -> None:
        self._pid, self._exceeds_memory = pid, exceeds_memory
        self._started = time.monotonic()
        self._deadline = self._started + limit_s
        self._handle = os.pidfd_open(pid)
        self._status: int | None = None
        self.last = Event.DATA
        """Result of the latest `wait`."""

    def __enter__(self) -> ChildWatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.exit_code()
        os.close(self._handle)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time within this context does not count against the process."""
        began = time.monotonic()
        yield
        waited = time.monotonic() - began
        self._started += waited
        self._deadline += waited

    def restart(self, limit_s: float) -> None:
        """Give the process that much time from now."""
        self._started = time.monotonic()
        self._deadline = self._started + limit_s

    def exceeded(self) -> Event | None:
        """The limit that the process has exceeded."""
        if self.left_s <= 0:
            return Event.TIMEOUT
        return Event.OVER_MEMORY if self._exceeds_memory() else None

    def wait(self, *sources: int) -> Event:
        """Wait until one of the sources can be read, the process ends or a limit is exceeded."""
        poll = select.poll()
        for descriptor in (self._handle, *sources):
            poll.register(descriptor, select.POLLIN)
        while True:
            left_s = self.left_s
            # Data that is present now came in time: a delay of this process must not count against the program.
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, min(left_s, _CHECK_S)) * 1000)]
            if ready:
                self.last = Event.ENDED if ready == [self._handle] else Event.DATA
            elif left_s <= 0:
                self.last = Event.TIMEOUT
            elif self._exceeds_memory():
                self.last = Event.OVER_MEMORY
            else:
                continue
            return self.last

    def receive(self, channel: socket.socket, size: int) -> bytes:
        """`size` bytes; fewer when the process ends or exceeds a limit before that."""
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
        """All that the process writes until it ends; None when it exceeds a limit or writes more than `limit` bytes."""
        data = bytearray()
        open_sources = [source]
        while len(data) <= limit:
            event = self.wait(*open_sources)
            if event is Event.ENDED:
                return bytes(data)
            if event is not Event.DATA:
                return None
            piece = os.read(source, 2**16)
            data += piece
            if not piece:
                open_sources = []
        return None

    def exit_code(self) -> int:
        """Wait for the end; a negative code is the signal that ended the process."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._status

"""A connection of a client that is not trusted: bounds that the HTTP server does not have."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_LIMIT_S = 10.0
"""Time for a connection to send the head of its next request."""
WRITE_LIMIT_S = 60.0
"""Time for a client to take a piece of an answer."""
_SPARE_DESCRIPTORS = 256
_BACKLOG = 4096


class BoundedConnection(H11Protocol):
    """Closed when no request begins in time, when its client does not take an answer, or when so many are open that the process
    would run out of descriptors."""

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_DESCRIPTORS):
            transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_LIMIT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self._stop_write_timer()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch(self) -> None:
        """Start the time when the connection has no request, stop it when it has one."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not has_request and self._timer is None:
            self._timer = self.loop.call_later(HEAD_LIMIT_S, self.transport.close)


def listen(host: str, port: int) -> socket.socket:
    """A socket for a server; `port` 0: any free one. OSError where it is taken, or the host is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # asyncio sets this only for sockets that name their protocol, which those of `create_server` do not. Without it an answer in
    # two writes waits 40 ms for the client's acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening

"""A connection of the code service: bounds that the HTTP server does not have."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_LIMIT_S = 10.0
"""Time for a connection to send the head of its next request."""
_SPARE_DESCRIPTORS = 256


class SandboxConnection(H11Protocol):
    """Closed when no request begins in time, or when so many are open that the process would run out of descriptors."""

    _timer: asyncio.TimerHandle | None = None

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

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the time when the connection has no request, stop it when it has one."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not has_request and self._timer is None:
            self._timer = self.loop.call_later(HEAD_LIMIT_S, self.transport.close)

"""Proxy from a box to the endpoint, the only address that a box without network reaches. Standard library only.

The listening socket may lie in another network namespace: its holder accepts, wherever it was made. So nothing runs inside the
box, and a client in it needs nothing but the URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any

MAX_CONNECTIONS = 64
"""Most connections at once; further ones wait in the backlog."""
_CHUNK = 2**16
_CONNECT_LIMIT_S = 10.0


class Relay:
    """Forwarder of one box's connections. For one event loop."""

    def __init__(self, listening: socket.socket) -> None:
        """Take ownership of the socket."""
        self._listening = listening
        self._address: tuple[str, int] | None = None
        self._server: asyncio.Server | None = None
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def listening(self) -> socket.socket:
        return self._listening

    def pass_to(self, address: tuple[str, int]) -> None:
        """Begin to accept and forward to this address, the only one of a box."""
        assert self._address in (None, address), "a box has one endpoint"
        if self._address is None:
            self._address = address
            self._listening.setblocking(False)
            self._spawn(self._accept())

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._listening.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                inner, _ = await loop.sock_accept(self._listening)
            except OSError:
                # Out of descriptors, or a client that has left already.
                self._room.release()
                await asyncio.sleep(0.1)
                continue
            self._spawn(self._pass(inner))

    async def _pass(self, inner: socket.socket) -> None:
        assert self._address is not None
        try:
            with contextlib.closing(inner):
                await self._join(inner, *self._address)
        finally:
            self._room.release()

    async def _join(self, inner: socket.socket, host: str, port: int) -> None:
        writers = []
        try:
            with contextlib.suppress(OSError, TimeoutError):
                if inner.family != socket.AF_UNIX:
                    inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(_CONNECT_LIMIT_S):
                    theirs, to_them = await asyncio.open_connection(host, port, limit=_CHUNK)
                writers.append(to_them)
                ours, to_us = await asyncio.open_connection(sock=inner, limit=_CHUNK)
                writers.append(to_us)
                await asyncio.gather(_copy(ours, to_them), _copy(theirs, to_us))
        finally:
            for writer in writers:
                writer.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(_CHUNK):
        target.write(piece)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()

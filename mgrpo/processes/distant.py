"""Processes of other machines that join a run to answer questions in JSON lines, like child processes.

Rank 0 has a `Door`; the other side calls `join`, and answers on the resulting connection. Each side proves only that it
holds the run's secret; messages are not encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable

from mgrpo.processes.json_lines import AskingEnd
from mgrpo.processes.tcp_links import GREETING_S, MAX_PROOF_BYTES, MAX_STRANGERS, is_proof, notice_silence, reach

RETRY_S = 0.5


class Distant(AskingEnd):
    """A process that has joined. Always `end` it."""

    def __init__(self, connection: socket.socket, *, max_line_bytes: int) -> None:
        self._connection = connection
        self.host = connection.getpeername()[0]
        """The address that it came from."""
        # Two descriptors: the one for questions is watched only while some wait.
        questions, answers = (os.fdopen(os.dup(connection.fileno()), mode, buffering=0) for mode in ("wb", "rb"))
        super().__init__(questions, answers, max_line_bytes=max_line_bytes)

    @property
    def how_it_ended(self) -> str:
        """Predicate of a sentence about the process: its end or its fault."""
        return self.fault or "closed its connection"

    def end(self) -> None:
        """Close the connection, which ends the other process's work. Any thread may call."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self.close_pipes()


class Door:
    """Listener for processes of other machines. All calls in the thread of one event loop; always `close` it."""

    def __init__(
        self, listener: socket.socket, *, secret: str, on_joined: Callable[[Distant], None], max_line_bytes: int
    ) -> None:
        """
        Args:
            listener: socket that accepts them from now on.
            secret: that they must prove.
            max_line_bytes: see `AskingEnd`.
        """
        listener.setblocking(False)
        self._listener, self._secret, self._on_joined, self._max_line_bytes = (
            listener,
            secret,
            on_joined,
            max_line_bytes,
        )
        self._strangers: dict[asyncio.Task[None], None] = {}
        """Connections without a proof yet, the oldest first."""
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Take no more."""
        tasks = [self._accepting, *self._strangers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # it has gone again, or this process has too many files open
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                next(iter(self._strangers)).cancel()
            task = asyncio.create_task(self._greet(connection))
            self._strangers[task] = None
            task.add_done_callback(self._strangers.pop)

    async def _greet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        nonce = secrets.token_hex(16)
        try:
            async with asyncio.timeout(GREETING_S):
                line = await _answer(connection, {"nonce": nonce, "is_secret": True})
            if not is_proof(line, self._secret, nonce):
                raise ConnectionError("no proof")
            notice_silence(connection)
            joined = Distant(connection, max_line_bytes=self._max_line_bytes)
        except (OSError, TimeoutError):
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        else:
            self._on_joined(joined)


async def _answer(connection: socket.socket, welcome: dict[str, object]) -> bytes:
    """The line with which a stranger answers."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, json.dumps(welcome).encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        data = await loop.sock_recv(connection, MAX_PROOF_BYTES - len(line))
        if not data:
            raise ConnectionError("no line")
        line += data
    return line[:-1]


def join(address: tuple[str, int], *, secret: str, timeout_s: float) -> socket.socket:
    """Connection to the listener at `address`, once it is open. One that closes before a first question was refused.

    Raises:
        TimeoutError: it was not open in time.
        ValueError: another kind of server answers.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link, nonce, _ = reach(address, timeout_s=max(RETRY_S, deadline - time.monotonic()))
        except OSError as err:
            if time.monotonic() + RETRY_S > deadline:
                raise TimeoutError(f"{err}") from err
            time.sleep(RETRY_S)
            continue
        link.connection.settimeout(None)
        link.prove(secret, nonce, number=0)
        return link.connection

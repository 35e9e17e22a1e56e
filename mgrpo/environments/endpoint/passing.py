"""Calls for a session of another endpoint, passed on to it: one name may stand in front of many endpoints.

A session's id begins with the number of its endpoint. What comes and goes is passed as it is, piece by piece; a client that goes
away ends the call there as well.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import aiohttp
from yarl import URL

from mgrpo.environments.endpoint.messages import Fault
from mgrpo.processes.tcp_links import notice_silence

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

PASSED = "x-mgrpo-passed"
"""The header of a call that was passed on, which is not passed on again."""
CONNECT_S = 10.0
_SESSION = re.compile(r"/s/([0-9]{1,6})-")
_OF_A_CONNECTION = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "proxy-connection", "expect", "host")
)
_WAITING = 4
"""Pieces of a body that may wait for the other endpoint."""


class Passing:
    """The way from one endpoint of a run to the others."""

    def __init__(self, number: int) -> None:
        """`number`: of this endpoint."""
        self.urls: Mapping[int, str] = {}
        """Where each endpoint of the run is reached by the others."""
        self._number, self._num_asked = number, 0
        self._client: aiohttp.ClientSession | None = None

    def url_of(self, scope: Mapping[str, Any]) -> str | None:
        """The endpoint whose session an HTTP call is for; None: it is answered here, with an error if nobody knows it."""
        found = _SESSION.match(_path(scope))
        if found is None or int(found[1]) == self._number:
            return None
        return None if _was_passed(scope) else self.urls.get(int(found[1]))

    def url_for_task(self, scope: Mapping[str, Any]) -> str | None:
        """The endpoint whose turn it is to give a worker a task, where this one has none; None: this one.

        A worker keeps its connection, and a balancer may send all of them to one endpoint.
        """
        if _was_passed(scope) or not self.urls:
            return None
        self._num_asked += 1
        numbers = sorted(self.urls)
        number = numbers[(self._number + self._num_asked) % len(numbers)]
        return None if number == self._number else self.urls[number]

    async def pass_on(self, url: str, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Have it answered there, until the answer has ended or the client has gone.

        An answer that is broken off there is left incomplete, for which the server closes the client's connection.

        Raises:
            Fault: 503, the other endpoint is not reached; nothing has been sent.
        """
        body: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        answering = asyncio.create_task(self._answer(url, scope, body, send))
        reading = asyncio.create_task(_read(receive, body))
        try:
            await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled, it closes its connection, by which the other endpoint knows that the client has gone.
            answering.cancel()
            reading.cancel()
            ended = await asyncio.gather(answering, reading, return_exceptions=True)
        if isinstance(error := ended[0], Exception):
            raise error

    async def close(self) -> None:
        """End what is under way."""
        if self._client is not None:
            await self._client.close()

    async def _answer(self, url: str, scope: Mapping[str, Any], body: asyncio.Queue[bytes | None], send: Send) -> None:
        has_begun = False
        try:
            async with self._connected().request(
                scope["method"],
                _target(url, scope),
                headers=[
                    *_kept((name.decode("latin1"), value.decode("latin1")) for name, value in scope["headers"]),
                    (PASSED, "1"),
                ],
                data=_pieces(body) if _has_body(scope) else None,
                allow_redirects=False,
            ) as answer:
                headers = [
                    (name.lower().encode("latin1"), value.encode("latin1"))
                    for name, value in _kept(answer.headers.items())
                ]
                has_begun = True
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientError as err:
            if has_begun:
                return
            raise Fault(503, "server_error", "the endpoint of this session is not reached; try again") from err

    def _connected(self) -> aiohttp.ClientSession:
        if self._client is None:
            # A connection of its own for each call: one that is kept may be closed while it is used again.
            connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket)
            self._client = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._client


async def _read(receive: Receive, body: asyncio.Queue[bytes | None]) -> None:
    """Take what the client sends, and end when it has gone. None is the end of its body."""
    while (event := await receive())["type"] != "http.disconnect":
        if event.get("body"):
            await body.put(event["body"])
        if not event.get("more_body"):
            await body.put(None)


async def _pieces(body: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (piece := await body.get()) is not None:
        yield piece


def _was_passed(scope: Mapping[str, Any]) -> bool:
    return any(name == PASSED.encode() for name, _ in scope["headers"])


def _has_body(scope: Mapping[str, Any]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _target(url: str, scope: Mapping[str, Any]) -> URL:
    """The same path and query there, to the byte."""
    query = scope.get("query_string", b"").decode("latin1")
    return URL(url + _path(scope) + (f"?{query}" if query else ""), encoded=True)


def _path(scope: Mapping[str, Any]) -> str:
    """As it was sent: what a client has escaped stays so, and cannot be taken for a part of the other endpoint's address."""
    return scope["raw_path"].decode("latin1")


def _kept(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Headers without those that are about one connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_A_CONNECTION]


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that notices when the other machine has gone."""
    family, kind, protocol = address[:3]
    found = socket.socket(family, kind, protocol)
    found.setblocking(False)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_silence(found)
    return found

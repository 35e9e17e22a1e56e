"""One session with an MCP server: opened by a separate task, checked after a failure, reopened when lost.

The library's sessions are anyio task groups. They must be left by the task that entered them, and a failed request may
cancel that task; so no caller ever enters one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar
from urllib.parse import parse_qsl, urlsplit

from mgrpo.environments.adaptors.mcp_relay import MAX_MESSAGE_BYTES
from mgrpo.environments.offered.agent import masked
from mgrpo.processes.reply_bodies import PLAIN

TRANSPORTS = ("stdio", "http", "sse")
_OPEN_S = 30.0
_CHECK_S = 5.0
_CLOSE_S = 5.0
_SHOWN_LOG = 400
_MAX_TOOLS = 1000
_SECRET = re.compile("key|token|secret|pass|auth|cookie|credential|session", re.IGNORECASE)
_BLANK_LINES = (b"\n\n", b"\r\r", b"\r\n\r\n")
"""Ends of an event."""
_RELAY = "import sys; sys.path.append(sys.argv.pop(1)); from mgrpo.environments.adaptors.mcp_relay import main; main()"
"""Program that runs the server, which then dies with this process; the library starts servers in separate sessions."""
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])

T = TypeVar("T")
Record = dict[str, Any]
"""A message of the protocol, with the protocol's names."""


class SessionError(Exception):
    """The server cannot be reached, or went away; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A server: its address, or the command that starts it."""

    transport: str
    server_url: str = ""
    command: str = ""
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The address or command for messages, without the parts of an address that may hold a key."""
        url = urlsplit(self.server_url)
        return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl() or " ".join(
            (self.command, *self.args)
        )

    @property
    def hidden(self) -> list[str]:
        """Values under names of secrets, which no text of the server may show to the model."""
        url = urlsplit(self.server_url)
        given = [*self.env.items(), *self.headers.items(), *parse_qsl(url.query), ("password", url.password or "")]
        secret = [value for name, value in given if value and _SECRET.search(name)]
        # A header may have the kind of the key before it.
        return [word for value in secret for word in {value, *value.split()}]

    async def connect(self, stack: contextlib.AsyncExitStack, log: TextIO) -> Any:
        """The library's session, after the handshake; a server that is started writes its errors to `log`."""
        from mcp import ClientSession

        streams = await stack.enter_async_context(self._streams(stack, log))
        session: Any = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
        # Version 1 and version 2. Patterns and references of the server's own schemas would hold up the loop.
        session._validate_tool_result = session.validate_tool_result = _accept
        await session.initialize()
        return session

    def _streams(self, stack: contextlib.AsyncExitStack, log: TextIO) -> contextlib.AbstractAsyncContextManager[Any]:
        if self.transport == "stdio":
            from mcp import StdioServerParameters, stdio_client

            if shutil.which(self.command) is None:
                raise SessionError(f"the command {self.command!r} was not found")
            launch = ["-I", "-S", "-c", _RELAY, _PACKAGE_PARENT, self.command, *self.args]
            return stdio_client(StdioServerParameters(command=sys.executable, args=launch, env=dict(self.env)), log)
        if self.transport == "sse":
            from mcp.client.sse import sse_client

            return sse_client(self.server_url, headers=dict(self.headers), httpx_client_factory=bounded_client)
        from mcp.client.streamable_http import streamable_http_client

        client = bounded_client(headers=dict(self.headers))
        stack.push_async_callback(client.aclose)
        return streamable_http_client(self.server_url, http_client=client)


class McpSession:
    """Requests to one server, from any number of tasks at once."""

    def __init__(self, server: McpServer, *, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._owner: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Any] | None = None
        self._closing = asyncio.Event()
        self._is_suspect = False
        self._wrote = ""
        self._tools: list[Record] | None = None

    async def tools(self) -> list[Record]:
        """All tools of the server; it is asked once."""
        if self._tools is None:
            self._tools = await self._asked(_all_tools)
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Record:
        """The result of one call. Errors: the library's, or SessionError."""

        async def request(client: Any) -> Record:
            return (await client.call_tool(name, dict(arguments))).model_dump(mode="json", by_alias=True)

        return await self._asked(request)

    async def renew(self) -> None:
        """Replace the session by a new one; raises SessionError."""
        async with self._lock:
            await self._end()
        await self._ready()

    async def close(self) -> None:
        async with self._lock:
            await self._end()

    async def _asked(self, request: Callable[[Any], Awaitable[T]]) -> T:
        return await self._answer(await self._ready(), request, self._timeout_s)

    async def _answer(self, client: Any, request: Callable[[Any], Awaitable[T]], limit_s: float) -> T:
        """The answer, unless the session ends first. After anything else the session is checked before its next use."""
        assert self._owner is not None
        owner, asked = self._owner, asyncio.ensure_future(request(client))
        try:
            await asyncio.wait({asked, owner}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() and owner.done():
                raise SessionError(f"the session with {self._server} ended{self._because(owner)}")
            if not asked.done():
                raise TimeoutError(f"no answer in {limit_s:g} s")
            if asked.cancelled():
                raise SessionError(f"the session with {self._server} was cancelled")
            return asked.result()
        except BaseException:
            self._is_suspect = True
            raise
        finally:
            asked.cancel()
            asked.add_done_callback(_seen)

    async def _ready(self) -> Any:
        """The library's session, reopened if it has ended or does not answer."""
        async with self._lock:
            if self._is_suspect and not await self._is_alive():
                await self._end()
            self._is_suspect = False
            if self._owner is None or self._owner.done():
                self._opened, self._closing = asyncio.get_running_loop().create_future(), asyncio.Event()
                self._owner = asyncio.create_task(self._own(self._opened, self._closing))
            owner, opened = self._owner, self._opened
            assert opened is not None
            await asyncio.wait({opened, owner}, timeout=_OPEN_S, return_when=asyncio.FIRST_COMPLETED)
            if opened.done():
                return opened.result()
            reason = self._because(owner) if owner.done() else f": no answer in {_OPEN_S:g} s"
            await self._end()
            raise SessionError(f"no session with {self._server}{reason}")

    async def _own(self, opened: asyncio.Future[Any], closing: asyncio.Event) -> None:
        with tempfile.TemporaryFile("a+", errors="replace") as log:
            try:
                async with contextlib.AsyncExitStack() as stack:
                    opened.set_result(await self._server.connect(stack, log))
                    await closing.wait()
            finally:
                log.seek(0)
                self._wrote = log.read().strip()[-_SHOWN_LOG:]

    async def _is_alive(self) -> bool:
        if self._owner is None or self._owner.done() or self._opened is None or not self._opened.done():
            return False
        try:
            await self._answer(self._opened.result(), lambda client: client.list_tools(), _CHECK_S)
        except Exception:
            return False
        return True

    async def _end(self) -> None:
        owner, self._owner = self._owner, None
        if owner is None:
            return
        if self._opened is not None and self._opened.done():
            self._closing.set()
            await asyncio.wait({owner}, timeout=_CLOSE_S)
        if not owner.done():
            owner.cancel()
            await asyncio.wait({owner}, timeout=_CLOSE_S)
        owner.add_done_callback(_seen)

    def _because(self, owner: asyncio.Task[None]) -> str:
        """The reason why the session ended, as the end of a sentence: the first error in the groups and the server's output."""
        if owner.cancelled() or (error := owner.exception()) is None:
            return ""
        while inner := getattr(error, "exceptions", ()):
            error = inner[0]
        if isinstance(error, SessionError):
            return f": {error}"
        wrote = f"; the server wrote: {self._wrote}" if self._wrote else ""
        return masked(f": {type(error).__name__}: {error!s:.1000}{wrote}", self._server.hidden)


def _seen(task: asyncio.Future[Any]) -> None:
    """Retrieve a task's error, so that asyncio does not report it as unhandled."""
    if not task.cancelled():
        task.exception()


async def _all_tools(client: Any) -> list[Record]:
    from mcp.types import PaginatedRequestParams

    found: list[Record] = []
    cursor = None
    for _ in range(_MAX_TOOLS):
        page = await client.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        record = page.model_dump(mode="json", by_alias=True)
        found += record["tools"]
        if len(found) > _MAX_TOOLS:
            break
        if not (cursor := record.get("nextCursor")):
            return found
    raise ValueError(f"the server lists more than {_MAX_TOOLS} tools or pages of them, expected fewer")


async def _accept(name: str, result: Any) -> None:
    """Accept any structure of a result: the model is shown its text."""


def bounded_client(headers: Mapping[str, str] | None = None, **settings: Any) -> Any:
    """The library's client, of httpx or of httpx2: no redirects to other hosts, which would get the user's headers, nothing compressed,
    and no message that is too long."""
    from mcp.shared._httpx_utils import create_mcp_http_client

    client: Any = create_mcp_http_client(headers={**(headers or {}), **PLAIN}, **settings)
    client.event_hooks = {"response": [functools.partial(_bound, type(client).__module__.partition(".")[0])]}
    return client


async def _bound(library: str, response: Any) -> None:
    if response.has_redirect_location:
        asked = response.request.url
        target = asked.join(response.headers["Location"])
        if (target.scheme, target.host, target.port) != (asked.scheme, asked.host, asked.port):
            raise ValueError(
                f"the server leads to {target.host[:200]}, expected answers of {asked.host}; give that address"
            )
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"the answer is in Content-Encoding {encoding[:40]}, expected none")
    is_events = response.headers.get("Content-Type", "").lower().startswith("text/event-stream")
    stream = response.stream

    class Bounded(importlib.import_module(library).AsyncByteStream):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in bounded(stream, by_event=is_events):
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    response.stream = Bounded()


async def bounded(pieces: Any, *, by_event: bool) -> AsyncIterator[bytes]:
    """Pieces of a body.

    Args:
        by_event: bound each event of it instead of the whole.
    Raises:
        ValueError: it is longer than `MAX_MESSAGE_BYTES`.
    """
    size, last = 0, b""
    async for piece in pieces:
        size += len(piece)
        if by_event:
            joined = last + piece
            ends = [place + len(line) for line in _BLANK_LINES if (place := joined.rfind(line)) >= 0]
            size = len(joined) - max(ends) if ends else size
            last = joined[-3:]
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"the server sends a message of more than {MAX_MESSAGE_BYTES} bytes")
        yield piece

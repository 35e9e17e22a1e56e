"""One HTTP request and its answer: the body within its limits, the wait for a turn, and its delivery to the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any

from mgrpo.environments.endpoint.messages import BadRequest, Fault

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

MAX_HELD_BYTES = 1 << 30
"""Most bytes of the bodies of all open requests; further ones are refused with status 503."""
_JSON = (b"content-type", b"application/json")
_MOST_DIGITS = 20
"""Most digits of a length; Python refuses to read numbers of thousands of digits."""


class ClientGone(Exception):
    """The client disconnected."""


_MOST_VALUES = 1 << 16
"""Most values of one body; reading one without a bound blocks all other calls for seconds."""


class Held:
    """Bytes of the bodies of all requests, or of those of one trajectory."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, *, within: Held | None = None) -> None:
        """`within`: a total to which the bytes are added as well."""
        self.num_bytes, self.max_bytes, self._within = 0, max_bytes, within

    def add(self, num_bytes: int) -> None:
        """Count further bytes; negative: these are no longer held."""
        self.num_bytes += num_bytes
        if self._within is not None:
            self._within.add(num_bytes)

    def check(self) -> None:
        """Raise a Fault if there are too many."""
        if self._within is not None:
            self._within.check()
        if self.num_bytes > self.max_bytes and self._within is not None:
            raise Fault(
                429,
                "rate_limit_error",
                f"the open calls of this trajectory have more than {self.max_bytes} bytes; wait until one has been answered",
                "rate_limit_exceeded",
            )
        if self.num_bytes > self.max_bytes:
            raise Fault(503, "server_error", "too many requests are being read; try again", "overloaded")


class Exchange:
    """One request and its response over ASGI."""

    def __init__(self, scope: Event, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.method: str = scope["method"]
        self.parts: list[str] = scope["path"].split("/")[1:]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.has_begun = False
        """True once the head of the answer has been sent."""
        self._has_body_left = self.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self.headers

    @property
    def key(self) -> str:
        """API key, from x-api-key or the bearer token."""
        if (given := self.headers.get(b"x-api-key")) is None:
            given = self.headers.get(b"authorization", b"")
            given = given[7:] if given[:7].lower() == b"bearer " else given
        return given.decode("latin1").strip()

    @contextlib.asynccontextmanager
    async def body(self, held: Held, *, max_bytes: int, limit_s: float) -> Any:
        """The body, counted as held until the answer is out.

        Raises:
            Fault: it is too large, or does not arrive in time.
            ClientGone: it will not arrive.
        """
        size = num_held = 0
        refused: Fault | None = None
        try:
            length = self.headers.get(b"content-length", b"")
            if length.isdigit() and (len(length) > _MOST_DIGITS or int(length) > max_bytes):
                raise _too_large(max_bytes)
            pieces = []
            try:
                async with asyncio.timeout(limit_s):
                    while True:
                        event = await self._receive()
                        if event["type"] == "http.disconnect":
                            raise ClientGone
                        piece = event.get("body", b"")
                        size += len(piece)
                        if size > max_bytes:
                            raise _too_large(max_bytes)
                        if refused is None:
                            pieces.append(piece)
                            held.add(len(piece))
                            num_held += len(piece)
                            try:
                                held.check()
                            except Fault as fault:
                                # The rest is read and dropped: a client that is cut off may not see the answer.
                                refused = fault
                                pieces.clear()
                                held.add(-num_held)
                                num_held = 0
                        if not event.get("more_body"):
                            break
            except TimeoutError:
                raise Fault(
                    408, "invalid_request_error", f"the body did not arrive within {limit_s:g} s", "request_timeout"
                ) from None
            self._has_body_left = False
            if refused is not None:
                raise refused
            yield b"".join(pieces)
        finally:
            held.add(-num_held)

    async def wait(self, task: asyncio.Task[Any], *, comment_s: float | None) -> asyncio.Task[None]:
        """Wait for a task; returns the watch for the client's end, to be cancelled.

        Args:
            comment_s: seconds between signs of life in a stream, which begins with the first one; None: the answer is no stream.
        Raises:
            ClientGone: before the task was done, or at the same time.
        """
        watch = asyncio.create_task(self._gone())
        try:
            while not task.done():
                await asyncio.wait((task, watch), timeout=comment_s, return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    raise ClientGone
                if not task.done():
                    await self._begin_stream()
                    await self._send({"type": "http.response.body", "body": b": sampling\n\n", "more_body": True})
        except BaseException:
            watch.cancel()
            raise
        return watch

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def deliver(self, data: bytes, watch: asyncio.Task[None], *, is_stream: bool) -> None:
        """Answer with a turn.

        Raises:
            ClientGone: the client has not received it.
        """
        if is_stream:
            await self._begin_stream()
        else:
            await self._begin(200, [_JSON, (b"content-length", str(len(data)).encode())])
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if watch.done():
            raise ClientGone
        await self._send({"type": "http.response.body", "body": b""})

    async def answer(self, status: int, value: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Answer with JSON."""
        data = json.dumps(value).encode()
        await self._begin(status, [_JSON, (b"content-length", str(len(data)).encode()), *headers])
        await self._send({"type": "http.response.body", "body": data})

    async def refuse(self, fault: Fault, value: Any, event: bytes) -> None:
        """Answer with an error: `value`, or `event` if a stream has begun."""
        if self.has_begun:
            await self._send({"type": "http.response.body", "body": event})
            return
        await self.answer(fault.status, value, list(_headers(fault)))

    async def _begin_stream(self) -> None:
        if not self.has_begun:
            await self._begin(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")])

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        if self._has_body_left:
            # The rest of the body is not read, so that no other request can follow it.
            headers = [*headers, (b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        BadRequest: it is no JSON object, or has too many values.
    """
    # In a valid beginning, the text outside of strings is found exactly; nothing is read behind the first error.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_values = plain.count(b'"') // 2
    if num_values <= 2 * _MOST_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        num_values = sum(outside.count(each) for each in (b",", b"[", b"{"))
    if num_values > _MOST_VALUES:
        raise BadRequest(f"The body of a request may have at most {_MOST_VALUES} values.")
    try:
        value = json.loads(body, parse_constant=_refused)
    except (ValueError, RecursionError) as err:
        raise BadRequest(f"We could not parse the JSON body of your request: {str(err)[:200]}") from None
    if not isinstance(value, dict):
        raise BadRequest("The body of a request must be a JSON object.")
    return value


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _too_large(max_bytes: int) -> Fault:
    return Fault(413, "invalid_request_error", f"a body may have at most {max_bytes} bytes", "request_too_large")


def _headers(fault: Fault) -> Iterator[tuple[bytes, bytes]]:
    """Headers that make clients retry or stop."""
    if fault.status in (429, 503) and fault.code != "run_over":
        yield b"retry-after", b"1"
    elif fault.status != 408:
        yield b"x-should-retry", b"false"

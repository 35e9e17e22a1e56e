"""Calls that one endpoint passes on to another, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import aiohttp
import pytest
import uvicorn

from mgrpo.environments.endpoint.messages import Fault
from mgrpo.environments.endpoint.passing import Passing


async def body_of(receive):
    body = b""
    while (event := await receive())["type"] != "http.disconnect":
        body += event.get("body", b"")
        if not event.get("more_body"):
            return body
    return None


class Endpoint:
    """An application that passes on what is another's, and says what it was asked."""

    def __init__(self, number):
        self.passing = Passing(number)
        self.asked = []
        self.released, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        if (url := self.passing.url_of(scope)) is not None:
            try:
                return await self.passing.pass_on(url, scope, receive, send)
            except Fault as fault:
                return await answer(send, fault.status, fault.message.encode())
        headers = dict(scope["headers"])
        kind = headers.get(b"x-kind", b"whole")
        self.asked.append((scope["method"], scope["raw_path"], scope["query_string"], headers))
        if kind == b"early":
            return await answer(send, 408, b"too slow")
        body = await body_of(receive)
        if kind == b"whole":
            return await answer(send, 418, body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
        if kind == b"broken":
            return None
        gone = asyncio.create_task(body_of(receive))
        released = asyncio.create_task(self.released.wait())
        await asyncio.wait({gone, released}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.left.set()
        released.cancel(), gone.cancel()
        await send({"type": "http.response.body", "body": b"data: done\n\n"})


async def answer(send, status, body):
    headers = [(b"content-length", str(len(body)).encode()), (b"x-should-retry", b"false")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def endpoints(num):
    """So many, which know each other, and their addresses."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    urls = {number: f"http://127.0.0.1:{listener.getsockname()[1]}" for number, listener in enumerate(listeners)}
    apps = [Endpoint(number) for number in range(num)]
    servers = []
    for app, listener in zip(apps, listeners, strict=True):
        app.passing.urls = urls
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        server.capture_signals = contextlib.nullcontext
        servers.append((server, asyncio.create_task(server.serve([listener]))))
    while not all(server.started for server, _ in servers):
        await asyncio.sleep(0.01)
    try:
        async with aiohttp.ClientSession() as client:
            yield apps, urls, client
    finally:
        for server, task in servers:
            server.should_exit = server.force_exit = True
            await task
        for app in apps:
            await app.passing.close()


def test_a_call_reaches_the_endpoint_of_its_session_as_it_was_sent():
    """Behind one name any endpoint gets a call; only the session's own has its tokens."""

    async def run():
        async with endpoints(3) as (apps, urls, client):
            path = "/s/2-ab/v1/chat%2Fx?beta=true&a=%20"
            async with client.post(urls[0] + path, data=b"{}" * 100_000, headers={"x-api-key": "k"}) as found:
                assert (found.status, await found.read()) == (418, b"{}" * 100_000)
                assert found.headers["x-should-retry"] == "false"
            assert not apps[0].asked and not apps[1].asked
            [(method, raw, query, headers)] = apps[2].asked
            assert (method, raw, query, headers[b"x-api-key"]) == (
                "POST",
                b"/s/2-ab/v1/chat%2Fx",
                b"beta=true&a=%20",
                b"k",
            )
            async with client.get(urls[1] + "/s/0-ab/v1/models") as found:
                assert (found.status, apps[0].asked[0][0]) == (418, "GET")

    asyncio.run(run())


@pytest.mark.parametrize(
    "path", ["/v1/models", "/s/0-ab/x", "/s/7-ab/x", "/s/ab", "/", "/s/99999999999999999999-a", "/x/s/1-a"]
)
def test_the_rest_is_answered_where_it_came(path):
    """An id that nobody knows must be refused, not looked for."""

    async def run():
        async with endpoints(2) as (apps, urls, client), client.post(urls[0] + path, data=b"x") as found:
            assert found.status == 418 and len(apps[0].asked) == 1 and not apps[1].asked

    asyncio.run(run())


def test_a_call_is_passed_on_once():
    """Endpoints that disagree about a number must not send a call round for ever."""

    async def run():
        async with endpoints(2) as (apps, urls, client):
            apps[0].passing.urls = {1: urls[0]}
            async with client.post(urls[0] + "/s/1-ab/x", data=b"x") as found:
                assert found.status == 418 and len(apps[0].asked) == 1

    asyncio.run(run())


def test_a_stream_arrives_piece_by_piece():
    """A client's read time-out must see the signs of life that the other endpoint sends while a turn is sampled."""

    async def run():
        async with (
            endpoints(2) as (apps, urls, client),
            client.post(urls[0] + "/s/1-ab/x", data=b"x", headers={"x-kind": "stream"}) as found,
        ):
            assert await asyncio.wait_for(found.content.readany(), 10) == b": waiting\n\n"
            apps[1].released.set()
            assert await found.content.read() == b"data: done\n\n"

    asyncio.run(run())


def test_a_client_that_goes_away_ends_the_call_there():
    """Its turn is then not delivered, and not trained."""

    async def run():
        async with endpoints(2) as (apps, urls, client):
            async with client.post(urls[0] + "/s/1-ab/x", data=b"x", headers={"x-kind": "stream"}) as found:
                await found.content.readany()
            await asyncio.wait_for(apps[1].left.wait(), 10)

    asyncio.run(run())


def test_an_answer_before_the_body_has_ended():
    """A body that never ends is refused by the session's endpoint; the one between waits no longer."""

    async def slow():
        yield b"x"
        await asyncio.sleep(60)

    async def run():
        async with endpoints(2) as (_, urls, client):
            post = client.post(urls[0] + "/s/1-ab/x", data=slow(), headers={"x-kind": "early"})
            async with asyncio.timeout(20), post as found:
                assert (found.status, await found.read()) == (408, b"too slow")

    asyncio.run(run())


def test_an_answer_that_breaks_off_is_no_whole_answer():
    """A cut stream must not look like a short one."""

    async def run():
        async with endpoints(2) as (_, urls, client):
            post = client.post(urls[0] + "/s/1-ab/x", data=b"x", headers={"x-kind": "broken"})
            async with post as found:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await found.read()

    asyncio.run(run())


def test_an_endpoint_that_is_not_there():
    """Clients try again after 503; the endpoint may come back, and then answers a retry with the turn that it has."""

    async def run():
        async with endpoints(2) as (apps, urls, client):
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                apps[0].passing.urls = {1: f"http://127.0.0.1:{unused.getsockname()[1]}"}
                async with client.post(urls[0] + "/s/1-ab/x", data=b"x" * 1_000_000) as found:
                    assert (found.status, await found.read()) == (
                        503,
                        b"the endpoint of this session is not reached; try again",
                    )

    asyncio.run(run())


def test_a_path_cannot_name_another_machine():
    """What a client escapes must not become a part of the address."""
    passing = Passing(0)
    passing.urls = {1: "http://127.0.0.1:1"}
    for raw in (b"%2fs/1-a", b"@evil/s/1-a", b"http://evil/s/1-a", b"/%73/1-a", b"/s/%31-a"):
        assert passing.url_of({"path": "/s/1-a", "raw_path": raw, "headers": []}) is None

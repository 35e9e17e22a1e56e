"""Processes of other machines that join to be asked, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import threading

import pytest

from mgrpo.environments.loop.losses import EnvironmentLost
from mgrpo.environments.workers.link import Link
from mgrpo.processes import distant
from mgrpo.processes.distant import Door, join
from mgrpo.processes.tcp_links import MAX_STRANGERS

SECRET = "a secret of the run"


@contextlib.asynccontextmanager
async def door(secret=SECRET, max_line_bytes=1 << 20):
    """A door, its address, and the queue of those that have come in."""
    listener = socket.create_server(("127.0.0.1", 0))
    joined: asyncio.Queue = asyncio.Queue()
    found = Door(listener, secret=secret, on_joined=joined.put_nowait, max_line_bytes=max_line_bytes)
    try:
        yield listener.getsockname(), joined
    finally:
        await found.close()


def answering(address, answer, secret=SECRET):
    """A process that joins and answers each question with what `answer` says, in a thread."""

    def run():
        with join(address, secret=secret, timeout_s=10) as connection, connection.makefile("rwb") as lines:
            for line in lines:
                if not (said := answer(json.loads(line))):
                    return
                lines.write(said)
                lines.flush()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def plain(question):
    return json.dumps({"id": question["id"], "twice": 2 * question["x"]}).encode() + b"\n"


def test_who_knows_the_secret_is_asked_as_a_child_is():
    """The learner asks an endpoint of another node by the same link; long lines go both ways."""

    async def run():
        async with door(max_line_bytes=1 << 24) as (address, joined):
            thread = answering(address, plain)
            other = await asyncio.wait_for(joined.get(), 10)
            assert other.host == "127.0.0.1"
            link = Link(other, lambda why: None)
            answers = await asyncio.gather(*(link.ask({"x": "ab" * 10**6 if x == 3 else x}, 10) for x in range(5)))
            assert [answer["twice"] for answer in answers] == [0, 2, 4, "abab" * 10**6, 8]
            link.end()
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive()

    asyncio.run(run())


@pytest.mark.parametrize(
    "said", [b"0 " + b"0" * 64 + b"\n", b"hello\n", b"\n", b"{}" * 100 + b"\n", b"x" * 1000], ids=lambda said: said[:5]
)
def test_who_does_not_know_it_is_not_asked(said):
    """Whoever is asked could forge trajectories, and sees what is trained."""

    async def run():
        async with door() as (address, joined):
            reader, writer = await asyncio.open_connection(*address)
            welcome = json.loads(await reader.readline())
            assert welcome["is_secret"] and len(welcome["nonce"]) == 32
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            assert joined.empty()
            answering(address, plain, secret="another")
            answering(address, plain)
            await asyncio.wait_for(joined.get(), 10)
            await asyncio.sleep(0.2)
            assert joined.empty()

    asyncio.run(run())


def test_a_proof_is_good_for_one_connection():
    """Who has overheard one cannot join with it."""

    async def run():
        async with door() as (address, joined):
            first, second = [await asyncio.open_connection(*address) for _ in range(2)]
            nonce = json.loads(await first[0].readline())["nonce"]
            proof = f"0 {hmac.digest(SECRET.encode(), f'{nonce} 0'.encode(), 'sha256').hex()}\n".encode()
            second[1].write(proof)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(second[0].read(), 10)
            assert joined.empty()
            first[1].write(proof)
            await asyncio.wait_for(joined.get(), 10)
            first[1].close()
            second[1].close()

    asyncio.run(run())


def test_strangers_are_bounded_in_number_and_time(monkeypatch):
    """Connections that say nothing must not keep out those that belong to the run."""
    monkeypatch.setattr(distant, "GREETING_S", 0.5)

    async def run():
        async with door() as (address, joined):
            silent = [await asyncio.open_connection(*address) for _ in range(MAX_STRANGERS + 5)]
            answering(address, plain)
            await asyncio.wait_for(joined.get(), 10)
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 10)
                writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("ending", ["closes", "writes nonsense", "writes a line without an end"])
def test_one_that_ends_or_breaks_the_protocol_is_lost(ending):
    """Its trajectories are lost, and the run goes on."""

    def answer(question):
        if ending == "closes":
            return b""
        return b"x\n" if ending == "writes nonsense" else b"x" * 3_000

    async def run():
        async with door(max_line_bytes=2_000) as (address, joined):
            answering(address, answer)
            over: asyncio.Queue = asyncio.Queue()
            link = Link(await asyncio.wait_for(joined.get(), 10), over.put_nowait)
            with pytest.raises(EnvironmentLost):
                await link.ask({"x": 1}, 10)
            await asyncio.wait_for(over.get(), 10)
            assert link.is_over

    asyncio.run(run())


def test_joining_waits_for_the_door_as_long_as_it_is_told():
    """Nodes of a run start in any order."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    with pytest.raises(TimeoutError):
        join(address, secret=SECRET, timeout_s=0.8)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def other_service():
            connection, _ = listener.accept()
            connection.sendall(b"SSH-2.0\n")

        threading.Thread(target=other_service, daemon=True).start()
        with pytest.raises(ValueError, match="Expecting value"):
            join(listener.getsockname(), secret=SECRET, timeout_s=10)

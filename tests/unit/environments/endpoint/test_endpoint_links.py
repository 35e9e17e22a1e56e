"""The learner's side of several endpoints: its own processes, and one that joins from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import aiohttp
import openai
import pytest

from mgrpo.environments.agents.endpoint_link import Endpoints, EndpointSettings
from tests.ports import free_port
from tests.unit.environments.chat_templates import make_tokenizer
from tests.unit.environments.endpoint.scripted import Engine, Learner
from tests.unit.environments.endpoint.served import ADD, ASKED, language_of
from tests.unit.environments.endpoint.serving import ROOM
from tests.unit.environments.endpoint.test_several import TOKEN, start


def settings_of(folder, tokenizer, **fields):
    language = language_of(folder, tokenizer)
    return EndpointSettings(language=language, **fields)


class Run:
    """Endpoints, and trajectories at them."""

    def __init__(self, endpoints, learner):
        self.endpoints, self.learner = endpoints, learner

    async def open(self):
        async def sample(wish):
            answer = self.learner.answer(wish)
            tree = self.learner.trees[session.id]
            await session.answer(wish["number"], tree._turns[wish["number"]].sampled)
            assert answer["number"] == wish["number"]

        session = await self.endpoints.open(ROOM | {"sampling": {}, "task": None, "trajectory": "t"}, sample)
        return session

    async def call(self, session):
        """A turn of a session."""
        async with openai.AsyncOpenAI(
            base_url=f"{session.base_url}/v1", api_key=session.api_key, max_retries=0
        ) as client:
            await client.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])


@contextlib.asynccontextmanager
async def running(folder, **fields):
    tokenizer = make_tokenizer()
    endpoints = Endpoints(settings_of(folder, tokenizer, **fields), count=2)
    await endpoints.start()
    try:
        yield Run(endpoints, Learner(Engine(tokenizer)))
    finally:
        await endpoints.close()


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.05)


def test_one_that_joins_serves_with_the_others_and_is_let_go(tmp_path):
    """Endpoints of other nodes come and go while a run trains."""

    async def check():
        address = ("127.0.0.1", free_port())
        async with running(tmp_path, join=address, join_secret=TOKEN) as run:
            process = start("{}:{}".format(*address), TOKEN)
            try:
                await until(lambda: len(run.endpoints.urls) == 3)
                sessions = [await run.open() for _ in range(3)]
                assert sorted(session.id.partition("-")[0] for session in sessions) == ["0", "1", "2"]
                for session in sessions:
                    await run.call(session)
                ends = [await session.end() for session in sessions]
                assert [[turn["delivered"] for turn in end["turns"]] for end in ends] == [[True]] * 3

                sessions = [await run.open() for _ in range(3)]
                process.kill()
                await until(lambda: len(run.endpoints.urls) == 2)
                assert [session.lost.done() for session in sessions] == [
                    session.id.startswith("2-") for session in sessions
                ]
                assert not (await run.open()).id.startswith("2-")
            finally:
                process.kill()
                process.wait()

    asyncio.run(check())


def test_with_workers_one_that_nobody_asks_is_given_nothing(tmp_path):
    """A worker has fixed addresses: tasks of an endpoint that joins later would wait until they are lost."""

    async def ask(client, url):
        async with client.get(f"{url}/tasks/next?wait_s=0", headers={"x-api-key": "k"}) as answer:
            assert (answer.status, await answer.json()) == (200, {"task": None})

    async def check():
        async with running(tmp_path, worker_key="k") as run, aiohttp.ClientSession() as client:
            one, other = run.endpoints._all
            assert sorted([(await run.open()).id[:2] for _ in range(2)]) == ["0-", "1-"]
            async with client.get(f"{one.url}/tasks/next", headers={"x-api-key": "wrong"}) as answer:
                assert answer.status == 401
            assert not one.is_asked
            await ask(client, other.url)
            await until(lambda: other.is_asked)
            assert [(await run.open()).id[:2] for _ in range(3)] == ["1-"] * 3
            os.kill(other._link.pid, signal.SIGKILL)
            await until(lambda: not other.is_serving)
            assert (await run.open()).id.startswith("1-"), "its address is the same when it is started again"
            await ask(client, one.url)
            await until(lambda: one.is_asked)
            assert {(await run.open()).id[:2] for _ in range(2)} == {"0-", "1-"}

    asyncio.run(check())


def test_one_that_dies_is_started_again_where_it_was(tmp_path):
    """A balancer, a firewall and workers know its address."""

    async def check():
        async with running(tmp_path) as run:
            sessions = [await run.open() for _ in range(2)]
            dead = next(endpoint for endpoint in run.endpoints._all if endpoint.number == 1)
            old = dead.url
            os.kill(dead._link.pid, signal.SIGKILL)
            await until(lambda: not dead.is_serving)
            await until(lambda: dead.is_serving)
            assert dead.url == old
            assert [session.lost.done() for session in sessions] == [
                session.id.startswith("1-") for session in sessions
            ]
            session = await run.open()
            assert session.id.startswith("1-")
            await run.call(session)
            assert len((await session.end())["turns"]) == 1

    asyncio.run(check())


def test_a_port_that_another_program_has_is_named_with_its_setting(tmp_path):
    """Fixed ports are for firewalls."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        endpoints = Endpoints(settings_of(tmp_path, make_tokenizer(), port=port), count=1)
        with pytest.raises(ValueError, match="choose another agent_endpoint_port") as caught:
            asyncio.run(endpoints.start())
    assert f"cannot listen at 127.0.0.1 port {port}: Address already in use" in str(caught.value)

"""Several endpoints of one run, of which one has joined from elsewhere: any of them may get a call."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys

import httpx
import openai
import pytest

from mgrpo.processes.distant import Door
from mgrpo.processes.json_lines import Child
from tests.unit.environments.endpoint.served import ADD, ASKED
from tests.unit.environments.endpoint.serving import PROGRAM, endpoints
from tests.unit.environments.endpoint.test_clients import APIS, run

TOKEN = "0123456789abcdef" * 4


@contextlib.asynccontextmanager
async def joined():
    """An endpoint that `mgrpo agent-endpoint` has started, and the process."""
    coming: asyncio.Queue = asyncio.Queue()
    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, secret=TOKEN, on_joined=coming.put_nowait, max_line_bytes=1 << 26)
    process = start(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN)
    try:
        yield await asyncio.wait_for(coming.get(), 60), process
    finally:
        process.kill()
        process.wait()
        await door.close()


def start(address, token, *flags):
    words = [sys.executable, "-m", "mgrpo", "agent-endpoint", "--join", address, *flags]
    environment = {**os.environ, "RAY_AUTH_TOKEN": token or ""}
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)


def through(other, session):
    """The same session, by the address of another endpoint."""
    return session | {"base_url": f"{other.direct}/s/{session['session']}"}


async def count(clients):
    """A conversation of which each call goes to the next of these clients."""
    messages = list(ASKED)
    for client in clients:
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message = completion.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            answer = str(json.loads(call.function.arguments)["x"] + 1)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})


def client_of(session, **options):
    return openai.AsyncOpenAI(
        base_url=f"{session['base_url']}/v1", api_key=session["api_key"], **{"max_retries": 0} | options
    )


def test_any_endpoint_may_get_the_calls_of_a_session(tmp_path):
    """A balancer sends each call where it likes; the tokens are those of a run with one endpoint."""

    async def check():
        async with joined() as (distant, _):
            children = [Child(PROGRAM, max_line_bytes=1 << 26) for _ in range(2)]
            async with endpoints(tmp_path, children=[*children, distant]) as served:
                learner = served[0].learner
                session = await served[0].open()
                await run("chat", session)
                expected = learner.branches(session["session"], await served[0].ask("end", session=session["session"]))
                for number, own in enumerate(served):
                    session = await own.open()
                    assert session["session"].startswith(f"{number}-")
                    async with contextlib.AsyncExitStack() as stack:
                        clients = [
                            await stack.enter_async_context(client_of(through(other, session))) for other in served
                        ]
                        await count(itertools.cycle(clients))
                    end = await own.ask("end", session=session["session"])
                    assert learner.branches(session["session"], end) == expected
                apis = [api for api in APIS if api.endswith("-stream") and not api.startswith("chat")]
                for api, (own, other) in zip(apis, itertools.permutations(served, 2), strict=False):
                    session = await own.open()
                    await run(api, through(other, session))
                    end = await own.ask("end", session=session["session"])
                    assert learner.branches(session["session"], end) == expected, api

    asyncio.run(check())


def test_errors_and_ends_pass_through(tmp_path):
    """An agent must see the same errors by any address; a client that went away has not got its turn."""

    async def check():
        async with endpoints(tmp_path, num=2) as (one, other):
            session = await other.open(max_model_length=60)
            far = through(one, session)
            async with client_of(far) as client:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": "x" * 500}]
                    )
                assert caught.value.code == "context_length_exceeded"
            async with client_of(far | {"api_key": "wrong"}) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="policy", messages=ASKED)
            unknown = far | {"base_url": far["base_url"][:-1] + "_"}
            async with client_of(unknown) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="policy", messages=ASKED)
            end = await other.ask("end", session=session["session"])
            assert end["counts"]["refused"] == {"context_length_exceeded": 1, "401": 1} and not end["turns"]

            session = await other.open()
            other.link.end()
            async with client_of(through(one, session)) as client:
                with pytest.raises(openai.InternalServerError) as failed:
                    await client.chat.completions.create(model="policy", messages=ASKED)
                assert failed.value.status_code == 503

    asyncio.run(check())


def test_a_retry_by_another_address_is_the_same_call(tmp_path):
    """A balancer may send a retry elsewhere: nothing is sampled twice."""

    async def check():
        async with endpoints(tmp_path, num=2) as (one, other):
            session = await other.open()
            other.delay_s = 1.0
            asked = {"model": "policy", "messages": ASKED, "tools": [ADD]}
            async with client_of(through(one, session), timeout=0.5) as client:
                with pytest.raises(openai.APITimeoutError):
                    await client.chat.completions.create(**asked)
            async with client_of(session) as client:
                await client.chat.completions.create(**asked, extra_headers={"x-stainless-retry-count": "1"})
            end = await other.ask("end", session=session["session"])
            assert len(other.learner.engine.log) == 1 and end["counts"]["retries"] == 1
            assert [turn["delivered"] for turn in end["turns"]] == [True]

    asyncio.run(check())


def test_a_worker_that_reaches_one_endpoint_gets_the_tasks_of_all(tmp_path):
    """A worker keeps its connection, so that a balancer sends each of its questions to the same endpoint."""

    async def check():
        async with endpoints(tmp_path, num=3, worker_key="the run's") as served:
            sessions = {(await each.open(task={"x": 1}))["base_url"] for each in served}
            async with httpx.AsyncClient(base_url=served[0].direct, timeout=60) as client:

                async def taken():
                    answer = await client.get("/tasks/next", headers={"authorization": "Bearer the run's"})
                    return answer.json()["task"]

                found = {(await taken())["base_url"] for _ in served}
                assert found == sessions
                assert (await client.get("/tasks/next", headers={"authorization": "Bearer x"})).status_code == 401
                # Whoever has gone keeps no task from being given out.
                served[1].link.end()
                served[2].link.end()
                asked = [asyncio.create_task(taken()) for _ in range(3)]
                session = await served[0].open(task={"x": 2})
                found = [each["base_url"] for each in await asyncio.gather(*asked) if each is not None]
                assert found == [session["base_url"]]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("127.0.0.1", TOKEN, "--join 127.0.0.1: expected HOST:PORT"),
        ("127.0.0.1:1", "", "RAY_AUTH_TOKEN is not set"),
        ("127.0.0.1:1", TOKEN, "no run has answered at --join 127.0.0.1:1 within --timeout 1 s"),
    ],
)
def test_what_joining_says_is_wrong(address, token, said):
    """The user reads it on another machine than the run's."""
    process = start(address, token, "--timeout", "1")
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 2 and said in printed


def test_a_wrong_token_is_refused():
    """Whoever joins sees what is trained, and could forge it."""

    async def check():
        coming: asyncio.Queue = asyncio.Queue()
        listener = socket.create_server(("127.0.0.1", 0))
        door = Door(listener, secret=TOKEN, on_joined=coming.put_nowait, max_line_bytes=1 << 26)
        process = start(f"127.0.0.1:{listener.getsockname()[1]}", "another")
        _, printed = await asyncio.to_thread(process.communicate, None, 120)
        assert process.returncode == 2 and "RAY_AUTH_TOKEN differs" in printed and coming.empty()
        await door.close()

    asyncio.run(check())


def test_it_ends_with_the_run(tmp_path):
    """No process outlives a run on any machine."""

    async def check():
        async with joined() as (distant, process):
            async with endpoints(tmp_path, children=[distant]) as [served]:
                await served.open()
            assert await asyncio.to_thread(process.wait, 30) == 0

    asyncio.run(check())

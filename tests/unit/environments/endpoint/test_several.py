"""Several endpoints of one run, of which one may have joined from elsewhere: each has sessions of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

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


def client_of(session, **options):
    return openai.AsyncOpenAI(
        base_url=f"{session['base_url']}/v1", api_key=session["api_key"], **{"max_retries": 0} | options
    )


def test_each_endpoint_serves_its_own_sessions(tmp_path):
    """The tokens are those of a run with one endpoint, by each API, also where an endpoint has joined from elsewhere."""

    async def check():
        async with joined() as (distant, _):
            children = [Child(PROGRAM, max_line_bytes=1 << 26) for _ in range(2)]
            async with endpoints(tmp_path, children=[*children, distant]) as served:
                learner, expected = served[0].learner, None
                for number, own in enumerate(served):
                    for api in {"chat", "messages-stream", "responses-stream"}.intersection(APIS):
                        session = await own.open()
                        assert session["base_url"] == f"{own.url}/s/{session['session']}"
                        assert session["session"].startswith(f"{number}-")
                        await run(api, session)
                        end = await own.ask("end", session=session["session"])
                        branches = learner.branches(session["session"], end)
                        expected = expected or branches
                        assert branches == expected, (number, api)

    asyncio.run(check())


def test_a_call_at_another_endpoint_says_where_it_belongs(tmp_path):
    """A balancer that goes by something else than the path would look like a session that has ended."""

    async def check():
        async with endpoints(tmp_path, num=2, public_url="http://agents.example:8000") as (one, other):
            session = await other.open()
            assert session["base_url"] == f"http://agents.example:8000/s/{session['session']}"
            for key in (session["api_key"], "wrong"):
                strayed = session | {"base_url": f"{one.listens}/s/{session['session']}", "api_key": key}
                async with client_of(strayed) as client:
                    with pytest.raises(
                        openai.APIStatusError, match=r"send paths that begin with /s/1- to that one"
                    ) as said:
                        await client.chat.completions.create(model="policy", messages=ASKED)
                assert (said.value.status_code, said.value.code) == (421, "wrong_endpoint")
            async with client_of(session | {"base_url": f"{other.listens}/s/{session['session']}"}) as client:
                await client.chat.completions.create(model="policy", messages=ASKED, tools=[ADD])
            end = await other.ask("end", session=session["session"])
            assert len(end["turns"]) == 1 and not end["counts"]["refused"]

    asyncio.run(check())


def test_a_worker_that_knows_all_endpoints_plays_the_tasks_of_all(tmp_path):
    """Each gives its own tasks; one that has ended keeps no worker from the others."""

    async def check():
        async with endpoints(tmp_path, num=3, worker_key="the run's") as served:
            sessions = [await each.open(task={"x": 1}, deadline_s=600.0) for each in served]
            words = [sys.executable, "-m", "mgrpo", "agent-worker", "--agent", "true", "--agent_box", "none"]
            for each in served:
                words += ["--url", each.url]
            variables = {**os.environ, "MGRPO_WORKER_KEY": "the run's"}
            with subprocess.Popen([*words, "--at_once", "1"], env=variables) as worker:
                try:
                    for each, session in zip(served, sessions, strict=True):
                        found = await each.ask("wait", session=session["session"])
                        assert (found["status"], found["left"]["ended"]) == ("ended", "ended")
                    served[0].link.end()
                    session = await served[2].open(task={"x": 2}, deadline_s=600.0)
                    assert (await served[2].ask("wait", session=session["session"]))["status"] == "ended"
                finally:
                    worker.kill()

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

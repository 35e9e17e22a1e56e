"""The tools of an MCP server, over the library: a scripted server for what goes wrong, and the library's own servers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgrpo.environments.adaptors import mcp_session
from mgrpo.environments.adaptors.mcp import _SHARED, Mcp
from mgrpo.environments.environment import Call
from tests.ports import free_port

pytest.importorskip("mcp", reason="the package mcp is not installed")

HERE = Path(__file__).parent
WIRE = {"command": sys.executable, "args": [str(HERE / "mcp_wire.py")]}
REAL = {"command": sys.executable, "args": [str(HERE / "mcp_server.py"), "stdio"]}


async def opened(**settings):
    environment = Mcp(**settings)
    await environment.setup()
    return environment


async def answer(environment, name, **arguments):
    (observation,) = await environment.step([Call(name=name, arguments=arguments)])
    return observation


async def text(environment, name, **arguments):
    return (await answer(environment, name, **arguments)).text


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ends(pid, limit_s=5.0):
    until = time.monotonic() + limit_s
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(pid)


def test_tools_of_all_pages_are_shown_as_the_server_describes_them():
    async def run():
        environment = await opened(**WIRE)
        tools = environment.tools()
        await environment.close()
        return tools

    tools = asyncio.run(run())
    assert [tool.name for tool in tools] == ["count", "fail", "leave", "wait", "freeze", "picture", "nothing", "pid"]
    assert tools[3].description == "Tool wait."
    assert tools[3].parameters == {"type": "object", "properties": {"seconds": {"type": "number"}}}


def test_answers_become_text_and_errors_become_failed_calls(monkeypatch):
    monkeypatch.setenv("SECRET", "of the trainer")

    async def run():
        environment = await opened(**WIRE, env={"OWN": "own"})
        calls = [Call(name=name, arguments={}) for name in ("count", "fail", "picture", "nothing", "pid")]
        found = await environment.step(calls)
        await environment.close()
        return found

    count, fail, picture, nothing, pid = asyncio.run(run())
    assert (count.text, count.failed) == ("1", False)
    assert (fail.text, fail.failed) == ("it failed", True)
    assert picture.text == "look:\n[image image/png]\na page"
    assert nothing.text == '{"value": 7}'
    assert pid.text.endswith(" own None"), "a server sees no variables that it was not given"


def test_instances_of_one_worker_share_a_session_until_the_last_is_closed():
    """A program for each of hundreds of trajectories would not fit into memory."""

    async def run():
        first, second = await asyncio.gather(opened(**WIRE), opened(**WIRE))
        pids = [(await text(each, "pid")).split()[0] for each in (first, second)]
        await first.reset({}, seed=0)
        await first.close()
        left = await text(second, "count")
        await second.close()
        return pids, left

    (pid, other), count = asyncio.run(run())
    assert pid == other
    assert count == "3"
    assert ends(int(pid))
    assert not _SHARED


def test_a_trajectory_with_a_session_of_its_own_begins_anew():
    """What one trajectory leaves in a server with a memory must not be seen by the next."""

    async def run():
        environment = await opened(**WIRE, session="trajectory")
        first = await text(environment, "pid")
        counts = [await text(environment, "count")]
        await environment.reset({}, seed=0)
        counts.append(await text(environment, "count"))
        second = await text(environment, "pid")
        await environment.close()
        return counts, first.split()[0], second.split()[0]

    counts, first, second = asyncio.run(run())
    assert counts == ["2", "1"]
    assert first != second
    assert ends(int(first))
    assert ends(int(second))


def test_calls_of_many_trajectories_wait_beside_each_other():
    async def run():
        environment = await opened(**WIRE)
        began = time.monotonic()
        found = await asyncio.gather(*(text(environment, "wait", seconds=0.1) for _ in range(20)))
        seconds = time.monotonic() - began
        await environment.close()
        return found, seconds

    found, seconds = asyncio.run(run())
    assert found == ["waited"] * 20
    assert seconds < 1.0


def test_a_session_may_be_closed_by_another_task_than_opened_it():
    """anyio refuses that: cancel scopes belong to the task that entered them."""

    async def run():
        environment = await asyncio.create_task(opened(**WIRE))
        await asyncio.create_task(answer(environment, "count"))
        await asyncio.create_task(environment.close())

    asyncio.run(run())


def test_a_server_that_ends_fails_one_call_and_is_started_again():
    async def run():
        environment = await opened(**WIRE)
        waiting = asyncio.create_task(answer(environment, "wait", seconds=30))
        await answer(environment, "count")
        left = await answer(environment, "leave")
        again = await answer(environment, "count")
        other = await asyncio.wait_for(waiting, 5)
        await environment.close()
        return left, again, other

    left, again, other = asyncio.run(run())
    assert left.failed
    assert other.failed
    assert (again.text, again.failed) == ("1", False)


def test_a_request_that_the_library_cancels_is_a_failed_call():
    """A cancellation that travelled on would end the trajectory's own task, and others with it."""

    class Client:
        async def call_tool(self, name, arguments):
            raise asyncio.CancelledError

    class Server:
        async def connect(self, stack, log):
            return Client()

    async def run():
        session = mcp_session.McpSession(Server(), timeout_s=1.0)
        with pytest.raises(mcp_session.SessionError, match="was cancelled"):
            await session.call("count", {})
        await session.close()

    asyncio.run(run())


def test_a_call_that_is_cancelled_leaves_the_session_as_it_is():
    async def run():
        environment = await opened(**WIRE)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer(environment, "wait", seconds=0.5), 0.2)
        counts = [await text(environment, "count")]
        await asyncio.sleep(0.4)
        counts.append(await text(environment, "count"))
        await environment.close()
        return counts

    assert asyncio.run(run()) == ["2", "3"]


def test_a_server_that_no_longer_answers_is_replaced(monkeypatch):
    monkeypatch.setattr(mcp_session, "_CHECK_S", 0.3)

    async def run():
        environment = await opened(**WIRE, timeout=0.5)
        pid = (await text(environment, "pid")).split()[0]
        late = await answer(environment, "freeze", seconds=30)
        again = await text(environment, "count")
        await environment.close()
        return int(pid), late, again

    pid, late, again = asyncio.run(run())
    assert late.failed
    assert late.text == "The call failed: no answer in 0.5 s"
    assert again == "1"
    assert ends(pid)


def test_a_server_that_hangs_ends_with_its_worker():
    code = (
        "import asyncio, sys\n"
        "from mgrpo.environments.adaptors.mcp import Mcp\n"
        "from mgrpo.environments.environment import Call\n"
        "async def run():\n"
        f"    environment = Mcp(command=sys.executable, args={WIRE['args']!r})\n"
        "    await environment.setup()\n"
        "    pid = (await environment.step([Call(name='pid', arguments={})]))[0].text\n"
        "    frozen = asyncio.create_task(environment.step([Call(name='freeze', arguments={'seconds': 60})]))\n"
        "    await asyncio.sleep(0.1)\n"
        "    print(pid, flush=True)\n"
        "    await frozen\n"
        "asyncio.run(run())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        pid = int(worker.stdout.readline().split()[0])
        assert is_alive(pid)
        os.kill(worker.pid, signal.SIGKILL)
    assert ends(pid)


def test_a_server_that_cannot_start_is_named_with_what_it_wrote():
    with pytest.raises(mcp_session.SessionError) as caught:
        asyncio.run(opened(command=sys.executable, args=[*WIRE["args"], "broken"]))
    assert f"no session with {sys.executable} {WIRE['args'][0]} broken: " in str(caught.value)
    assert str(caught.value).endswith("the server wrote: this server has no configuration")
    with pytest.raises(mcp_session.SessionError, match="the command 'no-such-server' was not found"):
        asyncio.run(opened(command="no-such-server"))
    with pytest.raises(mcp_session.SessionError, match=r"no session with http://127.0.0.1:9/mcp: ConnectError"):
        asyncio.run(opened(server_url="http://127.0.0.1:9/mcp"))


def test_one_tool_of_a_server_can_be_chosen():
    async def run(name):
        environment = await opened(**WIRE, tool_name=name)
        tools = environment.tools()
        await environment.close()
        return tools

    assert [tool.name for tool in asyncio.run(run("pid"))] == ["pid"]
    with pytest.raises(ValueError, match="has no tool 'none'; its tools: count, fail, leave"):
        asyncio.run(run("none"))
    assert not _SHARED, "what could not be set up is closed"


def test_a_server_of_the_library_answers():
    async def run():
        environment = await opened(**REAL)
        tools = {tool.name: tool for tool in environment.tools()}
        found = [await answer(environment, "add", a=2, b=3), await answer(environment, "add", a="x")]
        found += [await answer(environment, "fail", text="no"), await answer(environment, "leave")]
        found.append(await answer(environment, "count"))
        await environment.close()
        return tools, found

    tools, (added, wrong, failed, left, count) = asyncio.run(run())
    assert tools["add"].description == "Adds two numbers."
    assert set(tools["add"].parameters["properties"]) == {"a", "b"}
    assert added.text == "5"
    assert wrong.failed
    assert failed.failed
    assert failed.text.startswith("Error executing tool fail")
    assert left.failed
    assert count.text == "call 1"


def test_a_server_of_the_library_answers_over_http_and_may_be_started_again():
    """Its sessions are gone then, and the first call afterwards must not be lost."""
    port = free_port()

    def started():
        return subprocess.Popen([sys.executable, str(HERE / "mcp_server.py"), str(port)], stderr=subprocess.DEVNULL)

    def wait_until_open():
        for _ in range(6000):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.01)

    async def run(server):
        wait_until_open()
        environment = await opened(server_url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "k"})
        found = [await text(environment, "add", a=2, b=3), await text(environment, "count")]
        server.kill()
        server.wait()
        found.append((await answer(environment, "count")).failed)
        again = started()
        try:
            wait_until_open()
            found.append(await text(environment, "count"))
            await environment.close()
        finally:
            again.kill()
            again.wait()
        return found

    server = started()
    try:
        assert asyncio.run(run(server)) == ["5", "call 1", True, "call 1"]
    finally:
        server.kill()
        server.wait()

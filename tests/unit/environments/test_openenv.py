"""The adaptor of OpenEnv: a server that speaks its protocol, for what goes wrong, and servers of its library."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from mgrpo.environments.adaptors.openenv import OpenEnv
from mgrpo.environments.environment import Call
from tests.ports import free_port

HERE = Path(__file__).parent
SCHEMA = {"properties": {"value": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["value"]}
TOOLS = [{"name": "look", "description": "Looks around.", "input_schema": {"type": "object", "properties": {}}}]


class Wire:
    """A server of the protocol. `step` gives the data of an observation, or an error's, for an action."""

    def __init__(self, *, tools=(), capacity=99, step=None):
        self.tools, self.capacity = tools, capacity
        self.step = step or (lambda action: {"observation": {"got": action}, "reward": None, "done": False})
        self.messages, self.sockets = [], []
        self.num_connections = 0

    async def talk(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_connections += 1
        if len(self.sockets) >= self.capacity:
            await self.send(socket, "error", {"message": "all taken", "code": "CAPACITY_REACHED"})
            await socket.close()
            return socket
        self.sockets.append(socket)
        try:
            async for received in socket:
                message = json.loads(received.data)
                self.messages.append(message)
                if message["type"] == "close":
                    break
                await self.answer(socket, message)
        finally:
            self.sockets.remove(socket)
        return socket

    async def answer(self, socket, message):
        data = message.get("data")
        if message["type"] == "state":
            await self.send(socket, "state", {})
        elif message["type"] == "reset":
            await self.send(socket, "observation", {"observation": {"hello": data}, "reward": None, "done": False})
        elif data == {"type": "list_tools"}:
            await (
                self.send(socket, "observation", {"observation": {"tools": self.tools}})
                if self.tools
                else self.send(socket, "error", {"message": "Invalid message", "code": "VALIDATION_ERROR"})
            )
        else:
            found = self.step(data)
            found = await found if asyncio.iscoroutine(found) else found
            if found is not None:
                await self.send(socket, "error" if "code" in found else "observation", found)

    @staticmethod
    async def send(socket, kind, data):
        await socket.send_str(json.dumps({"type": kind, "data": data}))

    @staticmethod
    async def described(request):
        return web.json_response({"action": SCHEMA})

    @asynccontextmanager
    async def serving(self, *, has_schema=True):
        app = web.Application()
        app.router.add_get("/ws", self.talk)
        if has_schema:
            app.router.add_get("/schema", self.described)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def opened(url, **settings):
    environment = OpenEnv(url=url, **settings)
    try:
        await environment.setup()
        yield environment
    finally:
        await environment.close()


async def answer(environment, name="step", **arguments):
    (observation,) = await environment.step([Call(name=name, arguments=arguments)])
    return observation


def test_a_server_without_tools_has_one_tool_with_the_fields_of_its_action():
    wire = Wire()

    async def run():
        async with wire.serving() as url, opened(url) as environment:
            opening = await environment.reset({"level": 3, "answer": 7}, seed=2**40 + 5)
            return environment.tools(), opening, await answer(environment, value=4)

    (tool,), opening, observation = asyncio.run(run())
    assert tool.name == "step"
    assert tool.parameters == {"properties": {"value": {"type": "integer"}}, "required": ["value"]}
    assert opening.text == '{"hello": {"seed": 5}}', "a small seed, and no column that was not asked for"
    assert observation.text == '{"got": {"value": 4}}'
    assert (observation.reward, observation.done, observation.failed) == (0.0, False, False)


def test_tools_of_the_server_are_called_by_their_names():
    result = {"content": [{"type": "text", "text": "a door"}], "is_error": False}
    steps = [
        {"observation": {"tool_name": "look", "result": result, "error": None}, "reward": 0.5, "done": True},
        {"observation": {"tool_name": "look", "result": {**result, "is_error": True}}},
        {"observation": {"tool_name": "look", "result": None, "error": {"message": "no light"}}},
    ]
    wire = Wire(tools=TOOLS, step=lambda action: steps.pop(0))

    async def run():
        found = []
        async with wire.serving() as url, opened(url) as environment:
            for _ in range(3):
                await environment.reset({}, seed=0)
                found.append(await answer(environment, "look", far=True))
            return environment.tools(), found

    (tool,), (seen, wrong, dark) = asyncio.run(run())
    assert (tool.name, tool.description) == ("look", "Looks around.")
    assert (seen.text, seen.reward, seen.done, seen.failed) == ("a door", 0.5, True, False)
    assert (wrong.text, wrong.failed) == ("a door", True)
    assert (dark.text, dark.failed) == ("The call failed: no light", True)
    assert wire.messages[-2]["data"] == {"type": "call_tool", "tool_name": "look", "arguments": {"far": True}}


def test_a_turn_is_an_action_where_its_field_is_named():
    wire = Wire(step=lambda action: {"observation": {"board": "X.O", "player": 1}, "reward": 1, "done": False})

    async def run():
        settings = {"action_field": "message", "text_field": "board", "reset_columns": ["level"]}
        async with wire.serving(has_schema=False) as url, opened(url, **settings) as environment:
            await environment.reset({"level": 3}, seed=1)
            return environment.tools(), await answer(environment, "act", text="go left")

    tools, observation = asyncio.run(run())
    assert not tools
    assert (observation.text, observation.reward) == ("X.O", 1.0)
    assert [message.get("data") for message in wire.messages[1:3]] == [{"seed": 1, "level": 3}, {"message": "go left"}]


def test_an_episode_that_is_over_takes_no_more_steps_until_the_next_reset():
    wire = Wire(step=lambda action: {"observation": {}, "done": True})

    async def run():
        async with wire.serving() as url, opened(url) as environment:
            await environment.reset({}, seed=0)
            found = await environment.step([Call(name="step", arguments={})] * 2)
            await environment.reset({}, seed=0)
            return [*found, await answer(environment)]

    first, second, third = asyncio.run(run())
    assert (first.done, first.failed) == (True, False)
    assert (second.text, second.failed) == ("The episode is over.", True)
    assert (third.done, third.failed) == (True, False)
    assert len([message for message in wire.messages if message["type"] == "step"]) == 3, "one lists the tools"


def test_a_step_that_the_server_refuses_is_a_failed_call_with_its_reasons():
    errors = [{"loc": ["value"], "msg": "Field required"}]
    wire = Wire(step=lambda action: {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors})

    async def run():
        async with wire.serving() as url, opened(url) as environment:
            return await answer(environment), environment.reward()

    observation, reward = asyncio.run(run())
    assert observation.text == "The step failed: Invalid message; value: Field required"
    assert (observation.failed, observation.done, reward) == (True, False, None)


def test_a_session_that_is_lost_ends_the_trajectory_without_a_reward():
    """Its state is gone: whatever the model does from then on says nothing about the model."""
    wire = Wire()

    async def run():
        async with wire.serving() as url, opened(url) as environment:
            await environment.reset({}, seed=0)
            wire.step = lambda action: wire.sockets[0].close()
            lost = await answer(environment)
            with pytest.raises(ConnectionError, match="the session was lost, and with it the reward"):
                environment.reward()
            after = await answer(environment)
            wire.step = lambda action: {"observation": {"fine": 1}}
            await environment.reset({}, seed=0)
            return lost, after, await answer(environment), environment.reward()

    lost, after, again, again_reward = asyncio.run(run())
    assert lost.text == "The environment is not available: the server has closed the connection"
    assert lost.failed
    assert lost.done
    assert after.done
    assert (again.text, again_reward) == ('{"fine": 1}', None)
    assert wire.num_connections == 2


def test_a_session_that_the_server_closed_between_trajectories_is_opened_again():
    """OpenEnv's servers end sessions that were idle."""
    wire = Wire()

    async def run():
        async with wire.serving() as url, opened(url) as environment:
            await asyncio.gather(*(socket.close() for socket in wire.sockets))
            return await environment.reset({}, seed=3)

    assert asyncio.run(run()).text == '{"hello": {"seed": 3}}'
    assert wire.num_connections == 2


def test_the_answer_to_a_cancelled_call_is_not_taken_for_that_of_the_next():
    """The state on the server is worth keeping, so the connection stays."""

    async def slow(action):
        await asyncio.sleep(0.1)
        return {"observation": {"got": action}}

    wire = Wire(step=slow)

    async def run():
        async with wire.serving() as url, opened(url) as environment:
            for value in (1, 2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(answer(environment, value=value), 0.02)
            return await answer(environment, value=3), await answer(environment, value=4)

    assert [each.text for each in asyncio.run(run())] == ['{"got": {"value": 3}}', '{"got": {"value": 4}}']
    assert wire.num_connections == 1


def test_a_full_server_is_waited_for():
    wire = Wire(capacity=1)

    async def run():
        async with wire.serving() as url, opened(url) as first:
            second = OpenEnv(url=url, action_field="a")
            waiting = asyncio.create_task(second.setup())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await first.close()
            await asyncio.wait_for(waiting, 2)
            await second.close()

    asyncio.run(run())


def test_a_server_that_stays_full_is_named_with_the_setting_that_helps():
    async def run():
        async with Wire(capacity=0).serving() as url, opened(url, capacity_timeout=0.1):
            pass

    with pytest.raises(ConnectionError, match=r"all its sessions for 0.1 s \(all taken\); set its max_concurrent_envs"):
        asyncio.run(run())


def test_a_server_that_is_not_there_or_no_server_of_the_protocol_is_named():
    async def missing():
        async with opened("http://127.0.0.1:9"):
            pass

    async def without_schema():
        async with Wire().serving(has_schema=False) as url, opened(url):
            pass

    with pytest.raises(ConnectionError, match=r"no server at http://127.0.0.1:9: "):
        asyncio.run(missing())
    with pytest.raises(ConnectionError, match=r"none gives the schema of its action .*404.*; name its text field"):
        asyncio.run(without_schema())
    with pytest.raises(ValueError, match="url='localhost:8000', expected one like http://localhost:8000"):
        OpenEnv(url="localhost:8000")


@pytest.fixture(scope="module")
def servers():
    """Addresses of the game and of the tools, served by the library."""
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("the package openenv-core is not installed")
    ports = [free_port(), free_port()]
    # The library turns its web page on by this variable, and would need more packages for it.
    environment = {**os.environ, "ENABLE_WEB_INTERFACE": "false"}
    command = [sys.executable, str(HERE / "openenv_server.py"), *map(str, ports)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    for port in ports:
        while process.poll() is None:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
    yield [f"http://127.0.0.1:{port}" for port in ports]
    process.kill()
    process.wait()


def test_a_game_of_the_library_is_played(servers):
    async def run():
        async with opened(servers[0], text_field="hint", reset_columns=["name"]) as environment:
            opening = await environment.reset({"name": "Ann"}, seed=7)
            values = (3, -1, "x", 7)
            return environment.tools(), opening, [await answer(environment, value=value) for value in values]

    (tool,), opening, (low, negative, text, right) = asyncio.run(run())
    assert (tool.description, list(tool.parameters["properties"])) == ("Guess the number.", ["value"])
    assert opening.text == "Hello Ann, guess!"
    assert (low.text, low.reward, low.failed) == ("higher", -0.1, False)
    assert (negative.text, negative.failed) == ("The step failed: numbers are not negative", True)
    assert text.failed
    assert "value: Input should be a valid integer" in text.text
    assert (right.text, right.reward, right.done) == ("right", 1.0, True)


def test_tools_of_the_library_are_called(servers):
    async def run():
        async with opened(servers[1]) as environment, opened(servers[1]) as other:
            for each in (environment, other):
                await each.reset({}, seed=0)
            found = [await answer(environment, "add", number=number) for number in (3, 4)]
            found += [await answer(other, "add", number=1), await answer(environment, "fail", text="no")]
            with pytest.raises(ConnectionError, match="given out all its sessions"):
                await OpenEnv(url=servers[1], capacity_timeout=0.01).setup()
            return environment.tools(), found

    tools, (three, seven, one, failed) = asyncio.run(run())
    assert [tool.name for tool in tools] == ["add", "fail"]
    assert [each.text for each in (three, seven, one)] == ["total 3", "total 7", "total 1"]
    assert (failed.text, failed.failed) == ("The call failed: Error calling tool 'fail': no", True)

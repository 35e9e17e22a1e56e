"""The tool python: names last for a trajectory and no longer, here and at a code service."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request

from mgrpo.environments.environment import Call, Observation
from mgrpo.environments.tools.python import Python
from mgrpo.processes.lifetime import children
from mgrpo.sandbox.app import create_app
from mgrpo.sandbox.interpreters import Kernels
from mgrpo.sandbox.local import borrow_kernels, give_back_kernels
from mgrpo.sandbox.sessions import Sessions
from tests.namespaces import skip_without_namespaces
from tests.unit.sandbox.test_app import FakeSandbox

PLENTY_S = 20.0
MEMORY_MB = 256


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Held for all tests of this file, so that the walls rise once."""
    skip_without_namespaces()
    yield borrow_kernels(MEMORY_MB, accept_risk=False)
    give_back_kernels(MEMORY_MB, accept_risk=False)


def in_turns(*turns: list[str], **settings: Any) -> list[list[Observation]]:
    """The observations of turns with calls of code, in one trajectory."""

    async def run() -> list[list[Observation]]:
        async with opened(**settings) as tool:
            await tool.reset({}, seed=0)
            return [await turn(tool, *codes) for codes in turns]

    return asyncio.run(run())


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Python]:
    tool = Python(**({"memory_mb": MEMORY_MB, "timeout": PLENTY_S} | settings))
    await tool.setup()
    try:
        yield tool
    finally:
        await tool.close()


async def turn(tool: Python, *codes: object) -> list[Observation]:
    return list(await tool.step([Call(name="python", arguments={"code": code}) for code in codes]))


def test_names_last_over_the_turns_of_a_trajectory():
    """Each call is answered, in its order."""
    first, second = in_turns(["x = 20", "x += 1; x"], ["print('x is', x)\nx * 2"])
    assert first == [Observation(text="(no output)\n"), Observation(text="21\n")]
    assert second == [Observation(text="x is 21\n42\n")]


def test_nothing_lasts_over_a_reset():
    """The next trajectory has another prompt, and must not find the answers of this one."""

    async def run() -> list[str]:
        async with opened() as tool:
            await tool.reset({}, seed=0)
            await turn(tool, "import os\nopen('answer', 'w').write('42')\nanswer = 42")
            await tool.reset({}, seed=0)
            return [each.text for each in await turn(tool, "import os\nos.listdir(), 'answer' in dir()")]

    assert asyncio.run(run()) == ["([], False)\n"]


def test_the_interpreter_of_a_trajectory_ends_with_it():
    """Released tools wait for minutes, and each interpreter may hold half a gigabyte of what the model has made."""

    def processes(owner: int) -> int:
        return sum(1 + processes(child) for child in children(owner))

    async def run() -> None:
        async with opened() as tool:
            await tool.reset({}, seed=0)
            await turn(tool, "1")
            during = processes(os.getpid())
            await tool.end()
            until = asyncio.get_running_loop().time() + PLENTY_S
            while processes(os.getpid()) >= during:
                assert asyncio.get_running_loop().time() < until, "the interpreter is still there"
                await asyncio.sleep(0.01)
            await tool.reset({}, seed=0)
            assert [each.text for each in await turn(tool, "2")] == ["2\n"]

    asyncio.run(run())


def test_without_state_every_call_begins_anew():
    """As Open Instruct's tool; the model is told."""
    ((_, after),) = in_turns(["x = 1", "x"], stateful=False)
    assert after.failed and "NameError" in after.text

    async def described(stateful: bool | None) -> str:
        async with opened(stateful=stateful) as tool:
            return tool.tools()[0].description

    assert "Names are kept between calls." in asyncio.run(described(None))
    assert "Nothing is kept between calls" in asyncio.run(described(False))


def test_the_model_is_told_of_one_parameter():
    """What is in the prompt, exactly."""

    async def run() -> dict[str, Any]:
        async with opened(timeout=2.5) as tool:
            (only,) = tool.tools()
            return only.schema

    assert asyncio.run(run()) == {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run Python code. What it prints is returned, and the value of a last expression. Names are "
            "kept between calls. A call may take 2.5 seconds; there is no network.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The Python code to run."}},
                "required": ["code"],
            },
        },
    }


@pytest.mark.parametrize("code", ["", " \n", None, 7, ["x"]])
def test_what_is_no_code_is_a_failed_call(code):
    """What a model writes never raises."""
    assert in_turns([code]) == [[Observation(text="The code is empty; expected Python code.\n", failed=True)]]


def test_failed_calls_say_why():
    """An error, a limit, a death: the trajectory goes on."""
    ((error, late, dead, alive),) = in_turns(
        ["1/0", "while True: pass", "import os\nos._exit(1)", "'alive'"], timeout=0.5
    )
    assert [each.failed for each in (error, late, dead, alive)] == [True, True, True, False]
    assert error.text.endswith("ZeroDivisionError: division by zero\n")
    assert late.text.endswith("The call took more than 0.5 s and was interrupted. Names are kept.\n")
    assert dead.text == "The interpreter ended with exit code 1. It was restarted: all names and files are lost.\n"
    assert alive.text == "'alive'\n"


def test_output_is_limited():
    """By default 4,000 bytes reach the model."""
    ((long,),) = in_turns(["print('a' * 10**6)"])
    assert 4000 <= len(long.text) < 4100 and "bytes left out" in long.text
    ((short,),) = in_turns(["print('a' * 10**6)"], output_limit=100)
    assert 100 <= len(short.text) < 200


def test_a_call_that_is_cancelled_leaves_the_tool_usable(kernels):
    """A trajectory is given up in the middle of a call; the next one gets the same instance."""

    async def run() -> tuple[str, str]:
        async with opened() as tool:
            await tool.reset({}, seed=0)
            await turn(tool, "x = 1")
            late = asyncio.create_task(turn(tool, "import time\ntime.sleep(100)"))
            await asyncio.sleep(0.1)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            await tool.reset({}, seed=0)
            first = (await turn(tool, "'x' in dir()"))[0].text
            os.kill(kernels._zygote.pid, signal.SIGKILL)
            kernels._zygote._process.wait()
            while (lost := (await turn(tool, "1"))[0].text) == "1\n":
                pass
            assert (await turn(tool, "2"))[0].text == "2\n"
            return first, lost

    first, lost = asyncio.run(run())
    assert first == "False\n" and lost.startswith("The interpreter was lost during the call. A new interpreter is used")


def test_instances_share_one_process_and_the_last_one_ends_it():
    """256 trajectories of a batch must not raise the walls 256 times."""
    before = set(children(os.getpid()))

    async def run() -> int:
        async with opened(memory_mb=300) as one, opened(memory_mb=300) as other:
            for tool in (one, other):
                await tool.reset({}, seed=0)
                await turn(tool, "1")
            return len(set(children(os.getpid())) - before)

    assert asyncio.run(run()) == 1
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0}, "timeout=0, expected a number from 0.01 to 300"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"memory_mb": 1}, "memory_mb=1"),
        ({"output_limit": True}, "output_limit=True"),
        ({"endpoint": "localhost:1234"}, "endpoint='localhost:1234', expected an address, for example http://"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    """Before anything starts."""
    with pytest.raises(ValueError, match=message):
        Python(**settings)


def test_code_is_refused_where_it_cannot_be_isolated(monkeypatch):
    """A model's code would have all that this user has."""
    monkeypatch.setattr("mgrpo.sandbox.sandbox._ALL_WALLS", ("none",))

    async def run(accept_risk: bool) -> str:
        async with opened(memory_mb=301, accept_risk=accept_risk) as tool:
            return (await turn(tool, "6 * 7"))[0].text

    with pytest.raises(ValueError, match="accept_risk"):
        asyncio.run(run(False))
    assert asyncio.run(run(True)) == "42\n"


async def at_service(app: FastAPI, use: Callable[[str], Awaitable[None]]) -> None:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await use(f"http://127.0.0.1:{listening.getsockname()[1]}/execute")
        finally:
            server.should_exit = True
            await serving


def test_a_code_service_has_the_same_answers(kernels: Kernels):
    """Interpreters may run on machines that have no GPUs; a trajectory does not notice."""
    sessions = Sessions(kernels, num_at_once=2, max_waiting=8)

    async def use(url: str) -> None:
        async with (
            opened(endpoint=url) as one,
            opened(api_endpoint=url) as other,
            opened(endpoint=url, stateful=False) as alone,
        ):
            for tool in (one, other, alone):
                await tool.reset({}, seed=0)
            assert not sessions._sessions
            assert [each.text for each in await turn(one, "x = 6", "x * 7")] == ["(no output)\n", "42\n"]
            assert "NameError" in (await turn(other, "x"))[0].text
            assert "NameError" in (await turn(alone, "x = 1", "x"))[1].text
            failed = (await turn(one, "print('on'); 1/0"))[0]
            assert failed.failed and failed.text.startswith("on\nTraceback") and "ZeroDivisionError" in failed.text
            assert len((await turn(one, "print('a' * 10**6)"))[0].text) < 4100
            assert (await turn(one, "'\ud800' # half a surrogate"))[0].text == "'?'\n"
            for name in list(sessions._sessions):
                sessions.end(name)
            lost = (await turn(one, "1"))[0]
            assert lost.failed and lost.text.startswith("1\nThe session was lost before this call. A new interpreter")
            await one.reset({}, seed=0)
            assert (await turn(one, "'x' in dir()"))[0] == Observation(text="False\n")
        assert not sessions._sessions

    asyncio.run(at_service(create_app(FakeSandbox(), sessions=sessions), use))


def test_a_service_without_sessions_runs_each_call_for_itself():
    """Open Instruct's has none; only who asks for names that last is told so."""
    app, seen = FastAPI(), []

    @app.post("/execute")
    async def execute(request: Request) -> dict[str, object]:
        seen.append(await request.json())
        return {"output": "seen\n", "error": "late" if "late" in seen[-1]["code"] else None, "success": True}

    async def use(url: str) -> None:
        async with opened(api_endpoint=url, timeout=3) as tool:
            assert "Nothing is kept between calls" in tool.tools()[0].description
            await tool.reset({}, seed=0)
            assert await turn(tool, "1", "late") == [
                Observation(text="seen\n"),
                Observation(text="seen\nlate", failed=True),
            ]
        assert seen[1:] == [{"code": "1", "timeout": 3.0}, {"code": "late", "timeout": 3.0}]
        with pytest.raises(ValueError, match="has no sessions; set stateful=false"):
            async with opened(endpoint=url, stateful=True):
                pass

    asyncio.run(at_service(app, use))


def test_a_reply_that_was_compressed_is_a_failed_call():
    """One chunk of it could become gigabytes."""
    import gzip

    from fastapi.responses import Response

    app = FastAPI()

    @app.post("/execute")
    async def execute(request: Request) -> Response:
        assert request.headers["Accept-Encoding"] == "identity"
        content, is_first = b'{"output": "42"}', (await request.json())["code"] == "None"
        headers = {} if is_first else {"Content-Encoding": "gzip"}
        return Response(content if is_first else gzip.compress(content), headers=headers)

    async def use(url: str) -> None:
        async with opened(endpoint=url) as tool:
            await tool.reset({}, seed=0)
            (observation,) = await turn(tool, "1")
            assert (
                observation.failed and "the answer is in Content-Encoding gzip, asked for was none" in observation.text
            )

    asyncio.run(at_service(app, use))


def test_an_old_connection_is_not_used_again(monkeypatch):
    """A service closes idle ones after some seconds; a call on one that is being closed would fail, and is not repeated."""
    monkeypatch.setattr("mgrpo.environments.tools.python.KEEP_ALIVE_S", 0.05)
    app, clients = FastAPI(), []

    @app.post("/execute")
    async def execute(request: Request) -> dict[str, object]:
        clients.append(request.scope["client"])
        return {"output": "42\n"}

    async def use(url: str) -> None:
        async with opened(endpoint=url) as tool:
            await tool.reset({}, seed=0)
            for _ in range(2):
                await asyncio.sleep(0.3)
                assert (await turn(tool, "1"))[0].text == "42\n"

    asyncio.run(at_service(app, use))
    assert len(set(clients)) == 3


def test_a_service_that_fails_is_named(monkeypatch):
    """At the start an error, later a failed call."""
    monkeypatch.setattr("mgrpo.environments.tools.python._PAUSES_S", (0.0, 0.0))
    app, statuses = FastAPI(), iter([200, 503, 503, 200, 500, 503, 503, 503])

    @app.post("/execute")
    async def execute():
        from fastapi.responses import JSONResponse

        return JSONResponse({"output": "42\n"}, status_code=next(statuses))

    async def use(url: str) -> None:
        async with opened(endpoint=url) as tool:
            await tool.reset({}, seed=0)
            good, broken, busy = await turn(tool, "1", "2", "3")
            assert good.text == "42\n"
            assert broken.failed and "the code service answered 500" in broken.text
            assert busy.failed and "the code service answered 503" in busy.text

    asyncio.run(at_service(app, use))

    async def unreachable() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        with pytest.raises(ValueError, match=f"endpoint=http://127.0.0.1:{port}/execute: .*cannot be reached"):
            async with opened(endpoint=f"http://127.0.0.1:{port}/execute"):
                pass

    asyncio.run(unreachable())


def test_the_tool_is_light_to_import():
    """Every worker imports it."""
    code = "import sys, mgrpo.environments.tools.python; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "aiohttp", "fastapi", "pydantic"} & set(loaded)

"""The code service executes code: for Open Instruct's tool as theirs does, and in sessions whose names last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest

from mgrpo.processes.lifetime import children
from mgrpo.sandbox.app import MAX_CODE_BYTES, create_app
from mgrpo.sandbox.interpreters import Kernels
from mgrpo.sandbox.sessions import Sessions
from tests.namespaces import skip_without_namespaces
from tests.unit.sandbox.test_app import FakeSandbox

PLENTY_S = 20.0


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    skip_without_namespaces()
    with Kernels(memory_mb=256) as kernels:
        kernels.start()
        yield kernels


def with_client(use: Callable[[httpx.AsyncClient], Awaitable[None]], kernels: Kernels, **options: float) -> None:
    sessions = Sessions(kernels, **({"num_at_once": 2, "max_waiting": 2} | options))

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(FakeSandbox(), sessions=sessions))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:
            await use(client)

    asyncio.run(run())


async def execute(client: httpx.AsyncClient, code: str, **more: object) -> dict:
    answer = await client.post("/execute", json={"code": code, "timeout": PLENTY_S} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_have_open_instructs_form(kernels):
    """Their tool joins output and error; names end with the call."""

    async def use(client: httpx.AsyncClient) -> None:
        assert await execute(client, "x = 6\nprint(x * 7)") == {"output": "42\n", "error": None, "success": True}
        failed = await execute(client, "print('on')\nx")
        assert failed.keys() == {"output", "error", "success"} and failed["output"] == "on\n" and not failed["success"]
        assert failed["error"].endswith("NameError: name 'x' is not defined\n")
        late = await execute(client, "while True: pass", timeout=0.2)
        assert "The call took more than 0.2 s" in late["error"]

    with_client(use, kernels)


def test_names_last_in_a_session_until_it_ends(kernels):
    """Two clients with sessions of their own do not see each other."""

    async def use(client: httpx.AsyncClient) -> None:
        news = [(await execute(client, f"x = {n}", session=name))["is_new_session"] for n, name in enumerate("aab")]
        assert news == [True, False, True]
        assert [(await execute(client, "x", session=name))["output"] for name in "ab"] == ["1\n", "2\n"]
        await client.delete("/execute/a")
        again = await execute(client, "x", session="a")
        assert again["is_new_session"] and "NameError" in again["error"]
        for name in "ab":
            await client.delete(f"/execute/{name}")

    with_client(use, kernels)


def test_calls_of_one_session_wait_for_each_other(kernels):
    """Sent at once they would answer each other."""

    async def use(client: httpx.AsyncClient) -> None:
        code = "import time\ntime.sleep(0.05)\nx = globals().get('x', 0) + 1\nx"
        answers = await asyncio.gather(*(execute(client, code, session="a") for _ in range(3)))
        assert sorted(answer["output"] for answer in answers) == ["1\n", "2\n", "3\n"]
        await client.delete("/execute/a")

    with_client(use, kernels)


def test_a_session_that_is_idle_ends(kernels):
    """Clients that are killed never end theirs, and every one holds an interpreter."""

    async def use(client: httpx.AsyncClient) -> None:
        await execute(client, "x = 1", session="a")
        while any(children(child) for child in children(kernels._zygote.pid)):
            await asyncio.sleep(0.02)
        assert (await execute(client, "1", session="a"))["is_new_session"]
        await client.delete("/execute/a")

    with_client(use, kernels, idle_limit_s=0.1)


def test_too_many_calls_and_sessions_are_refused(kernels):
    """Each holds memory; a client that is told so can wait."""

    async def use(client: httpx.AsyncClient) -> None:
        async def post(session: str | None, code: str) -> int:
            body = {"code": code, "timeout": PLENTY_S, "session": session}
            return (await client.post("/execute", json=body)).status_code

        assert [await post(name, "1") for name in ("a", "b", "a")] == [200, 503, 200]
        calls = [asyncio.create_task(post(None, "import time\ntime.sleep(0.3)")) for _ in range(3)]
        assert sorted(await asyncio.gather(*calls)) == [200, 200, 503]
        await client.delete("/execute/a")
        assert await post("b", "1") == 200
        await client.delete("/execute/b")

    with_client(use, kernels, num_at_once=1, max_waiting=1, max_sessions=1)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"code": 1}, 422),
        ({"code": "1", "timeout": 0}, 422),
        ({"code": "1", "timeout": 1e9}, 422),
        ({"code": "1", "session": ""}, 422),
        ({"code": "x" * MAX_CODE_BYTES}, 413),
    ],
)
def test_what_cannot_be_executed_is_refused(body, status, kernels):
    """With a status, since an answer is shown to the model."""

    async def use(client: httpx.AsyncClient) -> None:
        answer = await client.post("/execute", json=body)
        assert answer.status_code == status and answer.json()["detail"]
        unasked = await client.post("/execute", content=b"{}", headers={"Content-Type": "text/plain"})
        assert unasked.status_code == 422 and "application/json" in unasked.json()["detail"]

    with_client(use, kernels)


def test_the_app_of_the_verifiers_executes_nothing():
    """It runs in the process of a verifier, which has the labels; nobody asks it for that."""

    async def run() -> int:
        transport = httpx.ASGITransport(create_app(FakeSandbox()))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:
            return (await client.post("/execute", json={"code": "1"})).status_code

    assert asyncio.run(run()) == 404

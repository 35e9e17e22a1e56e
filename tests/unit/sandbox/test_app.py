"""The HTTP contract of the code service, which is Open Instruct's: either service can replace the other."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from mgrpo.processes.lifetime import children
from mgrpo.sandbox.app import create_app
from mgrpo.sandbox.connection import BoundedConnection
from mgrpo.sandbox.sandbox import Verdicts
from mgrpo.sandbox.server import serve_command
from mgrpo.sandbox.walled import SandboxError
from tests.unit.sandbox.test_cases import compressed

ADD = {"program": "def add(a, b): return a + b", "tests": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}
ECHO = {"program": "print(input())", "tests": [{"input": "1", "output": "1"}, {"input": "1", "output": "2"}]}


class FakeSandbox:
    """Programs wait until the test resolves them, or fail."""

    num_slots = 1

    def __init__(self) -> None:
        self.waiting: list[Future[Verdicts]] = []

    def run_asserts(self, program: str, tests: list[str], limit_s: float) -> Future[Verdicts]:
        future: Future[Verdicts] = Future()
        if program == "fail":
            future.set_exception(SandboxError("the sandbox broke"))
        else:
            self.waiting.append(future)
        return future


def post(app, *requests: tuple[str, object], **options: object) -> list[httpx.Response]:
    """Send them all at once."""

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
            bodies = [(path, json.dumps(body).encode()) for path, body in requests]
            headers = {"Content-Type": "application/json"} | options.pop("headers", {})
            posts = (client.post(path, content=body, headers=headers, **options) for path, body in bodies)
            return await asyncio.gather(*posts)

    return asyncio.run(send())


def test_answers_have_open_instructs_form(sandbox):
    """A client of their service can also read ours, which says in addition where a verdict was decided."""
    asserts, stdio = post(create_app(sandbox), ("/test_program", ADD), ("/test_program_stdio", ECHO))
    assert asserts.status_code == stdio.status_code == 200
    assert asserts.json().keys() == stdio.json().keys() == {"results", "runtimes", "in_process"}
    assert asserts.json()["in_process"] == stdio.json()["in_process"] == [0, 0]
    assert asserts.json()["results"] == stdio.json()["results"] == [1, 0]
    assert asserts.json()["runtimes"][0] >= 0 and asserts.json()["runtimes"][1] == -1.0
    assert all(runtime >= 0 for runtime in stdio.json()["runtimes"])


@pytest.mark.parametrize("tests", [json.dumps(ADD["tests"]), compressed(ADD["tests"])], ids=["JSON", "compressed"])
def test_tests_may_come_packed(tests, sandbox):
    """Their clients send labels as in the data set."""
    (answer,) = post(create_app(sandbox), ("/test_program", ADD | {"tests": tests, "max_execution_time": 20.0}))
    assert answer.json()["results"] == [1, 0]


def test_no_tests_have_no_results(sandbox):
    """Theirs answers with empty lists, and so does ours."""
    (answer,) = post(create_app(sandbox), ("/test_program", ADD | {"tests": []}))
    assert answer.status_code == 200 and answer.json() == {"results": [], "runtimes": [], "in_process": []}


@pytest.mark.parametrize(
    "body",
    [
        {"program": "x"},
        {"program": 1, "tests": []},
        ADD | {"tests": [1]},
        ADD | {"tests": "assert True"},
        ADD | {"max_execution_time": 0},
        ADD | {"max_execution_time": -1.0},
        ADD | {"max_execution_time": 1e9},
        ADD | {"max_execution_time": "soon"},
        ADD | {"max_execution_time": float("nan")},
        ADD | {"max_execution_time": float("inf")},
        ADD | {"tests": ["x"] * 10_001},
        [],
    ],
)
def test_what_cannot_be_run_is_refused(body):
    """A request that cannot be processed must not return zeros, which are scores."""
    (answer,) = post(create_app(FakeSandbox()), ("/test_program", body))
    assert answer.status_code == 422 and answer.json()["detail"]


def test_a_type_that_browsers_send_unasked_is_refused():
    """A page that its user merely visits could otherwise have programs run."""
    (answer,) = post(create_app(FakeSandbox()), ("/test_program", ADD), headers={"Content-Type": "text/plain"})
    assert answer.status_code == 422 and "application/json" in answer.json()["detail"]


def test_a_failure_of_the_sandbox_is_an_error():
    """The program then has no score; a zero would blame the program for a failure of the service."""
    (answer,) = post(create_app(FakeSandbox()), ("/test_program", ADD | {"program": "fail"}))
    assert answer.status_code == 500 and "the sandbox broke" in answer.json()["detail"]


def test_too_many_waiting_programs_are_refused():
    """An unbounded queue holds every program of a run in memory, and answers after its clients have timed out."""
    sandbox = FakeSandbox()
    app = create_app(sandbox, max_waiting=2)

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
            accepted = [asyncio.create_task(client.post("/test_program", json=ADD)) for _ in range(3)]
            while len(sandbox.waiting) < 3:
                await asyncio.sleep(0)
            refused = await client.post("/test_program", json=ADD)
            for future in sandbox.waiting:
                future.set_result(Verdicts([1, 1], [0.1, 0.1], [0, 0]))
            answers = [refused, *await asyncio.gather(*accepted)]
            last = asyncio.create_task(client.post("/test_program", json=ADD))
            while len(sandbox.waiting) < 4:
                await asyncio.sleep(0)
            sandbox.waiting[-1].set_result(Verdicts([0, 0], [-1.0, -1.0], [0, 0]))
            return [*answers, await last]

    refused, *answered = asyncio.run(send())
    assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
    assert [answer.json()["results"] for answer in answered] == [[1, 1]] * 3 + [[0, 0]]


def test_a_request_that_is_too_large_is_refused():
    """Read to its end, it takes the memory of the machine."""
    app = create_app(FakeSandbox(), max_body_bytes=1000)
    (answer,) = post(app, ("/test_program", ADD | {"program": "x" * 1000}))
    assert answer.status_code == 413


def test_all_requests_together_are_bounded():
    """Each below its limit, as many as connect would take the memory of the machine."""
    sandbox = FakeSandbox()
    app = create_app(sandbox, max_held_bytes=3000)

    async def send() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
            large = ADD | {"program": "x" * 2000}
            first = asyncio.create_task(client.post("/test_program", json=large))
            while not sandbox.waiting:
                await asyncio.sleep(0)
            refused = await client.post("/test_program", json=large)
            sandbox.waiting[0].set_result(Verdicts([1, 1], [0.1, 0.1], [0, 0]))
            statuses = [(await first).status_code, refused.status_code]
            again = asyncio.create_task(client.post("/test_program", json=large))
            while len(sandbox.waiting) < 2:
                await asyncio.sleep(0)
            sandbox.waiting[1].set_result(Verdicts([1, 1], [0.1, 0.1], [0, 0]))
            return [*statuses, (await again).status_code]

    assert asyncio.run(send()) == [200, 503, 200]


def test_a_body_that_does_not_arrive_is_not_waited_for():
    """Clients that stop halfway would hold what they have sent, and their connections, for ever."""
    app = create_app(FakeSandbox(), body_limit_s=0.1)

    async def half() -> AsyncIterator[bytes]:
        yield b'{"program'
        await asyncio.sleep(100)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sandbox") as client:
            return await client.post("/test_program", content=half(), headers={"Content-Type": "application/json"})

    assert asyncio.run(send()).status_code == 408


def test_a_connection_without_a_request_is_closed(monkeypatch):
    """A few hundred of them take all descriptors of a service that waits for ever."""
    monkeypatch.setattr("mgrpo.sandbox.connection.HEAD_LIMIT_S", 0.2)
    app = create_app(FakeSandbox())

    async def send() -> tuple[bytes, bytes]:
        server = uvicorn.Server(uvicorn.Config(app, port=0, http=BoundedConnection, log_level="warning"))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"POST /test_program HTTP/1.1\r\nHost: x\r\n")
            unfinished = await asyncio.wait_for(reader.read(), 60)
            reader, kept = await asyncio.open_connection(*listening.getsockname())
            kept.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET")
            after_one = await asyncio.wait_for(reader.read(), 60)
            writer.close(), kept.close()
            server.should_exit = True
            await serving
        return unfinished, after_one

    unfinished, after_one = asyncio.run(send())
    assert unfinished == b"" and after_one.startswith(b"HTTP/1.1 200 OK")


def test_the_command_serves_on_loopback(sandbox):
    """It reports once where it listens and what isolates programs, answers, and leaves no process behind.

    The first request starts no process, a large one delays no other, and a slot that is killed costs no program its verdict.
    """
    command = [sys.executable, "-m", "mgrpo.sandbox", "--port", "0", "--workers", "1", "--memory_mb", "256"]
    service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert service.stderr is not None
        first = service.stderr.readline()
        assert "active: own processes only, own files only, no network" in first
        url = re.search(r"code service at (http://127\.0\.0\.1:\d+), programs run at a time: 1; ", first)[1]
        assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "healthy"}
        healthy = children(service.pid)
        body = ADD | {"max_execution_time": 20.0}
        assert httpx.post(f"{url}/test_program", json=body, timeout=60).json()["results"] == [1, 0]
        assert children(service.pid) == healthy
        large = json.dumps(ADD | {"tests": compressed(["x" * 100] * 200_000)}).encode()
        with ThreadPoolExecutor() as threads:
            send = functools.partial(httpx.post, f"{url}/test_program", timeout=120)
            refused = threads.submit(send, content=large, headers={"Content-Type": "application/json"})
            answered = 0
            while not refused.done():
                assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "healthy"}
                answered += 1
            assert refused.result().status_code == 422 and "200000 tests" in refused.result().json()["detail"]
            assert answered > 2
            (slot,) = [pid for pid in children(service.pid) if b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            slow = {"program": "import time\ntime.sleep(1)", "tests": ["assert True"], "max_execution_time": 20.0}
            running = threads.submit(send, json=slow)
            while not children(slot):
                assert not running.done()
            os.kill(slot, signal.SIGKILL)
            assert running.result().json()["results"] == [1]
        answer = httpx.post(f"{url}/test_program", json=ADD | {"max_execution_time": 20.0}, timeout=60)
        assert answer.json()["results"] == [1, 0]
        for code, output in (("x = 6", ""), ("x * 7", "42\n")):
            body = {"code": code, "timeout": 20.0, "session": "a"}
            assert httpx.post(f"{url}/execute", json=body, timeout=60).json()["output"] == output
        started = children(service.pid)
    finally:
        service.send_signal(signal.SIGINT)
        said = service.communicate(timeout=60)[1]
    assert said == "" and service.returncode == 0
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.parametrize("port", ["80000", "-1", "http"])
def test_a_port_that_is_none_is_refused(port, capsys):
    """A service that listens elsewhere than its caller believes answers nobody."""
    with pytest.raises(SystemExit) as ended:
        serve_command([f"--port={port}"])
    assert ended.value.code == 2 and f"got {port!r}, expected a port from 1 to 65535" in capsys.readouterr().err


def test_a_port_in_use_is_named(capsys):
    """Before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve_command(["--port", str(port)]) == 2
    assert f"cannot listen at --host 127.0.0.1 --port {port}: Address already in use" in capsys.readouterr().err


def test_the_command_refuses_what_the_sandbox_refuses(capsys, monkeypatch):
    """If the service started without walls, the first hostile program would have the machine."""
    monkeypatch.setattr("mgrpo.sandbox.sandbox._ALL_WALLS", ("none",))
    assert serve_command(["--workers", "1"]) == 2
    assert "--accept_risk" in capsys.readouterr().err

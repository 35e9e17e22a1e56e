"""The HTTP contract of the code service, which is Open Instruct's: either service can replace the other."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future

import httpx
import pytest

from mgrpo.sandbox.app import create_app
from mgrpo.sandbox.sandbox import Verdicts
from mgrpo.sandbox.server import serve_command
from mgrpo.sandbox.slot import SandboxError
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
            return await asyncio.gather(*(client.post(path, json=body, **options) for path, body in requests))

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
        [],
    ],
)
def test_what_cannot_be_run_is_refused(body):
    """A request that cannot be processed must not return zeros, which are scores."""
    (answer,) = post(create_app(FakeSandbox()), ("/test_program", body))
    assert answer.status_code == 422 and answer.json()["detail"]


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


def test_the_command_serves_on_loopback(sandbox, tmp_path):
    """It reports at start what isolates programs, answers, and leaves no process behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mgrpo.sandbox", "--port", str(port), "--workers", "1", "--memory_mb", "256"]
    service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert service.stderr is not None
        first = service.stderr.readline()
        assert "sandbox with 1 slots: " in first and "active: own processes only, own files only, no network" in first
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        answer = httpx.post(f"{url}/test_program", json=ADD | {"max_execution_time": 20.0}, timeout=60)
        assert answer.json()["results"] == [1, 0]
    finally:
        service.send_signal(signal.SIGINT)
        service.wait(timeout=60)
        service.stderr.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_command_refuses_what_the_sandbox_refuses(capsys, monkeypatch):
    """If the service started without walls, the first hostile program would have the machine."""
    monkeypatch.setattr("mgrpo.sandbox.sandbox._ALL_WALLS", ("none",))
    assert serve_command(["--workers", "1"]) == 2
    assert "--accept_risk" in capsys.readouterr().err

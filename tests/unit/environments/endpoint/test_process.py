"""The endpoint as a process: it ends when it is told to and with its learner, and answers small calls without a delay."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mgrpo.sandbox.connection import listen
from tests.unit.environments.endpoint.served import Served

pytest.importorskip("transformers")
BODY = json.dumps({"messages": [{"role": "user", "content": "count to 0"}]}).encode()
PATIENCE_S = 60.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def wait_until(is_true: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def begin_call(served: Served) -> http.client.HTTPConnection:
    """A call whose turn does not end."""
    session = served.open()
    served.delay_s = 600.0
    connection = http.client.HTTPConnection(served.url.split("/")[2], timeout=60)
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    connection.request("POST", f"/s/{session['session']}/v1/chat/completions", BODY, headers)
    wait_until(lambda: served.taken)
    return connection


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_although_calls_are_open(served: Served, number: signal.Signals) -> None:
    """A server that waits for its open calls outlives the run that wants to end it."""
    connection = begin_call(served)
    process = psutil.Process(served.pid)
    process.send_signal(number)
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        connection.getresponse()


def test_it_dies_with_its_learner(tmp_path: Path) -> None:
    """Also when that is killed: no port and no session is left."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.unit.environments.endpoint.served import Served\n"
        f"served = Served(Path({str(tmp_path)!r})); print(served.url, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()) as learner:
        assert learner.stdout
        host, _, port = learner.stdout.readline().split("/")[2].partition(":")
        socket.create_connection((host, int(port))).close()
        learner.send_signal(signal.SIGKILL)

    def refuses() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex((host, int(port))) == errno.ECONNREFUSED

    wait_until(refuses)


def test_connections_that_are_accepted_send_at_once() -> None:
    """Otherwise every answer in two writes takes 40 ms more."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_long_first_prompts_hold_up_nobody(served: Served) -> None:
    """They are encoded in a thread; a short call that comes meanwhile is answered before they are."""
    session = served.open(max_model_length=10**7, max_tokens=10**7)
    order: list[str] = []

    def call(name: str, content: str) -> None:
        connection = http.client.HTTPConnection(served.url.split("/")[2], timeout=60)
        body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        connection.request("POST", f"/s/{session['session']}/v1/chat/completions", body, headers)
        assert connection.getresponse().status == 200
        order.append(name)

    call("first", "count to 0")
    long = threading.Thread(target=call, args=("long", "word " * 400_000))
    long.start()
    time.sleep(0.2)
    call("short", "count to 0")
    long.join()
    assert order == ["first", "short", "long"]


def test_questions_that_fail_are_answered(served: Served) -> None:
    """A learner that is wrong about a session must not wait for ever."""
    for question in ({"ask": "end", "session": "7-none"}, {"ask": "wait", "session": "7-none"}, {"ask": "dance"}):
        assert "error" in served.run(served._link.ask(question, PATIENCE_S))
    assert "error" not in served.run(
        served._link.ask({"ask": "sampled", "session": "7-none", "number": 3, "error": "late"}, PATIENCE_S)
    )

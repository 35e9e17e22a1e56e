"""Agents that run elsewhere: `mgrpo agent-worker` in a process of its own, at an endpoint with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from mgrpo.environments.endpoint.tasks import Tasks
from mgrpo.environments.launch import agent_worker
from mgrpo.environments.launch.agent_worker import KEY, AgentWorker
from tests.unit.environments.endpoint.served import ASKED, Served
from tests.unit.environments.launch.test_command import FORKS_AWAY, processes_with

RUN_KEY = "the run's"
ROOT = str(Path(__file__).parents[4])
PROMPT = {"prompt": ASKED, "worth": 0.5}
LONG_S = 120.0
SILENCE_S = 3.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("tokenizer"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Takes tasks from workers that are silent for so long."""
    found = Served(tmp_path_factory.mktemp("tokenizer"), worker_silence_s=SILENCE_S)
    yield found
    found.close()


@contextlib.contextmanager
def worker(url: str, agent: str, *flags: str, key: str | None = RUN_KEY) -> Iterator[subprocess.Popen]:
    environment = {name: value for name, value in os.environ.items() if name != KEY} | {"PYTHONPATH": ROOT}
    if key is not None:
        environment[KEY] = key
    words = [
        sys.executable,
        "-m",
        "mgrpo",
        "agent-worker",
        "--url",
        url,
        "--agent",
        agent,
        "--agent_box",
        "none",
        *flags,
    ]
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def opened(served: Served, row: dict[str, Any] | None = None, **bounds: Any) -> dict[str, Any]:
    return served.open(task=PROMPT if row is None else row, **{"deadline_s": LONG_S, **bounds})


def waited(served: Served, session: dict[str, Any]) -> dict[str, Any]:
    answer = served.ask("wait", session=session["session"])
    return {"over": answer["status"], **answer["left"]}


def until(is_so: Any) -> None:
    end = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)


def test_workers_play_all_tasks_and_one_of_them_many(served: Served) -> None:
    """Ids and order as with any agent; the reward is what the agent has written."""
    sessions = [opened(served) for _ in range(5)]
    with worker(served.url, "python chatting.py", "--at_once", "2"):
        found = [waited(served, session) for session in sessions]
    for session, left in zip(sessions, found, strict=True):
        assert (left["over"], left["ended"], left["status"]) == ("ended", "ended", 0)
        assert left["output"].startswith("done 4 ")
        end = served.end(session)
        assert end["reward"] == 0.5
        assert len(served.branches(session, end)) == 1 and len(end["turns"]) == 5


def test_a_worker_that_comes_late_finds_its_tasks(served: Served) -> None:
    """The time of a trajectory begins when its task is taken, not when it waits for a worker."""
    session = opened(served, deadline_s=LONG_S)
    time.sleep(1.0)
    with worker(served.url, "python chatting.py"):
        assert waited(served, session)["ended"] == "ended"


def test_a_crash_elsewhere_is_told_with_its_output(served: Served) -> None:
    session = opened(served)
    with worker(served.url, "python agents.py crashes"):
        left = waited(served, session)
    assert (left["ended"], left["status"], left["output"]) == ("crashed", 3, "before the crash\n")
    assert served.end(session)["reward"] is None


def test_an_agent_that_may_not_set_its_reward_does_not(served: Served) -> None:
    session = opened(served, sets_reward=False)
    with worker(served.url, "python chatting.py"):
        assert waited(served, session)["ended"] == "ended"
    assert served.end(session)["reward"] is None


def test_an_agent_that_hangs_elsewhere_is_late(served: Served) -> None:
    session = opened(served, deadline_s=3.0)
    with worker(served.url, "sleep 1000000"):
        left = waited(served, session)
    assert left["over"] == "late" or left["ended"] == "late"


def test_a_worker_that_is_killed_leaves_nothing_and_its_task_is_free(impatient: Served) -> None:
    """Within the time that it may be silent, not at the end of the trajectory's."""
    mark = f"mgrpo-mark-{os.getpid()}-worker"
    session = opened(impatient)
    with worker(impatient.url, f"sh -c '{FORKS_AWAY}; sleep 1000000' {mark}") as process:
        until(lambda: len(processes_with(mark)) == 2)
        process.kill()
        until(lambda: not processes_with(mark))
        assert waited(impatient, session) == {"over": "gone"}


def test_a_worker_that_hangs_loses_its_task_and_ends_it_when_it_goes_on(impatient: Served) -> None:
    """Two would play it; and it is ready for the next one."""
    mark = f"mgrpo-mark-{os.getpid()}-hangs"
    session = opened(impatient)
    with worker(impatient.url, f"sh -c 'test -f {mark} || sleep 1000000' {mark}", "--at_once", "1") as process:
        until(lambda: processes_with(mark))
        process.send_signal(signal.SIGSTOP)
        assert waited(impatient, session) == {"over": "gone"}
        impatient.end(session)
        process.send_signal(signal.SIGCONT)
        until(lambda: not processes_with(mark))
        again = opened(impatient)
        until(lambda: processes_with(mark))
        impatient.end(again)


def test_a_worker_that_says_that_it_is_alive_keeps_its_task() -> None:
    """However long it plays; and silence is what this process has seen, which may have been stopped itself."""

    async def check() -> None:
        lost: list[tuple[str, str]] = []
        tasks = Tasks("key", url="", begin=lambda name: None, lose=lambda *how: lost.append(how), silence_s=60.0)
        for name in ("kept", "quiet", "plain"):
            tasks.add(name, {"row": {}})
            assert await tasks.next("key") == (name, {"row": {}})
            tasks.begun(name, says_alive=name != "plain")
        for number in range(20):
            assert lost == ([("quiet", "gone")] if number > 4 else [])
            tasks.alive("kept")
            tasks._look()
        tasks.remove("kept")
        tasks.alive("kept")
        for _ in range(9):
            tasks._look()
        assert len(lost) == 1

    asyncio.run(check())


def test_a_worker_that_never_says_so_has_all_its_time(impatient: Served) -> None:
    """One of the user's own may be a few lines."""
    session = opened(impatient, deadline_s=3 * SILENCE_S)
    assert httpx.get(f"{impatient.url}/tasks/next", headers={"x-api-key": RUN_KEY}, timeout=LONG_S).json()["task"]
    assert waited(impatient, session) == {"over": "late"}
    answer = httpx.post(f"{session['base_url']}/alive", headers={"x-api-key": session["api_key"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "trajectory_over")
    impatient.end(session)
    answer = httpx.post(f"{session['base_url']}/alive", headers={"x-api-key": session["api_key"]})
    assert answer.status_code == 401


def test_a_worker_that_is_stopped_gives_its_task_back(served: Served) -> None:
    """The run need not wait for anything."""
    mark = f"mgrpo-mark-{os.getpid()}-stopped"
    session = opened(served)
    with worker(served.url, f"sh -c '{FORKS_AWAY}; sleep 1000000' {mark}") as process:
        until(lambda: len(processes_with(mark)) == 2)
        process.send_signal(signal.SIGTERM)
        assert waited(served, session)["ended"] == "gone"
        assert process.wait(LONG_S) == 0
    assert not processes_with(mark)


def test_a_wrong_key_ends_the_worker(served: Served) -> None:
    session = opened(served)
    with worker(served.url, "python chatting.py", key="another") as process:
        _, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 2 and "does not take this key" in said and "another" not in said
    assert served.end(session)["turns"] == []


def test_a_worker_without_a_key_says_where_to_put_one(served: Served, tmp_path: Path) -> None:
    with worker(served.url, "python chatting.py", key=None) as process:
        _, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 2 and KEY in said
    file = tmp_path / "key"
    file.write_text(f"{RUN_KEY}\n")
    session = opened(served)
    with worker(served.url, "python chatting.py", "--key_file", str(file), key=None):
        assert waited(served, session)["ended"] == "ended"


TASK = {
    "row": {},
    "base_url": "http://127.0.0.1:1/s/0-1",
    "api_key": "a",
    "task_key": "t",
    "reward_key": None,
    "deadline_s": None,
    "silence_s": 60.0,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({name: ...}, f"{name} of the task is missing; is the run of this version") for name in TASK),
        *(({name: [1]}, f"{name} of the task") for name in TASK),
        *(
            ({name: value}, f"{name} of the task")
            for name in ("silence_s", "deadline_s")
            for value in (0, -1, "x", True)
        ),
        *(({"silence_s": value}, "expected seconds above 0") for value in (float("nan"), float("inf"))),
        *(({"base_url": value}, "base_url") for value in ("file:///etc/passwd", "127.0.0.1:1", "http:///x")),
        *(({"base_url": value}, "URL") for value in ("http://a/\r\nx: y",)),
        *(
            ({name: value}, f"{name} of the task cannot be sent")
            for name in ("api_key", "task_key")
            for value in ("a\0", "ä", "\n")
        ),
    ],
)
def test_a_task_that_cannot_be_played_is_named(change: dict[str, Any], named: str) -> None:
    """A run of another version, or what answers in its place, must not end a worker or have it take task after task."""
    task = {name: value for name, value in (TASK | change).items() if value is not ...}
    with pytest.raises(ValueError, match=named):
        asyncio.run(next_task(json.dumps({"task": task}).encode()))


@pytest.mark.parametrize(
    "data",
    [
        *(b"[1]", b"7", b"{}", b"<html>", b'{"task": [1]}', b'{"task": "\xff"}', b""),
        b'{"task":' + b"[" * 100_000,
        b" " * 300_000,
    ],
)
def test_an_answer_that_holds_no_task_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_worker, "_MOST_TASK_BYTES", 200_000)
    with pytest.raises((ValueError, RecursionError)):
        asyncio.run(next_task(data))


def test_a_task_is_taken_as_it_is() -> None:
    assert asyncio.run(next_task(json.dumps({"task": TASK}).encode())) == TASK
    assert asyncio.run(next_task(b'{"task": null}')) is None


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (
            b"302 Found\r\nLocation: http://login.example/",
            "it answered 302, Location 'http://login.example/'; expected 200",
        ),
        (b"204 No Content", "it answered 204; expected 200"),
        (b"421 Misdirected Request", "it answered 421; expected 200"),
    ],
)
def test_another_status_is_named(head: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        asyncio.run(next_task(b"", head))


def test_an_endpoint_that_does_not_answer_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    """However often the others do."""

    async def check() -> None:
        worker = AgentWorker(["http://a", "http://b"], RUN_KEY, {})
        answers: list[str] = []

        async def next_of(client: Any, url: str) -> None:
            answers.append(url)
            if len(answers) > 12:
                raise asyncio.CancelledError
            if url == "http://b" and len(answers) != 8:
                raise ValueError("nothing there")

        worker._next = next_of  # type: ignore[method-assign]
        with contextlib.suppress(asyncio.CancelledError):
            await worker._play_all(None, None, 0)  # type: ignore[arg-type]

    asyncio.run(check())
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("no task from http://b (ValueError" in line for line in said), "again after an answer"


def test_calls_at_another_endpoint_end_a_task_and_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A balancer that does not choose by the path."""
    refusal = json.dumps({"error": {"message": "send paths that begin with /s/1- to that one"}}).encode()

    async def check() -> None:
        worker = AgentWorker(["http://a"], RUN_KEY, {})
        async with answering(refusal, b"421 Misdirected Request") as url, aiohttp.ClientSession() as client:
            for _ in range(2):
                async with asyncio.timeout(LONG_S):
                    await worker._while_wanted(client, TASK | {"base_url": f"{url}/s/1-2"})

    asyncio.run(check())
    said = capsys.readouterr().err
    assert (
        said.count("send paths that begin with /s/1- to that one") == said.count("\n") == 1
        and "/s/1-2 answered 421" in said
    )


@pytest.mark.parametrize(("wait", "status"), [("0", 200), ("0.5", 200), ("-1", 400), ("nan", 400), ("soon", 400)])
def test_a_worker_says_how_long_it_waits(served: Served, wait: str, status: int) -> None:
    """One of several endpoints must not hold a slot for which another has a task."""
    begun = time.monotonic()
    answer = httpx.get(f"{served.url}/tasks/next?alive=1&wait_s={wait}", headers={"x-api-key": RUN_KEY})
    assert answer.status_code == status and time.monotonic() - begun < 5
    assert status != 200 or answer.json() == {"task": None}


@contextlib.asynccontextmanager
async def answering(data: bytes, head: bytes = b"200 OK") -> AsyncIterator[str]:
    """The address of a server with this answer to everything."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        length = b"" if head.startswith(b"204") else b"Content-Length: %d\r\n" % len(data)
        writer.write(b"HTTP/1.1 " + head + b"\r\nConnection: close\r\n" + length + b"\r\n" + data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def next_task(data: bytes, head: bytes = b"200 OK") -> Any:
    """The task that a worker takes of an endpoint with this answer."""
    async with answering(data, head) as url, aiohttp.ClientSession() as client:
        return await AgentWorker([url], RUN_KEY, {})._next(client, url)


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x7f"])
def test_a_key_that_cannot_be_sent_is_refused_at_the_start(served: Served, key: str) -> None:
    """It would be taken for the network's fault, and tried for ever."""
    with worker(served.url, "true", key=key) as process:
        assert process.wait(LONG_S) == 2
        assert "cannot be sent; expected one line of printable ASCII" in process.stderr.read()


def test_of_two_ends_the_first_counts(served: Served) -> None:
    """A task that has ended must not be given back, to be played until it succeeds."""
    session = opened(served)
    for body in ({"ended": "crashed", "status": 3}, {"ended": "gone"}, {"ended": "ended", "output": "later"}):
        answer = httpx.post(
            f"{session['base_url']}/end", json=body, headers={"Authorization": f"Bearer {session['task_key']}"}
        )
        assert answer.status_code == 200
    assert waited(served, session) == {"over": "ended", "ended": "crashed", "status": 3, "output": ""}
    served.end(session)


@pytest.mark.parametrize("key", [None, "", "wrong", "the run's\xff"])
def test_tasks_are_for_those_with_the_key(served: Served, key: str | None) -> None:
    headers = {} if key is None else {"x-api-key": key.encode("latin1")}
    answer = httpx.get(f"{served.url}/tasks/next", headers=headers)
    assert answer.status_code == 401 and "row" not in answer.text


def test_a_task_whose_taker_has_gone_is_handed_out_again(served: Served) -> None:
    """It is not lost with a connection that broke while a worker waited."""
    headers = {"x-api-key": RUN_KEY}
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{served.url}/tasks/next", headers=headers, timeout=0.5)
    session = opened(served)
    task = httpx.get(f"{served.url}/tasks/next", headers=headers, timeout=LONG_S).json()["task"]
    assert task["row"] == PROMPT and task["base_url"] == session["base_url"] and task["deadline_s"] == LONG_S
    served.end(session)


@pytest.mark.parametrize(
    "body", [{"ended": "won"}, {"status": 1.5}, {"status": True}, {"status": 10**30}, {"output": 1}, {"ended": []}]
)
def test_an_end_in_other_words_is_refused(served: Served, body: dict[str, Any]) -> None:
    session = opened(served)
    answer = httpx.post(f"{session['base_url']}/end", json=body, headers={"x-api-key": session["api_key"]})
    assert answer.status_code == 400
    served.end(session)

"""The program that serves agents: `python -m mgrpo.environments.endpoint.process`, asked in JSON lines by the learner.

Every question has a number "id", which its answer repeats; answers come in any order. Questions and their answers:

    load     language, host, port, public_url, number, limits, sampling_conflict, worker_key
                                          ->  url, and direct: where other endpoints of the run reach this one
    peers    urls                         ->  nothing: the direct address of each endpoint of the run by its number
    open     max_tokens, max_model_length, per_turn_max_tokens, deadline_s, sampling; task, sets_reward
                                          ->  session, base_url, api_key, reward_key, task_key. With a task, a row, a worker plays it
    wishes                                ->  wishes, cancelled; waits until there are any
    sampled  session, number; tokens, logprobs, finish_reason, or error, is_over  ->  nothing
    wait     session                      ->  status: waits until the trajectory is over, "ended", "late", "lost" where no worker
                                              came, "gone" where it is silent; left: what it said, see `tasks.left_by`
    end      session                      ->  what `Session.report` says; its calls are cancelled and its keys are forgotten

An answer may be {"error": text} instead. The process ends with its learner, and at once: no call is waited for. One that has
joined from another machine (joined.py) is asked in the same way, over a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import uvicorn

from mgrpo.environments.endpoint.app import EndpointApp
from mgrpo.environments.endpoint.passing import Passing
from mgrpo.environments.endpoint.session import NUM_READERS, EndpointLimits, LongReader
from mgrpo.environments.endpoint.sessions import Sessions, bounds_of
from mgrpo.environments.endpoint.tasks import Tasks
from mgrpo.environments.endpoint.wishes import Wishes
from mgrpo.environments.loop.program_language import LanguageSpec
from mgrpo.processes.json_lines import Message, take_standard_streams
from mgrpo.processes.lifetime import die_with_parent
from mgrpo.sandbox.connection import HEAD_LIMIT_S, BoundedConnection, listen

MAX_QUESTION_BYTES = 1 << 30
_SWITCH_S = 0.0005
"""Seconds for which a thread that reads a long request keeps the loop waiting; Python's own is 0.005."""


def main() -> None:
    die_with_parent()
    # Python would raise in the middle of a call; the learner, not the terminal, ends this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(_serve(*take_standard_streams()))


async def _serve(questions: BinaryIO, answers: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_QUESTION_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
    # The learner reads when it has time, which no client may wait for.
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(answers, "wb"))
    await AskedEndpoint().serve(reader, writer.write)
    # An orderly end would wait for clients.
    os._exit(0)


class AskedEndpoint:
    """The endpoint of this process, once it is loaded."""

    def __init__(self, *, host: str | None = None, port: int | None = None) -> None:
        """`host`, `port`: where to serve; None: where the learner says."""
        _take_descriptors()
        self._host, self._port = host, port
        self._wishes = Wishes()
        self._passing: Passing | None = None
        self._server: asyncio.Task[None] | None = None
        self._loaded: Sessions | None = None
        self._tasks: Tasks | None = None

    async def serve(self, questions: asyncio.StreamReader, write: Callable[[bytes], object]) -> None:
        """Answer until no more is asked. What it serves goes on until the process ends.

        Args:
            write: sends an answer, sooner or later.
        """
        tasks = set()
        while line := await questions.readline():
            task = asyncio.create_task(self._answer(json.loads(line), write))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    async def _answer(self, question: Message, write: Callable[[bytes], object]) -> None:
        try:
            answer = await self._found(question)
        except Exception as err:
            answer = {"error": f"{type(err).__name__}: {err}"}
        write(json.dumps({**answer, "id": question["id"]}).encode() + b"\n")

    async def _found(self, question: Message) -> dict[str, Any]:
        match question["ask"]:
            case "load":
                return await self._load(question)
            case "peers":
                assert self._passing is not None, "the first question is load"
                self._passing.urls = {int(number): url for number, url in question["urls"].items()}
                return {}
            case "open":
                return self._open(question)
            case "wishes":
                return await self._wishes.take()
            case "sampled":
                known = ("session", "number", "tokens", "logprobs", "finish_reason", "error", "is_over")
                self._wishes.settle(**{name: question[name] for name in known if name in question})
                return {}
            case "wait":
                return await self._sessions.wait(question["session"])
            case "end":
                if self._tasks is not None:
                    self._tasks.remove(question["session"])
                return await self._sessions.end(question["session"])
            case other:
                raise AssertionError(other)

    @property
    def _sessions(self) -> Sessions:
        assert self._loaded is not None, "the first question is load"
        return self._loaded

    def _open(self, question: Message) -> dict[str, Any]:
        row, bounds = question.get("task"), bounds_of(question)
        opened = self._sessions.open(bounds, begins=row is None)
        if row is not None:
            assert self._tasks is not None, "tasks need a worker_key"
            kept = {name: opened[name] for name in ("base_url", "api_key", "task_key")}
            # Whoever may not say how good it was gets no key for that.
            reward_key = opened["reward_key"] if question.get("sets_reward", True) else None
            silence_s = self._sessions.limits.worker_silence_s
            limits = {"deadline_s": bounds.deadline_s, "silence_s": silence_s}
            task = {"row": row, **kept, "reward_key": reward_key, **limits}
            self._tasks.add(opened["session"], task)
        return opened

    async def _load(self, question: Message) -> dict[str, str]:
        """Serve; returns the address for agents, and the one for other endpoints."""
        spec = LanguageSpec.from_json(question["language"])
        if not spec.format.startswith("vllm:"):
            _do_without_torch()
        # One for the loop, and one for each thread of long requests.
        language, *others = [await asyncio.to_thread(spec.make) for _ in range(1 + NUM_READERS)]
        sys.setswitchinterval(_SWITCH_S)
        host = question["host"] if self._host is None else self._host
        port = question["port"] if self._port is None else self._port
        try:
            listening = listen(host, port)
        except OSError as err:
            raise ValueError(
                f"cannot listen at {host} port {port}: {err.strerror}; choose another agent_endpoint_port (mgrpo agent-endpoint: "
                "--port), or 0 for any free one"
            ) from err
        direct = _url(host, listening)
        url = (question.get("public_url") or direct).rstrip("/")
        limits = EndpointLimits(**question["limits"], refuses_sampling=question["sampling_conflict"] == "refuse")
        self._loaded = Sessions(
            language, self._wishes, reader=LongReader(others), number=question["number"], url=url, limits=limits
        )
        self._passing = Passing(question["number"])
        if (worker_key := question.get("worker_key")) is not None:
            self._tasks = Tasks(
                worker_key, begin=self._loaded.begin, lose=self._loaded.lose, silence_s=limits.worker_silence_s
            )
        server = _Server(
            uvicorn.Config(
                EndpointApp(self._loaded, self._passing, tasks=self._tasks),
                http=BoundedConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # The connection ends one that is idle.
                timeout_keep_alive=int(2 * HEAD_LIMIT_S),
            )
        )
        self._server = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            if self._server.done():
                self._server.result()
            await asyncio.sleep(0.01)
        # What is there now stays; the collector need not look at it again and again while clients wait.
        gc.collect()
        gc.freeze()
        return {"url": url, "direct": direct}


class _Server(uvicorn.Server):
    """Leaves signals to the process, which they end at once: an orderly end would wait for open calls."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _url(host: str, listening: socket.socket) -> str:
    """An address that leads to the socket."""
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    port = listening.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _do_without_torch() -> None:
    """Have transformers not find it: tokenizers and templates do not need it, and it takes 260 MB and two seconds."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def _take_descriptors() -> None:
    """Have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()

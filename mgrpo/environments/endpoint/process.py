"""The program that serves agents: `python -m mgrpo.environments.endpoint.process`, controlled in JSON lines by the learner.

Every request has a number "id", which its answer repeats; answers come in any order. Requests and their answers:

    load     language, host, port, public_url, number, limits, worker_key
                                          ->  url: its address for agents, and port: where it listens
    open     max_tokens, max_model_length, per_turn_max_tokens, deadline_s, sampling; task, sets_reward
                                          ->  session, base_url, api_key, reward_key, task_key. With a task, a row, a worker plays it
    wishes                                ->  wishes, cancelled: sampling requests; waits until there are some of either
    worker                                ->  nothing; waits until a worker has asked for a task. Needs a worker_key
    sampled  session, number; tokens, logprobs, finish_reason, or error, is_over  ->  nothing
    wait     session                      ->  status: waits until the trajectory is over, "ended", "late", "lost" if no worker
                                              came, "gone" if it is silent; left: its report, see `tasks.left_by`
    end      session                      ->  the result of `Session.report`; its calls are cancelled and its keys are forgotten

An answer may be {"error": text} instead. The process ends with its learner, at once, without waiting for calls. One that has
joined from another machine (joined.py) is controlled in the same way, over a connection.
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
"""Seconds for which a thread that reads a long request blocks the loop; Python's default is 0.005."""


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
        """`host`, `port`: address to listen at; None: from the learner's `load`."""
        _take_descriptors()
        self._host, self._port = host, port
        self._wishes = Wishes()
        self._server: asyncio.Task[None] | None = None
        self._loaded: Sessions | None = None
        self._tasks: Tasks | None = None

    async def serve(self, questions: asyncio.StreamReader, write: Callable[[bytes], object]) -> None:
        """Answer requests until their stream ends. The HTTP server runs until the process ends.

        Args:
            write: sends an answer, without blocking.
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
            case "open":
                return self._open(question)
            case "wishes":
                return await self._wishes.take()
            case "worker":
                assert self._tasks is not None, "workers need a worker_key"
                await self._tasks.was_asked.wait()
                return {}
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
            # Without the right to set the reward there is no key for it.
            reward_key = opened["reward_key"] if question.get("sets_reward", True) else None
            silence_s = self._sessions.limits.worker_silence_s
            limits = {"deadline_s": bounds.deadline_s, "silence_s": silence_s}
            task = {"row": row, **kept, "reward_key": reward_key, **limits}
            self._tasks.add(opened["session"], task)
        return opened

    async def _load(self, question: Message) -> dict[str, Any]:
        """Serve; returns the answer to `load`."""
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
        url = (question.get("public_url") or _url(host, listening)).rstrip("/")
        limits = EndpointLimits(**question["limits"])
        self._loaded = Sessions(
            language, self._wishes, reader=LongReader(others), number=question["number"], url=url, limits=limits
        )
        if (worker_key := question.get("worker_key")) is not None:
            self._tasks = Tasks(
                worker_key,
                url=url,
                begin=self._loaded.begin,
                lose=self._loaded.lose,
                silence_s=limits.worker_silence_s,
            )
        server = _Server(
            uvicorn.Config(
                EndpointApp(self._loaded, tasks=self._tasks),
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
        # The present objects stay; the collector need not scan them repeatedly while clients wait.
        gc.collect()
        gc.freeze()
        return {"url": url, "port": listening.getsockname()[1]}


class _Server(uvicorn.Server):
    """A server without signal handlers: signals end the process at once, as an orderly end would wait for open calls."""

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
    """Hide torch from transformers: tokenizers and templates do not need it, and it takes 260 MB and two seconds."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def _take_descriptors() -> None:
    """Raise the limit of open files to the most that the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()

"""`mgrpo agent-worker`: takes tasks of a run on another machine, and plays them with a command on this one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import signal
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import NoneType
from typing import Any

import aiohttp

from mgrpo.environments.launch.command import CommandAgent
from mgrpo.environments.offered.agent import Endpoint, Outcome
from mgrpo.processes.reply_bodies import PLAIN, plain_body

KEY = "MGRPO_WORKER_KEY"
"""The variable that holds the run's key for workers, there and here."""
_ANSWER_S = 30.0
"""Seconds for a call, longer than an endpoint holds a request for a task."""
_WAIT_S, _LEAST_WAIT_S = 10.0, 1.0
"""Seconds for which a slot waits for a task at all endpoints together, and the least at each."""
_LONGEST_PAUSE_S = 30.0
_KEEP_ALIVE_S = 5.0
"""Seconds for which an idle connection is reused; an endpoint closes it after 10 s."""
_NO_DEADLINE_S = 86_400.0
_LAST_WORDS_S = 5.0
_ALIVE_SHARE = 6
"""Heartbeats within the time after which the run takes a task away."""
_LEAST_PAUSE_S = 0.5
_MOST_TASK_BYTES = 1 << 26
_MOST_REFUSAL_BYTES = 1 << 16
_OVER = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.MISDIRECTED_REQUEST)
"""Answers after which a task is no longer played."""
_FORM: Mapping[str, Any] = {
    "row": (dict,),
    "base_url": (str,),
    "api_key": (str,),
    "task_key": (str,),
    "reward_key": (str, NoneType),
    "deadline_s": (int, float, NoneType),
    "silence_s": (int, float),
}
"""Fields of a task, with their types."""


class WorkerRefused(Exception):
    """The run rejects this worker's key."""


class AgentWorker:
    """A worker that plays tasks with one kind of command, several at a time."""

    def __init__(self, urls: Sequence[str], key: str, settings: Mapping[str, Any]) -> None:
        """
        Args:
            urls: addresses of the run's endpoints, each with its own tasks, or of the balancer before them.
            settings: arguments of `CommandAgent`.
        """
        self._urls, self._key, self._settings = [url.rstrip("/") for url in urls], key, settings
        self._silent: set[str] = set()
        """URLs whose silence has been reported."""
        self._has_strayed = False

    async def work(self, num_at_once: int) -> None:
        """Play tasks until cancelled. Tasks in progress are then lost, which is reported to the run.

        Raises:
            WorkerRefused: the key is wrong.
            ValueError: such agents cannot be started here.
        """
        first = CommandAgent(**self._settings)
        await first.setup()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
            auto_decompress=False,
        ) as client:
            agents = [first, *(CommandAgent(**self._settings) for _ in range(num_at_once - 1))]
            slots = [asyncio.create_task(self._play_all(client, agent, place)) for place, agent in enumerate(agents)]
            try:
                await asyncio.gather(*slots)
            finally:
                # A second cancellation would cut short the clean-up of the first.
                for slot in slots:
                    if not slot.cancelling():
                        slot.cancel()
                await asyncio.gather(*slots, return_exceptions=True)

    async def _play_all(self, client: aiohttp.ClientSession, agent: CommandAgent, place: int) -> None:
        pause_s = 1.0
        # Others begin at other endpoints.
        for number in itertools.count(place):
            url = self._urls[number % len(self._urls)]
            try:
                task = await self._next(client, url)
            except (aiohttp.ClientError, TimeoutError, RecursionError, ValueError) as err:
                self._say_silent(url, err)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = 1.0
            self._silent.discard(url)
            if task is not None:
                await self._play(client, agent, task)

    async def _next(self, client: aiohttp.ClientSession, url: str) -> Mapping[str, Any] | None:
        headers = _bearer(self._key) | PLAIN
        wait_s = max(_WAIT_S / len(self._urls), _LEAST_WAIT_S)
        asked = f"{url}/tasks/next?alive=1&wait_s={wait_s:g}"
        async with client.get(asked, headers=headers, allow_redirects=False) as answer:
            data = await plain_body(answer.headers, answer.content.iter_any(), _MOST_TASK_BYTES)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise WorkerRefused(f"the run at {url} does not take this key; give the one that it has in {KEY}")
        if answer.status == HTTPStatus.NOT_FOUND:
            raise ValueError(f"the run at {url} hands out no tasks; start it with agent=remote")
        if answer.status != HTTPStatus.OK:
            where = f", Location {to!r:.200}" if (to := answer.headers.get("Location")) is not None else ""
            raise ValueError(f"it answered {answer.status}{where}; expected 200")
        found = json.loads(data)
        if not isinstance(found, dict) or "task" not in found:
            raise ValueError(f"expected an object with a task, not {found!r:.80}")
        if (task := found["task"]) is not None:
            _check_task(task)
        return task

    async def _play(self, client: aiohttp.ClientSession, agent: CommandAgent, task: Mapping[str, Any]) -> None:
        outcome: dict[str, Any] | None = {"ended": "gone", "output": "its worker was stopped"}
        playing = asyncio.create_task(self._played(agent, task))
        wanted = asyncio.create_task(self._while_wanted(client, task))
        try:
            await asyncio.wait({playing, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                outcome = None
                return
            found = playing.result()
            outcome = {"ended": found.ended, "status": found.status, "output": found.output}
            if found.reward is not None and task["reward_key"] is not None:
                await _tell(client, task, "reward", {"reward": found.reward, "metrics": dict(found.metrics)})
        except Exception as err:
            # One task must not end the others.
            outcome = {"ended": "lost", "output": f"{type(err).__name__}: {err}"}
        finally:
            for each in (playing, wanted):
                each.cancel()
            await asyncio.gather(playing, wanted, return_exceptions=True)
            # Also where it is cancelled: the run need not wait for the deadline.
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    if outcome is not None:
                        await _tell(client, task, "end", outcome)
            except TimeoutError:
                pass
            finally:
                await agent.end()

    async def _played(self, agent: CommandAgent, task: Mapping[str, Any]) -> Outcome:
        endpoint = Endpoint(base_url=task["base_url"], api_key=task["api_key"], reward_key=task["reward_key"])
        await agent.reset(task["row"], seed=0)
        return await agent.run(endpoint, truth={}, limit_s=task["deadline_s"] or _NO_DEADLINE_S)

    async def _while_wanted(self, client: aiohttp.ClientSession, task: Mapping[str, Any]) -> None:
        """Send heartbeats for a task until the run reports its end, or they reach another endpoint."""
        while True:
            status, sentence = await _tell(client, task, "alive", {})
            if status == HTTPStatus.MISDIRECTED_REQUEST and not self._has_strayed:
                self._has_strayed = True
                sys.stderr.write(f"mgrpo agent-worker: {task['base_url']} answered 421: {sentence!r:.500}\n")
            if status in _OVER:
                return
            await asyncio.sleep(max(task["silence_s"] / _ALIVE_SHARE, _LEAST_PAUSE_S))

    def _say_silent(self, url: str, err: Exception) -> None:
        if url not in self._silent:
            self._silent.add(url)
            sys.stderr.write(f"mgrpo agent-worker: no task from {url} ({type(err).__name__}: {err}); trying again\n")


def _check_task(task: Any) -> None:
    """ValueError for a task that cannot be played: the run may be of another version."""
    for name, types in _FORM.items():
        value: Any = task.get(name, ...) if isinstance(task, dict) else task
        if not isinstance(value, types) or isinstance(value, bool):
            was = "missing" if value is ... else f"{value!r:.80}"
            raise ValueError(f"{name} of the task is {was}; is the run of this version of mgrpo?")
        if name.endswith("_s") and value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} of the task is {value!r:.80}; expected seconds above 0")
        if name.endswith("_key") and value is not None and not _is_plain(value):
            raise ValueError(f"{name} of the task cannot be sent; expected printable ASCII")
    url = urllib.parse.urlsplit(task["base_url"])
    if url.scheme not in ("http", "https") or not url.hostname or not task["base_url"].isprintable():
        raise ValueError(f"base_url of the task is {task['base_url']!r:.80}; expected a URL, http://... or https://...")


def _is_plain(key: str) -> bool:
    """True for a key that a header can hold."""
    return key.isascii() and key.isprintable()


async def _tell(
    client: aiohttp.ClientSession, task: Mapping[str, Any], what: str, values: object
) -> tuple[int | None, str]:
    """Report to the session; one that has ended ignores it. Returns the answer's status, None: no answer, and with status 421 the
    endpoint's message."""
    # The agent holds the trajectory's own key.
    key = task["reward_key"] if what == "reward" else task["task_key"]
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        url, headers = f"{task['base_url']}/{what}", _bearer(key) | PLAIN
        async with client.post(url, json=values or None, headers=headers, allow_redirects=False) as answer:
            is_strayed = answer.status == HTTPStatus.MISDIRECTED_REQUEST
            return answer.status, await _sentence(answer) if is_strayed else ""
    return None, ""


async def _sentence(answer: aiohttp.ClientResponse) -> str:
    """The message of an endpoint's refusal; "" if it cannot be read."""
    try:
        data = await plain_body(answer.headers, answer.content.iter_any(), _MOST_REFUSAL_BYTES)
        return str(json.loads(data)["error"]["message"])
    except (aiohttp.ClientError, TimeoutError, RecursionError, ValueError, TypeError, LookupError):
        return ""


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def worker_command(argv: Sequence[str]) -> int:
    """The command `mgrpo agent-worker`."""
    words = parser().parse_args(argv)
    try:
        key = _key(words.key_file)
        settings = {
            "command": words.agent,
            "box": words.agent_box,
            "image": words.agent_image,
            "network": words.agent_network,
            "files": words.agent_files,
            "env": tuple(words.agent_env),
            "max_processes": words.agent_max_processes,
            "memory_mb": words.agent_memory_mb,
            "disk_mb": words.agent_disk_mb,
            "cpus": words.agent_cpus,
        }
        worker = AgentWorker(words.url, key, settings)
        # Whatever ends this process, the keepers of its boxes end them.
        return asyncio.run(_until_stopped(worker, words.at_once))
    except ValueError as err:
        sys.stderr.write(f"mgrpo agent-worker: {err}\n")
        return 2


async def _until_stopped(worker: AgentWorker, num_at_once: int) -> int:
    working = asyncio.create_task(worker.work(num_at_once))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        return 0
    except WorkerRefused as err:
        sys.stderr.write(f"mgrpo agent-worker: {err}\n")
    return 2


def _key(file: str | None) -> str:
    """The run's key, from a variable: every user of the machine may read command lines."""
    try:
        key = os.environ.get(KEY, "") if file is None else Path(file).read_text().strip()
    except OSError as err:
        raise ValueError(f"--key_file {file} cannot be read: {err.strerror}") from err
    if not key:
        raise ValueError(f"there is no key of the run; export {KEY}, or name a file that holds it: --key_file FILE")
    if not _is_plain(key):
        raise ValueError(f"the key of the run in {file or KEY} cannot be sent; expected one line of printable ASCII")
    return key


def _command(text: str) -> str:
    if not shlex.split(text):
        raise ValueError
    return text


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    found = argparse.ArgumentParser(
        prog="mgrpo agent-worker",
        description="Takes tasks of a run with agent=remote, and has a command play them on this machine, until it is stopped. "
        f"The run's key is read from the variable {KEY} or from --key_file.",
        allow_abbrev=False,
    )
    found.add_argument("--url", action="append", required=True, help="of an endpoint of the run; repeated: of all")
    found.add_argument("--agent", required=True, type=_command, help='the command, such as "python agent.py"')
    found.add_argument("--at_once", type=int, default=4, metavar="N", help="tasks at a time, 4")
    found.add_argument("--key_file", metavar="FILE", help=f"holds the run's key, in place of the variable {KEY}")
    found.add_argument(
        "--agent_box", default="local", metavar="BOX", help="see the setting of this name; likewise the others"
    )
    found.add_argument("--agent_image", metavar="IMAGE")
    found.add_argument("--agent_network", action="store_true")
    found.add_argument("--agent_files", metavar="FOLDER")
    found.add_argument("--agent_env", nargs="*", default=(), metavar="NAME")
    found.add_argument("--agent_max_processes", type=int, default=256, metavar="N")
    found.add_argument("--agent_memory_mb", type=int, default=4096, metavar="MIB")
    found.add_argument("--agent_disk_mb", type=int, default=1024, metavar="MIB")
    found.add_argument("--agent_cpus", type=float, default=None, metavar="CORES")
    return found

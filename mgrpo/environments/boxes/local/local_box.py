"""Boxes of this machine, each with a keeper process: behind walls, or without ("none": a separate folder and processes).

Without walls a command has all rights of this user; its processes and its folder are removed all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.environments.boxes.box import (
    CLOSE_LIMIT_S,
    Bounds,
    BoxError,
    BoxLost,
    Done,
    address_of,
    moved,
    ready_in_time,
)
from mgrpo.environments.boxes.captured import Captured, in_memory
from mgrpo.environments.boxes.local import leftover, sight
from mgrpo.environments.boxes.local.keeper import MAX_PACKET, KeeperSetup
from mgrpo.environments.boxes.relay import Relay
from mgrpo.sandbox.walled import PROGRAM_IDS

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[4])
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from mgrpo.environments.boxes.local import keeper; keeper.main(sys.argv[2])"
_GRACE_S = 0.2
"""Seconds for output after the end of a command: processes that it left may hold the pipes open."""
_FILE_LIMIT_S = 60.0
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ACCEPT = (
    "Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined --security-opt apparmor=unconfined), "
    "or set agent_box=docker; or agent_box=none, which accepts that the agent can do whatever this user can"
)


async def open_local(bounds: Bounds, *, walls: Sequence[str] | None = None) -> LocalBox:
    """A box behind the first of these walls that this machine has; by default a user namespace's, then root's.

    Raises:
        ValueError: the machine has none of them, a path cannot be shown, or `Bounds.cpus` is set.
    """
    if bounds.cpus is not None:
        raise ValueError("agent_cpus holds back containers alone; set agent_box=docker or podman, or leave it out")
    reasons = []
    for kind in walls or (("user", "root") if os.geteuid() == 0 else ("user",)):
        try:
            return await _open(bounds, kind)
        except _Refused as err:
            reasons.append(str(err))
            if not err.is_forbidden:
                raise BoxError(f"no walls can be set up: {err}") from None
    raise ValueError(f"this machine cannot isolate an agent (agent_box=local): {'; '.join(reasons)}. {_ACCEPT}")


class _Refused(Exception):
    def __init__(self, why: str, is_forbidden: bool) -> None:
        super().__init__(why)
        self.is_forbidden = is_forbidden


async def _open(bounds: Bounds, kind: str) -> LocalBox:
    has_walls = kind != "none"
    if has_walls:
        shown = (
            sight.of_image(bounds.image, bounds.readable)
            if bounds.image
            else sight.of_machine(bounds.readable, network=bounds.network)
        )
    else:
        shown = {}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        folder = sight.FOLDER if has_walls else leftover.make_folder()
        setup = KeeperSetup(
            descriptor=theirs.fileno(),
            walls=kind,  # type: ignore[arg-type]
            folder=folder,
            shown=shown,
            is_image=bounds.image is not None,
            network=bounds.network or not has_walls,
            program_ids=(PROGRAM_IDS.start, len(PROGRAM_IDS)),
            memory_bytes=bounds.memory_bytes,
            disk_bytes=bounds.disk_bytes,
            max_processes=bounds.max_processes,
            environment=_environment(folder, bounds, has_walls=has_walls),
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-c", _BOOT, _PACKAGE_PARENT, setup.text()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=leftover.mark(folder) | {"PYTHONDONTWRITEBYTECODE": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        box = LocalBox(process, ours, setup, bounds)
        undo.pop_all()
    await ready_in_time(box, box.ready(), bounds, "a box")
    return box


class LocalBox:
    """A `Box`."""

    def __init__(self, keeper: subprocess.Popen, connection: socket.socket, setup: KeeperSetup, bounds: Bounds) -> None:
        self.folder = setup.folder
        self.scratch = "/tmp" if setup.walls != "none" else os.path.dirname(setup.folder)
        self._keeper, self._connection, self._setup, self._bounds = keeper, connection, setup, bounds
        self._loop = asyncio.get_running_loop()
        self._relay: Relay | None = None
        self._number = 0
        self._ends: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._all_ended: list[asyncio.Future[None]] = []
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._is_lost = False
        self._closing: asyncio.Task[None] | None = None
        connection.setblocking(False)
        self._loop.add_reader(connection, self._hear)

    async def ready(self) -> None:
        """Wait for the walls."""
        answer = await self._ready
        if "refused" in answer:
            raise _Refused(answer["refused"], answer["is_forbidden"])

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float,
    ) -> Done:
        job = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd or self.folder}
        return await self._ask("run", job, stdin, self._bounds.output_bytes).wait(timeout_s)

    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> LocalProcess:
        job = {"argv": list(argv), "env": dict(env or {}), "cwd": cwd or self.folder}
        return self._ask("run", job, b"", self._bounds.output_bytes, is_one=True)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        _checked(await self._ask("put", {"path": path, "mode": mode}, data, MAX_PACKET).wait(_FILE_LIMIT_S), path)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        asked = self._ask("get", {"path": path, "max_bytes": max_bytes}, b"", max_bytes + MAX_PACKET)
        return _checked(await asked.wait(_FILE_LIMIT_S), path).stdout

    async def url_for(self, url: str) -> str:
        self._check()
        if self._relay is None:
            return url
        address = address_of(url)
        self._relay.pass_to(address)
        return moved(url, *self._relay.listening.getsockname()[:2])

    async def end_processes(self) -> None:
        ended: asyncio.Future[None] = self._loop.create_future()
        self._send({"ask": "end"})
        self._all_ended.append(ended)
        await ended

    async def alive(self) -> bool:
        return not self._is_lost and self._closing is None

    async def close(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._lose()
        if self._relay is not None:
            await self._relay.close()
        ended = await _ended(self._keeper, CLOSE_LIMIT_S - 1)
        if not ended:
            self._keeper.kill()
            await _ended(self._keeper, 1)
        if self._setup.walls == "none":
            leftover.clear(os.path.dirname(self.folder))

    def _ask(
        self, kind: str, job: dict[str, Any], stdin: bytes, max_bytes: int, *, is_one: bool = False
    ) -> LocalProcess:
        self._check()
        self._number += 1
        with contextlib.ExitStack() as given:
            descriptors = [in_memory(json.dumps(job).encode()), in_memory(stdin)]
            outputs = []
            for _ in range(1 if is_one else 2):
                ours, theirs = os.pipe()
                outputs.append(ours)
                descriptors.append(theirs)
            for descriptor in descriptors:
                given.callback(os.close, descriptor)
            captured = [Captured(output, max_bytes) for output in outputs]
            try:
                self._send({"ask": kind, "id": self._number}, descriptors + descriptors[-1:] * is_one)
            except BoxLost:
                for each in captured:
                    each.close()
                raise
        end = self._ends[self._number] = self._loop.create_future()
        number = self._number
        return LocalProcess(end, captured, lambda: self._send({"ask": "kill", "id": number}))

    def _send(self, question: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        self._check()
        try:
            socket.send_fds(self._connection, [json.dumps(question).encode()], descriptors)
        except OSError as err:
            self._lose()
            raise BoxLost(f"a box does not answer: {err}") from err

    def _hear(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._connection, MAX_PACKET, 1)
            answer = json.loads(packet) if packet else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            answer = None
        match answer:
            case None:
                self._lose()
            case {"ready": _} | {"refused": _}:
                if descriptors:
                    self._relay = Relay(socket.socket(fileno=descriptors[0]))
                if not self._ready.done():
                    self._ready.set_result(answer)
            case {"ended": _}:
                if not (first := self._all_ended.pop(0)).done():
                    first.set_result(None)
            case {"id": number}:
                if (end := self._ends.pop(number, None)) is not None and not end.done():
                    end.set_result(answer)

    def _lose(self) -> None:
        """Mark the box as ended and close the connection, with which the keeper ends."""
        if self._is_lost:
            return
        self._is_lost = True
        self._loop.remove_reader(self._connection)
        self._connection.close()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._ends.values(), *self._all_ended]
        for future in waiting:
            if not future.done():
                future.set_exception(BoxLost("the box has ended"))
                future.exception()  # there may be no one who waits for it
        self._ends.clear()

    def _check(self) -> None:
        if self._is_lost:
            raise BoxLost("the box has ended")


class LocalProcess:
    """A `Process`."""

    def __init__(
        self, end: asyncio.Future[dict[str, Any]], outputs: Sequence[Captured], kill: Callable[[], None]
    ) -> None:
        self._end, self._outputs, self._kill = end, outputs, kill
        self._done: Done | None = None

    async def wait(self, timeout_s: float | None = None) -> Done:
        if self._done is not None:
            return self._done
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(self._end)
            except TimeoutError:
                timed_out = True
                await self.kill()
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await asyncio.shield(self._end)
        except TimeoutError:
            raise BoxLost("a process in a box could not be killed") from None
        except asyncio.CancelledError:
            with contextlib.suppress(BoxLost):
                await self.kill()
            raise
        finally:
            if not self._end.done():
                for output in self._outputs:
                    output.close()
            texts = await asyncio.gather(*(output.finish(_GRACE_S) for output in self._outputs))
        answer = self._end.result()
        if answer["why"]:
            texts[-1] += f"\nmgrpo: {answer['why']}\n".encode()
        stdout, stderr = (*texts, b"")[:2]
        truncated = any(output.truncated for output in self._outputs)
        self._done = Done(
            status=answer["status"], stdout=stdout, stderr=stderr, timed_out=timed_out, truncated=truncated
        )
        return self._done

    async def kill(self) -> None:
        if not self._end.done():
            self._kill()


def _checked(done: Done, path: str) -> Done:
    if done.status != 0:
        number, _, text = done.stderr.decode(errors="replace").partition(" ")
        raise OSError(int(number) if number.isdecimal() else errno.EIO, text or f"status {done.status}", path)
    return done


def _environment(folder: str, bounds: Bounds, *, has_walls: bool) -> dict[str, str]:
    """Variables of every command, none of this process. Without an image, `python` is this interpreter."""
    own = os.path.dirname(sys.executable)
    path = (
        _SYSTEM_PATH if bounds.image else f"{own}:{_SYSTEM_PATH if has_walls else os.environ.get('PATH', _SYSTEM_PATH)}"
    )
    return {
        "HOME": folder,
        "TMPDIR": "/tmp" if has_walls else folder,
        "PATH": path,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    } | ({} if has_walls else leftover.mark(folder))


async def _ended(process: subprocess.Popen, limit_s: float) -> bool:
    """Wait for the end of a process; False if it takes longer."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    if process.poll() is not None:
        return True
    handle = os.pidfd_open(process.pid)
    loop.add_reader(handle, over.set)
    try:
        async with asyncio.timeout(limit_s):
            await over.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    process.wait()
    return True

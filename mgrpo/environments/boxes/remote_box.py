"""Boxes of another machine, behind its `mgrpo box-server`: the client. What is asked there is in `box_app`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import ipaddress
import os
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from mgrpo.environments.boxes.box import CLOSE_LIMIT_S, Bounds, BoxError, BoxLost, Done

TOKEN, TOKEN_FILE = "MGRPO_BOX_TOKEN", "MGRPO_BOX_TOKEN_FILE"
"""Variables with the server's token, or the path of a file that holds it."""
POLL_S = 15.0
"""A wait is asked for again after this time: no request lasts longer."""
BEAT_S = 10.0
"""A box is heard of at least this often; the server closes one that is not."""
_ASK_S = 90.0
_RETRIES_S = 30.0


def token() -> str | None:
    """The token that the environment has; None where it has none."""
    if path := os.environ.get(TOKEN_FILE):
        return Path(path).read_text().strip()
    return os.environ.get(TOKEN, "").strip() or None


async def open_remote(server: str, bounds: Bounds) -> RemoteBox:
    """A box at the server's URL.

    Raises:
        ValueError: there is no token, or the server refuses it or these bounds.
        BoxError: the server is not reached, is full, or opens no box in time.
    """
    if (secret := token()) is None:
        raise ValueError(
            f"agent_box={server} needs the server's token: set {TOKEN_FILE} to a file that holds it, or {TOKEN}"
        )
    box = RemoteBox(server.rstrip("/"), secret)
    try:
        async with asyncio.timeout(bounds.start_timeout_s):
            await box.open(bounds)
    except BaseException as err:
        await box.close()
        if isinstance(err, TimeoutError):
            raise BoxError(f"agent_box={server} opened no box within {bounds.start_timeout_s:g} s") from None
        if isinstance(err, BoxLost):
            raise BoxError(f"agent_box={server}: {err}") from err
        raise
    return box


class RemoteBox:
    """A `Box`."""

    folder, scratch = "", "/tmp"

    def __init__(self, server: str, secret: str) -> None:
        self._server = server
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {secret}"},
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=_ASK_S, sock_connect=10.0),
        )
        self._id: str | None = None
        self._is_lost = False
        self._beating: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self, bounds: Bounds) -> None:
        """Raises as `open_remote`."""
        answer = await self._post("/boxes", {"bounds": dataclasses.asdict(bounds)}, limit_s=bounds.start_timeout_s)
        self._id, self.folder, self.scratch = answer["box"], answer["folder"], answer["scratch"]
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float,
    ) -> Done:
        answer = await self.ask(
            "exec", argv=list(argv), env=dict(env or {}), cwd=cwd, stdin=_text(stdin), timeout_s=timeout_s
        )
        process = RemoteProcess(self, answer["process"])
        try:
            return await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(BoxError):
                await asyncio.shield(process.kill())
            raise

    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> RemoteProcess:
        answer = await self.ask("start", argv=list(argv), env=dict(env or {}), cwd=cwd)
        return RemoteProcess(self, answer["process"])

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self.ask("put", path=path, data=_text(data), mode=mode)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return base64.b64decode((await self.ask("get", path=path, max_bytes=max_bytes))["data"])

    async def url_for(self, url: str) -> str:
        """`url` must be one that the server's machine reaches, which passes connections on."""
        if _is_loopback(url) and not _is_loopback(self._server):
            raise ValueError(
                f"the endpoint's URL is {url!r}, which the box server at {self._server} cannot reach; set agent_endpoint_host to "
                "an address of this machine, or agent_endpoint_url"
            )
        return (await self.ask("url", url=url))["url"]

    async def end_processes(self) -> None:
        await self.ask("end")

    async def alive(self) -> bool:
        if self._is_lost or self._closing is not None:
            return False
        try:
            return (await self.ask("alive"))["alive"]
        except BoxError:
            return False

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def ask(self, kind: str, *, may_repeat: bool = False, **words: Any) -> dict[str, Any]:
        """One question about the box; `may_repeat`: also after a failure of the connection, for some time.

        Raises:
            BoxLost, OSError, ValueError: the box's, or the server is gone.
        """
        if self._is_lost or self._closing is not None:
            raise BoxLost("the box has ended")
        return await self._post(f"/boxes/{self._id}/{kind}", words, may_repeat=may_repeat)

    async def _close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        try:
            if self._id is not None and not self._is_lost:
                with contextlib.suppress(BoxError, OSError, ValueError):
                    await self._post(f"/boxes/{self._id}/close", {}, limit_s=CLOSE_LIMIT_S)
        finally:
            await self._session.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.ask("alive", may_repeat=True)
            except (BoxError, ValueError):
                return

    async def _post(
        self, path: str, words: Mapping[str, Any], *, limit_s: float = _ASK_S, may_repeat: bool = False
    ) -> dict[str, Any]:
        ends = time.monotonic() + (_RETRIES_S if may_repeat else 0.0)
        while True:
            try:
                timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=10.0)
                async with self._session.post(self._server + path, json=words, timeout=timeout) as reply:
                    return self._read(reply.status, await reply.json(content_type=None))
            except (aiohttp.ClientError, TimeoutError) as err:
                if time.monotonic() >= ends:
                    self._is_lost = self._id is not None
                    raise BoxLost(
                        f"the box server at {self._server} does not answer: {type(err).__name__}: {err}"
                    ) from err
                await asyncio.sleep(0.5)

    def _read(self, status: int, answer: Any) -> dict[str, Any]:
        match status, answer:
            case 200, dict():
                return answer
            case _, {"error": "lost", "text": text}:
                self._is_lost = True
                raise BoxLost(text)
            case _, {"error": "file", "text": text, "number": int(number), "path": path}:
                raise OSError(number, text, path)
            case _, {"error": "value", "text": text}:
                raise ValueError(f"{self._server}: {text}")
            case _, {"error": _, "text": text}:
                raise BoxError(f"{self._server}: {text}")
        raise BoxError(f"{self._server} answered with status {status}; is it a box server?")


class RemoteProcess:
    """A `Process`."""

    def __init__(self, box: RemoteBox, number: int) -> None:
        self._box, self._number = box, number
        self._done: Done | None = None

    async def wait(self, timeout_s: float | None = None) -> Done:
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        timed_out = False
        while self._done is None:
            left_s = POLL_S if ends is None or timed_out else min(POLL_S, max(0.0, ends - time.monotonic()))
            answer = await self._box.ask("wait", may_repeat=True, process=self._number, limit_s=left_s)
            if "status" in answer:
                answer |= {name: base64.b64decode(answer[name]) for name in ("stdout", "stderr")}
                answer["timed_out"] |= timed_out
                self._done = Done(**answer)
            elif ends is not None and time.monotonic() >= ends and not timed_out:
                timed_out = True
                await self.kill()
        return self._done

    async def kill(self) -> None:
        if self._done is None:
            await self._box.ask("kill", process=self._number)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

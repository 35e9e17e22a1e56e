"""Boxes of this machine for the tests, and a server outside of them."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from mgrpo.environments.boxes.box import MIB, Bounds, Done
from mgrpo.environments.boxes.local.local_box import LocalBox, open_local

PLENTY_S = 60.0
SMALL = Bounds(memory_bytes=512 * MIB, disk_bytes=16 * MIB, max_processes=64, output_bytes=4096)


@contextlib.asynccontextmanager
async def opened(walls: str, bounds: Bounds = SMALL) -> AsyncIterator[LocalBox]:
    box = await open_local(bounds, walls=[walls])
    try:
        yield box
    finally:
        await box.close()


def with_box(walls: str, use: Callable[[LocalBox], Awaitable[Any]], bounds: Bounds = SMALL) -> Any:
    """What `use` returns of a box."""

    async def run() -> Any:
        async with opened(walls, bounds) as box:
            return await use(box)

    return asyncio.run(run())


async def sh(box: LocalBox, command: str, **more: Any) -> Done:
    return await box.exec(["sh", "-c", command], **{"timeout_s": PLENTY_S, **more})


async def python(box: LocalBox, source: str, **more: Any) -> str:
    """What a script prints; it must end well."""
    done = await box.exec(["python", "-S", "-c", source], **{"timeout_s": PLENTY_S, **more})
    assert done.status == 0, done
    return done.stdout.decode().strip()


class _Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.path.encode() + b" " + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served() -> Iterator[str]:
    """URL of a server of this machine that repeats paths and bodies."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def running(argument: str) -> list[str]:
    """Processes `sleep ARGUMENT` of this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", argument.encode()]:
                found.append(entry.name)
    return found


async def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PLENTY_S
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def wait_until(is_so: Callable[[], Any]) -> None:
    asyncio.run(until(is_so))

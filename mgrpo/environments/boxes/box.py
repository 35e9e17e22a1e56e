"""The protocol of a box: where the command of one trajectory runs, with the files that it works on. Standard library only.

Whoever opens a box closes it. A box is for one event loop; times are in seconds, sizes in bytes. No answer of a box is trusted:
what runs in it may be hostile.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

CLOSE_LIMIT_S = 5.0
"""Longest time that `Box.close` takes."""
MIB = 2**20


class BoxError(RuntimeError):
    """A box could not be opened, or could not do what was asked."""


class BoxLost(BoxError):
    """The box has ended, with everything in it: its trajectory has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a command."""

    status: int
    """Exit status; negative: the signal that ended it."""
    stdout: bytes = b""
    """The last part, as far as `Bounds.output_bytes`."""
    stderr: bytes = b""
    """Likewise; empty where both were written to one pipe (`Box.start`)."""
    timed_out: bool = False
    """It took longer than it was allowed, and was killed."""
    truncated: bool = False
    """More was written than is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a box holds, and what it may use."""

    image: str | None = None
    """Name of a container's image, or the folder that becomes the root of local walls; None: this machine's system. A row of a dataset
    may name the first, never the second."""
    network: bool = False
    """Whether it reaches more than the endpoint."""
    readable: tuple[str, ...] = ()
    """Further files and folders of this machine that local walls show, under their own names and read-only."""
    memory_bytes: int = 4096 * MIB
    """All processes together."""
    disk_bytes: int = 1024 * MIB
    """All files that are written in it, together."""
    max_processes: int = 256
    cpus: float | None = None
    """Cores that all processes together may take; None: any. Only containers hold them back."""
    output_bytes: int = MIB
    """Kept of each output of a command; the rest is thrown away where it is written."""
    start_timeout_s: float = 120.0
    """For opening the box, an image's download included."""


class Process(Protocol):
    """A command that runs."""

    async def wait(self, timeout_s: float | None = None) -> Done:
        """Its end; after `timeout_s` it is killed. BoxLost where the box ends before."""

    async def kill(self) -> None:
        """Kill it and its process group; nothing where it has ended."""


class Box(Protocol):
    """An open box. After `close`, and once the box has ended, everything but `alive` and `close` raises BoxLost."""

    folder: str
    """The working folder, by its name in the box: empty at first, writable, where commands start."""
    scratch: str
    """A folder outside of it in which commands may make others, which end with the box."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float,
    ) -> Done:
        """Run a command to its end. It has no variable of this process: only the box's few and `env`.

        What it leaves running goes on until `end_processes` or `close`. A command that cannot be started has the status 127, as
        in a shell.
        """

    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        """Start a command whose outputs are one, without standard input."""

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, with its folders; relative to `folder`. OSError where the box does not let its own user do so."""

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """A regular file's content. OSError where there is none, or it is longer (EFBIG)."""

    async def url_for(self, url: str) -> str:
        """The endpoint's URL as commands in the box reach it, path included; `url`: as this machine does."""

    async def end_processes(self) -> None:
        """End everything that runs in the box, also what has left its session. Files stay."""

    async def alive(self) -> bool: ...

    async def close(self) -> None:
        """End the box with all processes and files, within `CLOSE_LIMIT_S`. May be called more than once."""


def address_of(url: str) -> tuple[str, int]:
    """Host and port of an endpoint's URL; ValueError where a box could not pass its bytes on."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(
            f"the endpoint's URL is {url!r}; a box without network needs http://HOST:PORT; set agent_network=true"
        )
    return parts.hostname, parts.port or 80


def moved(url: str, host: str, port: int) -> str:
    """The URL with another address."""
    return urllib.parse.urlunsplit(urllib.parse.urlsplit(url)._replace(netloc=f"{host}:{port}"))


async def ready_in_time(box: Box, ready: Awaitable[None], bounds: Bounds, name: str) -> None:
    """Wait until a new box is ready; one that does not become so is closed.

    Raises:
        BoxError: it was not ready in time; what `ready` raises is passed on.
    """
    try:
        async with asyncio.timeout(bounds.start_timeout_s):
            await ready
    except BaseException as err:
        await box.close()
        if isinstance(err, TimeoutError):
            raise BoxError(f"{name} was not ready after {bounds.start_timeout_s:g} s") from None
        raise

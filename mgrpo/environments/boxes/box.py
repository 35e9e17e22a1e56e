"""The protocol of a box, in which the command of one trajectory runs with its files. Standard library only.

The caller that opens a box closes it. A box is for one event loop; times are in seconds, sizes in bytes. Answers of a box are
untrusted: its programs may be hostile.
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
    """A box that could not be opened, or an operation of it that failed."""


class BoxLost(BoxError):
    """The box has ended, with everything in it: its trajectory has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of a command."""

    status: int
    """Exit status; negative: the signal that ended it."""
    stdout: bytes = b""
    """The last part, at most `Bounds.output_bytes`."""
    stderr: bytes = b""
    """Likewise; empty where both were written to one pipe (`Box.start`)."""
    timed_out: bool = False
    """True if it was killed at its time limit."""
    truncated: bool = False
    """True if more was written than is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Contents and limits of a box."""

    image: str | None = None
    """Name of a container's image, or the folder that becomes the root of local walls; None: this machine's system. A row of a dataset
    may name the first, never the second."""
    network: bool = False
    """True if it has access to more than the endpoint."""
    readable: tuple[str, ...] = ()
    """Further files and folders of this machine that local walls show, under their own names and read-only."""
    memory_bytes: int = 4096 * MIB
    """Bytes of memory of all processes together."""
    disk_bytes: int = 1024 * MIB
    """Bytes of all files that are written in it, together."""
    max_processes: int = 256
    cpus: float | None = None
    """Cores for all processes together; None: no limit. Only containers enforce it."""
    output_bytes: int = MIB
    """Bytes kept of each output of a command; the rest is discarded as it is written."""
    start_timeout_s: float = 120.0
    """Seconds for opening the box, an image's download included."""


class Process(Protocol):
    """A command that runs."""

    async def wait(self, timeout_s: float | None = None) -> Done:
        """Wait for its end; after `timeout_s` it is killed. BoxLost if the box ends first."""

    async def kill(self) -> None:
        """Kill it and its process group; no-op once it has ended."""


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

        Processes that it leaves continue until `end_processes` or `close`. A command that cannot be started has the status 127,
        as in a shell.
        """

    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        """Start a command with one pipe for both outputs, and without standard input."""

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, with its folders; relative to `folder`. OSError if the box's user may not write there."""

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """A regular file's content. OSError if it does not exist, or is longer (EFBIG)."""

    async def url_for(self, url: str) -> str:
        """The endpoint's URL for commands in the box, path included; `url`: that for this machine."""

    async def end_processes(self) -> None:
        """End all processes in the box, also those outside its session. Files stay."""

    async def alive(self) -> bool: ...

    async def close(self) -> None:
        """End the box with all processes and files, within `CLOSE_LIMIT_S`. May be called more than once."""


def address_of(url: str) -> tuple[str, int]:
    """Host and port of an endpoint's URL; ValueError if a box could not forward its bytes."""
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
        BoxError: it was not ready in time. Errors of `ready` pass through.
    """
    try:
        async with asyncio.timeout(bounds.start_timeout_s):
            await ready
    except BaseException as err:
        await box.close()
        if isinstance(err, TimeoutError):
            raise BoxError(f"{name} was not ready after {bounds.start_timeout_s:g} s") from None
        raise

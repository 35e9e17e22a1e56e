"""Opens a box by the word of the setting `agent_box`: walls of this machine, containers, another machine, or a user's package.

A package adds a kind of its own by an entry point of the group `mgrpo.boxes`: a coroutine function that takes `Bounds`.
"""

from __future__ import annotations

import asyncio
import weakref
from importlib.metadata import entry_points

from mgrpo.environments.boxes.box import Bounds, Box, BoxError
from mgrpo.environments.boxes.local import leftover
from mgrpo.environments.boxes.local.local_box import open_local

GROUP = "mgrpo.boxes"
VARIABLES = (
    *("MGRPO_BOX_TOKEN", "MGRPO_BOX_TOKEN_FILE", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY"),
    *("DOCKER_CERT_PATH", "CONTAINER_HOST", "XDG_RUNTIME_DIR"),
)
"""Of the environment, that the process which opens boxes needs; no box has them."""
STARTS_AT_ONCE = 8
"""Of one process: more would only make each of them slower."""
CONTAINERS = ("docker", "podman")
_rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def open_box(where: str, bounds: Bounds) -> Box:
    """An empty box of a kind; close it.

    Args:
        where: "local", "none", "docker", "podman", the URL of a box server, or the name of an entry point of `mgrpo.boxes`.

    Raises:
        ValueError: no such kind, or this machine or the settings do not allow it; the message says what to do.
        BoxError: it did not open, or not in time.
    """
    async with _rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(STARTS_AT_ONCE)):
        if where == "local":
            return await open_local(bounds)
        if where == "none":
            return await open_local(bounds, walls=["none"])
        if where in CONTAINERS:
            from mgrpo.environments.boxes.containers.container_box import open_container

            return await open_container(bounds, program=where)
        if where.startswith(("http://", "https://")):
            from mgrpo.environments.boxes.remote_box import open_remote

            return await open_remote(where, bounds)
        return await _open_others(where, bounds)


async def check_box(where: str, bounds: Bounds) -> None:
    """Once at a start: remove what killed runs have left on this machine, then open a box and close it. Raises as `open_box`."""
    await asyncio.to_thread(leftover.sweep)
    if where in CONTAINERS:
        from mgrpo.environments.boxes.containers.container_box import remove_orphans

        await remove_orphans(where)
    box = await open_box(where, bounds)
    await box.close()


async def _open_others(where: str, bounds: Bounds) -> Box:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if where not in found:
        known = ", ".join(["local", "none", *CONTAINERS, "http://HOST:PORT", *sorted(found)])
        raise ValueError(f"agent_box={where!r} is unknown; expected one of: {known}")
    try:
        async with asyncio.timeout(bounds.start_timeout_s):
            return await found[where].load()(bounds)
    except TimeoutError:
        raise BoxError(f"agent_box={where} did not open a box within {bounds.start_timeout_s:g} s") from None

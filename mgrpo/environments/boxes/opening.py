"""Opening of boxes by the setting `agent_box`: walls of this machine, containers, or a package's kind, as a hosted sandbox.

A package adds a kind by an entry point of the group `mgrpo.boxes`: a coroutine function that takes `Bounds`.
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
    *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"),
    *("CONTAINER_HOST", "XDG_RUNTIME_DIR"),
)
"""Environment variables for the process that opens boxes; no box has them."""
STARTS_AT_ONCE = 8
"""Most starts of one process at a time: more would only slow each other down."""
CONTAINERS = ("docker", "podman")
_rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def open_box(where: str, bounds: Bounds) -> Box:
    """Open an empty box of a kind; close it.

    Args:
        where: the kind: "local", "none", "docker", "podman", or the name of an entry point of `mgrpo.boxes`.

    Raises:
        ValueError: no such kind, or this machine or the settings do not allow it; the message has the remedy.
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
        return await _open_others(where, bounds)


async def check_box(where: str, bounds: Bounds) -> None:
    """At a start: remove leftovers of killed runs on this machine, then open and close a box. Raises as `open_box`."""
    await asyncio.to_thread(leftover.sweep)
    if where in CONTAINERS:
        from mgrpo.environments.boxes.containers.container_box import remove_orphans

        await remove_orphans(where)
    box = await open_box(where, bounds)
    await box.close()


async def _open_others(where: str, bounds: Bounds) -> Box:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if where not in found:
        known = ", ".join(["local", "none", *CONTAINERS])
        installed = ", ".join(sorted(found)) or "none is installed"
        raise ValueError(
            f"agent_box={where!r} is unknown; expected one of: {known}, or an entry point of the group {GROUP} ({installed})"
        )
    try:
        async with asyncio.timeout(bounds.start_timeout_s):
            return await found[where].load()(bounds)
    except TimeoutError:
        raise BoxError(f"agent_box={where} did not open a box within {bounds.start_timeout_s:g} s") from None

"""Containers as boxes for the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from mgrpo.environments.boxes.box import MIB, Bounds
from mgrpo.environments.boxes.containers.container_box import ContainerBox, open_container
from tests.unit.environments.boxes import fake_docker
from tests.unit.environments.boxes.docker_daemon import docker

IMAGE = fake_docker.IMAGE
BOUNDS = Bounds(image=IMAGE, memory_bytes=512 * MIB, max_processes=64, output_bytes=4096)


def containers() -> list[str]:
    """Names of all that are there."""
    return sorted(docker("ps", "--all", "--format", "{{.Names}}").split())


def with_container(use: Callable[[ContainerBox], Awaitable[Any]], bounds: Bounds = BOUNDS) -> Any:
    """What `use` returns of a container."""

    async def run() -> Any:
        box = await open_container(bounds)
        try:
            return await use(box)
        finally:
            await box.close()

    return asyncio.run(run())

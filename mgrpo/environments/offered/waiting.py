"""Placeholder agent of `mgrpo serve-agent`: writes the endpoint of its trajectory and waits for an external agent to end.

It runs in a worker, and communicates with that command by files in its folder. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgrpo.environments.offered.agent import Endpoint

SERVED, TASK, DONE = ".served", ".json", ".done"
"""Suffixes of a trajectory's files: its endpoint, once it can be called; its row; the mark that the agent has ended."""
_POLL_S = 0.1


async def wait(row: Mapping[str, Any], endpoint: Endpoint, *, folder: str) -> None:
    """Offer the trajectory to an external agent and wait for its end.

    Args:
        folder: where the files are.
    """
    place = Path(folder)
    name = endpoint.base_url.rpartition("/")[2]
    task = place / f"{name}{TASK}"
    task.write_text(json.dumps(row))
    served = {
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
        "reward_key": endpoint.reward_key,
        "task": str(task),
    }
    part = place / f"{name}.part"
    part.write_text(json.dumps(served))
    os.replace(part, place / f"{name}{SERVED}")
    while not (place / f"{name}{DONE}").exists():
        await asyncio.sleep(_POLL_S)

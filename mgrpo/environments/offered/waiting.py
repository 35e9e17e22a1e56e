"""An agent that does nothing itself: it says where the model of its trajectory is, and waits until whoever plays has ended.

It runs in a worker, and speaks to `mgrpo serve-agent` by files in a folder of that command. Standard library only.
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
"""Endings of a trajectory's files: its endpoint, once it can be called; its row; made when the agent has ended."""
_POLL_S = 0.1


async def wait(row: Mapping[str, Any], endpoint: Endpoint, *, folder: str) -> None:
    """Have somebody else play the trajectory.

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

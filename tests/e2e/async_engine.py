"""`async_engine.py FLAG ...`: the train command; the cores of its engines schedule as on a GPU, see `async_worker`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from mgrpo.cli import train_command
from mgrpo.rollout.vllm import actor


class AsyncEngineActor(actor.EngineActor):
    """Its configuration is made in its process, and made anew in the core's."""

    async def start(self, *args: Any, **settings: Any) -> None:
        importlib.import_module("tests.e2e.async_worker")
        await super().start(*args, **settings)


if __name__ == "__main__":
    from tests.e2e import async_engine

    actor.EngineActor = async_engine.AsyncEngineActor  # type: ignore[misc]
    raise SystemExit(train_command(sys.argv[1:]))

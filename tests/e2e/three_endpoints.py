"""`three_endpoints.py FILE FLAG ...`: `recorded_asks.py`, whose first trajectory begins when three endpoints serve."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mgrpo.cli import train_command
from mgrpo.environments.agents.endpoint_link import Endpoints
from tests.e2e import recorded_asks

if __name__ == "__main__":
    start = Endpoints.start

    async def started(endpoints: Endpoints) -> None:
        await start(endpoints)
        while len(endpoints.urls) < 3:
            await asyncio.sleep(0.05)

    Endpoints.start = started  # type: ignore[method-assign]
    recorded_asks.record(sys.argv[1])
    raise SystemExit(train_command(sys.argv[2:]))

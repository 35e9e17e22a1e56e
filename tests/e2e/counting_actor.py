"""An engine that says how many requests its scheduler has, and how many it was told to end."""

from __future__ import annotations

from collections.abc import Sequence

from mgrpo.rollout.vllm.actor import EngineActor


class CountingActor(EngineActor):
    """Its core is in its process."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ended = 0

    async def _abort(self, requests: Sequence[str]) -> None:
        self.num_ended += len(requests)
        await super()._abort(requests)

    async def count(self) -> tuple[int, int]:
        """Requests that run or wait, and those that were ended."""
        scheduler = self.engine.engine_core.core.scheduler
        return scheduler.get_num_unfinished_requests(), self.num_ended

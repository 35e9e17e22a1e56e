"""An engine that says how many tokens its scheduler has had computed."""

from __future__ import annotations

from typing import Any

from mgrpo.rollout.vllm.actor import EngineActor


class ComputingActor(EngineActor):
    """Its core is in its process."""

    def __init__(self) -> None:
        super().__init__()
        self.num_computed = 0

    async def start(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine's own, and count from then on."""
        started = await super().start(*args, **kwargs)
        scheduler = self.engine.engine_core.core.scheduler
        schedule = scheduler.schedule

        def counted(*given: Any) -> Any:
            output = schedule(*given)
            self.num_computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted
        return started

    async def computed(self) -> int:
        """Tokens until now, of prompts and sampled ones."""
        return self.num_computed

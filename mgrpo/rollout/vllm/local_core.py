"""vLLM's engine core inside the engine's actor, for engines with one worker on a CPU.

vLLM itself runs it in a separate process, and sends every request and token between the two. On a CPU that takes cores from the
learners, and a third of the time of short completions. Imported in the actor's process only.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient

from mgrpo.processes.background import Background

T = TypeVar("T")


def install() -> None:
    """Make AsyncLLM use `LocalCore` in this process."""
    EngineCoreClient.make_async_mp_client = LocalCore


class LocalCore(EngineCoreClient):
    """AsyncLLM's client of an engine core in one thread of this process, which runs all calls in order.

    The event loop stays free while the model computes. A step is one of the calls, so that others run between two steps.
    """

    def __init__(self, *, vllm_config: Any, executor_class: Any, log_stats: bool, **others: Any) -> None:
        self.thread = Background("engine core")
        self.core = self.thread.submit(lambda: EngineCore(vllm_config, executor_class, log_stats)).result()
        self.added: deque[EngineCoreRequest] = deque()
        """Requests not yet in the core, which adds all of them before any call."""
        self.failed: list[EngineCoreOutput] = []
        """Outputs of requests that could not be added."""
        self.is_called = asyncio.Event()
        """Set by each call since the last step."""
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        """Read by AsyncLLM. A failure that ends this core ends the actor."""

    async def get_output_async(self) -> EngineCoreOutputs:
        """Outputs of the next step; waits for work."""
        while True:
            self.is_called.clear()
            if (outputs := await self._run(self._step)) is not None:
                return outputs
            await self.is_called.wait()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request, without an await, so that requests added together are scheduled together."""
        self.added.append(request)
        self.is_called.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await self._call(self.core.abort_requests, request_ids)

    async def get_supported_tasks_async(self) -> tuple[Any, ...]:
        return await self._call(self.core.get_supported_tasks)

    async def pause_scheduler_async(self, mode: Any = "abort", clear_cache: bool = True) -> None:
        await self._call(self.core.pause_scheduler, mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        await self._call(self.core.resume_scheduler)

    async def is_scheduler_paused_async(self) -> bool:
        return await self._call(self.core.is_scheduler_paused)

    async def sleep_async(self, level: int = 1, mode: Any = "abort") -> None:
        await self._call(self.core.sleep, level, mode)

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        return await self._call(self.core.wake_up, tags)

    async def set_weight_version_async(self, weight_version: str) -> None:
        await self._call(self.core.set_weight_version, weight_version)

    async def collective_rpc_async(
        self, method: Any, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        return await self._call(self.core.collective_rpc, method, timeout, args, kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        self.thread.close()

    async def _call(self, method: Callable[..., T], *args: Any) -> T:
        self.is_called.set()
        return await self._run(partial(method, *args))

    def _run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self.thread.submit(partial(self._do, call)))

    def _do(self, call: Callable[[], T]) -> T:
        while self.added:
            request = self.added.popleft()
            try:
                prepared = self.core.preprocess_add_request(request)
            except Exception:
                # As in vLLM's separate core process, the failure concerns this request alone.
                traceback.print_exc()
                self.failed.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR))
            else:
                self.core.add_request(*prepared)
        return call()

    def _step(self) -> EngineCoreOutputs | None:
        """Outputs of a step; None: no work, or the scheduler is paused."""
        if self.failed:
            failed, self.failed = self.failed, []
            return EngineCoreOutputs(outputs=failed, finished_requests={each.request_id for each in failed})
        if not self.core.scheduler.has_requests():
            return None
        outputs, is_executed = self.core.step_fn()
        self.core.post_step(is_executed)
        return (outputs or {}).get(0, EngineCoreOutputs())

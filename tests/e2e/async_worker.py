"""An engine's worker on a CPU whose core schedules a batch while the one before is under way; vLLM imports it in the core's process.

vLLM turns that off on a CPU. The worker computes at once: the streams and events of CUDA by which a GPU's results are waited for
do nothing here. Scheduler, queue of batches and executor are those of an engine on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker


class AsyncWorker(CPUWorker):
    """Says how many batches its core has under way."""

    def init_device(self) -> None:
        print(f"{self.vllm_config.max_concurrent_batches} batches at a time", flush=True)
        super().init_device()


class Done:
    """In the place of a stream or an event."""

    def __init__(self, *args: Any, **settings: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...


def check(config: Any) -> None:
    """What vLLM sets on a CPU, but for this."""
    own_check(config)
    config.scheduler_config.async_scheduling = True
    config.parallel_config.worker_cls = f"{__name__}.AsyncWorker"


own_check = CpuPlatform.check_and_update_config
CpuPlatform.check_and_update_config = staticmethod(check)  # type: ignore[method-assign,assignment]
torch.cuda.Event = torch.cuda.Stream = Done  # type: ignore[misc,assignment]
torch.cuda.current_stream = Done  # type: ignore[assignment]
torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment,misc]

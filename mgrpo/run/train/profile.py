"""Profiles of chosen training steps: a trace by torch's profiler, or by nsys under `nsys profile`.

The parts of a step carry their names in both (`torch.autograd.profiler.record_function`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mgrpo.config import Config
from mgrpo.parallel import backend

_NSYS = "NSYS_PROFILING_SESSION_ID"
"""Variable of processes under `nsys profile`; torch's own profiler would compete with nsys for the device's counters."""
_COMMUNICATION = ("ncclDevKernel", "ncclKernel")
"""Beginnings of the names of NCCL's kernels, whose time includes waiting for other ranks."""


class Profiler:
    """Records the training steps `profile_steps` on rank 0.

    Writes `output_dir/profile/step_S_rank_0.trace.json.gz` (for Perfetto or chrome://tracing) and a table beside it. Under
    `nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat` nsys records the same steps instead.
    """

    def __init__(self, config: Config, *, rank: int, say: Callable[[str], None]) -> None:
        experiment = config.experiment
        self.steps = frozenset(() if rank else experiment.profile_steps)
        self.folder, self.rank, self.say = Path(experiment.output_dir) / "profile", rank, say

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the block if `step` is in `profile_steps`. A trace that cannot be written is reported, not an error."""
        if step not in self.steps:
            yield
        elif _NSYS in os.environ:
            with backend.recorded_by_nsys():
                yield
        else:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if backend.has_cuda() else [])]
            with profile(activities=activities) as recorded:
                yield
            try:
                self._write(recorded, step)
            except (OSError, RuntimeError) as err:
                self.say(f"no profile of step {step}: {err}")

    def _write(self, recorded: profile, step: int) -> None:
        name = f"step_{step}_rank_{self.rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}.trace.json.gz"
        recorded.export_chrome_trace(str(trace))
        totals, line = recorded.key_averages(), f"profile of step {step}: {trace}"
        order = "self_device_time_total" if backend.has_cuda() else "self_cpu_time_total"
        trace.with_name(f"{name}.txt").write_text(totals.table(sort_by=order, row_limit=60))
        if backend.has_cuda():
            kernels = [t for t in totals if t.device_type is DeviceType.CUDA and not t.is_user_annotation]
            busy, sent = (
                sum(kernel.self_device_time_total for kernel in kernels if kernel.key.startswith(prefixes)) / 1e6
                for prefixes in ("", _COMMUNICATION)
            )
            line += f"; kernels {busy:.2f} s, of which NCCL's {sent:.2f} s"
        self.say(line)

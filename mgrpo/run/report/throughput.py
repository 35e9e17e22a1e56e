"""The throughput of training: tokens per second and learner, and the share of the GPU's peak (MFU)."""

from __future__ import annotations

from mgrpo.config import Config
from mgrpo.models.shape import ModelShape
from mgrpo.planner.hardware import gpu_of
from mgrpo.planner.work import packed_flops, passes_of
from mgrpo.types import PackLengths


class Throughput:
    """Throughput of the learners, computed on rank 0 from all packs.

    Args:
        device_name: CUDA's name of this rank's GPU, assumed equal for all learners; None on a CPU.
    """

    def __init__(self, config: Config, shape: ModelShape, *, num_learners: int, device_name: str | None) -> None:
        self.shape, self.num_learners = shape, num_learners
        self.passes = passes_of(config)
        gpu = gpu_of(device_name) if device_name else None
        self.peak_flops = gpu and gpu.tflops * 1e12
        """FLOPs of one GPU per second; None: unknown."""

    def metrics(self, packs: PackLengths, train_s: float) -> dict[str, float]:
        """Figures of a step whose training took `train_s` seconds.

        MFU as in PaLM (arXiv:2204.02311, appendix B), for all passes of the step: recomputed operations do not count, and attention
        counts the keys that a token attends to.

        Args:
            packs: packs of one pass over the batch, of all mini-batches and data-parallel ranks.
        """
        learner_s = train_s * self.num_learners
        found = {"time/learner_tokens_per_second_per_gpu": packs.tokens / learner_s}
        if self.peak_flops:
            forward = packed_flops(self.shape, packs.runs, responses=packs.responses)
            found["learner_mfu"] = self.passes.in_forward * forward.total / (learner_s * self.peak_flops)
        return found

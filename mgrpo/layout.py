"""Who holds what: the parallel axes of a training run and of the inference engines. No torch, no processes.

Rank order is Megatron's default "tp-cp-ep-dp-pp": tensor-parallel ranks are neighbours, pipeline stages are farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this whatever the layout, so that a checkpoint fits every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The training layout. `world_size` is the number of learner ranks."""

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 1

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    def coordinate(self, rank: int) -> Coordinate:
        """Place of `rank` on every axis."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        context, rest = rest % self.context, rest // self.context
        data, pipeline = rest % self.data, rest // self.data
        return Coordinate(tensor=tensor, context=context, data=data, pipeline=pipeline)

    def problems(self) -> list[str]:
        """What is impossible about this layout by itself, one sentence each."""
        found = []
        for flag, size in self._sizes().items():
            if size < 1:
                found.append(f"{flag}={size} must be at least 1")
        if found:
            return found
        model = self.tensor * self.pipeline * self.context
        if self.world_size % model:
            found.append(
                f"{self.world_size} learner ranks cannot be split into tensor {self.tensor} x pipeline {self.pipeline} "
                f"x context {self.context} = {model}; start a multiple of {model} ranks (torchrun --nproc-per-node)"
            )
        for flag, size in self._sizes().items():
            if size > 1 and flag in NOT_YET:
                found.append(f"{flag}={size} is not implemented yet; use 1")
        if self.zero_stage != 1:
            found.append(f"zero_stage={self.zero_stage} is not implemented yet; use 1 (the distributed optimizer)")
        if self.sequence_parallel and self.tensor == 1:
            found.append("sequence_parallel=true needs tensor_model_parallel_size > 1")
        return found

    def _sizes(self) -> dict[str, int]:
        return {
            "world_size": self.world_size,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline,
        }


NOT_YET = ("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """A rank's place on each axis."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferLayout:
    """The inference layout: `engines` independent replicas, each over `tensor` workers."""

    engines: int = 1
    tensor: int = 1

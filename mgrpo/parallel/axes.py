"""Megatron's process groups for a layout."""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel

from mgrpo.layout import Layout
from mgrpo.parallel import backend


def make_groups(layout: Layout, *, seed: int) -> None:
    """Make the groups of every axis and seed their random states. Every learner rank must call, once per process."""
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.data * layout.context // layout.num_shards,
        distributed_timeout_minutes=backend.TRAINING_TIMEOUT_MINUTES,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def make_buffers(layout: Layout, *, tokens: int, hidden: int, dtype: torch.dtype, in_8_bits: bool) -> None:
    """Make Transformer Engine's buffers for communication between tensor-parallel ranks during a product. After `make_groups`, likewise.

    Args:
        tokens: of every pack, of a context-parallel rank.
        in_8_bits: gathered tensors are rounded.
    """
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    mode = UserBufferQuantizationMode.FP8 if in_8_bits else UserBufferQuantizationMode.NONE
    # Not by MPI, which would have to start the processes.
    initialize_ub([tokens, hidden], layout.tensor, quantization_modes=[mode], dtype=dtype, bootstrap_backend="nccl")

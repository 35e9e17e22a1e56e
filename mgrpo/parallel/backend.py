"""Device of training, CUDA or CPU: the only module that depends on it; `stand_in` makes Megatron run on either."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd.profiler import emit_nvtx
from torch.nn.attention import activate_flash_attention_impl

from mgrpo.parallel.stand_in import CPU
from mgrpo.parallel.stand_in import install as install

TRAINING_TIMEOUT_MINUTES = 15
"""Limit for all ranks to reach a collective of the training; waits for rank 0 and for files use separate groups."""


def has_cuda() -> bool:
    """True when learners run on GPUs."""
    return torch.cuda.is_available()


def why_no_cuda() -> str:
    """Likely reason, and remedy, where a machine has GPUs and torch finds none."""
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} is built for CPUs alone; install the packages of requirements/gpu.txt"
    driver = "driver 580 or newer" if cuda.startswith("13.") else "a driver for it"
    return f"torch {torch.__version__} with CUDA {cuda} needs {driver}; nvidia-smi shows this machine's, update it"


def device() -> torch.device:
    """The device of this rank's model."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda() else CPU


def device_bytes() -> int:
    """Memory of this rank's device; on the CPU an equal share of the machine's memory for each of its ranks."""
    if has_cuda():
        return torch.cuda.get_device_properties(device()).total_memory
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device_name() -> str | None:
    """Name of this rank's GPU, as CUDA gives it; None on the CPU."""
    return torch.cuda.get_device_name(device()) if has_cuda() else None


def peak_memory() -> dict[str, float]:
    """GiB of this rank's GPU since the last call: in tensors, and taken by torch's allocator. Empty on the CPU."""
    if not has_cuda():
        return {}
    peaks = {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / 2**30,
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks


def synchronize() -> None:
    """Wait until this rank's device has done all work so far; on the CPU it has."""
    if has_cuda():
        torch.cuda.synchronize()


def release_memory() -> None:
    """Give memory that torch's allocator holds and no tensor uses back to the device."""
    if has_cuda():
        torch.cuda.empty_cache()


@contextmanager
def recorded_by_nsys() -> Iterator[None]:
    """Record the block with nsys, including the names of operations and of a step's parts; CUDA only."""
    torch.cuda.profiler.start()
    try:
        with emit_nvtx():
            yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def meeting_store(*, rank: int, world_size: int, timeout_s: float, socket: int | None) -> torch.distributed.Store:
    """The store in which the ranks meet: torchrun's, or the one that this rank serves on an inherited socket.

    Args:
        socket: number of that socket; None for ranks that do not serve.
    """
    if world_size == 1:
        return torch.distributed.HashStore()
    timeout = timedelta(seconds=timeout_s)
    if socket is not None:
        return torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=socket,
        )
    return next(torch.distributed.rendezvous("env://", rank, world_size, timeout=timeout))[0]


def init_process_group(
    *, rank: int, world_size: int, timeout_minutes: float, store: torch.distributed.Store | None = None
) -> None:
    """Join the default process group: NCCL with CUDA, gloo without. Every rank must call; one alone needs no rendezvous.

    Tensors in host memory need a separate group, of backend gloo.
    """
    if has_cuda():
        torch.cuda.set_device(device())
    torch.distributed.init_process_group(
        # Megatron's groups take after this one. With gloo in addition to NCCL each of them would connect all its ranks by TCP.
        "nccl" if has_cuda() else "gloo",
        rank=rank,
        world_size=world_size,
        store=store or (torch.distributed.HashStore() if world_size == 1 else None),
        timeout=timedelta(minutes=min(timeout_minutes, TRAINING_TIMEOUT_MINUTES)),
    )


@contextmanager
def host_threads() -> Iterator[None]:
    """Within, torch may use this rank's share of the machine's cores."""
    before = torch.get_num_threads()
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leave_process_groups() -> None:
    """Destroy the default group and Megatron's groups, so that another run may start. Every learner rank must call."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def to_device(array: np.ndarray, dtype: type[np.generic]) -> torch.Tensor:
    """A copy on this rank's device. With CUDA the host does not wait for it."""
    host = torch.from_numpy(array.astype(dtype))
    return host.pin_memory().to(device(), non_blocking=True) if has_cuda() else host


@functools.cache
def flash_attention(dtype: torch.dtype, head_dim: int) -> Literal["FA2", "FA3"] | None:
    """torch's flash attention for heads of this type and size: its release, or None.

    The first call activates FlashAttention 3 for this process if its kernels are installed, on GPUs that have them (Hopper).
    """
    if not has_cuda() or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return None
    capability = torch.cuda.get_device_capability(device())
    if capability < (8, 0):
        return None
    if capability[0] == 9 and find_spec("flash_attn_interface") is not None:
        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as err:
            logging.getLogger(__name__).warning("FlashAttention 3 is installed and cannot be used: %s", err)
        else:
            return "FA3"
    return "FA2"


@functools.cache
def delta_rule_kernel(dtype: torch.dtype) -> Callable[..., Any] | None:
    """flash-linear-attention's gated delta rule for operands of this type; None if it is not available."""
    if not has_cuda() or dtype not in (torch.bfloat16, torch.float16) or find_spec("fla") is None:
        return None
    kernel: Callable[..., Any] = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return kernel


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its kernels fused, for tensors of any lengths; on the CPU, where it would take a C++ compiler, itself."""
    return torch.compile(function, dynamic=True) if has_cuda() else function


def random_states() -> dict[str, torch.Tensor]:
    """This rank's random states by name, each `[n]` uint8: torch's, the device's, and Megatron's of every axis."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"cpu": torch.get_rng_state()}
    if has_cuda():
        states["cuda"] = torch.cuda.get_rng_state(device())
    return states | {f"tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restore the result of `random_states`."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    if has_cuda():
        torch.cuda.set_rng_state(states["cuda"], device())
    prefix = "tracker/"
    trackers = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(trackers)


def transformer_settings() -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that depend on the device."""
    fused = has_cuda()
    return {
        "use_cpu_initialization": not fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def accumulates_gradients() -> bool:
    """True if apex's kernel is installed, with which Megatron's own layers add to their gradients in the matrix product."""
    return has_cuda() and find_spec("fused_weight_gradient_mlp_cuda") is not None

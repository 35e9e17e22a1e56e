"""The one place that knows whether this machine trains on CUDA or on the CPU.

megatron-core 0.16 refers to its device as `torch.cuda.<something>` or as the literal "cuda", both through the global name
`torch` of its own modules. Without CUDA `install()` rebinds that name, in those modules only, to a stand-in whose current
device is the CPU. megatron-core itself is not edited, and with CUDA the stand-in is not used.

Without Transformer Engine two of its modules lack a name that they read, on any device; `install()` supplies it.

`REBOUND` and `REBOUND_WITHOUT_TE` list everything that is replaced and why; a test fails when one of the names goes away.
"""

from __future__ import annotations

import functools
import importlib.abc
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd.profiler import emit_nvtx
from torch.distributed import DeviceMesh

CPU = torch.device("cpu")

REBOUND: tuple[tuple[str, str, str], ...] = (
    # Without CUDA: (module under megatron.core, name, why)
    ("tensor_parallel.layers", "torch", "allocates weights on torch.cuda.current_device()"),
    ("tensor_parallel.random", "torch", "uses the CUDA random state; here the CUDA generator is the CPU's"),
    ("tensor_parallel.random", "_lazy_call", "is imported by name from torch.cuda"),
    ("pipeline_parallel.p2p_communication", "torch", "exchanges shapes on torch.cuda.current_device()"),
    ("pipeline_parallel.schedules", "torch", "creates token counts on device 'cuda'"),
    ("distributed.param_and_grad_buffer", "torch", "allocates gradient buffers, uses streams and events"),
    ("optimizer.distrib_optimizer", "torch", "compares Tensor.type() with 'torch.cuda.FloatTensor'"),
    ("optimizer.clip_grads", "torch", "creates norms on device 'cuda', calls Tensor.type()"),
    ("models.common.embeddings.rope_utils", "torch", "pins memory, which a CPU build refuses"),
    ("jit", "jit_fuser", "is torch.compile, which would run a C++ compiler in every rank"),
    (
        "transformer.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        "checks is_cuda before it converts the sizes of a split to numpy",
    ),
    ("distributed.fsdp.mcore_fsdp_adapter", "DeviceMesh", "creates meshes of device type 'cuda'"),
)
REBOUND_WITHOUT_TE: tuple[tuple[str, str, str], ...] = (
    # Without Transformer Engine, with CUDA and without: (module under megatron.core, name, why)
    (
        "transformer.moe.moe_utils",
        "te_general_gemm",
        "is compared with None by the router, but bound by the import only",
    ),
    ("distributed.fsdp.mcore_fsdp_adapter", "TELinear", "is a mock, which isinstance refuses"),
)


def has_cuda() -> bool:
    """True when learners run on GPUs."""
    return torch.cuda.is_available()


def why_no_cuda() -> str:
    """The likely reason, and what to do, where a machine has GPUs and torch finds none."""
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
    """Of this rank's GPU, as CUDA gives it; None on the CPU."""
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


@contextmanager
def recorded_by_nsys() -> Iterator[None]:
    """nsys records what runs within, with the names of operations and of a step's parts; on the CPU it cannot."""
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
    """Join the default process group: NCCL with CUDA, gloo without. Every rank must call; one alone needs no rendezvous."""
    if has_cuda():
        torch.cuda.set_device(device())
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if has_cuda() else "gloo",
        rank=rank,
        world_size=world_size,
        store=store or (torch.distributed.HashStore() if world_size == 1 else None),
        timeout=timedelta(minutes=timeout_minutes),
    )


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
    """Restore what `random_states` returned."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    if has_cuda():
        torch.cuda.set_rng_state(states["cuda"], device())
    prefix = "tracker/"
    trackers = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    get_cuda_rng_tracker().set_states(trackers)


def transformer_settings() -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that depend on the device and on what can be imported."""
    fused = has_cuda()
    return {
        "use_cpu_initialization": not fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }


class _Stream:
    """A CUDA stream on the CPU, where everything runs in program order."""

    cuda_stream, device = 0, CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        return False

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


_STREAM = _Stream()
_CUDA = {
    "current_device": lambda: CPU,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda stream: _STREAM,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "default_generators": _Generators(),
}
_BY_NAME = {"_lazy_call": lambda call, **kwargs: call(), "_lazy_init": lambda: None}
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")


class _StandIn(types.ModuleType):
    """The module `real` with some names replaced."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(self._real, name)
        return value


class _DeviceType(type):
    def __call__(cls, kind: Any, *index: Any) -> torch.device:
        return CPU if str(kind).startswith("cuda") else torch.device(kind, *index)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.device)


class _Device(metaclass=_DeviceType):
    """torch.device to which "cuda" and f"cuda:{torch.cuda.current_device()}" mean the CPU."""


class _Mesh(DeviceMesh):
    @staticmethod
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu", *args, **kwargs)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _torch_without_cuda() -> _StandIn:
    replaced: dict[str, Any] = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    replaced["device"] = _Device
    replaced["cuda"] = _StandIn(torch.cuda, _CUDA | {"random": _StandIn(torch.cuda.random, _CUDA)})
    return _StandIn(torch, replaced)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Rebinds names in each `megatron.core.*` module right after its body has run.

    Args:
        stand_in: for the name `torch`; None with CUDA.
    """

    def __init__(self, stand_in: _StandIn | None) -> None:
        self.stand_in = stand_in

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("megatron.core."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run_body = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run_body(module)
                _supply_transformer_engine_names(module)
                if self.stand_in is not None:
                    _rebind_without_cuda(module, self.stand_in)

            loader.exec_module = exec_module
        return spec


def _supply_transformer_engine_names(module: types.ModuleType) -> None:
    names = module.__dict__
    if module.__name__ == "megatron.core.transformer.moe.moe_utils":
        names.setdefault("te_general_gemm", None)
    if module.__name__ == "megatron.core.distributed.fsdp.mcore_fsdp_adapter" and not isinstance(
        names["TELinear"], type
    ):
        names["TELinear"] = type("TELinear", (), {})


def _rebind_without_cuda(module: types.ModuleType, stand_in: _StandIn) -> None:
    names = module.__dict__
    if names.get("torch") is torch:
        names["torch"] = stand_in
    names.update({name: fake for name, fake in _BY_NAME.items() if name in names})
    if names.get("DeviceMesh") is DeviceMesh:
        names["DeviceMesh"] = _Mesh
    if module.__name__ == "megatron.core.transformer.moe.moe_utils":
        names["maybe_move_tensor_to_cpu"] = _on_host
    if module.__name__ == "megatron.core.jit":
        module.disable_jit_fuser()
    if module.__name__ == "megatron.core.tensor_parallel.random":
        # It logs an error when the CPU generator changes inside a CUDA fork; here both are the same generator.
        logging.getLogger(module.__name__).setLevel(logging.CRITICAL)


def _patch_tensor(stand_in: _StandIn) -> None:
    """For calls made inside megatron-core, `t.cuda()` is `t` and a float tensor's type is 'torch.cuda.FloatTensor'."""
    tensor_class: Any = torch.Tensor
    real_type, real_cuda = tensor_class.type, tensor_class.cuda

    def from_megatron() -> bool:
        return sys._getframe(2).f_globals.get("torch") is stand_in

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> str | torch.Tensor:
        name_or_tensor = real_type(self, *args, **kwargs)
        if isinstance(name_or_tensor, str) and from_megatron():
            return name_or_tensor.replace("torch.", "torch.cuda.", 1)
        return name_or_tensor

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if from_megatron() else real_cuda(self, *args, **kwargs)

    tensor_class.type, tensor_class.cuda = tensor_type, cuda


def install() -> None:
    """Let megatron-core run without CUDA and without Transformer Engine. Call before the first import of `megatron.core`."""
    # The run reports once what is installed beside Megatron; a dozen modules would warn about it on every rank.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=".*_tensor. is deprecated", category=FutureWarning)
    if any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("mgrpo.parallel.backend.install() must run before megatron.core is imported")
    stand_in = None if has_cuda() else _torch_without_cuda()
    sys.meta_path.insert(0, _ImportHook(stand_in))
    if stand_in is not None:
        _patch_tensor(stand_in)

"""Unmodified megatron-core on machines without CUDA and without Transformer Engine.

megatron-core refers to its device as `torch.cuda.<something>` or as the literal "cuda", both through the global name
`torch` of its own modules. Without CUDA `install()` rebinds that name, in those modules only, to a stand-in whose current
device is the CPU. megatron-core itself is not edited, and with CUDA the stand-in is not used.

Without Transformer Engine two of its modules lack a name that they read, on any device; `install()` supplies it.

`REBOUND` and `REBOUND_WITHOUT_TE` list everything that is replaced and why; a test fails when one of the names goes away.
"""

from __future__ import annotations

import functools
import importlib.abc
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, Self

import torch
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


class IdleStream:
    """A CUDA stream, or an event in one, where everything has happened already."""

    cuda_stream, device = 0, CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        return False

    def record_event(self, event: Self | None = None) -> Self:
        return event or type(self)()

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    wait_stream = wait_event = wait

    def synchronize(self) -> None: ...


class _Generators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


_STREAM = IdleStream()
_CUDA = {
    "current_device": lambda: CPU,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "Stream": IdleStream,
    "Event": IdleStream,
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
                with _hidden("wandb"):
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
    # megatron-core 0.19 compares the class's name and no longer imports it.
    if module.__name__ == "megatron.core.distributed.fsdp.mcore_fsdp_adapter" and not isinstance(
        names.get("TELinear", type), type
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
    """Make `t.cuda()` return `t`, and a float tensor's type 'torch.cuda.FloatTensor', for calls made inside megatron-core."""
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


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Make the package unimportable within the block. W&B makes folders in /tmp as it is imported, and a killed process leaves them."""
    is_known, before = package in sys.modules, sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_known:
            sys.modules[package] = before  # type: ignore[assignment]
        else:
            del sys.modules[package]


def install() -> None:
    """Make megatron-core run without CUDA and without Transformer Engine. Call before the first import of `megatron.core`."""
    if find_spec("amp_C") is None:
        # Another package may be called apex, and Megatron would try to use it.
        sys.modules.setdefault("apex", None)  # type: ignore[arg-type]
    # The run reports once the packages installed besides Megatron; a dozen modules would warn about it on every rank.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=".*_tensor. is deprecated", category=FutureWarning)
    if any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("mgrpo.parallel.stand_in.install() must run before megatron.core is imported")
    stand_in = None if torch.cuda.is_available() else _torch_without_cuda()
    sys.meta_path.insert(0, _ImportHook(stand_in))
    if stand_in is not None:
        _patch_tensor(stand_in)

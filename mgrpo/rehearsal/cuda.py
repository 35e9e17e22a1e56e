"""A simulated CUDA device: tensors can report it as theirs, and torch's autograd engine accepts it.

A CPU build of torch lacks CUDA in two places that Python cannot reach, its table of device guards and its CUDA
hooks. Both are C++ objects whose layout belongs to one release, so other releases are refused. `install` rebinds names of
torch.cuda for good: a process that has called it can do nothing but rehearse.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from mgrpo.parallel import stand_in

TORCH = "2.13"
"""The release of torch whose C++ layout is known."""
DEVICE = torch.device("cuda", 0)
_NUM_METHODS = 64
"""Upper bound of the number of methods of either C++ interface."""
_IS_BUILT, _HAS_CONTEXT = 2, 4
"""Places of isBuilt and hasPrimaryContext among the virtual methods of the CUDA hooks."""
_CUDA_GUARD = 1
"""Place of CUDA among the device guards."""
_kept: list[Any] = []
"""Objects that C++ points to."""

Tell = Callable[[str], None]


class RehearsalError(ValueError):
    """Rehearsal is impossible here; the message gives the reason."""


def install(*, memory_bytes: int, waits: Tell) -> None:
    """Simulate a CUDA device in this process. Call before Megatron is imported, which takes names from torch.cuda.

    Args:
        memory_bytes: of the device.
        waits: called with the name of each wait of the host that does not pass through torch's dispatcher.
    Raises:
        RehearsalError: this is another release of torch.
    """
    if not torch.__version__.startswith(f"{TORCH}."):
        raise RehearsalError(
            f"torch {torch.__version__} cannot rehearse: the stand-in for CUDA knows the inside of torch {TORCH} only; "
            "install that release (its CPU build is enough)"
        )
    if not torch.cuda.is_available():
        _register_guard()
        _answer_hooks()
    # Or the fake mode would create a CUDA context.
    mode: Any = FakeTensorMode
    mode.avoid_device_init = True
    _rebind_cuda(memory_bytes, waits)
    _rebind_tensors(waits)


def _method(answer: int, kind: Any) -> int:
    """Address of a virtual method without arguments that returns `answer`."""
    function = ctypes.CFUNCTYPE(kind, ctypes.c_void_p)(lambda this: answer)
    _kept.append(function)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _array(addresses: list[int]) -> int:
    array = (ctypes.c_void_p * len(addresses))(*addresses)
    _kept.append(array)
    return ctypes.addressof(array)


def _register_guard() -> None:
    """Register a CUDA guard that counts no devices, which torch replaces by a guard that does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_CUDA_GUARD + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[_CUDA_GUARD]:
        no_devices = _method(0, ctypes.c_int8)
        guards[_CUDA_GUARD] = _array([_array([no_devices] * _NUM_METHODS)])
        torch._C._ensureCUDADeviceGuardSet()


def _answer_hooks() -> None:
    """Make CUDA's hooks report to the autograd engine that CUDA was built and has a context, by a copy of their methods."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))
    hooks = get_hooks()
    methods = hooks[0][:_NUM_METHODS]
    methods[_IS_BUILT] = methods[_HAS_CONTEXT] = _method(1, ctypes.c_bool)
    hooks[0] = ctypes.cast(_array(methods), ctypes.POINTER(ctypes.c_void_p))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        raise RehearsalError(
            f"torch {torch.__version__} does not accept the stand-in for CUDA; install its release {TORCH}"
        )


class RehearsedStream(stand_in.IdleStream):
    """A stream or an event that reports when the host waits for it."""

    device, stream_id = DEVICE, 0
    waits: Tell

    def synchronize(self) -> None:
        self.waits("synchronize of a stream or an event")


def _rebind_cuda(memory_bytes: int, waits: Tell) -> None:
    RehearsedStream.waits = staticmethod(waits)
    properties = SimpleNamespace(
        total_memory=memory_bytes, name="rehearsal", major=9, minor=0, multi_processor_count=132
    )
    answers: dict[str, Any] = {
        "current_device": 0,
        "current_stream": RehearsedStream(),
        "default_stream": RehearsedStream(),
        "device_count": 8,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "is_available": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "is_initialized": True,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (memory_bytes, memory_bytes),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "memory_stats": {},
    }
    for name in ("empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats", "set_device"):
        answers[name] = None
    for name in ("set_rng_state", "set_stream", "_lazy_call", "_lazy_init"):
        answers[name] = None
    cuda: Any = torch.cuda
    for name, value in answers.items():
        setattr(cuda, name, lambda *args, answer=value, **kwargs: answer)
    cuda.synchronize = lambda device=None: waits("torch.cuda.synchronize")
    cuda.get_rng_state = _random_state
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(cuda.random, name, getattr(cuda, name))
    cuda.stream = cuda.device = lambda *args: contextlib.nullcontext()
    cuda.Stream = cuda.Event = RehearsedStream
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: 0


def _random_state(device: Any = None) -> torch.Tensor:
    with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
        return torch.zeros(16, dtype=torch.uint8)


def _rebind_tensors(waits: Tell) -> None:
    """Replace methods that would call CUDA itself, and two that torch answers below the dispatcher."""
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
    tensor.pin_memory, tensor.is_pinned = lambda self, *device: pin(self), lambda self, *device: is_pinned(self)
    tensor.cuda = lambda self, *args, **kwargs: self.to(DEVICE, non_blocking=kwargs.get("non_blocking", False))
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args: self.to(DEVICE)
    module._apply = _apply
    make = torch.tensor

    def from_items(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Items of a list are read below all modes, where fake ones have no value.
        if isinstance(data, (list, tuple)):
            data = tree_map_only(FakeTensor, lambda item: item.item(), data)
        return make(data, *args, **kwargs)

    functions: Any = torch
    functions.tensor = from_items
    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like"):
        setattr(functions, name, _pinning(getattr(torch, name)))
    functions.compile = _uncompiled
    fake: Any = FakeTensor
    fake.tolist = lambda self: self.to("cpu").tolist()


_pinned: set[int] = set()
"""Storages of host memory that a device may read on its own."""


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor.pin_memory on the simulated device."""
    return tensor if is_pinned(tensor) else _marked(tensor.clone())


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _pinned.add(storage._cdata)
    weakref.finalize(storage, _pinned.discard, storage._cdata)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Tensor.is_pinned on the simulated device."""
    return tensor.untyped_storage()._cdata in _pinned


def _pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = factory(*args, **kwargs)
        return _marked(made) if pin_memory and made.device.type == "cpu" else made

    return make


def _uncompiled(function: Any = None, **options: Any) -> Any:
    """torch.compile without compilation, which fails under a dispatch mode."""
    return function if function is not None else lambda decorated: decorated


def _apply(self: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """torch.nn.Module._apply without its swap of tensor contents, which fails for tensors that the fake mode weakly references."""
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in self.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            values = convert(old.data)
            if old not in moved and (values.device, values.dtype) != (old.device, old.dtype):
                moved[old] = torch.nn.Parameter(values, old.requires_grad)
                moved[old].__dict__.update(old.__dict__)
            module._parameters[name] = moved.get(old, old)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else convert(buffer)
    return self

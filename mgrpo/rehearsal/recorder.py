"""A dispatch mode that runs the host's operations, fakes the device's, and counts both.

It is above FakeTensorMode. Tensors in host memory are real, so that lengths and indices have their true values; only
those on CUDA are fake. Values that the host reads from the device come from small integer tensors with known values, else
from `guess`, else they are 1.

torch's MemTracker counts memory alone, by modules and optimizer hooks, which Megatron's buffers do not have.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # The shapes of c10d's operations.
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, register_flop_formula

from mgrpo.rehearsal.cuda import DEVICE, is_pinned, pin
from mgrpo.rehearsal.device_bytes import Memory

aten = torch.ops.aten
KNOWN_ELEMENTS = 4096
"""Integer tensors up to this size keep their values: lengths, shapes, positions."""
TEMPORARY = frozenset({"forward", "backward"})
_PACKAGES = ("/megatron/core/", "/mgrpo/")
_OWN = "/mgrpo/rehearsal/"
_COMPARED = {aten.equal.default, aten.is_nonzero.default}
_SIZED_BY_VALUES = {aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor}
_WRITES_BY_INDEX = {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


@register_flop_formula(aten._grouped_mm)
def _grouped_products(
    first: Sequence[int], second: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Operations: each row of one, or in a product of two flat matrices each pair of rows, meets one group of the other."""
    return 2 * first[-2] * first[-1] * second[-1]


def site() -> str:
    """The place of the caller: the innermost frame of Megatron, if any, and that of mgrpo, as `file:line function`."""
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        path = frame.f_code.co_filename
        for package in _PACKAGES:
            if package in path and _OWN not in path:
                text = f"{package[1:]}{path.rpartition(package)[2]}:{frame.f_lineno} {frame.f_code.co_name}"
                if package == "/mgrpo/":
                    return f"{innermost} < {text}" if innermost else text
                innermost = innermost or text
        frame = frame.f_back
    return innermost or "autograd engine"


class Recorder(TorchDispatchMode):
    """Memory, communication, operations and waits of one rank."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.phase = "build"
        self.num_operations = 0
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """Number of the host's waits for the device, by (phase, what, site)."""
        self.uploads: Counter[tuple[str, str, str]] = Counter()
        """The same for copies to the device from memory that it cannot read itself, which hold up the host only."""
        self.sent: Counter[tuple[str, str, str]] = Counter()
        """Bytes by (axis, phase, operation), in rings."""
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.offloaded: Counter[str] = Counter()
        """Bytes by phase that are copied to page-locked host memory, and wait there."""
        self.flops: Counter[tuple[str, str]] = Counter()
        """Operations by (phase, "attention", "products" or "products in 8 bits")."""
        self.axes: dict[str, str] = {}
        """The axis of each process group, by the group's name."""
        self.guess: Callable[[torch.Tensor], np.ndarray | None] = lambda tensor: None
        """Values of a tensor that the host reads."""
        self.guess_count: Callable[[torch.Tensor], int | None] = lambda tensor: None
        """The number of elements of a mask that are true; by default all."""

    @property
    def now(self) -> str:
        """The phase of the step; a backward pass is recognised by torch's engine."""
        return "backward" if torch._C._current_graph_task_id() != -1 else self.phase

    def forget(self) -> None:
        """Reset the counters; allocations remain."""
        for counter in (self.waits, self.uploads, self.sent, self.calls, self.offloaded, self.flops):
            counter.clear()
        self.memory.forget_peak()

    def wait(self, what: str) -> None:
        """Record that the host waits for the device."""
        self.waits[self.now, what, site()] += 1

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the memory of a tensor that the backward pass needs as activations."""
        if _is_on_device(tensor):
            self.memory.rename(tensor, "activations", only=TEMPORARY)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_collective = func.namespace == "c10d"
        if is_collective:
            self._count_sent(func, args)
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if target != DEVICE.type and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self.num_operations += 1
        if is_collective and "coalesced" in str(func):  # torch has no fake for these
            return FakeWork().boxed()
        on_device = [tensor for tensor in tensors if _is_on_device(tensor)]
        if on_device:
            answer = self._answer(func, args, kwargs, on_device[0], target)
            if answer is not NotImplemented:
                return answer
            args = self._with_places(func, args)
        elif func is aten._to_copy.default and target == DEVICE.type:
            return self._upload(args[0], kwargs)
        return self._pretend(func, args, kwargs, tensors)

    # --- what the host reads

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: Any, target: Any) -> Any:
        """The result of an operation that the host waits for; NotImplemented for all others."""
        if func is aten._local_scalar_dense.default:
            self.wait("item")
            return self._values(first).item()
        if func in _COMPARED:
            self.wait(func._overloadpacket.__name__)
            return True
        if func in _SIZED_BY_VALUES:
            return self._sized_by_values(func, args, kwargs)
        if func is aten._to_copy.default and target == "cpu":
            found = self._on_host(first, kwargs.get("dtype") or first.dtype)
            if kwargs.get("non_blocking"):
                with unset_fake_temporarily():
                    return pin(found)  # as torch itself
            self.wait("copy to the host")
            return found
        if func is aten.copy_.default and args[0].device.type == "cpu":
            if not ((len(args) > 2 and args[2]) or kwargs.get("non_blocking")):
                self.wait("copy to the host")
            if is_pinned(args[0]) and first.numel() > KNOWN_ELEMENTS:
                self.offloaded[self.now] += first.nbytes
                return args[0]  # the values are not read, and memory that is not written is not taken
            with unset_fake_temporarily():
                return args[0].copy_(self._on_host(first, first.dtype))
        if func is aten.copy_.default and args[1].device.type == "cpu":
            self._count_upload(args[1])
        return NotImplemented

    def _values(self, tensor: torch.Tensor) -> np.ndarray:
        known = getattr(tensor, "known", None)
        with unset_fake_temporarily():
            found = self.guess(tensor) if known is None else known.numpy().copy()
        return np.ones(tuple(tensor.shape)) if found is None else np.asarray(found).reshape(tuple(tensor.shape))

    def _on_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.from_numpy(np.array(self._values(tensor))).to(dtype)

    def _sized_by_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        first = args[0]
        size = kwargs.get("output_size")
        if size is None:
            self.wait(func._overloadpacket.__name__)
            if func is aten.repeat_interleave.Tensor:
                size = int(self._values(first).sum())
            else:
                size = self.guess_count(first) or first.numel()
        made = (
            first.new_empty((size, first.dim()), dtype=torch.int64)
            if func is aten.nonzero.default
            else first.new_empty(size, dtype=torch.int64 if func is aten.repeat_interleave.Tensor else first.dtype)
        )
        self._own(made)
        return made

    def _with_places(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace boolean indices by all places, as if all were true; a real one reads the true places from the device."""
        writes = func in _WRITES_BY_INDEX and args[2].numel() > 1
        if func is not aten.index.Tensor and not writes:
            return args
        places: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype is torch.bool and _is_on_device(index):
                self.wait("boolean index")
                places += [torch.empty(index.numel(), dtype=torch.int64, device=DEVICE) for _ in range(index.dim())]
            else:
                places.append(index)
        return args[0], places, *args[2:]

    # --- what the device computes

    def _upload(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        self._count_upload(source)
        made: Any = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=DEVICE)
        if not isinstance(source, FakeTensor) and _may_be_known(made):
            with unset_fake_temporarily():
                made.known = source.to(made.dtype)
        self._own(made)
        return made

    def _count_upload(self, source: torch.Tensor) -> None:
        if not is_pinned(source):
            self.uploads[self.now, "copy from pageable memory", site()] += 1

    def _pretend(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        try:
            _check_lists(func, args)
            out = func(*args, **kwargs)
        except Exception as err:
            err.add_note(f"in {func} at {site()}")
            raise
        if count := flop_registry.get(func._overloadpacket):
            kind = "attention" if "atten" in str(func) or "attn" in str(func) else "products"
            if any(tensor.is_floating_point() and tensor.itemsize == 1 for tensor in tensors):
                kind = "products in 8 bits"
            self.flops[self.now, kind] += count(*args, **kwargs, out_val=out)
        for leaf in tree_leaves(out):
            self._own(leaf)
        self._follow_values(func, args, kwargs, tensors, out)
        return out

    def _own(self, made: Any) -> None:
        if isinstance(made, torch.Tensor) and _is_on_device(made):
            self.memory.add(made, self.now)

    def _follow_values(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], out: Any
    ) -> None:
        """Compute small integers for real where all that they come from is known."""
        has_values = func.namespace == "aten" and "empty" not in str(func) and _may_be_known(out)
        if has_values and all(not isinstance(x, FakeTensor) or getattr(x, "known", None) is not None for x in tensors):
            args, kwargs = tree_map_only(FakeTensor, _known, (args, kwargs))
            kwargs = {key: "cpu" if key == "device" else value for key, value in kwargs.items() if key != "pin_memory"}
            with unset_fake_temporarily(), torch.no_grad():
                out.known = func(*args, **kwargs)
        elif func._schema.is_mutable and args and isinstance(args[0], FakeTensor):
            written: Any = args[0]
            written.known = None

    # --- communication

    def _count_sent(self, func: Any, args: tuple[Any, ...]) -> None:
        operation = func._overloadpacket.__name__
        boxed = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject) and _is_group(leaf))
        group = dist.ProcessGroup.unbox(boxed)
        first, second = (
            sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)) for part in args[:2]
        )
        if not any(_is_on_device(leaf) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)):
            return
        key = self.axes.get(group.group_name, f"{group.size()} ranks"), self.now, operation
        self.sent[key] += round(_ring_bytes(operation, group.size(), first, second))
        self.calls[key] += 1


def _check_lists(func: Any, args: tuple[Any, ...]) -> None:
    """A fused optimizer's kernel reads all its lists on the device; the fake mode does not look where lists are."""
    if func._overloadpacket.__name__.startswith("_fused_"):
        lists = [leaf for part in args if isinstance(part, (list, tuple)) for leaf in part]
        if devices := {leaf.device.type for leaf in lists if isinstance(leaf, torch.Tensor)} - {DEVICE.type}:
            raise RuntimeError(f"{func} takes tensors on {DEVICE.type} only, found some on {', '.join(devices)}")


def _known(tensor: Any) -> torch.Tensor:
    return tensor.known


def _is_group(boxed: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(boxed._type())


def _ring_bytes(operation: str, size: int, first: int, second: int) -> float:
    """Bytes that a rank sends; `first` and `second` are the bytes of the operation's first two arguments."""
    ring = (size - 1) / size
    if operation == "recv_":
        return 0
    if operation.startswith("allreduce"):
        return 2 * ring * first
    if "reduce_scatter" in operation or "alltoall" in operation:
        return ring * second
    return ring * first if "allgather" in operation else first


def _is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.device.type == DEVICE.type


def _may_be_known(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.numel() <= KNOWN_ELEMENTS and not tensor.is_floating_point()

"""Activation offloading: saved tensors move to host memory until the backward pass, copied on separate streams during compute.

The tensors that the layers of a block save for the backward pass go to page-locked memory one layer at a time: while the next
layer computes, with two layers on the device at most. They come back one layer ahead of their backward pass. The last layer of a
block stays on the device: its backward pass comes first, and covers the way back of the layer before it. Under full
recomputation each layer saves its input alone.

The host never blocks: streams wait for each other's events. On a CPU the copies are the same, between host memory and itself,
and events have always happened.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from mgrpo.parallel import backend


class _Saved:
    """The memory below saved tensors, `[elements of a storage]`: on the device, on the host, or both while it is copied.

    The copies are on the current stream, and the host does not wait for them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        num_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.on_device: torch.Tensor | None = tensor.as_strided((num_elements,), (1,), 0)
        self.on_host: torch.Tensor | None = None

    def send(self) -> None:
        assert self.on_device is not None
        self.on_host = torch.empty_like(self.on_device, device="cpu", pin_memory=backend.has_cuda())
        self.on_host.copy_(self.on_device, non_blocking=True)

    def take_memory(self) -> None:
        assert self.on_host is not None
        self.on_device = torch.empty_like(self.on_host, device=backend.device())

    def fetch(self) -> None:
        assert self.on_device is not None and self.on_host is not None
        self.on_device.copy_(self.on_host, non_blocking=True)
        self.on_host = None


class _Layer:
    """Tensors that one layer saves in one forward pass, and the layer before it in the same pass."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = before
        self.saved: dict[tuple[int, torch.dtype], _Saved] = {}
        """Saved tensors by storage and type: several may view one, which stays allocated as long as it is listed here."""
        device = torch.get_device_module(backend.device())
        self.sent, self.back = device.Event(), device.Event()

    def save(self, tensor: torch.Tensor) -> _Saved:
        key = tensor.untyped_storage()._cdata, tensor.dtype
        if key not in self.saved:
            self.saved[key] = _Saved(tensor)
        return self.saved[key]


class ActivationOffload:
    """Takes over the forward pass of `block`, whose last layer must not be its only one."""

    def __init__(self, block: TransformerBlock) -> None:
        self._block, self._forward = block, block.forward
        self._device = torch.get_device_module(backend.device())
        self._out, self._in = self._device.Stream(), self._device.Stream()
        self._layer: _Layer | None = None
        """The layer whose forward pass this is; None outside of those that have a backward pass."""
        self._is_open = False
        self._shared: set[int] = set()
        """Storages that stay: of weights, of inputs of every layer, and of the input that the pipeline's schedule holds."""
        block.forward = self._offloading
        for layer in block.layers:
            layer.register_forward_pre_hook(self._begin)

    def _offloading(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        read = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        stay = [*self._block.parameters(), *tree_leaves((args, read)), self._block.input_tensor]
        self._shared = {x.untyped_storage()._cdata for x in stay if isinstance(x, torch.Tensor)}
        self._is_open = True
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                output = self._forward(*args, **kwargs)
            self._release(self._layer and self._layer.before)
        finally:
            self._layer, self._is_open = None, False
        return output

    def _begin(self, layer: torch.nn.Module, inputs: Any) -> None:
        if not self._is_open:  # a forward pass without a backward pass, or one that is repeated in it
            return
        if self._layer:
            self._send(self._layer)
            self._release(self._layer.before)
        self._layer = _Layer(self._layer)

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_shared = tensor.untyped_storage()._cdata in self._shared
        if self._layer is None or is_shared or tensor.device != backend.device():
            return tensor.detach()
        saved = self._layer.save(tensor.detach())
        return self._layer, saved, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        layer, saved, shape, stride, offset = packed
        self._fetch(layer)
        self._fetch(layer.before)
        layer.back.wait(self._device.current_stream())
        return saved.on_device.as_strided(shape, stride, offset)

    def _send(self, layer: _Layer) -> None:
        """Begin the copies of a layer whose forward pass is complete."""
        self._out.wait_stream(self._device.current_stream())
        with self._device.stream(self._out):
            for saved in layer.saved.values():
                saved.send()
        layer.sent.record(self._out)

    def _release(self, layer: _Layer | None) -> None:
        """Free tensors that have been copied; the compute stream waits for that, so that there are never more than two layers."""
        if layer:
            layer.sent.wait(self._device.current_stream())
            for saved in layer.saved.values():
                saved.on_device = None

    def _fetch(self, layer: _Layer | None) -> None:
        """Begin the copies back, once. Each is freed with the last operation that needs it."""
        if layer is None or not layer.saved:
            return
        gone = [saved for saved in layer.saved.values() if saved.on_device is None]
        # Made on the stream that uses and frees it; its memory may still be in use there.
        for saved in gone:
            saved.take_memory()
        self._in.wait_stream(self._device.current_stream())
        layer.sent.wait(self._in)
        with self._device.stream(self._in):
            for saved in gone:
                saved.fetch()
        layer.back.record(self._in)
        layer.saved = {}

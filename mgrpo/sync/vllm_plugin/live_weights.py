"""Map from slices of Hugging Face tensors to a vLLM worker's live weights, with checks that vLLM computes with these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mgrpo.models.adapters import ENGINE_ADAPTER, LoraShape, adapter_tensors, lora_a, lora_b
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.placement.mlp_rows import is_frozen
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors

PLAIN = ("CPU", "TRITON", "BATCHED_TRITON")
"""vLLM's kernels for experts that compute with the weights as its loader left them; the first of them after `rebind`."""
ABSORBED = ("W_UK_T", "W_UV", "W_K", "W_V")
"""vLLM's names for the matrices that latent attention derives from `kv_b_proj`."""
SET_AFTER_LOADING = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
"""Buffers of vLLM's attention that it sets to 1 when weights without quantization have been loaded, or made up."""
LiveBoxes = list[tuple[Box, torch.Tensor]]


def check_experts(model: torch.nn.Module, *, has_experts: bool) -> None:
    """Raise RuntimeError unless the experts' weights have the layout of vLLM's loader, in which they are written in place."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = {method.unquantized_backend.name for method in methods if hasattr(method, "unquantized_backend")}
    if has_experts and not (kernels and kernels <= set(PLAIN)):
        found = ", ".join(sorted(kernels)) or "unknown"
        raise RuntimeError(
            f"vLLM's kernels for the experts are {found}; a weight sync writes in place what {' or '.join(PLAIN)} reads, and "
            "others reorder the weights. Leave moe_backend out of vllm_extra_args; otherwise this version of vLLM is not supported"
        )


def check_in_place(model: torch.nn.Module) -> None:
    """Raise RuntimeError if vLLM computes with copies of the loaded weights, which a sync would not update."""
    for name, module in model.named_modules():
        if hasattr(module, "_cpu_unpacked_conv_weight"):
            raise RuntimeError(
                f"vLLM has packed the weights of {name} in place, and a weight sync writes them unpacked; start the engine with "
                "MGRPO_ENGINE=1, otherwise this version of vLLM is not supported"
            )
        source = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        if source is None:
            continue
        if not source.numel():
            raise RuntimeError(
                f"vLLM has given up {name}.kv_b_proj, which a weight sync writes, for a packed copy; start the engine with "
                "--attention-backend CPU_MLA"
            )
        for absorbed in ABSORBED:
            matrix = getattr(module, absorbed, None)
            if matrix is not None and matrix.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
                raise RuntimeError(
                    f"vLLM computes with {name}.{absorbed}, a copy of kv_b_proj, which a weight sync does not reach; leave "
                    "attention_backend out of vllm_extra_args, otherwise this version of vLLM is not supported"
                )


def check_written(model: torch.nn.Module, views: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError unless `views` cover every weight of a model that was started without its files (`load_format=dummy`).

    Other weights would keep vLLM's random values. Views of the same elements count once; weights that share the memory of a covered
    weight are covered.
    """
    written: dict[int, dict[tuple, int]] = {}
    for view in views:
        place = view.data_ptr(), tuple(view.shape), view.stride()
        written.setdefault(view.untyped_storage().data_ptr(), {})[place] = view.nbytes
    left = []
    for at, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_floating_point():
                continue
            is_kept = name in module._non_persistent_buffers_set or name in SET_AFTER_LOADING
            memory = tensor.untyped_storage()
            if not is_kept and sum(written.get(memory.data_ptr(), {}).values()) < memory.nbytes():
                left.append(f"{at}.{name}".lstrip("."))
    if left:
        raise RuntimeError(
            f"the weight sync does not write {', '.join(left[:3])}{', ...' * (len(left) > 3)} of the engine, which was started without "
            "the model's files; this version of vLLM is not supported"
        )


class _RecordCopies(TorchDispatchMode):
    """Runs a loader on tensors without data and records the source and target of each copy."""

    def __init__(self, stand_ins: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.found: LiveBoxes = []
        self.zeros: list[torch.Tensor] = []
        self._stand_ins = stand_ins
        self._names = {_storage(tensor): name for name, tensor in stand_ins.items()}
        self._zeroed: set[str] = set()
        self._clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By storage: a whole copy of (a view of) a stand-in, and its original."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copied(*args[:2])
            return args[0]
        if func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0):
            name = self._names.get(_storage(args[0]))
            if name is None:
                self.zeros.append(args[0])
            else:
                self._zeroed.add(name)
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and _storage(args[0]) in self._names:
            self._clones[_storage(result)] = result, args[0]
        return result

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        clone, origin = self._clones.get(_storage(source), (None, source))
        name = self._names.get(_storage(origin))
        if name is None or (clone is not None and (clone.shape, clone.stride()) != (source.shape, source.stride())):
            raise RuntimeError(
                "this model's loader changes weights while it loads them; they cannot be written in place"
            )
        if name in self._zeroed:
            self.zeros.append(target)
        else:
            self.found.append(_box_of(origin, target, name, self._stand_ins[name]))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _box_of(view: torch.Tensor, target: torch.Tensor, name: str, whole: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """The box of a view of the stand-in `whole`, and `target`, the view's destination, in the box's shape.

    Dimensions are recognised by their strides: a loader may transpose them, and drop one from which it takes a single index.
    """
    assert target.shape == view.shape, (name, view.shape, target.shape)
    left, order, start, shape, offset = list(range(view.dim())), [], [], [], view.storage_offset()
    for stride in whole.stride():
        dim = next((dim for dim in left if view.stride(dim) == stride), None)
        start.append(offset // stride)
        offset %= stride
        shape.append(1 if dim is None else view.shape[dim])
        if dim is not None:
            left.remove(dim)
            order.append(dim)
    if left:
        raise RuntimeError(f"this model's loader reshapes {name} while it loads it; it cannot be written in place")
    return Box(name, tuple(start), tuple(shape)), target.permute(order).view(shape)


def live_boxes(model: torch.nn.Module, shape: dict[str, Any]) -> tuple[LiveBoxes, list[torch.Tensor]]:
    """Every slice of an HF tensor that this worker's live weights hold, see `loaded_boxes`."""
    return loaded_boxes(model, hf_tensors(ModelShape.from_dict(shape)))


def loaded_boxes(model: torch.nn.Module, tensors: Mapping[str, Shape]) -> tuple[LiveBoxes, list[torch.Tensor]]:
    """The slices of HF tensors that this worker's live weights hold, found by running vLLM's own loader.

    Args:
        tensors: name and shape of each.

    Returns:
        The boxes with their views, and the views that the loader fills with zeros: the vocabulary's padding, and biases that are added
        by another worker.
    """
    stand_ins = _stand_ins(model, tensors)
    with torch.no_grad(), _RecordCopies(stand_ins) as record:
        load: Any = model.load_weights
        load(iter(stand_ins.items()))
    return record.found, record.zeros


def adapter_boxes(model: torch.nn.Module, shape: dict[str, Any], lora: LoraShape) -> LiveBoxes:
    """Every slice of an adapter's A or B in this worker's first adapter slot, which is reserved for them from here on.

    The slot is 0 until it is written. Requests with the adapter id `ENGINE_ADAPTER` compute with it.

    Raises:
        RuntimeError: the engine was started without adapters.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    manager: Any = getattr(model, "lora_manager", None)
    if manager is None:
        raise RuntimeError("the engine was started without enable_lora, which lora_sync=adapter needs")
    stand_ins = _stand_ins(model, adapter_tensors(ModelShape.from_dict(shape), lora))
    layers = {}
    for matrix in filter(lora.adapts, hf_tensors(ModelShape.from_dict(shape))):
        layer = matrix.removesuffix(".weight")
        # With alpha = rank vLLM does not scale B, which is sent scaled.
        layers[layer] = LoRALayerWeights(
            layer, lora.rank, lora.rank, stand_ins[lora_a(matrix)], stand_ins[lora_b(matrix)]
        )
    manager.remove_adapter(ENGINE_ADAPTER)
    with torch.no_grad(), _RecordCopies(stand_ins) as record:
        manager.add_adapter(LoRAModel(ENGINE_ADAPTER, lora.rank, layers))
        manager.activate_adapter(ENGINE_ADAPTER)
    # At the end of a weight update vLLM removes its adapters, as if they belonged to the old weights.
    manager.remove_all_adapters = lambda: None
    return record.found


def _stand_ins(model: torch.nn.Module, shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Tensors without data, of the model's type, or float32 for those that always are."""
    own = next(parameter.dtype for name, parameter in model.named_parameters() if not is_frozen(name))
    dtypes = {name: torch.float32 if is_frozen(name) else own for name in shapes}
    return {name: torch.empty(size, dtype=dtypes[name], device="meta") for name, size in shapes.items()}

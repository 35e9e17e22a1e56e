"""vLLM's end of the weight sync, which vLLM itself loads (entry point `vllm.general_plugins`) in each of its processes.

It does nothing unless the engine's environment asks for it. What it rebinds in vLLM (`REBOUND`) concerns the CPU only:
there vLLM packs weights into private copies, which can be neither written in place nor compared.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mgrpo.models.adapters import ENGINE_ADAPTER, LoraShape, adapter_tensors, are_apart, lora_a, lora_b
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.placement.mlp_rows import is_frozen
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors
from mgrpo.processes.lifetime import die_with_parent
from mgrpo.sync.channel import Receiver, invited_lora
from mgrpo.sync.live import Held

BACKEND = "mgrpo"
ASKED = "MGRPO_ENGINE"
"""Set to "1" in the environment of an engine's processes."""
PLAIN = ("CPU", "TRITON", "BATCHED_TRITON")
"""vLLM's kernels for experts that compute with the weights as its loader left them; the first of them after `REBOUND`."""
RUN_ANSWERS_S = 5.0
"""Seconds that rank 0 of a run that is alive may take to accept a connection."""
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"


def plain_experts(
    output: torch.Tensor,
    tokens: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    experts: torch.Tensor,
    activation: str,
    *args: Any,
) -> None:
    """vLLM's `cpu_fused_moe`, one expert after the other, on the weights as its loader left them.

    Args:
        output, tokens: `[tokens, hidden]`.
        gate_up, down: `[experts, 2 * ffn, hidden]`, `[experts, hidden, ffn]`.
        weights, experts: `[tokens, top_k]`.
    """
    if activation != "silu" or gate_up_bias is not None or down_bias is not None:
        raise NotImplementedError(f"experts with biases or activation {activation!r} on a CPU")
    output.zero_()
    for expert in experts.unique().tolist():
        rows, choices = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(tokens[rows], gate_up[expert]).chunk(2, dim=-1)
        done = F.linear(F.silu(gate) * up, down[expert])
        output.index_add_(0, rows, (done * weights[rows, choices, None]).to(output.dtype))


REBOUND: tuple[tuple[str, str, Any, str], ...] = (
    # (module, name, value, why)
    ("vllm._custom_ops", "_supports_onednn", False, "keeps linear weights as live parameters instead of oneDNN copies"),
    (
        "vllm.model_executor.layers.utils",
        "check_cpu_sgl_kernel",
        lambda *args, **kwargs: False,
        "the same for the kernels vLLM prefers for bf16 on AMX machines",
    ),
    (CPU_EXPERTS, "cpu_prepack_moe_weight", lambda weight, isa: weight, "the same for the weights of experts"),
    (CPU_EXPERTS, "cpu_fused_moe", plain_experts, "computes with them; vLLM's kernel needs them packed"),
)


def register() -> None:
    """Called by vLLM, possibly several times, in client, engine core and workers."""
    if os.environ.get(ASKED) != "1":
        return
    # The engine core would outlive an engine that is killed; here it is a child of the engine's process.
    if multiprocessing.parent_process() is not None:
        die_with_parent()
    from tqdm import tqdm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    # Otherwise tqdm makes a named semaphore, which stays in /dev/shm when the process is killed.
    tqdm.set_lock(threading.RLock())
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())
    if current_platform.is_cpu():
        # vLLM's attention may be the first user of AMX in its process, and dies without the kernel's permission.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        for module, name, value, _ in REBOUND:
            setattr(importlib.import_module(module), name, value)


def _engine_class() -> type:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class Invitation(WeightTransferInitInfo):
        """`mgrpo.sync.channel.Sender.invitation`."""

        invitation: dict[str, Any]
        is_trial: bool = False
        """Only make sure that an invitation with this `model` could be accepted."""

    @dataclass
    class Update(WeightTransferUpdateInfo):
        seed: int
        """For the sampler, from here on."""
        version: int | None = None
        """Version of the weights that are being sent; None: none are, only the sampler is seeded."""
        check: bool = False

    class ReshardEngine(WeightTransferEngine[Invitation, Update]):
        """Receives exactly this worker's slices, in place."""

        init_info_cls, update_info_cls = Invitation, Update
        receiver: Receiver | None = None
        padding: Sequence[torch.Tensor] = ()

        def init_transfer_engine(self, init_info: Invitation) -> None:
            invitation = init_info.invitation
            check_free(self.receiver, invitation)
            check_experts(self.model, has_experts=invitation["model"]["experts"] is not None)
            if init_info.is_trial:
                check_model(self.model_config, invitation["model"])
                return
            self.shutdown()
            boxes, self.padding = live_boxes(self.model, invitation["model"])
            loaded: Held = ()
            if are_apart(lora := invited_lora(invitation)):
                boxes, loaded = adapter_boxes(self.model, invitation["model"], lora), boxes
            worker = self.parallel_config.rank
            self.receiver = Receiver(boxes, loaded=loaded, worker=worker, invitation=invitation)

        def start_weight_update(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class ends in torch.accelerator.synchronize(), which raises without an accelerator.
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        @torch.no_grad()
        def receive_weights(self, update_info: Update) -> None:
            torch.manual_seed(update_info.seed)
            if update_info.version is None:
                return
            if self.receiver is None:
                raise RuntimeError("the engine has not joined a transfer group")
            self.receiver.receive(update_info.version)
            # An engine that has slept wakes up with other memory, of which the sync writes the boxes only.
            for view in self.padding:
                view.zero_()
            if update_info.check:
                self.receiver.report_digests(update_info.version)

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None:
            if self.receiver is not None:
                self.receiver.close()
            self.receiver = None

    return ReshardEngine


def check_free(receiver: Receiver | None, invitation: dict[str, Any]) -> None:
    """RuntimeError if the engine takes part in another run; one that has ended without a word does not count."""
    if receiver is None or not receiver.channel.is_open:
        return
    host, port = receiver.place
    if (host, port) == (invitation.get("host"), invitation.get("port")):
        return
    try:
        socket.create_connection((host, port), timeout=RUN_ANSWERS_S).close()
    except OSError:
        return
    raise RuntimeError(
        f"the engine takes part in another run, whose rank 0 is at {host}:{port}; end that run first, or use another engine"
    )


def check_model(model_config: Any, shape: dict[str, Any]) -> None:
    """ValueError unless vLLM's `model_config` is that of a model with this `ModelShape`."""
    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config

    name = model_config.model
    # As the trainer reads it; what transformers makes of it may have other names.
    own = shape_of(read_hf_config(name) if os.path.isdir(name) else model_config.hf_config.to_dict())
    wanted = ModelShape.from_dict(shape)
    differing = [
        f"{field.name}={getattr(own, field.name)} instead of {getattr(wanted, field.name)}"
        for field in fields(wanted)
        if getattr(own, field.name) != getattr(wanted, field.name)
    ]
    if differing:
        raise ValueError(
            f"the engine's model, {name}, is not the run's: {', '.join(differing[:4])}; start the engine with the folder that "
            "model_name_or_path names"
        )


def check_experts(model: torch.nn.Module, *, has_experts: bool) -> None:
    """RuntimeError unless the experts' weights lie as vLLM's loader left them: they are written in place, in that order."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = {method.unquantized_backend.name for method in methods if hasattr(method, "unquantized_backend")}
    if has_experts and not (kernels and kernels <= set(PLAIN)):
        found = ", ".join(sorted(kernels)) or "unknown"
        raise RuntimeError(
            f"vLLM's kernels for the experts are {found}; a weight sync writes in place what {' or '.join(PLAIN)} reads, and "
            "others reorder the weights. Leave moe_backend out of vllm_extra_args; otherwise this version of vLLM is not supported"
        )


class _RecordCopies(TorchDispatchMode):
    """Runs a loader on tensors without data, and records what it would have copied where."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.zeros: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if source.device.type != "meta":
                raise RuntimeError(
                    "this model's loader changes weights while it loads them; they cannot be written in place"
                )
            self.copies.append((target, source))
            return target
        if func is torch.ops.aten.zero_.default or (func is torch.ops.aten.fill_.Scalar and args[1] == 0):
            self.zeros.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


def live_boxes(
    model: torch.nn.Module, shape: dict[str, Any]
) -> tuple[list[tuple[Box, torch.Tensor]], list[torch.Tensor]]:
    """Every slice of an HF tensor that this worker's live weights hold, found by running vLLM's own loader.

    Returns:
        The boxes with their views, and the views that the loader fills with zeros: the vocabulary's padding.
    """
    stand_ins = _stand_ins(model, hf_tensors(ModelShape.from_dict(shape)))
    with torch.no_grad(), _RecordCopies() as record:
        load: Any = model.load_weights
        load(iter(stand_ins.items()))
    return _copied(record, stand_ins), record.zeros


def adapter_boxes(model: torch.nn.Module, shape: dict[str, Any], lora: LoraShape) -> list[tuple[Box, torch.Tensor]]:
    """The same for adapters: every slice of an A or B that this worker's first slot for adapters holds, which is theirs from here on.

    All of it is 0 until it is written. Requests for the adapter with the id `ENGINE_ADAPTER` compute with it.

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
    with torch.no_grad(), _RecordCopies() as record:
        manager.add_adapter(LoRAModel(ENGINE_ADAPTER, lora.rank, layers))
        manager.activate_adapter(ENGINE_ADAPTER)
    # At the end of a weight update vLLM forgets its adapters, as if they were of other weights.
    manager.remove_all_adapters = lambda: None
    return _copied(record, stand_ins)


def _stand_ins(model: torch.nn.Module, shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Tensors without data, of the model's type, or float32 where they always are."""
    own = next(parameter.dtype for name, parameter in model.named_parameters() if not is_frozen(name))
    dtypes = {name: torch.float32 if is_frozen(name) else own for name in shapes}
    return {name: torch.empty(size, dtype=dtypes[name], device="meta") for name, size in shapes.items()}


def _copied(record: _RecordCopies, stand_ins: Mapping[str, torch.Tensor]) -> list[tuple[Box, torch.Tensor]]:
    """The slices of stand-ins that were copied, each with where to."""
    by_storage = {tensor.untyped_storage()._cdata: name for name, tensor in stand_ins.items()}
    found = []
    for target, source in record.copies:
        name = by_storage[source.untyped_storage()._cdata]
        whole, offset, start = stand_ins[name], source.storage_offset(), []
        for stride in whole.stride():
            start.append(offset // stride)
            offset %= stride
        assert source.dim() == whole.dim() and target.shape == source.shape, (name, source.shape, target.shape)
        found.append((Box(name, tuple(start), tuple(source.shape)), target))
    return found

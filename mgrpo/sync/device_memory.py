"""GPU memory that a process shares with another one of its machine (CUDA IPC), described in plain values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch

_FIELDS = 8
"""Number of the fields in torch's description of shared memory: numbers, names in bytes and a flag."""


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Name of the variable that enables torch's expandable segments, which no other process can map; None: not enabled."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", environment.get(name, ""), re.IGNORECASE):
            return name
    return None


def offer(memory: torch.Tensor) -> bytes:
    """JSON for `mapped`; `memory`, a whole allocation of torch's, must stay alive.

    Raises:
        OSError: no other process can map it.
    """
    if name := expandable_segments(os.environ):
        raise OSError(f"{name}={os.environ[name]}, expected no expandable_segments; start the engine with {name} empty")
    storage: Any = memory.untyped_storage()
    fields = storage._share_cuda_()
    assert len(fields) == _FIELDS, "another version of torch"
    plain = [{"bytes": field.hex()} if isinstance(field, bytes) else field for field in fields]
    return json.dumps({"gpu": gpu_name(memory.device), "fields": plain}).encode()


def mapped(offered: bytes, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Map the memory of another process, `[n]`, on this one's `device`.

    Raises:
        RuntimeError: `device` cannot map it.
    """
    offer = json.loads(offered)
    # The first field is the device's number in the other process, which may count fewer of them.
    _, *fields = [bytes.fromhex(field["bytes"]) if isinstance(field, dict) else field for field in offer["fields"]]
    untyped: Any = torch.UntypedStorage
    try:
        storage = untyped._new_shared_cuda(device.index or 0, *fields)
    except RuntimeError as err:
        raise RuntimeError(
            f"GPU {gpu_name(device)} cannot map the memory of GPU {offer['gpu']}: {str(err).splitlines()[0]}; "
            "vllm_mode=colocate needs peer access between them (`nvidia-smi topo -p2p r`), or else "
            "vllm_tensor_parallel_size=1 with an engine for each learner"
        ) from err
    return torch.empty(0, dtype=dtype, device=device).set_(storage)


def gpu_name(device: torch.device) -> str:
    """UUID of a GPU, equal in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)

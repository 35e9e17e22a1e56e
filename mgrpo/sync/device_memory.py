"""GPU memory that a process shares with another one of its machine (CUDA IPC), described in plain values."""

from __future__ import annotations

import json
from typing import Any

import torch

_FIELDS = 8
"""What torch says about memory that it shares: numbers, names in bytes and a flag."""


def offer(memory: torch.Tensor) -> bytes:
    """JSON for `mapped`; whoever has made `memory`, a whole allocation of torch's, must keep it."""
    storage: Any = memory.untyped_storage()
    fields = storage._share_cuda_()
    assert len(fields) == _FIELDS, "another version of torch"
    return json.dumps([{"bytes": field.hex()} if isinstance(field, bytes) else field for field in fields]).encode()


def mapped(offered: bytes, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The memory of another process, `[n]`, as this one's `device` reaches it.

    Raises:
        RuntimeError: it does not reach it.
    """
    # The first field is the device's number in the other process, which may count fewer of them.
    _, *fields = [bytes.fromhex(field["bytes"]) if isinstance(field, dict) else field for field in json.loads(offered)]
    untyped: Any = torch.UntypedStorage
    storage = untyped._new_shared_cuda(device.index or 0, *fields)
    return torch.empty(0, dtype=dtype, device=device).set_(storage)

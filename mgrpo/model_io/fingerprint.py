"""The fingerprint that tells a model's weights from others of the same shape, without reading them all."""

from __future__ import annotations

import hashlib

import torch

from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, hf_tensors
from mgrpo.policy.weights import Read


def fingerprint(read: Read, shape: ModelShape) -> str:
    """SHA-256 over the first row of every tensor, in the type in which it is stored.

    Training changes every row of the matrices that it trains; folders of other formats or files have the same.
    """
    digest = hashlib.sha256()
    for name, full in hf_tensors(shape).items():
        row = read(Box(name, (0,) * len(full), (1, *full[1:]) if len(full) > 1 else full))
        digest.update(f"{name} {row.dtype}".encode())
        digest.update(row.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Bytes a learner rank holds: parameters, gradients, optimizer states, and the logits of one micro-batch.

What is counted is what Megatron allocates once, by the rule table that also loads the weights. Activations, allocator
fragmentation, NCCL's buffers and engines on the same device are not: `choose_logits_chunk` leaves half for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mgrpo.layout import VOCAB_MULTIPLE, Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.table import local_parameters

FP32_BYTES = 4
LOGITS_CHUNK = 16_384
"""Most columns at a time where logits do not fit: 0.5 GiB in bf16 for 16,384 tokens, and still wide GEMMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What one rank holds from the first step to the last."""

    parameters: int
    gradients: int
    """The fp32 buffer that micro-batches add to and data-parallel ranks reduce."""
    optimizer: int
    """This rank's share: two fp32 moments, and an fp32 master of weights that are not fp32."""
    reference: int
    """The reference model's parameters."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.reference


def num_parameters(shape: ModelShape, layout: Layout, *, stage: int) -> int:
    """Elements that one rank of a pipeline stage holds, vocabulary padding included; equal on the stage's ranks."""
    first_rank = stage * layout.world_size // layout.pipeline
    return sum(math.prod(parameter.shape) for parameter in local_parameters(shape, layout, first_rank).values())


def state_bytes(
    shape: ModelShape, layout: Layout, *, stage: int, dtype_bytes: int, has_reference: bool = False
) -> StateBytes:
    """One rank of a pipeline stage under the distributed optimizer (ZeRO-1)."""
    held = num_parameters(shape, layout, stage=stage)
    fp32_copies = 2 if dtype_bytes == FP32_BYTES else 3
    return StateBytes(
        parameters=held * dtype_bytes,
        gradients=held * FP32_BYTES,
        optimizer=-(-held // layout.data) * fp32_copies * FP32_BYTES,
        reference=held * dtype_bytes if has_reference else 0,
    )


def logits_bytes(tokens: int, *, shape: ModelShape, layout: Layout, dtype_bytes: int) -> int:
    """Logits of `tokens` rows on one rank of the last stage; their gradient is written over them."""
    return tokens * (padded_vocab(shape) // layout.tensor) * dtype_bytes


def padded_vocab(shape: ModelShape) -> int:
    """Columns of the LM head over all tensor ranks."""
    return -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def choose_logits_chunk(
    setting: int | Literal["auto"],
    *,
    shape: ModelShape,
    layout: Layout,
    dtype_bytes: int,
    pack_length: int,
    has_reference: bool,
    device_bytes: int,
) -> int:
    """Columns of the LM head to compute at a time; 0 computes all at once.

    A number is taken as given. "auto" is 0 when the logits of a whole pack fit into half of what the last stage's states
    leave of the device, else `LOGITS_CHUNK` or a quarter of the shard. An estimate: a pack has fewer response rows than tokens, so the logits are
    rather over- than underestimated; activations are not counted and have the other half, which long packs without
    recomputation can exceed whatever is chosen here.

    Args:
        dtype_bytes: of the model's weights and logits.
        pack_length: most tokens in a pack.
        has_reference: a reference model lies on the same device.
        device_bytes: memory of the device. Give all ranks the same number: a tensor-parallel group must agree.
    """
    if setting != "auto":
        return setting
    states = state_bytes(shape, layout, stage=layout.pipeline - 1, dtype_bytes=dtype_bytes, has_reference=has_reference)
    logits = logits_bytes(pack_length, shape=shape, layout=layout, dtype_bytes=dtype_bytes)
    if 2 * logits <= device_bytes - states.total:
        return 0
    # At least four chunks, or little is saved.
    return min(LOGITS_CHUNK, -(-padded_vocab(shape) // layout.tensor // 4))

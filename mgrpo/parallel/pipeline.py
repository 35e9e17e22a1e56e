"""Messages between pipeline stages without shapes: all stages hold the same packs and derive them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

Shape = tuple[int, int, int]

REBOUND: tuple[tuple[str, str, str], ...] = (
    # (module under megatron.core, name, why)
    (
        "pipeline_parallel.p2p_communication",
        "P2PCommunicator",
        "sends the shape of each message before it, and waits for the device to read it",
    ),
)
"""`PackCommunicator` overrides `_communicate_shapes`."""


class PackCommunicator(P2PCommunicator):
    """Megatron's messages of one pass over some micro-batches, without an exchange of their shapes.

    Stages send inputs, and gradients, in the order of the schedule: each group of as many micro-batches as there are
    stages goes through one chunk after another. The first stage receives no input of its first chunk, the last stage no
    gradient of its last one.

    Args:
        shapes: of the hidden states of each micro-batch, `[local tokens, 1, hidden]`.
        num_chunks: of each stage.
    """

    def __init__(self, config: ModelParallelConfig, shapes: Sequence[Shape], num_chunks: int) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        stage, num_stages = self.pp_group.rank(), self.pp_group.size()
        self._inputs = _in_order(shapes, num_stages, num_chunks - (stage == 0))
        self._gradients = _in_order(shapes, num_stages, num_chunks - (stage == num_stages - 1))

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Shapes of the input and of the gradient that this stage receives next."""
        return next(self._inputs) if recv_prev else None, next(self._gradients) if recv_next else None


def _in_order(shapes: Sequence[Shape], num_stages: int, num_chunks: int) -> Iterator[Shape]:
    for start in range(0, len(shapes), num_stages):
        for _ in range(num_chunks):
            yield from shapes[start : start + num_stages]


def communication(config: ModelParallelConfig, shapes: Sequence[Shape], num_chunks: int) -> dict[str, Any]:
    """Arguments of Megatron's schedule with which stages do not exchange shapes; none without a pipeline."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return {}
    return {
        "p2p_communicator": PackCommunicator(config, shapes, num_chunks),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]),
    }

"""A learner rank's part of a checkpoint, written and read in slices of HF tensors, independent of the layout.

Every layout, ZeRO stage and number of ranks writes the same tensors, so each can continue from any other: masters and
Adam's moments in float32, the models that follow the policy once they have moved, and one step count. Random states are
kept by rank. Of a policy with adapters these are the adapters' tensors: the model's own stay as they are in its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from mgrpo.checkpoint.boxes import assign
from mgrpo.checkpoint.reader import StoredCheckpoint
from mgrpo.checkpoint.shard import Part
from mgrpo.models.adapters import adapter_tensors
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.table import hf_tensors, trained_tensors
from mgrpo.parallel import backend
from mgrpo.policy.parameters import gather_boxes
from mgrpo.policy.policy import Policy
from mgrpo.policy.shards import MOMENTS, Shard
from mgrpo.policy.untrained_policy import UntrainedPolicy

MASTER, REFERENCE, AVERAGE, RANDOM = "master", "reference", "average", "random"
KINDS = (MASTER, *MOMENTS, REFERENCE, AVERAGE)


class TrainState:
    """The tensors of a run's state on this rank: those of the policy and of the models that follow it."""

    def __init__(self, policy: Policy, following: Mapping[str, UntrainedPolicy], *, group: dist.ProcessGroup) -> None:
        """
        Args:
            following: by kind, all of the policy's shape; saved once they have moved.
        """
        self.policy, self.group = policy, group
        self._following = following
        self.rank = dist.get_rank()

    def parts(self) -> list[Part]:
        """The boxes that this rank writes: each is written by one of the ranks that hold it. Every rank must call.

        Raises:
            ValueError: the optimizer does not expose its float32 weights.
        """
        if self.policy.parallel.use_precision_aware_optimizer:
            raise ValueError("the state of use_precision_aware_optimizer=true cannot be saved yet; turn it off")
        held = list(self._held())
        own = [(KINDS.index(part.kind), part.box) for part in held]
        holdings = [
            [(KINDS[kind], box) for kind, box in boxes] for boxes in gather_boxes(own, self.policy.shape, self.group)
        ]
        chosen = assign(holdings, dict.fromkeys(KINDS, 4))[self.rank]
        return [*(held[index] for index in chosen), *self._random_parts()]

    def full_shapes(self) -> dict[str, dict[str, Shape]]:
        """Shape of every tensor of the checkpoint, by kind and name. Not collective."""
        shape, lora = self.policy.shape, self.policy.lora
        tensors = adapter_tensors(shape, lora) if lora else hf_tensors(shape)
        trained = tensors if lora else trained_tensors(shape)
        random = {
            _random_name(rank, name): tuple(state.shape)
            for rank in range(dist.get_world_size())
            for name, state in backend.random_states().items()
        }
        return {
            **{kind: dict(tensors) for kind in (MASTER, *self._moved)},
            **{kind: dict(trained) for kind in MOMENTS},
            RANDOM: random,
        }

    def restore_optimizer(self, checkpoint: StoredCheckpoint, *, num_updates: int) -> None:
        """Load masters, moments and Adam's step count; call after `prepare_training` and after the weights are loaded.

        Raises:
            ValueError: the optimizer keeps its states where they cannot be put back.
        """
        if self.policy.parallel.optimizer_cpu_offload and backend.has_cuda():
            raise ValueError(
                f"{checkpoint.path} cannot be continued with optimizer_cpu_offload=true yet; continue without it"
            )
        for shard in self.policy.shards:
            for kind, values in self._kinds(shard):
                for box, view in shard.boxes(self.policy.parameters.places[shard.name], values):
                    checkpoint.read(kind, box, out=view)
            shard.set_num_updates(num_updates)

    def restore_random(self, checkpoint: StoredCheckpoint) -> None:
        """Load this rank's random states, if the checkpoint was written by the same number of ranks."""
        names = set(checkpoint.names(RANDOM))
        states = backend.random_states()
        own = {name: _random_name(self.rank, name) for name in states}
        if checkpoint.world_size == dist.get_world_size() and names.issuperset(own.values()):
            for name, state in states.items():
                box = Box(own[name], (0,), tuple(state.shape))
                states[name] = checkpoint.read(RANDOM, box)
            backend.set_random_states(states)

    @property
    def _moved(self) -> dict[str, UntrainedPolicy]:
        return {kind: model for kind, model in self._following.items() if model.has_moved}

    def _held(self) -> Iterator[Part]:
        for shard in self.policy.shards:
            place = self.policy.parameters.places[shard.name]
            for kind, values in self._kinds(shard) if not place.is_copy else ():
                for box, view in shard.boxes(place, values):
                    yield Part(kind, box, view)
        for box, view in self.policy.parameters.boxes(self.policy.parameters.frozen) if not self.policy.lora else ():
            yield Part(MASTER, box, view)
        for kind, model in self._moved.items():
            for box, view in model.master_boxes():
                yield Part(kind, box, view)

    def _kinds(self, shard: Shard) -> list[tuple[str, torch.Tensor]]:
        return [(MASTER, shard.main), *((kind, shard.moment(kind)) for kind in MOMENTS)]

    def _random_parts(self) -> list[Part]:
        return [
            Part(RANDOM, Box(_random_name(self.rank, name), (0,), tuple(state.shape)), state)
            for name, state in backend.random_states().items()
        ]


def _random_name(rank: int, name: str) -> str:
    return f"{name}.{rank}"

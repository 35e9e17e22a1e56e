"""Teachers on the learners' layout: models beside the policy, or the policy itself, and what they say of a step's packs.

They are asked as the reference is, before the first update of a step; with a longer prompt on packs of their own, whose
responses are the same tokens. A model of another size is cut over the same ranks. Every method is collective over all learner
ranks unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from mgrpo import packing
from mgrpo.checkpoint.reader import StoredCheckpoint
from mgrpo.checkpoint.train_state import AVERAGE
from mgrpo.config import Config
from mgrpo.config.distillation import SELF, TEACHERS
from mgrpo.model_io.model_reader import model_reader
from mgrpo.models.shape import ModelShape
from mgrpo.parallel import backend
from mgrpo.policy.microbatch import Microbatch, Taught
from mgrpo.policy.policy import Policy
from mgrpo.policy.untrained_policy import UntrainedPolicy
from mgrpo.policy.weights import Read
from mgrpo.run.train.finite import check_loaded
from mgrpo.types import PackedBatch

SAME_PACK = ("tokens", "branches", "cu_seqlens", "rows")
"""The fields that say what a model reads in a pack, and what of it is asked."""


class HeldTeachers:
    """The teachers of a run whose learners hold them; none in any other."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        *,
        make: Callable[[ModelShape], UntrainedPolicy],
        shapes: Mapping[str, ModelShape],
        on_progress: Callable[[], None],
    ) -> None:
        """
        Args:
            make: a model beside the policy, without weights.
            shapes: of the models that are loaded, by their names in the settings.
        """
        self.settings, self.policy, self.on_progress = config.distillation, policy, on_progress
        self._asked = self.settings.teachers if self.settings.teacher_mode == "learner" else ()
        self._shapes = shapes
        self._folders = {teacher.model: config.teacher_path(teacher) for teacher in self.settings.loaded_teachers}
        self.models: dict[str, UntrainedPolicy] = {
            # Ids that the policy lacks are padding of the teacher's vocabulary: it shares no probability with them.
            model: make(replace(shape, vocab=policy.shape.vocab))
            for model, shape in shapes.items()
        }
        """By their names in the settings; without the policy itself."""
        if self.settings.averages:
            self.models[SELF] = make(policy.shape)

    @property
    def average(self) -> UntrainedPolicy | None:
        """The average of the policies so far, where one teaches."""
        return self.models.get(SELF)

    def load(
        self, *, own: Read, checkpoint: StoredCheckpoint | None, weights: Read | None, group: dist.ProcessGroup
    ) -> None:
        """Fill all of them.

        Args:
            own: reads the policy's weights, with which its average begins.
            checkpoint: the state that the run continues.
            weights: reads the teachers' weights, by default from their folders.
        Raises:
            ConfigError: on all ranks, where some are not finite.
        """
        for name, model in self.models.items():
            if name != SELF:
                model.load(weights or model_reader(self._folders[name], self._shapes[name]))
                check_loaded(model, f"{TEACHERS}={name}", group)
            elif checkpoint and AVERAGE in checkpoint.kinds:
                model.load_masters(partial(checkpoint.read, AVERAGE))
            else:
                model.load(own)

    def packs(self, index: Mapping[str, np.ndarray], own: np.ndarray) -> list[dict[int, list[PackedBatch]]]:
        """For each mini-batch what every teacher reads that any rank asks in it, by its place. Not collective.

        Args:
            index, own: see `Batch`.
        """
        if not self._asked or "teachers" not in index:
            return [{} for _ in index["num_sequences"]]
        parts = np.split(index["teachers"], np.cumsum(index["num_sequences"])[:-1])
        asked = [sorted(set(part[part >= 0].tolist())) for part in parts]
        packs = {number: packing.teacher_packs(index, own, number) for number in set(chain.from_iterable(asked))}
        return [{number: packs[number][mini_batch] for number in each} for mini_batch, each in enumerate(asked)]

    def teach(self, microbatches: Sequence[Microbatch], asked: Mapping[int, Sequence[PackedBatch]]) -> None:
        """Set what is taught about these micro-batches, on the last stage.

        Args:
            asked: of their mini-batch, see `packs`.
        """
        if not self._asked:
            return
        num_likeliest = self.settings.num_likeliest
        for microbatch in microbatches if self.policy.is_last_stage else ():
            if microbatch.pack.teachers is not None:
                microbatch.taught = _nothing(len(microbatch.pack.targets), num_likeliest)
        for number, packs in asked.items():
            model = self.models.get(self._asked[number].model, self.policy)
            read = [self._reading(*both) for both in zip(microbatches, packs, strict=True)]
            said = model.teach(read, num_likeliest=num_likeliest, temperature=self.settings.teacher_temperature)
            for microbatch, taught in zip(microbatches, said, strict=False):
                _note(microbatch, taught, teacher=number)
            self.on_progress()

    def follow(self) -> None:
        """Move the average towards the policy, if there is one."""
        if self.average:
            self.average.move_towards(self.policy, self.settings.teacher_update_rate)

    def remarks(self) -> Iterator[str]:
        """Lines for the user about them. Not collective."""
        for name, model in self.models.items():
            num_bytes = sum(parameter.nbytes for parameter in model.parameters.live.values())
            yield f"teacher {name}: {num_bytes / 1e9:.2f} GB of weights on this learner, which no zero_stage shards"

    def _reading(self, microbatch: Microbatch, pack: PackedBatch) -> Microbatch:
        """A teacher's pack on the device, where the policy's is already if they are the same. Not collective."""
        if all(np.array_equal(getattr(pack, name), getattr(microbatch.pack, name)) for name in SAME_PACK):
            return replace(microbatch, logprobs={}, routing={})
        (own,) = self.policy.microbatches([pack])
        return own


def _nothing(num_responses: int, num_likeliest: int) -> Taught:
    """What is taught of tokens about which no teacher says anything."""
    device, size = backend.device(), (num_responses, num_likeliest)
    return Taught(
        logprobs=torch.full((num_responses,), torch.nan, device=device),
        ids=torch.full(size, -1, dtype=torch.int32, device=device) if num_likeliest else None,
        likeliest=torch.full(size, torch.nan, device=device) if num_likeliest else None,
    )


def _note(microbatch: Microbatch, said: Taught, *, teacher: int) -> None:
    """Put what a teacher says where its sequences are in the micro-batch; of tokens that were not sampled it says nothing."""
    pack, taught = microbatch.pack, microbatch.taught
    assert pack.teachers is not None and taught is not None, "a teacher is asked about samples that have none"
    is_its_own = np.repeat(pack.teachers == teacher, np.diff(pack.response_cu_seqlens))
    places = backend.to_device(np.flatnonzero(is_its_own), np.int64)
    was_sampled = ~microbatch.loss_inputs.rollout_logprobs[places].isnan()
    taught.logprobs[places] = said.logprobs.where(was_sampled, torch.nan)
    if taught.ids is not None and taught.likeliest is not None:
        assert said.ids is not None and said.likeliest is not None
        taught.ids[places], taught.likeliest[places] = said.ids, said.likeliest

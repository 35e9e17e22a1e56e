"""Teachers on the learners' layout, models beside the policy or the policy itself, and their log-probabilities of a step's packs.

They are computed like the reference's, before the first update of a step; for a longer prompt on separate packs with the same
response tokens. A model of another size is sharded over the same ranks. Methods are collective over all learner ranks unless
noted.
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
"""Fields of a pack that determine the model's input and the scored tokens."""


class HeldTeachers:
    """The teachers that learners hold; none unless `teacher_mode` is "learner"."""

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
            make: builds a model without weights.
            shapes: shapes of the loaded models, by their names in the settings.
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
        """Models by their names in the settings, without the policy itself."""
        if self.settings.averages:
            self.models[SELF] = make(policy.shape)

    @property
    def average(self) -> UntrainedPolicy | None:
        """The average of the policies so far, if it is a teacher."""
        return self.models.get(SELF)

    def load(
        self, *, own: Read, checkpoint: StoredCheckpoint | None, weights: Read | None, group: dist.ProcessGroup
    ) -> None:
        """Load all teachers.

        Args:
            own: reads the policy's weights, the initial value of its average.
            checkpoint: the state that the run continues.
            weights: reads the teachers' weights, by default from their folders.
        Raises:
            ConfigError: on all ranks, if a weight is not finite.
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
        """Packs of every teacher that any rank uses in a mini-batch, by the teacher's number, for each mini-batch. Not collective.

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
        """Set the teacher log-probabilities of these micro-batches, on the last stage.

        Args:
            asked: packs of their mini-batch, see `packs`.
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
        """Notes for the user about the teachers' memory. Not collective."""
        for name, model in self.models.items():
            num_bytes = sum(parameter.nbytes for parameter in model.parameters.live.values())
            yield f"teacher {name}: {num_bytes / 1e9:.2f} GB of weights on this learner, which no zero_stage shards"

    def _reading(self, microbatch: Microbatch, pack: PackedBatch) -> Microbatch:
        """A teacher's pack on the device; reuses the policy's if they are equal. Not collective."""
        if all(np.array_equal(getattr(pack, name), getattr(microbatch.pack, name)) for name in SAME_PACK):
            return replace(microbatch, logprobs={}, routing={})
        (own,) = self.policy.microbatches([pack])
        return own


def _nothing(num_responses: int, num_likeliest: int) -> Taught:
    """Teacher values of tokens without a teacher: NaN log-probabilities, ids -1."""
    device, size = backend.device(), (num_responses, num_likeliest)
    return Taught(
        logprobs=torch.full((num_responses,), torch.nan, device=device),
        ids=torch.full(size, -1, dtype=torch.int32, device=device) if num_likeliest else None,
        likeliest=torch.full(size, torch.nan, device=device) if num_likeliest else None,
    )


def _note(microbatch: Microbatch, said: Taught, *, teacher: int) -> None:
    """Copy a teacher's values to its sequences in the micro-batch; log-probabilities of tokens that were not sampled become NaN."""
    pack, taught = microbatch.pack, microbatch.taught
    assert pack.teachers is not None and taught is not None, "a teacher is asked about samples that have none"
    is_its_own = np.repeat(pack.teachers == teacher, np.diff(pack.response_cu_seqlens))
    places = backend.to_device(np.flatnonzero(is_its_own), np.int64)
    was_sampled = ~microbatch.loss_inputs.rollout_logprobs[places].isnan()
    taught.logprobs[places] = said.logprobs.where(was_sampled, torch.nan)
    if taught.ids is not None and taught.likeliest is not None:
        assert said.ids is not None and said.likeliest is not None
        taught.ids[places], taught.likeliest[places] = said.ids, said.likeliest

"""The models that learners hold, sharded over the same ranks: the policy, its reference and its teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mgrpo.checkpoint.reader import StoredCheckpoint
from mgrpo.checkpoint.train_state import AVERAGE, MASTER, REFERENCE
from mgrpo.config import Config
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.model_io.model_reader import fingerprint, model_reader
from mgrpo.model_io.peft_folder import peft_reader
from mgrpo.models.adapters import LoraShape
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.memory import choose_logits_chunk
from mgrpo.models.shape import ModelShape
from mgrpo.parallel import backend
from mgrpo.parallel.packed.attention import attention_remarks
from mgrpo.parallel.packed.delta_rule import delta_rule_remarks
from mgrpo.policy.policy import Policy
from mgrpo.policy.untrained_policy import UntrainedPolicy
from mgrpo.policy.weights import Read
from mgrpo.run.inputs.continuing import adapter_record
from mgrpo.run.train.finite import check_loaded
from mgrpo.run.train.held_teachers import HeldTeachers

Kind = TypeVar("Kind", bound=Policy)


class HeldModels:
    """One rank's models. Methods are collective over all learner ranks unless noted."""

    def __init__(
        self,
        config: Config,
        *,
        shape: ModelShape,
        layout: Layout,
        host_group: dist.ProcessGroup,
        teacher_shapes: Sequence[ModelShape] = (),
        on_progress: Callable[[], None],
    ) -> None:
        """Build the models without weights, see `load`. Arguments as for `Learner`."""
        self.config, self.shape, self.layout, self.host_group = config, shape, layout, host_group
        algorithm = config.algorithm
        self.has_reference = config.loss.beta != 0 or algorithm.log_ref_kl
        settings = config.distillation
        loaded = settings.loaded_teachers if settings.teacher_mode == "learner" else ()
        teacher_shapes = teacher_shapes or [shape_of(read_hf_config(config.teacher_path(each))) for each in loaded]
        shape_of_teacher = {teacher.model: own for teacher, own in zip(loaded, teacher_shapes, strict=True)}
        self.logits_chunk = self._common_logits_chunk(list(shape_of_teacher.values()))
        self.policy = self._make(
            Policy,
            shape,
            config.parallel,
            logits_chunk=self.logits_chunk,
            lora=config.adapter.lora,
            trains_entropy=algorithm.entropy_coef != 0 or algorithm.use_adaptive_entropy,
            scores_entropy=algorithm.top_entropy_quantile < 1,
        )
        # Without its adapters the policy is the reference.
        self.reference = self._untrained(shape) if self.has_reference and not self.policy.lora else None
        self.teachers = HeldTeachers(
            config, self.policy, make=self._untrained, shapes=shape_of_teacher, on_progress=on_progress
        )
        self.adapter_record: dict[str, Any] | None = None
        """Record of the policy's adapters for a saved state, on rank 0."""

    @property
    def untrained(self) -> list[UntrainedPolicy]:
        """All models except the policy."""
        return [*([self.reference] if self.reference else []), *self.teachers.models.values()]

    @property
    def following(self) -> dict[str, UntrainedPolicy]:
        """Models that may follow the policy, by the kind of their tensors in a saved state."""
        found = {REFERENCE: self.reference, AVERAGE: self.teachers.average}
        return {kind: model for kind, model in found.items() if model}

    def load(self, checkpoint: StoredCheckpoint | None, weights: Read | None) -> None:
        """Load weights from the checkpoint, otherwise, and those that it lacks, from the models' folders.

        Raises:
            ConfigError: on all ranks, if a weight is not finite.
        """
        read = weights or model_reader(self.config.model_path, self.shape)
        trained = partial(checkpoint.read, MASTER) if checkpoint else None
        self.policy.load(read if self.policy.lora else trained or read)
        self._load_adapters(base=read, trained=trained)
        name = self.config.model.model_name_or_path
        place = f"resume={checkpoint.path}" if checkpoint else f"model_name_or_path={name}"
        check_loaded(self.policy, place, self.host_group)
        if self.reference and checkpoint and REFERENCE in checkpoint.kinds:
            self.reference.load_masters(partial(checkpoint.read, REFERENCE))
        elif self.reference:
            self.reference.load(read)
        self.teachers.load(own=trained or read, checkpoint=checkpoint, weights=weights, group=self.host_group)

    def remarks(self) -> Iterator[str]:
        """Notes for the user about the models' kernels and memory. Not collective."""
        if self.logits_chunk:
            yield f"LM head: {self.logits_chunk} columns at a time; full logits are never materialised"
        dtype = getattr(torch, self.config.model.model_dtype)
        yield from attention_remarks(dtype, self.shape.head_dim)
        if self.shape.delta:
            yield from delta_rule_remarks(dtype)
        yield from self.teachers.remarks()

    def _load_adapters(self, *, base: Read, trained: Read | None) -> None:
        """Fill the policy's adapters, if it has any. Not collective.

        Args:
            base: reads the model's own weights.
            trained: reads the adapters of a state; None: from lora_adapter_path, or initialised from the seed.
        """
        if (lora := self.policy.lora) is None:
            return
        path = self.config.provenance.folder("lora_adapter_path", self.config.adapter.lora_adapter_path)
        read = trained or (peft_reader(path, self.shape, lora) if path else None)
        if read:
            self.policy.load_adapters(read)
        if self.policy.rank == 0:
            self.adapter_record = {
                "settings": adapter_record(lora, self.shape),
                "base": fingerprint(base, self.shape),
            }

    def _common_logits_chunk(self, teachers: Sequence[ModelShape]) -> int:
        """The number of columns that all ranks' LM heads compute at a time; 0: all."""
        # The smallest device decides for all: ranks that differ would meet in different collectives.
        device_bytes = torch.tensor(backend.device_bytes())
        dist.all_reduce(device_bytes, dist.ReduceOp.MIN, group=self.host_group)
        config = self.config
        return choose_logits_chunk(
            config.parallel.logits_chunk,
            shape=self.shape,
            layout=self.layout,
            dtype_bytes=getattr(torch, config.model.model_dtype).itemsize,
            pack_length=self.layout.round_up(config.parallel.pack_length),
            has_reference=self.has_reference,
            device_bytes=int(device_bytes),
            lora=config.adapter.lora,
            fp32_logits=config.model.cast_lm_head_to_fp32,
            teachers=teachers,
            averages=config.distillation.averages,
        )

    def _untrained(self, shape: ModelShape) -> UntrainedPolicy:
        settings = replace(self.config.parallel, routing_replay="none")
        # A teacher may cap its logits where the policy does not; it has as many as the policy.
        chunk = 0 if shape.logit_softcap else self.logits_chunk
        return self._make(UntrainedPolicy, shape, settings, logits_chunk=chunk)

    def _make(
        self,
        kind: type[Kind],
        shape: ModelShape,
        settings: Parallel,
        *,
        logits_chunk: int,
        lora: LoraShape | None = None,
        **entropy: bool,
    ) -> Kind:
        return kind(
            shape,
            self.layout,
            dtype=getattr(torch, self.config.model.model_dtype),
            seed=self.config.experiment.seed,
            temperature=self.config.rollout.temperature,
            settings=settings,
            lora=lora,
            logits_chunk=logits_chunk,
            fp32_logits=self.config.model.cast_lm_head_to_fp32,
            **entropy,
        )

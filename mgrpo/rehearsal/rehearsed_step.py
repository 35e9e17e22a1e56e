"""A whole training step of one rank: the real learner loads, scores, trains, updates, sends its weights, and is restored."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer, uneven_dtensor

from mgrpo.config import Config
from mgrpo.layout import Layout
from mgrpo.models.placement.boxes import Box
from mgrpo.models.shape import ModelShape
from mgrpo.ops import compiled
from mgrpo.packing.document import assemble
from mgrpo.packing.slices import to_slices
from mgrpo.packing.step import plan_step
from mgrpo.planner.roles import document_lengths
from mgrpo.rehearsal.eight_bits import package
from mgrpo.rehearsal.eight_bits.multiplied import placeholders
from mgrpo.rehearsal.recorder import Recorder, site
from mgrpo.rehearsal.restore import checkpoint_of
from mgrpo.rehearsal.silent_output import save_state, send_weights
from mgrpo.rehearsal.world import rank_of
from mgrpo.run.train.learner import Learner
from mgrpo.types import KeptTokens, TeacherScores, TrainSample

SMALL = 1 << 28
"""Bytes of a rank whose weights are also checked and whose state is also written, which copies them to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalJob:
    """The step to rehearse: its rank, and its amount of training."""

    config: Config
    shape: ModelShape
    teachers: Sequence[ModelShape]
    """Shapes of `Distillation.loaded_teachers`."""
    layout: Layout
    rank: int
    packs: int
    """Micro-batches of each optimizer step."""


def rehearse(job: RehearsalJob, recorder: Recorder) -> dict[str, Any]:
    """Run the step; return its costs as plain values. `recorder` also holds them, even if the step fails."""
    began = time.monotonic()
    _skip_what_asks_other_ranks()
    try:
        with rank_of(job.rank, job.layout.world_size, recorder, caches_shapes=job.layout.sharding < 2):
            make = partial(
                Learner,
                job.config,
                shape=job.shape,
                layout=job.layout,
                host_group=dist.new_group(),
                weights=_nothing,
                teacher_shapes=job.teachers,
            )
            learner = make()
            _name_axes(recorder)
            _name_states(recorder, learner)
            index, own, own_tokens = _packs(job)
            if job.shape.experts:
                _route_equally(recorder, job, own_tokens)
            _name_phases(recorder, learner)
            recorder.phase = "data"
            has_engine = job.config.parallel.transformer_impl == "transformer_engine"
            if job.layout.sharding >= 2 or learner.models.following or has_engine:
                # Before the first step of all Megatron-FSDP gathers parameters that are whole afterwards, models that follow
                # the policy have no float32 copies, and weights none in 8 bits.
                learner.learn(index, own, step=1)
                _name_untrained(recorder, learner)
                _name_engine(recorder, learner)
            recorder.forget()
            learner.learn(index, own, step=1)
            remarks = learner.remarks()
            states, at_peak = dict(recorder.memory.by_kind), (recorder.memory.peak, recorder.memory.at_peak)
            is_small = recorder.memory.total < SMALL
            with in_phase(recorder, "sync"):
                send_weights(learner.policy, job.config, job.shape, job.layout, recorder, checks=is_small)
            parallel, restored = job.config.parallel, dict[str, Any]()
            if is_small and not parallel.use_precision_aware_optimizer:
                with in_phase(recorder, "save"):
                    save_state(learner)
            seconds, operations = round(time.monotonic() - began, 1), recorder.num_operations
            if not (parallel.use_precision_aware_optimizer or parallel.optimizer_cpu_offload):
                with tempfile.TemporaryDirectory() as folder:
                    checkpoint = checkpoint_of(learner, folder)
                    del learner
                    learner, restored = _restore(recorder, partial(make, checkpoint=checkpoint))
            found = {
                "rank": job.rank,
                "stage": job.layout.coordinate(job.rank).pipeline,
                "packs": job.packs,
                "seconds": seconds,
                "operations": operations,
                "remarks": remarks,
                "states": states,
                "peak": at_peak[0],
                "at_peak": at_peak[1],
                "restored": restored,
                "offloaded": recorder.offloaded["forward"],
                "sent": [[*key, recorder.calls[key], size] for key, size in sorted(recorder.sent.items())],
                "flops": [[*key, count] for key, count in sorted(recorder.flops.items())],
                "waits": [[*key, count] for key, count in recorder.waits.most_common()],
                "uploads": [[*key, count] for key, count in recorder.uploads.most_common()],
            }
            if restored and is_small:
                with in_phase(recorder, "again"):
                    learner.learn(index, own, step=2)
            return found
    finally:
        package.release()
        parallel_state.destroy_model_parallel()


def _skip_what_asks_other_ranks() -> None:
    """Skip Megatron's exchanges between ranks that check agreement, and report the ops as built for CUDA."""
    fsdp: Any = mcore_fsdp_adapter.FullyShardedDataParallel
    fsdp.sync_rng_states_across_tp_group = lambda self: None
    for module in (uneven_dtensor, param_and_grad_buffer):
        vars(module)["validate_uneven_dtensor"] = lambda *args, **kwargs: None
    built = compiled.build_info() | {"cuda_archs": "9.0"}
    vars(compiled)["build_info"] = lambda: built


def _nothing(box: Box) -> torch.Tensor:
    """Weights without values or memory."""
    return torch.zeros(1).expand(box.shape)


def _packs(job: RehearsalJob) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """Packs of two completions of one prompt each, as index and slice, and the tokens of one that this rank holds."""
    config, layout = job.config, job.layout
    limit = layout.round_up(config.parallel.pack_length)
    parts = config.algorithm.num_mini_batches
    prompt, response = document_lengths(config, layout)
    # Every token is sampled from the same set of top_k, itself among them.
    sizes = np.full(response, config.rollout.top_k)
    kept = KeptTokens.of_sizes(np.arange(sizes.sum(), dtype=np.int32) % sizes[0], sizes) if sizes[0] else None
    own_teachers = config.distillation.teachers
    samples = [
        TrainSample(
            prompt_tokens=np.ones(prompt, np.int32),
            tokens=np.ones(response, np.int32),
            loss_mask=np.ones(response, np.bool_),
            rollout_logprobs=np.zeros(response, np.float32),
            advantage=float(number % 2),
            group=number // 2,
            kept=kept,
            teacher=number // 2 % len(own_teachers) if own_teachers else -1,
            taught=_taught(config, response),
        )
        for number in range(2 * job.packs * layout.data * parts)
    ]
    padding = {"multiple_of": layout.pack_multiple_of, "document_multiple_of": layout.document_multiple_of}
    plan = plan_step(
        samples,
        pack_length=limit,
        dp=layout.data,
        num_mini_batches=parts,
        multiple_of=layout.pack_multiple_of,
        document_multiple_of=layout.document_multiple_of,
        micro_batches_multiple_of=layout.micro_batches_multiple_of,
        share_prompts=config.parallel.shared_prompt_packing is True,
    )
    rank = layout.coordinate(job.rank).data
    own = plan[0][rank]
    assert len(own) == job.packs, (len(own), job.packs)
    tokens = len(assemble(samples, own[0], **padding).tokens)
    index, slices = to_slices(samples, plan, **padding)
    return index, slices[rank].filled(), tokens // layout.context // (layout.tensor if layout.sequence_parallel else 1)


def _taught(config: Config, response: int) -> TeacherScores | None:
    """Scores of a completion by a teacher on an engine or a server; None: it is on the learners, or no teacher."""
    own = config.distillation
    if not own.distills or own.teacher_mode == "learner":
        return None
    likeliest = np.zeros((response, own.num_likeliest), np.float32) if own.num_likeliest else None
    return TeacherScores(
        logprobs=np.zeros(response, np.float32),
        ids=None if likeliest is None else likeliest.astype(np.int32),
        likeliest=likeliest,
    )


def _name_axes(recorder: Recorder) -> None:
    found: dict[str, Callable[[], Any]] = {
        "tensor": parallel_state.get_tensor_model_parallel_group,
        "context": parallel_state.get_context_parallel_group,
        "pipeline": parallel_state.get_pipeline_model_parallel_group,
        "data": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
        "shards": lambda: parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        ),
        "replicas": parallel_state.get_inter_distributed_optimizer_instance_group,
        "expert": parallel_state.get_expert_model_parallel_group,
        "expert tensor": parallel_state.get_expert_tensor_parallel_group,
        "expert data": parallel_state.get_expert_data_parallel_group,
        "model": parallel_state.get_model_parallel_group,
        "embedding": parallel_state.get_embedding_group,
        "world": lambda: dist.group.WORLD,
    }
    for axis, get in found.items():
        try:
            recorder.axes.setdefault(get().group_name, axis)
        except (AssertionError, AttributeError):
            continue  # this layout has no such group


def _name_states(recorder: Recorder, learner: Learner) -> None:
    """Name the memory that stays allocated from step to step. Asking for moments makes those that the first update would make."""
    policy, memory = learner.policy, recorder.memory
    _name_untrained(recorder, learner)
    for shard in policy.shards:
        for tensor in (shard.main, shard.moment("exp_avg"), shard.moment("exp_avg_sq")):
            memory.rename(tensor, "optimizer")
    # In ZeRO-3 these are whole only while they are used.
    for parameter in policy.parameters.live.values() if policy.layout.sharding < 3 else ():
        memory.rename(parameter.data, "parameters")
    for chunk in policy.chunks:
        for kind, tensor in _buffers(chunk, policy.layout.sharding):
            memory.rename(tensor, kind)


def _name_untrained(recorder: Recorder, learner: Learner) -> None:
    for model in learner.models.untrained:
        kind = "reference" if model is learner.reference else "teachers"
        for tensor in (*(parameter.data for parameter in model.parameters.live.values()), *model.state_memory()):
            recorder.memory.rename(tensor, kind)


def _name_engine(recorder: Recorder, learner: Learner) -> None:
    """Name tensors of Transformer Engine's layers that last from step to step: rounded weights, placeholders of gradients, buffers."""
    models = (learner.policy, *learner.models.untrained)
    modules = (module for model in models for chunk in model.chunks for module in chunk.modules())
    pairs = itertools.chain.from_iterable(getattr(module, "copies", None) or () for module in modules)
    rounded = [each for each in itertools.chain.from_iterable(pairs) if each is not None]
    copies = itertools.chain.from_iterable((each.data, each.scale) for each in rounded)
    for tensor in (*copies, *placeholders.values(), *package.Userbuffers.memory):
        recorder.memory.rename(tensor, "transformer_engine")


def _buffers(chunk: Any, sharding: int) -> Iterator[tuple[str, torch.Tensor]]:
    if sharding < 2:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield "gradients", buffer.grad_data
            if buffer.param_data is not None:
                yield "parameters", buffer.param_data
        return
    for group in chunk.param_and_grad_buffer.parameter_groups:
        for kind, buffer in (("gradients", group.main_grad_buffer), ("parameters", group.model_weight_buffer)):
            if getattr(buffer, "data", None) is not None:
                yield kind, buffer.data


def _restore(recorder: Recorder, make: Callable[[], Learner]) -> tuple[Learner, dict[str, Any]]:
    """A learner that continues, with its peak and its states in bytes, excluding the memory left by the earlier one."""
    gc.collect()
    memory = recorder.memory
    memory.forget_peak()
    left, total = Counter(memory.by_kind), memory.total
    with in_phase(recorder, "restore"):
        learner = make()
        _name_states(recorder, learner)
    return learner, {"peak": memory.peak - total, "states": dict(Counter(memory.by_kind) - left)}


def _name_phases(recorder: Recorder, learner: Learner) -> None:
    policy = learner.policy
    names: dict[str, list[tuple[Any, str]]] = {
        "score": [(model, "score") for model in (policy, learner.reference) if model],
        "teach": [(model, "teach") for model in (policy, *learner.teachers.models.values())],
        "forward": [(policy, "train_step")],
        "update": [(policy.optimizer, "update")],
        "metrics": [(learner, "_reduce"), (learner, "not_finite")],
    }
    for phase, methods in names.items():
        for owner, name in methods:
            setattr(owner, name, _within(recorder, phase, getattr(owner, name)))


def _within(recorder: Recorder, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with in_phase(recorder, phase):
            return method(*args, **kwargs)

    return call


@contextmanager
def in_phase(recorder: Recorder, phase: str) -> Iterator[None]:
    """Make the recorder count for this phase within the body."""
    before, recorder.phase = recorder.phase, phase
    try:
        yield
    finally:
        recorder.phase = before


def _route_equally(recorder: Recorder, job: RehearsalJob, tokens: int) -> None:
    """Simulate a router that gives every expert as many tokens; the size of the tensor read identifies the count."""
    experts = job.shape.experts
    assert experts is not None
    copies, groups = tokens * experts.top_k, job.layout.expert
    by_size = {
        1: copies,
        groups: copies // groups,
        experts.count // groups: copies * groups // experts.count,
        experts.count: copies // experts.count,
    }

    def guess(tensor: torch.Tensor) -> np.ndarray | None:
        size = tensor.numel()
        if "/moe/" not in site():
            return None
        value = by_size.get(size, copies // experts.count if size % experts.count == 0 else None)
        return None if value is None else np.full(size, value)

    def guess_count(mask: torch.Tensor) -> int | None:
        size = mask.numel()
        return size // experts.count * experts.top_k if size % experts.count == 0 else None

    recorder.guess, recorder.guess_count = guess, guess_count

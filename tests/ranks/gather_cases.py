"""What the ranks of `test_gathers.py` run: training in which weights come as late as they may."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.ranks import cases, run_cases


class Late:
    """A gather of a bucket that is complete only when it is waited for; until then the other ranks' weights are NaN."""

    def __init__(self, bucket: Any, log: list[tuple[str, int]]) -> None:
        self.bucket, self.log = bucket, log
        bucket.param_gather_handle.wait()
        (self.weights,) = [part.param_data for part in bucket.buckets]
        self.arrived = self.weights.clone()
        own = self.weights.chunk(bucket.intra_distributed_optimizer_instance_size)[
            bucket.intra_distributed_optimizer_instance_rank
        ]
        kept = own.clone()
        self.weights.fill_(torch.nan)
        own.copy_(kept)
        log.append(("begun", id(bucket)))

    def wait(self) -> None:
        self.weights.copy_(self.arrived)
        self.log.append(("waited for", id(self.bucket)))


@contextmanager
def late_gathers(overlaps: bool = True) -> Iterator[list[tuple[str, int]]]:
    """Within it asynchronous gathers are `Late`, and buckets small; what was begun and waited for, in this order."""
    from megatron.core.distributed import param_and_grad_buffer

    from mgrpo.policy import optimizer

    group = param_and_grad_buffer._ParamAndGradBucketGroup
    start, log = group.start_param_sync, []

    def start_param_sync(bucket: Any, **kwargs: Any) -> None:
        start(bucket, **kwargs)
        if bucket.param_gather_handle is not None:
            bucket.param_gather_handle = Late(bucket, log)

    made = optimizer.DistributedDataParallelConfig

    def small(**options: Any) -> Any:
        gathers_late = overlaps and options["overlap_param_gather"]
        return made(**options | {"bucket_size": 2000, "overlap_param_gather": gathers_late})

    with (
        patch.object(group, "start_param_sync", start_param_sync),
        patch.object(optimizer, "DistributedDataParallelConfig", small),
    ):
        yield log


def trained(
    overlaps: bool,
    model_dir: str,
    layout: dict[str, Any],
    samples: list[Any],
    settings: dict[str, Any],
    dtype: str = "float32",
    logits_chunk: int = 0,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Four optimizer steps, the second of which is skipped and the third followed by a score.

    "events" are those of each step and of the score: gathers begun and waited for. "late_after_layers" is the largest
    number of buckets that had not come when a layer had been computed.
    """
    from mgrpo.config.schema import Optimizer

    def loss(factor: float, logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> tuple[torch.Tensor, float]:
        own = -(logprobs * batch.loss_inputs.loss_mask).sum() / num_trained
        return own * factor, float(own.detach())

    def count_late(*call: Any) -> None:
        late.append(sum(bucket.param_gather_handle is not None for bucket in policy.optimizer._buckets))

    late, events = [], []
    with late_gathers(overlaps) as log:
        policy = cases.make_policy(
            model_dir,
            layout,
            dtype=getattr(torch, dtype),
            settings=settings,
            logits_chunk=logits_chunk,
            lora=lora,
        )
        for chunk in policy.chunks:
            for layer in chunk.decoder.layers:
                layer.register_forward_hook(count_late)
        policy.prepare_training(Optimizer(learning_rate=1e-2, adam_epsilon=1e-2), num_optimizer_steps=4)
        packs, num_trained = cases.own_packs(policy, samples, share_prompts=True, pack_length=64)
        learned: list[Any] = []
        for factor in (1.0, torch.inf, 1.0, 1.0):
            result = policy.train_step(policy.microbatches(packs), partial(loss, factor))
            learned.append((result.measured, str(result.grad_norm)))
            events.append(log[:])
            log.clear()
            if policy.optimizer_steps == 3:
                microbatches = policy.microbatches(packs)
                policy.score(microbatches, "old")
                learned += [batch.logprobs["old"].tolist() for batch in microbatches if batch.logprobs]
                events.append(log[:])
                log.clear()
        for _, values in policy.boxes():
            learned.append(hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
    return {"learned": learned, "events": events, "late_after_layers": max(late)}


def read(model_dir: str, settings: dict[str, Any], groups: list, folder: str) -> dict[str, dict[str, bool]]:
    """For each reader of weights, after an update: whether all had come when it began, and when it read them."""
    from mgrpo.config.schema import Engine as EngineSettings
    from mgrpo.model_io.hf_export import export_hf
    from mgrpo.rollout.engines.fleet import Fleet
    from mgrpo.rollout.engines.roster import Roster
    from mgrpo.run.train.engine_weights import EngineWeights
    from tests.scripted_engine import ScriptedEngine
    from tests.tiny_models import load_hf

    def finite(tensors: Iterable[torch.Tensor]) -> bool:
        return all(bool(tensor.detach().isfinite().all()) for tensor in tensors if tensor.is_floating_point())

    def exported() -> bool:
        export_hf(policy, model_dir, folder, group=learner.host_group)
        dist.barrier(group=learner.host_group)
        return finite(load_hf(Path(folder)).parameters())

    def sent() -> bool:
        weights.send(1, step=1)
        return were_finite == [True]

    def followed() -> bool:
        learner.reference.move_towards(policy, 0.5)
        return finite(learner.reference.parameters.live.values())

    with late_gathers():
        trainer = run_cases.trainer_of(model_dir, settings, groups)
        learner, policy = trainer.learner, trainer.learner.policy
        batch = trainer.source.next(1, 0)
        engine_settings = EngineSettings()
        weights = EngineWeights(
            policy,
            shape=policy.shape,
            layout=policy.layout,
            settings=engine_settings,
            lead=trainer.lead,
            fleet=Fleet(Roster([ScriptedEngine()], engine_settings), seed=1) if dist.get_rank() == 0 else None,
            host_group=learner.host_group,
        )
        # Like the real one it has views from the beginning.
        views, were_finite = [view for _, view in policy.boxes()], []
        weights.sender = SimpleNamespace(
            generations={0: 0}, send=lambda version, engines: were_finite.append(finite(views)) or {}
        )
        weights.seating.arrange({0: 0})
        readers: dict[str, Callable[[], bool]] = {
            "check": lambda: learner.not_finite() == [],
            "reference": followed,
            "export": exported,
            "state": lambda: finite(part.tensor for part in learner.state.parts()),
            "sync": sent,
        }
        found = {}
        for name, reader in readers.items():
            learner._optimize(batch.index, batch.slice)
            found[name] = {"had_come": finite(policy.parameters.live.values()), "are_read_whole": reader()}
    return found


def update_ratio(model_dir: str, settings: dict[str, Any], groups: list) -> float:
    """What a step with adapters reports of them."""
    with late_gathers():
        trainer = run_cases.trainer_of(model_dir, settings | {"use_peft": True}, groups)
        batch = trainer.source.next(1, 0)
        return trainer.learner.learn(batch.index, batch.slice, step=1).metrics["lora/update_ratio"]

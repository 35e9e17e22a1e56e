"""What the ranks of a test of teachers on the learners' layout run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mgrpo.types import TrainSample
from tests.ranks.run_cases import trainer_of


def taught(
    model_dir: str, settings: dict[str, Any], samples: list[TrainSample], folder: str, steps_before: int = 0
) -> dict[str, Any]:
    """What each sample was taught when it was last trained on in a step, on the ranks that report metrics; and the step's metrics.

    Args:
        folder: takes the model, as it was before that step in "before", and after it in "after".
        steps_before: steps before that one.
    """
    from mgrpo.model_io.hf_export import export_hf

    trainer = trainer_of(model_dir, settings, samples)
    learner = trainer.learner
    for step in range(1, steps_before + 1):
        batch = trainer.source.next(step, 0)
        learner.learn(batch.index, batch.slice, step=step)
    export_hf(learner.policy, model_dir, f"{folder}/before", group=learner.host_group)
    make_loss, seen, beats = learner._loss, {}, []

    def watched(mini_batch: Any) -> Any:
        loss = make_loss(mini_batch)

        def watch(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any, *candidates: torch.Tensor) -> Any:
            cuts = batch.pack.response_cu_seqlens
            for sample, a, b in zip(batch.pack.samples.tolist(), cuts[:-1], cuts[1:], strict=True):
                seen[sample] = None
                if batch.taught:
                    of = batch.taught
                    parts = (of.logprobs, of.ids, of.likeliest)
                    seen[sample] = [None if part is None else part[a:b].cpu().numpy() for part in parts]
            return loss(logprobs, entropy, batch, *candidates)

        return watch

    learner._loss = watched
    learner.teachers.on_progress = lambda: beats.append(1)
    batch = trainer.source.next(steps_before + 1, 0)
    learned = learner.learn(batch.index, batch.slice, step=steps_before + 1)
    export_hf(learner.policy, model_dir, f"{folder}/after", group=learner.host_group)
    return {
        "samples": seen if learner.policy.reports_metrics else {},
        "beats": len(beats),
        "metrics": learned.metrics | {"grad_norm": learned.results[-1].grad_norm},
    }


def averaged(model_dir: str, settings: dict[str, Any], samples: list[TrainSample], steps: int) -> dict[str, float]:
    """How far the average is from the formula after some steps, and from the policy."""
    trainer = trainer_of(model_dir, settings, samples)
    policy, average = trainer.learner.policy, trainer.learner.teachers.average
    rate = trainer.config.distillation.teacher_update_rate

    def weights() -> dict[str, np.ndarray]:
        return {name: policy.parameter(name).detach().double().numpy() for name in policy.parameters.live}

    expected = {name: values.copy() for name, values in weights().items()}
    for step in range(1, steps + 1):
        batch = trainer.source.next(step, 0)
        trainer.learner.learn(batch.index, batch.slice, step=step)
        expected = {name: rate * own + (1 - rate) * expected[name] for name, own in weights().items()}
    found = {name: average.parameter(name).detach().double().numpy() for name in expected}
    return {
        "error": max(float(abs(found[name] - values).max()) for name, values in expected.items()),
        "distance": min(float(abs(found[name] - values).max()) for name, values in weights().items()),
    }


def refused(model_dir: str, settings: dict[str, Any]) -> str:
    """The error of a learner that is made."""
    from mgrpo.config import ConfigError

    try:
        trainer_of(model_dir, settings, [])
    except ConfigError as err:
        return str(err)
    return ""


def asleep(model_dir: str, settings: dict[str, Any], samples: list[TrainSample]) -> dict[str, Any]:
    """Bytes that the models beside the policy hold while engines have the devices; and their weights before and after, as digests."""
    from mgrpo.run.train.gpu_turns import GpuTurns
    from tests.ranks.run_cases import digest

    trainer = trainer_of(model_dir, settings, samples)
    learner = trainer.learner
    batch = trainer.source.next(1, 0)
    learner.learn(batch.index, batch.slice, step=1)
    turns = GpuTurns(learner, trainer.lead, None)

    def held() -> list[torch.Tensor]:
        models = learner.models.untrained
        return [own for model in models for own in (*model.parameters.live.values(), *model.state_memory())]

    # Memory that numpy has seen is never given up.
    before = [digest(own.clone()) for own in held()]
    turns.make_room()
    left = sum(own.untyped_storage().nbytes() for own in held())
    turns._take_room()
    return {"before": before, "left": left, "after": [digest(own.clone()) for own in held()]}

"""What the ranks of a test of teachers on the learners' layout run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mgrpo.types import TrainSample
from tests.ranks.run_cases import trainer_of


def taught(
    model_dir: str, settings: dict[str, Any], samples: list[TrainSample], folder: str = "", steps_before: int = 0
) -> dict[str, Any]:
    """What each sample was taught when it was trained on, on the ranks that report metrics.

    Args:
        folder: takes the model as it is before that step, after `steps_before` others.
    """
    from mgrpo.model_io.hf_export import export_hf

    trainer = trainer_of(model_dir, settings, samples)
    learner = trainer.learner
    for step in range(1, steps_before + 1):
        batch = trainer.source.next(step, 0)
        learner.learn(batch.index, batch.slice, step=step)
    if folder:
        export_hf(learner.policy, model_dir, folder, group=learner.host_group)
    make_loss, seen, beats = learner._loss, {}, []

    def watched(mini_batch: Any) -> Any:
        loss = make_loss(mini_batch)

        def watch(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
            cuts = batch.pack.response_cu_seqlens
            for sample, a, b in zip(batch.pack.samples.tolist(), cuts[:-1], cuts[1:], strict=True):
                seen[sample] = None
                if batch.taught:
                    of = batch.taught
                    parts = (of.logprobs, of.ids, of.likeliest)
                    seen[sample] = [None if part is None else part[a:b].cpu().numpy() for part in parts]
            return loss(logprobs, entropy, batch)

        return watch

    learner._loss = watched
    learner.teachers.on_progress = lambda: beats.append(1)
    batch = trainer.source.next(steps_before + 1, 0)
    learner.learn(batch.index, batch.slice, step=steps_before + 1)
    return {"samples": seen if learner.policy.reports_metrics else {}, "beats": len(beats)}


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

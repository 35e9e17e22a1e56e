"""What ends a run whose gradients are not finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mgrpo.parallel import backend

backend.install()

from mgrpo.policy.policy import StepResult  # noqa: E402  after the CPU stand-in
from mgrpo.run.records import Learned  # noqa: E402
from mgrpo.run.train.health import MAX_SKIPPED, Health  # noqa: E402


def skipped(*, loss_scale=None, has_overflowed=False):
    result = StepResult(
        measured=[],
        grad_norm=float("inf"),
        learning_rate=1e-6,
        is_finite=False,
        loss_scale=loss_scale,
        has_overflowed=has_overflowed,
    )
    return Learned(results=[result], metrics={}, learning_rate=1e-6, not_finite=[])


@pytest.fixture
def health():
    config = SimpleNamespace(optimizer=SimpleNamespace(learning_rate=1e-6))
    return Health(config, SimpleNamespace(last_good=lambda: "there is no checkpoint"))


def test_steps_in_a_row_without_a_finite_gradient_end_the_run(health):
    """A run that goes on without learning burns GPUs until someone looks."""
    for step in range(1, MAX_SKIPPED):
        health.check(skipped(), step)
    with pytest.raises(RuntimeError, match="had a gradient that is not finite, and were skipped; lower learning_rate"):
        health.check(skipped(), MAX_SKIPPED)


def test_overflows_end_the_run_only_when_the_scale_cannot_fall(health):
    """The first steps of a run in float16 may all overflow: they look for the scale."""
    for step in range(1, 17):
        health.check(skipped(loss_scale=2.0 ** (17 - step), has_overflowed=True), step)
    for step in range(17, 16 + MAX_SKIPPED):
        health.check(skipped(loss_scale=1.0), step)
    with pytest.raises(RuntimeError, match=r"not finite even with loss scale 1 .*model_dtype=bfloat16"):
        health.check(skipped(loss_scale=1.0), 16 + MAX_SKIPPED)

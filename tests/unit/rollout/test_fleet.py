"""Calls to all engines at once, and how the failure of one is told."""

from __future__ import annotations

import dataclasses

import pytest

from mgrpo.config.schema import Engine as EngineSettings
from mgrpo.rollout.collect import EVALUATION, sampler_seed
from mgrpo.rollout.engine import EngineError
from mgrpo.rollout.fleet import Fleet
from tests.scripted_engine import ScriptedEngine

SETTINGS = dataclasses.replace(EngineSettings(), weight_sync_timeout=1, engine_start_timeout=1)


def fleet(*engines: ScriptedEngine) -> Fleet:
    return Fleet(engines, SETTINGS, seed=5, keep_logs=lambda: "; logs are in out/engine_logs")


def test_each_engine_samples_a_step_from_a_stream_of_its_own() -> None:
    """Equal streams would make every engine explore the same randomness; streams that depend on the past do not resume."""
    own = fleet(ScriptedEngine(), ScriptedEngine())
    own.finish(own.receive_weights(3, check=True, step=4), "receive weights")
    own.reseed(EVALUATION)
    for number, engine in enumerate(own.engines):
        assert engine.calls == [
            ("receive_weights", 3, True, sampler_seed(5, 4, number)),
            ("seed", sampler_seed(5, EVALUATION, number)),
        ]


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (
            ScriptedEngine(fails="receive_weights"),
            "could not receive weights: receive_weights has failed; logs are in out/engine_logs",
        ),
        (
            ScriptedEngine(hangs="receive_weights"),
            "could not receive weights within weight_sync_timeout=1 s: no answer from engines 1; raise "
            "weight_sync_timeout if the work is that long; logs are in out/engine_logs",
        ),
    ],
)
def test_an_engine_that_fails_or_hangs_is_told_with_its_reason(engine, sentence) -> None:
    """Without a time limit a hung engine holds every learner for hours."""
    own = fleet(ScriptedEngine(), engine)
    with pytest.raises(EngineError) as raised:
        own.finish(own.receive_weights(1, check=False, step=1), "receive weights")
    assert str(raised.value) == sentence


def test_a_failure_is_told_at_once_also_when_another_engine_hangs() -> None:
    """The time-out of the healthy would otherwise hide the reason, for minutes."""
    own = fleet(ScriptedEngine(hangs="receive_weights"), ScriptedEngine(fails="receive_weights"))
    calls = own.receive_weights(1, check=False, step=1)
    with pytest.raises(EngineError, match="receive_weights has failed"):
        own.raise_failure(calls, "receive weights", within_s=60)


def test_no_failure_is_raised_where_none_is_known() -> None:
    """The learners' own error is then the one to tell."""
    own = fleet(ScriptedEngine(hangs="receive_weights"))
    own.raise_failure(own.receive_weights(1, check=False, step=1), "receive weights", within_s=0.01)


def test_an_engine_that_cannot_start_ends_the_wait() -> None:
    """Its own message says why, for example that the model does not fit."""
    with pytest.raises(EngineError, match="could not start an engine: start has failed"):
        fleet(ScriptedEngine(), ScriptedEngine(fails="start")).wait_ready()

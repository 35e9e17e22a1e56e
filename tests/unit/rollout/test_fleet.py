"""Calls to all engines at once, and how the failure of one is told."""

from __future__ import annotations

import dataclasses

import pytest

from mgrpo.config.schema import Engine as EngineSettings
from mgrpo.rollout.engine import EngineError
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster, listed
from mgrpo.rollout.requests import EVALUATION, sampler_seed
from tests.scripted_engine import ScriptedEngine

SETTINGS = dataclasses.replace(EngineSettings(), weight_sync_timeout=1, engine_start_timeout=1)


def fleet(*engines: ScriptedEngine) -> Fleet:
    return Fleet(Roster(engines, SETTINGS, keep_logs=lambda: "; logs are in out/engine_logs"), seed=5)


def test_each_engine_samples_a_step_from_a_stream_of_its_own() -> None:
    """Equal streams would make every engine explore the same randomness; streams that depend on the past do not resume."""
    own = fleet(ScriptedEngine(), ScriptedEngine())
    own.finish(own.receive_weights([0, 1], 3, check=True, step=4), "receive weights")
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
            "could not receive weights, version 1: receive_weights has failed; logs are in out/engine_logs",
        ),
        (
            ScriptedEngine(hangs="receive_weights"),
            "could not receive weights, version 1 within weight_sync_timeout=1 s: no answer from engine 1; raise "
            "weight_sync_timeout if the work is that long; logs are in out/engine_logs",
        ),
    ],
)
def test_an_engine_that_fails_or_hangs_is_lost_with_its_reason_and_the_others_go_on(engine, sentence, capsys) -> None:
    """Without a time limit a hung engine holds every learner for hours."""
    own = fleet(ScriptedEngine(), engine)
    calls = own.receive_weights([0, 1], 1, check=False, step=1)
    assert own.finish(calls, "receive weights, version 1") == [0]
    assert own.members.open == [0] and own.members[1].reason == sentence
    assert capsys.readouterr().err == f"mgrpo: engine 1 is dead and is given up: {sentence}\n"
    with pytest.raises(EngineError, match=r"^1 of 2 engines are left, min_engines=2; engine 1: could not receive"):
        least(own, 2)


def test_what_learners_say_counts_where_the_engine_says_nothing_itself() -> None:
    """Its own reason is the cause; that a learner could not reach it only follows."""
    for engine, reason in (
        (ScriptedEngine(hangs="receive_weights"), "could not receive: no way"),
        (ScriptedEngine(fails="receive_weights"), "could not receive weights, version 1: receive_weights has failed"),
    ):
        own = fleet(ScriptedEngine(), engine)
        calls = own.receive_weights([0, 1], 1, check=False, step=1)
        assert own.finish(calls, "receive", {1: "no way"}) == [0]
        assert own.members[1].reason.startswith(reason)


def least(own: Fleet, count: int) -> None:
    """A run that needs so many engines looks at those it has."""
    own.roster.min_engines = count
    own.roster.synced()
    own.roster.raise_failure()


def test_an_engine_that_cannot_start_ends_the_wait() -> None:
    """Its own message says why, for example that the model does not fit."""
    with pytest.raises(EngineError, match="could not start an engine: start has failed"):
        fleet(ScriptedEngine(), ScriptedEngine(fails="start")).wait_ready()


def test_a_message_names_a_few_of_many_engines():
    """A thousand reasons in a line hide the first one."""
    assert listed([3, 4]) == "3, 4" and not listed([])
    assert listed(range(1000), "; ") == "0; 1; 2; 3; 4; 5; 6; 7; and 992 more"

"""A loss of the user's own is checked with everything else, before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mgrpo.config import ConfigError
from mgrpo.moving import load_file
from mgrpo.run.report.result import TrainResult
from mgrpo.run.start import launch

FILE = "examples/own_loss/loss.py"


@pytest.fixture
def config(tmp_path):
    loaded = load_file("examples/configs/quickstart.yaml")
    return dataclasses.replace(
        loaded,
        parallel=dataclasses.replace(loaded.parallel, tensor_model_parallel_size=1),
        experiment=dataclasses.replace(loaded.experiment, output_dir=str(tmp_path / "out")),
    )


def with_loss(config, policy_loss):
    return dataclasses.replace(config, loss=dataclasses.replace(config.loss, policy_loss=policy_loss))


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("policy_loss", "words"),
    [
        ("ppo", "policy_loss=ppo is unknown; choose one of ppo_clip, cispo, .* or name a function"),
        (":smooth_clip", "policy_loss=:smooth_clip is unknown"),
        (f"{FILE}:", "is unknown"),
        (f"{FILE}:smooth", f"policy_loss: {FILE}:smooth: smooth does not exist; functions there: smooth_clip"),
        ("no_such_module:loss", "policy_loss: no_such_module:loss cannot be imported"),
    ],
)
def test_a_bad_name_is_one_problem_on_every_rank(config, monkeypatch, rank, policy_loss, words):
    """A rank that finds out later leaves the others waiting in a collective."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(launch, "_start", lambda *arguments: pytest.fail("started"))
    with pytest.raises(ConfigError, match=f"^1 problem .*\n.*{words}"):
        launch.train(with_loss(config, policy_loss))


def test_an_object_that_is_not_a_loss_is_a_problem(config):
    """`mgrpo.train(config, loss=...)` with the wrong thing."""
    with pytest.raises(ConfigError, match=r"^1 problem .*\n.*policy_loss: loss=.* cannot be called with one argument"):
        launch.train(config, loss=lambda: 0)


def test_the_function_reaches_the_run(config, monkeypatch):
    """It would train the named loss and say nothing."""
    started = []

    def start(config, inputs, continued, loss, listener):
        started.append((config, loss))
        return TrainResult(output_dir=Path("out"), steps=1, before={}, after={}, exported=None)

    monkeypatch.setattr(launch, "_start", start)

    def function(inputs):
        return inputs.total(inputs.logprobs)

    launch.train(config, loss=function)
    named = with_loss(config, f"{FILE}:smooth_clip")
    launch.train(named)
    assert started == [(config, function), (named, None)]

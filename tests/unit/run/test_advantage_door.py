"""A user's advantages are checked with everything else, before anything starts, and reach rank 0's batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mgrpo.config import ConfigError
from mgrpo.moving import load_file
from mgrpo.run.produce.source import Source
from mgrpo.run.report.result import TrainResult
from mgrpo.run.start import launch
from tests.unit.algo.test_own_advantages import from_page


@pytest.fixture
def config(tmp_path):
    loaded = load_file("examples/configs/quickstart.yaml")
    return dataclasses.replace(
        loaded, experiment=dataclasses.replace(loaded.experiment, output_dir=str(tmp_path / "out"))
    )


def named(config, name):
    return dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, advantage_normalization_type=name)
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{file}:rlo", "advantage_normalization_type: {file}:rlo: rlo does not exist; functions there: rloo"),
        ("no_such_module:f", "advantage_normalization_type: no_such_module:f cannot be imported"),
        ("rlo", "advantage_normalization_type=rlo is unknown; choose one of standard, .* or name a function"),
    ],
)
def test_a_bad_name_is_one_problem(config, tmp_path, monkeypatch, name, words):
    """Found after the engines have started it would cost minutes."""
    monkeypatch.setattr(launch, "_start", lambda *arguments: pytest.fail("started"))
    file = from_page("rloo.py", tmp_path)
    with pytest.raises(ConfigError, match=f"^1 problem .*\n.*{words.format(file=file)}"):
        launch.train(named(config, name.format(file=file)))


def test_an_object_that_is_no_estimator_is_a_problem(config):
    """`mgrpo.train(config, advantage_fn=...)` with the wrong thing."""
    with pytest.raises(ConfigError, match=r"^1 problem .*\n.*advantage_fn=.* cannot be called with one argument"):
        launch.train(config, advantage_fn=lambda: 0)


def test_what_an_object_makes_moot_is_refused_as_with_a_name(config):
    """Rules read the configuration, which knows the object by its name."""
    alone = dataclasses.replace(config.distillation, teacher_model_name_or_path=("self",), distillation_only=True)
    with pytest.raises(
        ConfigError, match=r"distillation_only=true makes every advantage 0, so that .*test_advantage_door:"
    ):
        launch.train(dataclasses.replace(config, distillation=alone), advantage_fn=lambda groups: [])


def test_the_function_reaches_the_run(config, tmp_path, monkeypatch):
    """It would train the named advantages and say nothing; ranks other than 0 need not have the file."""
    started = []

    def start(config, inputs, continued, loss, listener):
        started.append((config.algorithm.advantage_normalization_type, inputs and inputs.advantage_fn))
        return TrainResult(output_dir=Path("out"), steps=1, before={}, after={}, exported=None)

    def function(groups):
        return [group.rewards for group in groups]

    monkeypatch.setattr(launch, "_start", start)
    launch.train(config, advantage_fn=function)
    launch.train(named(config, f"{from_page('rloo.py', tmp_path)}:rloo"))
    launch.train(config)
    monkeypatch.setenv("RANK", "1")
    launch.train(named(config, "nowhere_here:f"))
    names, functions = zip(*started, strict=True)
    assert names[0].startswith(f"{__name__}:") and names[0].endswith("function") and functions[0] is function
    assert functions[1].__name__ == "rloo"
    assert (names[2], functions[2]) == ("standard", None)
    assert (names[3], functions[3]) == ("nowhere_here:f", None)


def test_the_source_computes_advantages_with_it():
    """The door and the formula are each tested; this is what lies between them."""
    from mgrpo.layout import Layout
    from mgrpo.run.produce.production import Production
    from tests.unit.run.producing import config, evaluator, producer

    own, given = config(), producer(lambda index: (0.0, 1.0))
    production = Production(
        config=own,
        tokenizer=None,
        producer=given,
        evaluator=evaluator(),
        data=[],
        remarks=[],
        advantage_fn=lambda groups: [np.arange(len(group.rewards)) + 10.0 for group in groups],
    )
    source = Source(production, None, own, layout=Layout(world_size=1), hidden=64, rejoining=None)
    batch = source._make(0)
    assert [sample.advantage for sample in batch.samples][:2] == [10.0, 11.0]

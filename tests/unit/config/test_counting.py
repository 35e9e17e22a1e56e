"""How long a run is whose length is given in passes over the data."""

from __future__ import annotations

import dataclasses

import pytest

from mgrpo.config import to_yaml
from mgrpo.config.derived import bounded, counted, counts_of, fitted, same_counts
from mgrpo.config.dump import derived_lines
from mgrpo.config.validate import problems
from mgrpo.moving import from_values, parse

SMALL = {"num_unique_prompts_rollout": 4, "num_samples_per_prompt_rollout": 2}


@pytest.mark.parametrize(
    ("passes", "num_prompts", "episodes", "steps"),
    [(3, 10, 60, 7), (1, 8, 16, 2), ("0.29", 100, 58, 7), (1.5, 5, 14, 1), ("1e-1", 80, 16, 2), (0.5, 7, 6, 0)],
)
def test_passes_are_counted_in_whole_prompts(passes, num_prompts, episodes, steps):
    """A learning rate falls to 0 over the counted steps: one too few or too many shifts all of it."""
    config = counted(from_values(SMALL | {"num_train_epochs": passes}), num_prompts)
    assert (config.experiment.total_episodes, config.num_training_steps) == (episodes, steps)
    assert config.experiment.num_train_epochs is None
    assert config.provenance.sources["total_episodes"] == "alias num_train_epochs (argument)"
    assert f"{num_prompts} prompts x 2 samples, {steps} step" in config.notes[-1]


def test_a_run_given_in_completions_does_not_depend_on_its_data():
    """What was asked for explicitly may not change with a row more."""
    config = from_values(SMALL)
    assert counted(config, 7) == config and counted(config, 7).notes == config.notes


def test_the_saved_configuration_is_of_the_same_length(tmp_path):
    """config.yaml is what a run is repeated from, perhaps where the data have another length."""
    config = counted(from_values(SMALL | {"num_train_epochs": 2}), 10)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert parse([str(path)]) == config
    again = parse([str(path), "--num_train_epochs", "4"])
    assert again.experiment.num_train_epochs == 4 and "total_episodes (file" in "".join(again.notes)


@pytest.mark.parametrize(
    ("given", "passes", "episodes"),
    [
        ({"preset": "trl_main"}, 3.0, None),
        ({"preset": "trl_seed", "total_episodes": 80}, None, 80),
        ({"preset": "trl_main", "max_steps": 5, "num_train_epochs": 2}, None, 5 * 8),
        ({"preset": "trl_main", "max_steps": -1}, 3.0, None),
        ({"preset": "trl_main", "num_train_epochs": None}, None, 100_000),
        ({"preset": "open_instruct_main"}, None, 100_000),
    ],
)
def test_what_says_how_long_a_run_is(given, passes, episodes):
    """A script of TRL without a length makes three passes; max_steps overrides passes, as there."""
    config = from_values(given)
    assert config.experiment.num_train_epochs == passes
    assert episodes is None or config.experiment.total_episodes == episodes
    assert any("overrides it" in note for note in config.notes) == ("num_train_epochs" in given and passes != given["num_train_epochs"])  # fmt: skip


def test_rules_about_steps_wait_for_the_data(model):
    """Before the data are counted every one of them would judge a length that is not the run's."""
    config = from_values(model | SMALL | {"num_train_epochs": 2, "warm_up_steps": 6, "profile_steps": [5]})
    assert problems(config, world_size=1) == []
    (warm_up,) = problems(counted(config, 10), world_size=1)
    assert "warm_up_steps=6 is more than the run's 5 optimizer steps" in warm_up
    assert problems(counted(config, 12), world_size=1) == []
    (short, *_) = problems(counted(config, 1), world_size=1)
    assert short.startswith("total_episodes=4 is less than one step") and "given as num_train_epochs" in short
    (wrong,) = problems(from_values(model | {"num_train_epochs": 0}), world_size=1)
    assert wrong == "num_train_epochs=0.0 must be above 0 and finite"


def test_strategies_by_epoch_are_steps_of_one_pass():
    """TRL's scripts save and evaluate so."""
    config = from_values(SMALL | {"save_strategy": "epoch", "eval_strategy": "epoch", "num_generations": 2})
    done = counted(config, 13)
    assert (done.checkpoint.save_freq, done.experiment.local_eval_every) == (3, 3)
    assert counted(from_values(SMALL | {"save_strategy": "epoch"}), 3).checkpoint.save_freq == 1
    own = counted(parse(["--save_strategy", "steps", "--save_steps", "7"]), 13)
    assert own.checkpoint.save_freq == 7


@pytest.mark.parametrize(("share", "steps", "every"), [(0.1, 100, 10), (0.29, 100, 29), (0.25, 10, 3), (0.01, 10, 1)])
def test_steps_below_1_are_a_share_of_the_run(share, steps, every):
    """Scripts of TRL save and evaluate ten times a run so, however long it is; rounded up, as in transformers."""
    config = from_values(SMALL | {"total_episodes": 8 * steps, "save_steps": share, "eval_steps": share})
    done = counted(config, 50)
    assert (done.checkpoint.save_freq, done.experiment.local_eval_every) == (every, every)
    assert f"save_freq is {every}, the steps of {share} of {steps}" in done.notes
    by_passes = counted(from_values(SMALL | {"num_train_epochs": 2, "save_steps": 0.5}), 2 * steps)
    assert by_passes.checkpoint.save_freq == steps // 2


def test_ranks_without_the_data_take_the_counts_of_the_one_with_them():
    """Ranks that disagree about the last step wait for each other for ever."""
    config = from_values(SMALL | {"num_train_epochs": 2, "save_strategy": "epoch"})
    done = counted(config, 20)
    assert same_counts(config, counts_of(done)) == done
    assert dataclasses.replace(done).num_training_steps == 10


def test_an_uncounted_length_is_not_shown_as_a_number():
    """--show_config without the data would print the default's."""
    config = from_values(SMALL | {"num_train_epochs": 2})
    assert "num_training_steps: num_train_epochs decides" in derived_lines(config, world_size=1)
    waits = from_values(SMALL | {"total_episodes": 80, "save_steps": 0.5})
    assert "\n# save_freq: decided when the data can be read  # alias save_steps (argument)\n" in to_yaml(waits)
    assert "\nsave_freq: 5  # alias save_steps (argument)\n" in to_yaml(counted(waits, 10))
    assert "num_training_steps: 5\n" in derived_lines(counted(config, 10), world_size=1)


SHORT = {"preset": "trl_main", "response_length": 6}


@pytest.mark.parametrize(
    ("given", "positions", "longest", "lengths"),
    [
        ({}, 512, 20, (506, 512)),  # TRL's script with a model of 512 positions
        ({}, 4096, 20, (512, 518)),
        ({}, 4096, 3000, (3000, 3006)),
        ({}, 4096, 5000, (4090, 4096)),
        ({}, None, 5000, (512, 518)),
        ({"eval_response_length": 100}, 512, 20, (412, 418)),
        ({"pack_length": 800}, 4096, 3000, (794, 800)),
        ({"max_prompt_length": 32}, 4096, 3000, (32, 512)),
        ({"max_prompt_length": None}, 4096, 3000, (3000, 3006)),
        ({"max_prompt_token_length": 512, "pack_length": 1024}, 4096, 3000, (512, 1024)),
        ({"preset": "trl_seed"}, 4096, 3000, (512, 518)),
    ],
)
def test_prompts_that_nobody_limits_are_as_long_as_model_and_data_ask(given, positions, longest, lengths):
    """TRL's main version has no limit: a limit of ours would leave prompts out, or keep a small model from starting."""
    config = fitted(bounded(from_values(SMALL | SHORT | given), positions), longest)
    assert (config.data.max_prompt_token_length, config.parallel.pack_length) == lengths
    assert sum("pack_length is" in note or "and pack_length" in note for note in config.notes) <= 1
    assert same_counts(from_values(SMALL | SHORT | given), counts_of(counted(config, 8))) == counted(config, 8)

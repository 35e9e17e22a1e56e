"""What a user is told who writes a name that no setting has."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError
from mgrpo.config.fields import settings
from mgrpo.moving import parse
from mgrpo.moving.name_hints import hints

MISTAKES = {
    "lr": "learning_rate",
    "kl_coef": "beta",
    "kl-loss-coef": "beta",
    "use-kl-loss": "beta",
    "group_size": "num_samples_per_prompt_rollout",
    "n": "num_samples_per_prompt_rollout",
    "gpus": "num_learners_per_node",
    "model": "model_name_or_path",
    "hf-checkpoint": "model_name_or_path",
    "dataset": "dataset_mixer_list",
    "dataset_name": "dataset_mixer_list",
    "max_new_tokens": "response_length",
    "max_lenght": "response_length",
    "max_response_length": "response_length",
    "lora_rank": "lora_r",
    "learning_rte": "learning_rate",
    "learningrate": "learning_rate",
    "num_generation": "num_generations",
    "temprature": "temperature",
    "batch_size": "num_unique_prompts_rollout",
    "batchsize": "num_unique_prompts_rollout",
    "epochs": "num_train_epochs",
    "num-epoch": "num_train_epochs",
    "output": "output_dir",
    "outputdir": "output_dir",
    "steps": "total_episodes",
    "beta1": "adam_beta1",
    "warmup": "warm_up_steps",
    "clip_range": "clip_higher",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "grad_accum": "num_mini_batches",
    "reward_fn": "reward_funcs",
    "wieght_decay": "weight_decay",
    "version": "--version",
}
"""What is written, and a setting that the answer must name."""


def test_a_word_of_verl_is_answered_with_its_trainer_the_settings_and_the_page():
    """Words and remarks that run into each other cannot be taken apart by a reader."""
    with pytest.raises(ConfigError) as caught:
        parse(["algorithm.adv_estimator=grpo"])
    assert caught.value.problems[0] == (
        "unknown setting algorithm.adv_estimator (command line); it is a name of verl, whose commands docs/moving/verl.md translates: "
        "use advantage_normalization_type (grpo: standard, or centered with norm_adv_by_std_in_grpo=false (Dr. GRPO); rloo, "
        "reinforce_plus_plus and reinforce_plus_plus_baseline; others are refused); settings are written --name value"
    )


@pytest.mark.parametrize("word", MISTAKES)
def test_common_mistakes_are_answered_with_the_setting(word):
    """A misleading answer is worse than none: the user looks for what is wrong with a setting that he did not mean."""
    with pytest.raises(ConfigError) as caught:
        parse([f"--{word}", "1"])
    (problem,) = caught.value.problems
    advice = problem.split("; ", 1)[1]
    named = {part.strip("?,;:") for part in advice.split() if part.startswith("--")}
    assert f"{'' if word == 'version' else '--'}{MISTAKES[word]}" in named, problem
    assert all(name[2:] in settings() or name in ("--num_generations", "--version") for name in named), problem


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("turn_discount", "it is always 1 now"),
        ("advantage_ddof", "use --advantage_std; population or sample"),
        (
            "env_reset_timeout",
            "use --tool_timeout; an environment may take twice as long to begin, and at least 60 seconds",
        ),
        ("rubric_judge_model", "the environment variable RUBRIC_JUDGE_MODEL names it now"),
    ],
)
def test_a_setting_of_an_earlier_version_is_answered_with_what_took_its_place(name, advice):
    """The list of all settings does not say where it is gone."""
    with pytest.raises(ConfigError) as caught:
        parse([f"--{name}", "1"])
    assert caught.value.problems == (f"unknown setting --{name} (command line); {advice}",)


def test_words_of_verl_are_answered_as_well():
    """Its overrides have no dashes."""
    with pytest.raises(ConfigError) as caught:
        parse(["actor_rollout_ref.rollout.n=5", "+data.max_response_length=9"])
    first, second = caught.value.problems
    assert "use num_samples_per_prompt_rollout" in first and "use response_length" in second
    assert {"trainer.n_gpus_per_node", "rollout_batch_size"} <= hints().keys()

"""Names of other trainers beside our own and beside presets: who wins, and what the run says of it."""

from __future__ import annotations

import pytest
from alias_cases import changed, problems_of

from mgrpo.config import LossConfig, to_yaml
from mgrpo.config.derived import layout_of
from mgrpo.config.dump import derived_lines
from mgrpo.config.fields import flat, settings
from mgrpo.config.validate import problems
from mgrpo.moving import from_values, load_file, parse
from mgrpo.moving.presets import PRESET_NOTES, PRESETS


def test_a_preset_that_does_not_exist_is_refused():
    """The error names those that do."""
    words = "preset=dpo does not exist; choose from mgrpo, seed, open_instruct_main"
    assert words in "\n".join(problems_of({"preset": "dpo"}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epsilon": 0.3, "clip_lower": 0.2}, "epsilon means clip_lower=0.3, but clip_lower=0.2 is given"),
        ({"num_generations": 8, "num_samples_per_prompt_rollout": 4}, "num_generations means"),
        ({"num_generations": 8, "number_samples_per_prompt": 4}, "but num_generations means 8"),
        ({"loss_type": "sapo", "policy_loss": "cispo"}, "loss_type means policy_loss=sapo"),
        ({"loss_type": "sapo", "loss_fn": "dapo"}, "loss_type means policy_loss=sapo, but loss_fn means ppo_clip"),
        ({"loss_type": "grpo", "masked_mean_axis": None}, "masked_mean_axis means aggregation=token"),
        ({"max_completion_length": 9, "response_length": 8}, "max_completion_length means response_length=9"),
        ({"deepspeed_stage": 2, "zero_stage": 1}, "deepspeed_stage means zero_stage=2"),
        ({"deepspeed_stage": 2, "fsdp": "full_shard"}, "fsdp means zero_stage=3, but deepspeed_stage means 2"),
        (
            {"gradient_checkpointing": True, "recompute_granularity": "selective"},
            "gradient_checkpointing means recompute_granularity=full",
        ),
        ({"cp_strategy": "ulysses", "cp_comm_type": "all_gather"}, "cp_strategy means cp_comm_type=a2a"),
        (
            {"deepspeed_stage": 3, "deepspeed_zpg": 4, "fsdp_shard_degree": 2},
            "deepspeed_zpg means fsdp_shard_degree=4",
        ),
        (
            {"truncated_importance_sampling_ratio_cap": 2, "rho_clamp_upper_bound": 3},
            "truncated_importance_sampling_ratio_cap means rho_clamp_upper_bound=2",
        ),
        (
            {"generation_batch_size": 64, "num_generations": 8, "num_unique_prompts_rollout": 5},
            "generation_batch_size means num_unique_prompts_rollout=8",
        ),
        (
            {"steps_per_generation": 8, "num_generations": 8, "num_mini_batches": 5},
            "steps_per_generation means num_mini_batches=8",
        ),
    ],
)
def test_an_alias_and_its_target_must_agree(given, words):
    """Whichever of two values won, half of the command line would be a lie."""
    (found,) = problems_of(given)
    assert words in found and found.endswith("keep one of them")


def test_an_alias_and_its_target_may_agree():
    """Scripts that run under two trainers say both."""
    given = {"epsilon": 0.3, "clip_lower": 0.3, "clip_higher": 0.3, "num_generations": 8}
    assert changed(from_values(given | {"num_samples_per_prompt_rollout": 8})) == {
        "clip_lower": 0.3, "clip_higher": 0.3, "num_samples_per_prompt_rollout": 8,
    }  # fmt: skip


def test_a_flag_wins_over_the_file_by_whatever_name(tmp_path):
    """A sweep overrides one value of a file; that the two use different names must not matter."""
    path = tmp_path / "run.yaml"
    path.write_text("preset: seed\nclip_lower: 0.1\nclip_higher: 0.1\nnum_generations: 8\ntemperature: 0.9\n")
    config = parse([str(path), "--epsilon", "0.3", "--num_samples_per_prompt_rollout", "2"])
    assert (config.loss.clip_lower, config.loss.clip_higher) == (0.3, 0.3)
    assert config.rollout.num_samples_per_prompt_rollout == 2
    assert config.rollout.temperature == 0.9
    assert config.provenance.sources == {
        "clip_lower": "alias epsilon (flag)",
        "clip_higher": "alias epsilon (flag)",
        "num_samples_per_prompt_rollout": "flag",
        "temperature": f"file {path}",
        "async_steps": "preset seed",
        "tool_parser_type": "preset seed",
        "scored_text": "preset seed",
        "use_rho_correction": "derived",
    }
    assert "num_generations -> num_samples_per_prompt_rollout (2, flag wins)" in config.notes


def test_a_flag_names_the_preset_before_the_file_does(tmp_path):
    """`--preset` on the command line of a file that names another one."""
    path = tmp_path / "run.yaml"
    path.write_text("preset: seed\n")
    assert load_file(path).rollout.temperature == 0.7
    assert parse([str(path)]).rollout.temperature == 0.7
    assert parse([str(path), "--preset", "mgrpo"]).rollout.temperature == 1.0
    assert parse([str(path), "--preset", "mgrpo"]).provenance.preset == "mgrpo"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_sound_set_of_settings(preset, tmp_path):
    """A preset that names a setting wrongly, or is refused, would never have worked."""
    (tmp_path / "config.json").write_text("{}")
    base = {"model_name_or_path": str(tmp_path), "dataset_mixer_list": ["a", "1.0"], "preset": preset}
    config = from_values(base)
    assert problems(config, world_size=1) == []
    assert set(PRESETS[preset]) <= settings().keys()
    for name, value in PRESETS[preset].items():
        assert flat(config)[name] == value
        assert config.provenance.sources[name] == f"preset {preset}"
    assert set(PRESET_NOTES.get(preset, ())) <= set(config.notes)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("mgrpo", (1, 1.0, 0.05, 0.2, 4, "standard", False, 0, False)),
        ("seed", (1, 0.7, 0.05, 0.2, 4, "standard", True, 1, False)),
        ("open_instruct_main", (42, 1.0, 0.05, 0.272, 4, "centered", True, 8, True)),
        ("trl_seed", (42, 1.0, 0.0, 0.2, 8, "standard", False, 0, False)),
        ("trl_main", (42, 1.0, 0.0, 0.2, 8, "standard", True, 0, False)),
    ],
)
def test_presets_differ_where_the_trainers_do(preset, expected):
    """The values that have drifted between the trainers, by hand."""
    config = from_values({"preset": preset})
    own = config.algorithm
    assert (
        config.experiment.seed,
        config.rollout.temperature,
        config.loss.beta,
        config.loss.clip_higher,
        config.rollout.num_samples_per_prompt_rollout,
        own.advantage_normalization_type,
        config.loss.use_rho_correction,
        config.rollout.async_steps,
        config.rollout.inflight_updates,
    ) == expected


@pytest.mark.parametrize(
    ("given", "expected", "note"),
    [
        ({"max_staleness": 4}, (2, 4, True), "async_steps is 2, half of max_staleness=4: steps then take what has fin"),
        ({"max_staleness": 5, "preset": "trl_main"}, (3, 5, True), "async_steps is 3, half of max_staleness=5"),
        ({"max_staleness": 1}, (1, 1, True), "async_steps is 1, half of max_staleness=1"),
        ({"max_staleness": 4, "async_steps": 1}, (1, 4, True), None),
        ({"weight_sync_steps": 3}, (0, 2, True), None),
        ({"weight_sync_steps": 3, "async_steps": 1}, (1, 3, True), None),
        (
            {"weight_sync_steps": 3, "max_staleness": 6},
            (2, 6, True),
            "async_steps is 2, half of max_staleness=6 less the 2 between weight syncs: steps then take what has finished first, where "
            "async_steps=4",
        ),
        ({"weight_sync_steps": 3, "max_staleness": 2}, (0, 2, True), None),
        ({"max_staleness": 4, "async_steps": 0}, (0, 0, False), None),
        ({"max_staleness": 0}, (0, 0, False), None),
        ({"max_staleness": None}, (0, 0, False), None),
        ({"async_steps": 3}, (3, 3, True), None),
        (
            {"inflight_updates": True},
            (1, 1, True),
            "async_steps is 1: inflight_updates needs completions that are under",
        ),
        ({"preset": "seed"}, (1, 1, True), None),
        ({"preset": "seed", "async_steps": 4, "max_staleness": 6}, (4, 6, True), None),
        ({"preset": "seed", "async_steps": 0}, (0, 0, False), None),
        ({"preset": "seed", "use_vllm_logprobs": True}, (1, 1, False), None),
        ({"preset": "seed", "truncated_importance_sampling_ratio_cap": 0}, (1, 1, False), None),
        (
            {"preset": "open_instruct_main", "max_staleness": 12},
            (8, 12, True),
            "preset open_instruct_main: a step waits",
        ),
    ],
)
def test_how_far_ahead_and_how_old_follow_from_either_number(given, expected, note):
    """TRL gives one number and Open Instruct the other; a run that took turns in their place would be twice as slow."""
    config = from_values(given)
    assert (config.rollout.async_steps, config.max_age, config.loss.use_rho_correction) == expected
    derived = [line for line in config.notes if line.startswith(("async_steps", "preset open"))]
    assert [line.startswith(note or "nothing") for line in derived] == [True] * (note is not None)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"async_steps": 3}, "async_steps=3"),
        ({"async_steps": 3, "weight_sync_steps": 2}, "async_steps=3 and weight_sync_steps=2"),
        ({"async_steps": 3, "max_staleness": 6}, "async_steps=3"),
        ({"max_staleness": 4}, "async_steps=2"),
        ({"replay_buffer_size": 64}, "replay_buffer_size=64"),
        ({"async_steps": 2, "replay_buffer_size": 64}, "async_steps=2 and replay_buffer_size=64"),
        ({"active_sampling": True, "active_sampling_oversample": 0.5}, "active_sampling_oversample=0.5"),
        ({"preset": "seed"}, "async_steps=1"),
        ({"preset": "open_instruct_main"}, None),
        ({"async_steps": 3, "use_rho_correction": True}, None),
        ({"async_steps": 3, "use_vllm_logprobs": True}, None),
        ({"async_steps": 3, "policy_loss": "mine.py:loss"}, None),
        ({"active_sampling": True}, None),
        ({}, None),
    ],
)
def test_tokens_of_older_policies_are_corrected_without_being_asked(given, cause):
    """Scripts of other trainers say how far to run ahead and no more; uncorrected, the ratio would be that of other policies."""
    found = [note for note in from_values(given).notes if note.startswith("use_rho_correction is true")]
    assert [note.partition(" trains on tokens of older policies, which")[0] for note in found] == (
        [f"use_rho_correction is true: {cause}"] if cause else []
    )
    if cause:
        assert from_values(given).loss.use_rho_correction
        assert not from_values(given | {"use_rho_correction": False}).loss.use_rho_correction


@pytest.mark.parametrize(
    ("given", "is_corrected", "is_derived"),
    [
        ({"vllm_kv_cache_dtype": "fp8"}, True, True),
        ({"use_fp8_kv_cache": True}, True, True),
        ({"use_fp8_kv_cache": False}, False, False),
        ({"vllm_kv_cache_dtype": "fp8", "use_rho_correction": True}, True, False),
        ({"vllm_kv_cache_dtype": "fp8", "use_vllm_logprobs": True}, False, False),
        ({"vllm_kv_cache_dtype": "fp8", "policy_loss": "mine.py:loss"}, False, False),
        ({"vllm_kv_cache_dtype": "fp8", "preset": "trl_main"}, True, False),
    ],
)
def test_rounded_keys_and_values_are_corrected_without_being_asked(given, is_corrected, is_derived):
    """Without a correction the ratio compares the trained policy with one that did not sample."""
    config = from_values(given)
    assert config.loss.use_rho_correction == is_corrected
    assert (
        any(note.startswith("use_rho_correction is true: with vllm_kv_cache_dtype=fp8") for note in config.notes)
        == is_derived
    )


@pytest.mark.parametrize("preset", ["open_instruct_main", "mgrpo"])
def test_updates_in_flight_of_a_preset_are_for_asynchronous_runs(preset):
    """A script that only sets `--async_steps 0` would be refused for a flag that it does not have."""
    synchronous = from_values({"preset": preset, "async_steps": 0})
    assert not synchronous.rollout.inflight_updates
    assert ("inflight_updates is false, because async_steps is 0" in synchronous.notes) == (preset != "mgrpo")
    assert from_values({"preset": preset, "async_steps": 0, "inflight_updates": True}).rollout.inflight_updates
    recomputes = from_values({"preset": preset, "inflight_updates_recompute_kv_cache": True})
    assert recomputes.rollout.inflight_kv == "recompute"
    assert from_values({"inflight_updates_recompute_kv_cache": False}).rollout.inflight_kv == "keep"


def test_each_alias_is_noted_once_with_its_value():
    """A translation that is not reported cannot be checked by the user."""
    config = from_values({"epsilon": 0.3, "num_iterations": 2, "sequence_parallel_size": 1, "max_prompt_length": 99})
    assert config.notes == (
        "num_iterations -> num_epochs (2)",
        "epsilon -> clip_lower (0.3), clip_higher (0.3)",
        "sequence_parallel_size -> context_parallel_size (1); Ulysses: ranks that share each sequence and exchange it for "
        "heads (a2a), of which each tensor rank needs a multiple of this; cp_comm_type=all_gather has no such rule. Not "
        "sequence_parallel, which splits activations across tensor ranks",
        "max_prompt_length -> max_prompt_token_length (99), overlong_prompt_policy (truncate_left); longer prompts are cut "
        "from the left, as in TRL",
    )


def test_a_problem_with_a_setting_names_the_alias_that_gave_it():
    """`clip_lower must be ...` says nothing to someone who wrote epsilon."""
    found = problems(from_values({"epsilon": 1.5, "deepspeed_offload_optimizer": True, "zero_stage": 3}), world_size=1)
    assert "clip_lower=1.5 must be in [0, 1) (clip_lower was given as epsilon)" in found
    assert any(line.endswith("(optimizer_cpu_offload was given as deepspeed_offload_optimizer)") for line in found)


def test_the_dump_says_who_set_what_and_loads_back(tmp_path):
    """A run is only repeatable when its record loads, and only explainable when it says why a value is what it is."""
    path = tmp_path / "a #b.yaml"
    path.write_text("preset: open_instruct_main\nexp_name: 'x # y'\nepsilon_high: 0.28\n")
    config = parse([str(path), "--beta", "0.1", "--reward_weights", "1", "0.5"])
    text = to_yaml(config)
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))
    assert lines["beta"] == " 0.1  # flag"
    assert lines["seed"] == " 42  # preset open_instruct_main"
    assert lines["clip_higher"] == f" 0.28  # alias epsilon_high (file {path})"
    assert lines["exp_name"] == f" 'x # y'  # file {path}"
    assert lines["reward_weights"] == " [1.0, 0.5]  # flag"
    assert lines["clip_lower"] == " 0.2"
    again = tmp_path / "config.yaml"
    again.write_text(text)
    assert load_file(again) == config
    assert load_file(again).notes == ()


def test_a_source_with_a_line_break_stays_in_its_comment(tmp_path):
    """The rest of the path would be read as YAML."""
    path = tmp_path / "a\nseed: 5.yaml"
    path.write_text("beta: 0.1\n")
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(load_file(path)))
    assert load_file(again) == from_values({"beta": 0.1})


def test_what_follows_from_the_settings_is_computed_in_one_place():
    """Two formulas for the number of steps part sooner or later."""
    config = from_values(
        {
            "num_generations": 8,
            "num_unique_prompts_rollout": 5,
            "num_mini_batches": 3,
            "num_epochs": 2,
            "total_episodes": 410,
            "tensor_model_parallel_size": 2,
            "apply_r1_style_format_reward": True,
            "additive_format_reward": True,
        }
    )
    assert (layout_of(config, 8).data, config.batch_size, config.completions_per_optimizer_step) == (4, 40, 14)
    assert (config.num_training_steps, config.num_optimizer_steps) == (10, 60)
    assert (config.max_model_length, config.reward.max_possible_score) == (512, 11.0)
    assert config.experiment.run_name == "grpo__1"
    assert "# num_optimizer_steps: 60\n" in derived_lines(config, world_size=8)


def test_every_setting_of_the_loss_reaches_it():
    """A setting that stops on its way to the loss is silently ignored."""
    given = {
        "policy_loss": "sapo", "ratio_level": "sequence", "aggregation": "dr_grpo", "clip_lower": 0.11, "clip_higher": 0.12,
        "delta": 1.3, "dual_clip": 3.1, "sapo_temperature_pos": 1.1, "sapo_temperature_neg": 1.2, "vespo_k_pos": 1.4,
        "vespo_lambda_pos": 1.5, "vespo_k_neg": 1.6, "vespo_lambda_neg": 1.7, "beta": 0.3, "kl_estimator": 1,
        "kl_bias_correction": True, "use_rho_correction": True, "rho_level": "sequence_mean", "rho_clamp_lower_bound": 0.4,
        "rho_clamp_upper_bound": 5.1, "rho_mask_level": "sequence_sum", "rho_mask_lower_bound": 0.5,
        "rho_mask_upper_bound": 6.1, "off_policy_mask_threshold": 0.6,
        "loss_denominator": "9", "local_batch_size": 3, "cispo_two_sided": True,
    }  # fmt: skip
    found = from_values(given).loss
    assert [name for name, value in given.items() if getattr(found, name) != value] == []
    plain = LossConfig()
    assert [name for name in LossConfig.__slots__ if getattr(found, name) == getattr(plain, name)] == []
    assert from_values({}).loss == plain
    by_number = from_values({"loss_denominator": "12.5"}).loss
    assert (by_number.effective_aggregation, by_number.constant) == ("constant", 12.5)

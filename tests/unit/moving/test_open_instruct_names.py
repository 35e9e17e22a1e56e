"""What the names of Open Instruct and of its old scripts come to, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from alias_cases import assert_means, problems_of

from mgrpo.config.fields import flat
from mgrpo.config.validate import problems
from mgrpo.moving import from_values, parse
from mgrpo.moving.presets import KEPT


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_fn": "cispo", "clip_higher": 3}, {"policy_loss": "cispo", "clip_higher": 3.0}),
        ({"loss_fn": "dapo", "loss_denominator": "1000"}, {"loss_denominator": "1000"}),
        ({"masked_mean_axis": 1}, {"aggregation": "seq_mean"}),
        ({"masked_mean_axis": None}, {"aggregation": "token"}),
        (
            {"truncated_importance_sampling_ratio_cap": 4},
            {"use_rho_correction": True, "rho_clamp_upper_bound": 4.0},
        ),
        ({"truncated_importance_sampling_ratio_cap": 0}, {}),
        ({"rho_mask_sequence_level": True}, {"rho_level": "sequence_mean", "rho_mask_level": "sequence_mean"}),
        ({"no_filter_zero_std_samples": False}, {"filter_zero_std_samples": True}),
        ({"number_samples_per_prompt": 8}, {"num_samples_per_prompt_rollout": 8}),
        ({"deepspeed_stage": 3}, {"zero_stage": 3}),
        (
            {"deepspeed_stage": 3, "sequence_parallel_size": 2},
            {"zero_stage": 3, "context_parallel_size": 2, "cp_comm_type": "a2a"},
        ),
        (
            {"deepspeed_stage": 3, "sequence_parallel_size": 2, "cp_comm_type": "all_gather"},
            {"zero_stage": 3, "context_parallel_size": 2},
        ),
        ({"vllm_data_parallel_size": 4}, {"vllm_num_engines": 4}),
        ({"vllm_data_parallel_size": 2, "vllm_num_engines": 3}, {"vllm_num_engines": 6}),
        ({"vllm_data_parallel_size": 1, "vllm_num_engines": 3}, {"vllm_num_engines": 3}),
        ({"sequence_parallel_size": 1}, {}),
        ({"cp_degree": 2}, {"context_parallel_size": 2}),
        ({"cp_degree": 2, "cp_strategy": "llama3"}, {"context_parallel_size": 2}),
        ({"cp_degree": 2, "cp_strategy": "zig_zag"}, {"context_parallel_size": 2}),
        ({"cp_degree": 2, "cp_strategy": "ulysses"}, {"context_parallel_size": 2, "cp_comm_type": "a2a"}),
        ({"deepspeed_stage": 0}, {"zero_stage": 0}),
        ({"deepspeed_stage": 2, "deepspeed_zpg": 8}, {"zero_stage": 2}),
        ({"deepspeed_stage": 3, "deepspeed_zpg": 1}, {"zero_stage": 3}),
        ({"deepspeed_offload_optimizer": True}, {"optimizer_cpu_offload": True}),
        ({"gradient_checkpointing": True}, {"recompute_granularity": "full"}),
        ({"gradient_checkpointing": False}, {}),
        (
            {"gradient_checkpointing": False, "recompute_granularity": "selective"},
            {"recompute_granularity": "selective"},
        ),
        ({"gradient_checkpointing": True, "activation_memory_budget": 1}, {"recompute_granularity": "full"}),
        ({"gradient_checkpointing": False, "activation_memory_budget": 0.5}, {"recompute_granularity": "selective"}),
        ({"gradient_checkpointing": True, "activation_memory_budget": 0.5}, {"recompute_granularity": "selective"}),
        ({"activation_memory_budget": 1}, {}),
        ({"activation_memory_budget": 0.99}, {"recompute_granularity": "selective"}),
        ({"activation_memory_budget": 0.5}, {"recompute_granularity": "selective"}),
        ({"activation_memory_budget": 0.49}, {"recompute_granularity": "full"}),
        ({"activation_memory_budget": 0}, {"recompute_granularity": "full"}),
        ({"activation_checkpointing_mode": "budget"}, {}),
        (
            {"activation_checkpointing_mode": "full", "activation_memory_budget": 0.9},
            {"recompute_granularity": "full"},
        ),
        ({"actor_num_gpus_per_node": [8, 8]}, {"num_learners_per_node": (8, 8)}),
        ({"warm_up_steps": 7}, {"warm_up_steps": 7}),
        ({"max_grad_norm": None}, {"max_grad_norm": 0.0}),
        ({"dtype": "torch.float32"}, {"model_dtype": "float32"}),
        ({"torch_dtype": "float16"}, {"model_dtype": "float16"}),
        ({"chat_template": "none"}, {"chat_template_name": "none"}),
        ({"chat_template_name": None}, {}),
        ({"add_r1_style_format_reward": True}, {"apply_r1_style_format_reward": True}),
        ({"penalty_reward_value": -10}, {"non_stop_penalty_value": -10.0}),
        ({"beaker_eval_freq": 50}, {"save_freq": 50}),
        ({"beaker_eval_freq": 50, "save_freq": 25}, {"save_freq": 25}),
        ({"kl_estimator": "kl3"}, {"kl_estimator": 2}),
        (
            {"rho_mask_tv_divergence": True, "rho_mask_sequence_level": True},
            {"rho_level": "sequence_mean", "rho_mask_level": "divergence"},
        ),
        ({"gs_checkpoint_state_dir": "gs://b/a"}, {"checkpoint_state_dir": "gs://b/a"}),
        (
            {"tools": ["code", "search"], "code_tool_api_endpoint": "http://c"},
            {"tools": ("code", "search"), "tool_configs": ('{"endpoint": "http://c"}', "{}")},
        ),
        ({"kl_estimator": "kl1"}, {"kl_estimator": 0}),
        ({"active_fill_completions": True}, {"active_sampling": True}),
        ({"no_resample_solve_rate": 0.9}, {"no_resampling_pass_rate": 0.9}),
        ({"cliprange": 0.1}, {"clip_lower": 0.1, "clip_higher": 0.1}),
        ({"cliprange": 0.1, "clip_higher": 0.3}, {"clip_lower": 0.1, "clip_higher": 0.3}),
        ({"masked_mean_denominator": 1000}, {"loss_denominator": "1000.0"}),
        ({"masked_mean_denominator": None}, {}),
        ({"accumulate_inference_batches_timeout": 1800.5}, {"rollout_timeout": 1801}),
        ({"eps": 1e-5}, {"adam_epsilon": 1e-5}),
        ({"num_evals": 10}, {"local_eval_every": 156}),
        ({"num_evals": 10, "total_episodes": 64}, {"local_eval_every": 1, "total_episodes": 64}),
        ({"async_mode": True}, {"async_steps": 1, "use_rho_correction": True}),
        ({"async_mode": False}, {}),
        ({"async_mode": True, "async_steps": 0}, {}),
        (
            {"dataset_mixer": '{"a": 1.0, "b": 200}', "dataset_train_splits": ["train", "dev"]},
            {"dataset_mixer_list": ("a", "1.0", "b", "200"), "dataset_mixer_list_splits": ("train", "dev")},
        ),
        (
            {"dataset_eval_mixer": '{"a": 1.0}', "dataset_eval_splits": ["dev"]},
            {"dataset_mixer_eval_list": ("a", "1.0"), "dataset_mixer_eval_list_splits": ("dev",)},
        ),
        ({"local_rollout_batch_size": 16}, {}),
        (
            {"local_rollout_batch_size": 12, "number_samples_per_prompt": 8, "actor_num_gpus_per_node": [8, 8]},
            {
                "num_unique_prompts_rollout": 192,
                "num_samples_per_prompt_rollout": 8,
                "num_learners_per_node": (8, 8),
            },
        ),
        ({"local_rollout_batch_size": 16, "local_mini_batch_size": 16}, {"num_mini_batches": 4}),
        ({"local_rollout_batch_size": 8, "per_device_train_batch_size": 4}, {"num_unique_prompts_rollout": 8}),
        ({"num_unique_prompts_rollout": 8, "per_device_train_batch_size": 4}, {"num_unique_prompts_rollout": 8}),
        ({"total_episodes": 6400, "max_steps": 10}, {"total_episodes": 6400, "max_tool_calls": 10}),
        (
            {"single_gpu_mode": True, "async_steps": 8, "inflight_updates": True},
            {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
        ),
        ({"reward_model_path": "owner/rm", "reward_model_multiplier": 0.0}, {}),
    ],
)
def test_open_instruct_names_mean_what_they_mean_there(given, expected):
    """A translated flag that trains something else is worse than one that is refused."""
    assert_means(given, expected)


@pytest.mark.parametrize(
    ("given", "ranks", "degree"),
    [
        ({"deepspeed_zpg": 8}, 16, 8),
        ({"deepspeed_zpg": 8}, 8, 8),
        ({"deepspeed_zpg": 8}, 6, None),
        ({"deepspeed_zpg": 1}, 16, None),
        # Tensor and pipeline ranks hold other parameters, context ranks the same.
        ({"deepspeed_zpg": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 16, None),
        ({"deepspeed_zpg": 4, "tensor_model_parallel_size": 2, "context_parallel_size": 2}, 16, 4),
        ({"fsdp_num_replicas": 2}, 8, 4),
        ({"fsdp_num_replicas": 1}, 8, 8),
        ({"fsdp_num_replicas": 1}, 1, None),
        ({"fsdp_num_replicas": 2, "fsdp_shard_degree": 4}, 8, 4),
        ({"fsdp_num_replicas": 2, "tensor_model_parallel_size": 2, "context_parallel_size": 2}, 16, 4),
        ({"fsdp_shard_degree": 2}, 8, 2),
    ],
)
def test_replicas_become_ranks_that_share_a_parameter(model, given, ranks, degree):
    """Too few ranks could not hold the model, too many would send it over the slow links that the script avoids."""
    config = from_values(model | {"deepspeed_stage": 3} | given, world_size=ranks)
    assert config.parallel.fsdp_shard_degree == degree
    assert problems(config, world_size=ranks) == []


def test_the_number_of_replicas_holds_for_the_ranks_it_was_computed_for(model):
    """Two replicas of 8 ranks are groups of 4: on 4 ranks there would be one."""
    config = from_values(model | {"zero_stage": 3, "fsdp_num_replicas": 2}, world_size=8)
    (found,) = problems(config, world_size=4)
    assert found.startswith("world_size=8 is what batch and layout were computed for, but 4 learner ranks were started")


def test_a_flag_with_the_number_of_replicas_wins_over_a_file_with_their_size(tmp_path):
    """The product rule is for one author; a sweep overrides the file by whichever name it knows."""
    path = tmp_path / "run.yaml"
    path.write_text("zero_stage: 3\nfsdp_shard_degree: 8\n")
    config = parse([str(path), "--fsdp_num_replicas", "4"], world_size=8)
    assert config.parallel.fsdp_shard_degree == 2
    assert parse([str(path), "--gradient_checkpointing", "false"]).parallel.recompute_granularity == "none"
    path.write_text("preset: trl_main\n")
    assert parse([str(path)]).parallel.recompute_granularity == "full"
    assert parse([str(path), "--gradient_checkpointing", "false"]).parallel.recompute_granularity == "none"


def test_a_share_that_cannot_be_had_is_told(model):
    """Without a line the owner would look for groups of 8 in the traffic of 4 ranks."""
    config = from_values({"deepspeed_stage": 3, "deepspeed_zpg": 8}, world_size=4)
    assert config.notes[0] == (
        "deepspeed_zpg=8 is more than the 4 data- and context-parallel ranks, so all of them share each parameter"
    )
    assert from_values({"deepspeed_zpg": 4}).notes == ("deepspeed_zpg has no effect without deepspeed_stage=3",)
    assert from_values({"deepspeed_zpg": 8}).notes == ()
    (note,) = from_values({"activation_memory_budget": 0.7}).notes
    assert note.startswith(
        "activation_memory_budget -> recompute_granularity (selective); 1: none; 0.5 or more: selective"
    )
    (note,) = from_values({"cp_strategy": "zig_zag"}).notes
    assert note.endswith("each rank always holds an early and a late part of a sequence, in zig-zag order")
    assert from_values({"fsdp_config": {"version": 2}}).notes == ("fsdp_config has no effect without fsdp",)


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (
            {"single_gpu_mode": True, "async_steps": 4},
            "async_steps is 0 in place of 4: with single_gpu_mode learner and engine take turns",
        ),
        (
            {"single_gpu_mode": True},
            "single_gpu_mode needs vllm_kv_cache_mb on a GPU, the MiB of the engine's KV cache, in place of "
            "vllm_gpu_memory_utilization; `mgrpo plan` shows what fits",
        ),
        (
            {"single_gpu_mode": True, "inflight_updates": True},
            "inflight_updates is false: with single_gpu_mode weights change between steps",
        ),
        (
            {"dataset_mixer_list": ["a", "1.0"], "dataset_mixer_list_splits": ["dev", "dev"]},
            "dataset_mixer_list_splits is dev for each dataset: it is given 2 times for 1",
        ),
        (
            {"num_unique_prompts_rollout": 8, "per_device_train_batch_size": 4},
            "per_device_train_batch_size has no effect: beside num_unique_prompts_rollout it counts packs, and a micro-batch is "
            "always one pack of pack_length tokens; the gradient is the same",
        ),
        (
            {"gradient_checkpointing": True, "activation_memory_budget": 0.5},
            "gradient_checkpointing has no effect beside activation_memory_budget, as in Open Instruct",
        ),
        (
            {"beaker_eval_freq": 50, "save_freq": 25},
            "beaker_eval_freq has no effect beside save_freq: nothing is evaluated on Beaker",
        ),
        (
            {"num_training_steps": 20000},
            "num_training_steps has no effect: total_episodes / (prompts x samples), which Open Instruct also computes, "
            "whatever is given",
        ),
        (
            {"reward_model_path": "owner/rm", "reward_model_multiplier": 0.0},
            "reward_model_path has no effect with reward_model_multiplier=0",
        ),
    ],
)
def test_what_is_not_done_as_the_script_says_is_told(given, note):
    """A script that runs differently without a line about it is misunderstood by its owner."""
    assert note in from_values(given).notes


def test_datasets_of_several_splits_need_one_for_each(model):
    """Only where all are the same does it not matter how often a split is named."""
    config = from_values(model | {"dataset_mixer_list_splits": ["train", "dev"]})
    (found,) = problems(config, world_size=1)
    assert found.startswith("dataset_mixer_list_splits has 2 entries, expected 1 or one for each of 1 datasets")


def test_an_open_instruct_denominator_wins_over_a_trl_preset():
    """`--loss_denominator` under a preset whose aggregation is fixed would otherwise be ignored."""
    for given in ({"loss_denominator": "token"}, {"loss_fn": "dapo"}):
        assert from_values({"preset": "trl_seed"} | given).loss.effective_aggregation == "token"
    assert from_values({"preset": "trl_seed", "loss_denominator": "9"}).loss.constant == 9.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size=8 is refused: a micro-batch is one pack"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size=2 needs deepspeed_stage=3"),
        (
            {"fsdp_num_replicas": 3, "world_size": 8},
            "fsdp_num_replicas=3 does not divide the 8 data- and context-parallel ranks; choose from {1, 2, 4, 8}",
        ),
        ({"fsdp_num_replicas": 0}, "fsdp_num_replicas=0 does not divide the 1 data- and context-parallel ranks"),
        (
            {"fsdp_num_replicas": 4, "fsdp_shard_degree": 4, "world_size": 8},
            "fsdp_shard_degree=4 x fsdp_num_replicas=4 must be the 8 data- and context-parallel ranks; leave one of the",
        ),
        ({"activation_memory_budget": 1.5}, "activation_memory_budget=1.5 must be in [0, 1]"),
        ({"activation_memory_budget": "nan"}, "activation_memory_budget=nan must be in [0, 1]"),
        (
            {"activation_checkpointing_mode": "selected_modules"},
            "activation_checkpointing_mode=selected_modules is refused: OLMo-core's modules have no counterparts here; use",
        ),
        (
            {"eval_on_step_0": True, "local_eval_every": -1},
            "eval_on_step_0=true needs local_eval_every above 0, got -1",
        ),
        ({"max_steps": 10}, "max_steps=10 is refused: without tools there are no calls to limit"),
        ({"masked_mean_axis": 0}, "masked_mean_axis must be 1 or none, got"),
        (
            {"local_mini_batch_size": 8},
            "local_mini_batch_size=8 is a part of local_rollout_batch_size, which is not given",
        ),
        (
            {"local_rollout_batch_size": 6, "local_mini_batch_size": 16},
            "local_mini_batch_size=16 must divide the 24 completions of a rank, local_rollout_batch_size=6 prompts x 4",
        ),
        ({"local_rollout_batch_size": 0}, "local_rollout_batch_size=0 must be at least 1"),
        ({"num_evals": 0}, "num_evals=0 must be at least 1; local_eval_every=-1 evaluates only before and after"),
        ({"dataset_mixer": "rows.json"}, "dataset_mixer=rows.json must be a JSON object"),
        (
            {"reward_model_path": "owner/rm"},
            "reward_model_path=owner/rm is refused: give the reward model in reward_funcs",
        ),
        ({"fill_completions": True}, "active_sampling samples others in place of those left out"),
    ],
)
def test_what_open_instruct_refuses_is_refused_in_its_words(given, words):
    """The user knows the other trainer's names; a sentence about ours alone would not be understood."""
    assert words in "\n".join(problems_of(given))


DEFAULTS = json.loads(Path(__file__).with_name("open_instruct_defaults.json").read_text())
"""Of the trainer's flags; tools/peers/record_open_instruct.py reads them from Open Instruct's sources."""
MAIN = from_values({}, preset="open_instruct_main")


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_of_open_instruct_is_the_presets(name):
    """A script that leaves a flag out must train as it does there."""
    given = from_values({name: DEFAULTS[name]}, preset="open_instruct_main")
    is_kept = name in KEPT["open_instruct_main"]
    assert (flat(given) != flat(MAIN) or "max_possible_score" in given.provenance.expected) == is_kept
    assert KEPT["open_instruct_main"].keys() <= DEFAULTS.keys()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("math_dapo=math", ("math=math_open_instruct", "math_dapo=math_open_instruct")),
        ("code=code_stdio", ("math=math_open_instruct", "code=code_stdio")),
        ("math=math", ("math=math",)),
        ("Math=strict_math", ("Math=strict_math",)),
    ],
)
def test_a_scripts_verifier_goes_with_the_presets(given, expected):
    """`--remap_verifier math_dapo=math` means Open Instruct's math; alone it would be read strictly, without a word."""
    config = parse(["--preset", "open_instruct_main", "--remap_verifier", given])
    assert config.reward.remap_verifier == expected
    assert any("of preset open_instruct_main stays" in note for note in config.notes) == (len(expected) == 2)
    assert parse(["--remap_verifier", given]).reward.remap_verifier == (given,)


def test_a_repository_without_an_upload_is_said():
    """Open Instruct uploads by default; a script that only names the owner expects to find its model there."""
    said = "hf_entity: nothing is uploaded to me/grpo__42, because push_to_hub is true by default in Open Instruct"
    for flags, count in ((["--hf_entity", "me"], 1), (["--hf_entity", "me", "--push_to_hub", "false"], 0), ([], 0)):
        notes = parse(["--preset", "open_instruct_main", *flags]).notes
        assert sum(note.startswith(said) for note in notes) == count

"""What the names of Open Instruct, TRL and old scripts come to, and who wins."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError, LossConfig, from_values, load_file, parse, to_yaml
from mgrpo.config.derived import layout_of
from mgrpo.config.dump import derived_lines
from mgrpo.config.fields import flat, settings
from mgrpo.config.peers.presets import PRESET_NOTES, PRESETS
from mgrpo.config.validate import problems

TRL_RHO = {
    "use_rho_correction": True,
    "rho_level": "sequence_sum",
    "rho_mask_level": "sequence_sum",
    "rho_clamp_lower_bound": 0.0,
    "rho_clamp_upper_bound": 0.0,
    "rho_mask_lower_bound": 0.0,
    "rho_mask_upper_bound": 3.0,
}


def changed(config):
    """Settings that differ from the defaults."""
    default = flat(from_values({}))
    return {name: value for name, value in flat(config).items() if value != default[name]}


def problems_of(values, **options):
    with pytest.raises(ConfigError) as caught:
        from_values(values, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"epsilon": 0.3}, {"clip_lower": 0.3, "clip_higher": 0.3}),
        ({"epsilon": 0.1, "epsilon_high": 0.28}, {"clip_lower": 0.1, "clip_higher": 0.28}),
        ({"epsilon_high": 0.28}, {"clip_higher": 0.28}),
        ({"epsilon": 0.1, "clip_higher": 0.28}, {"clip_lower": 0.1, "clip_higher": 0.28}),
        ({"epsilon": 0.3, "epsilon_high": None}, {"clip_lower": 0.3, "clip_higher": 0.3}),
        (
            {"loss_type": "cispo", "epsilon_high": 5},
            {"policy_loss": "cispo", "aggregation": "token", "clip_higher": 4.0},
        ),
        ({"loss_fn": "cispo", "clip_higher": 3}, {"policy_loss": "cispo", "clip_higher": 3.0}),
        ({"loss_fn": "dapo", "loss_denominator": "1000"}, {"loss_denominator": "1000"}),
        ({"loss_type": "grpo"}, {"aggregation": "seq_mean"}),
        ({"loss_type": "bnpo"}, {"aggregation": "local_token"}),
        ({"loss_type": "dr_grpo"}, {"aggregation": "dr_grpo"}),
        ({"loss_type": "dapo"}, {"aggregation": "token"}),
        ({"loss_type": "sapo"}, {"policy_loss": "sapo", "aggregation": "seq_mean"}),
        ({"loss_type": "vespo"}, {"policy_loss": "vespo", "aggregation": "token"}),
        ({"loss_type": "luspo"}, {"aggregation": "luspo", "ratio_level": "sequence"}),
        ({"importance_sampling_level": "sequence"}, {"ratio_level": "sequence"}),
        ({"masked_mean_axis": 1}, {"aggregation": "seq_mean"}),
        ({"masked_mean_axis": None}, {"aggregation": "token"}),
        (
            {"scale_rewards": True},
            {"advantage_ddof": 1, "advantage_eps": 1e-4},
        ),
        (
            {"scale_rewards": "none"},
            {"advantage_normalization_type": "centered", "advantage_ddof": 1, "advantage_eps": 1e-4},
        ),
        (
            {"scale_rewards": "batch"},
            {"advantage_normalization_type": "batch_std", "advantage_ddof": 1, "advantage_eps": 1e-4},
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            {"advantage_normalization_type": "gdpo", "advantage_ddof": 1, "advantage_eps": 1e-4},
        ),
        ({"multi_objective_aggregation": "sum_then_normalize"}, {}),
        (
            {"truncated_importance_sampling_ratio_cap": 4},
            {"use_rho_correction": True, "rho_clamp_upper_bound": 4.0},
        ),
        ({"truncated_importance_sampling_ratio_cap": 0}, {}),
        ({"rho_mask_sequence_level": True}, {"rho_level": "sequence_mean", "rho_mask_level": "sequence_mean"}),
        ({"vllm_importance_sampling_correction": True}, TRL_RHO),
        ({"vllm_importance_sampling_correction": False, "vllm_importance_sampling_clip_max": 2}, {}),
        ({"vllm_importance_sampling_cap": 5}, TRL_RHO | {"rho_mask_upper_bound": 5.0}),
        (
            {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_min": 0.5},
            TRL_RHO | {"rho_mask_upper_bound": 0.0, "rho_clamp_lower_bound": 0.5, "rho_clamp_upper_bound": 3.0},
        ),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2},
            TRL_RHO | {"rho_level": "token", "rho_mask_level": "token", "rho_mask_upper_bound": 2.0},
        ),
        ({"use_bias_correction_kl": True}, {"kl_bias_correction": True}),
        ({"no_filter_zero_std_samples": False}, {"filter_zero_std_samples": True}),
        ({"num_iterations": 2}, {"num_epochs": 2}),
        ({"num_generations": 8}, {"num_samples_per_prompt_rollout": 8}),
        ({"number_samples_per_prompt": 8}, {"num_samples_per_prompt_rollout": 8}),
        ({"sync_ref_model": True, "ref_model_sync_steps": 64}, {"ref_policy_update_freq": 64}),
        (
            {"sync_ref_model": True, "num_mini_batches": 4, "num_epochs": 2},
            {"ref_policy_update_freq": 64, "num_mini_batches": 4, "num_epochs": 2},
        ),
        ({"sync_ref_model": False, "ref_model_sync_steps": 64}, {}),
        ({"ref_model_mixup_alpha": 0.9}, {"alpha": 0.9}),
        ({"deepspeed_stage": 3}, {"zero_stage": 3}),
        (
            {"deepspeed_stage": 3, "sequence_parallel_size": 2},
            {"zero_stage": 3, "context_parallel_size": 2, "cp_comm_type": "a2a"},
        ),
        (
            {"deepspeed_stage": 3, "sequence_parallel_size": 2, "cp_comm_type": "all_gather"},
            {"zero_stage": 3, "context_parallel_size": 2},
        ),
        ({"sequence_parallel_size": 1}, {}),
        ({"cp_degree": 2}, {"context_parallel_size": 2}),
        ({"cp_degree": 2, "cp_strategy": "llama3"}, {"context_parallel_size": 2}),
        ({"cp_degree": 2, "cp_strategy": "zig_zag"}, {"context_parallel_size": 2}),
        ({"cp_degree": 2, "cp_strategy": "ulysses"}, {"context_parallel_size": 2, "cp_comm_type": "a2a"}),
        ({"deepspeed_stage": 0}, {"zero_stage": 0}),
        ({"deepspeed_stage": 2, "deepspeed_zpg": 8}, {"zero_stage": 2}),
        ({"deepspeed_stage": 3, "deepspeed_zpg": 1}, {"zero_stage": 3}),
        ({"deepspeed_offload_optimizer": True}, {"optimizer_cpu_offload": True}),
        ({"fsdp": "full_shard auto_wrap"}, {"zero_stage": 3}),
        ({"fsdp": ["shard_grad_op", "auto_wrap"]}, {"zero_stage": 2}),
        ({"fsdp": "hybrid_shard", "fsdp_shard_degree": 2}, {"zero_stage": 3, "fsdp_shard_degree": 2}),
        ({"fsdp": True}, {"zero_stage": 3}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "xla": False}}, {"zero_stage": 2}),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_activation_checkpointing": "true"}},
            {"zero_stage": 3, "recompute_granularity": "full"},
        ),
        ({"fsdp": "false", "fsdp_config": {"cpu_offload": True}}, {}),
        ({"gradient_checkpointing": True}, {"recompute_granularity": "full"}),
        ({"gradient_checkpointing": False}, {}),
        (
            {"gradient_checkpointing": False, "recompute_granularity": "selective"},
            {"recompute_granularity": "selective"},
        ),
        ({"gradient_checkpointing": True, "activation_memory_budget": 1}, {"recompute_granularity": "full"}),
        ({"gradient_checkpointing": False, "activation_memory_budget": 0.5}, {"recompute_granularity": "selective"}),
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
        ({"max_completion_length": 128}, {"response_length": 128}),
        (
            {"max_completion_length": 1024, "max_prompt_length": 512},
            {
                "response_length": 1024,
                "max_prompt_token_length": 512,
                "pack_length": 1536,
                "overlong_prompt_policy": "truncate_left",
            },
        ),
        (
            {"max_completion_length": 1024, "pack_length": 4096},
            {"response_length": 1024, "pack_length": 4096},
        ),
        ({"warmup_steps": 20}, {"warm_up_steps": 20}),
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1}),
        ({"warm_up_steps": 7}, {"warm_up_steps": 7}),
        ({"max_grad_norm": None}, {"max_grad_norm": 0.0}),
        ({"bf16": False}, {"model_dtype": "float32"}),
        ({"dtype": "torch.float32"}, {"model_dtype": "float32"}),
        ({"bf16": None, "dtype": None, "num_generations": None}, {}),
        ({"chat_template": "none"}, {"chat_template_name": "none"}),
        ({"chat_template_name": None}, {}),
        ({"add_r1_style_format_reward": True}, {"apply_r1_style_format_reward": True}),
        ({"penalty_reward_value": -10}, {"non_stop_penalty_value": -10.0}),
        ({"beaker_eval_freq": 50}, {"save_freq": 50}),
        ({"save_steps": 50, "num_mini_batches": 4}, {"save_freq": 13, "num_mini_batches": 4}),
        ({"save_strategy": "no"}, {"save_freq": -1}),
        ({"eval_strategy": "steps", "eval_steps": 30}, {"local_eval_every": 30}),
        ({"eval_strategy": "steps"}, {"local_eval_every": 10}),
        ({"eval_strategy": "no", "eval_steps": 30}, {"local_eval_every": -1}),
        ({"num_generations_eval": 4}, {"eval_pass_at_k": 4}),
        ({"ddp_timeout": 1810}, {"backend_timeout": 31}),
        ({"max_steps": 5}, {}),
        (
            {"max_steps": 100, "num_generations": 8},
            {"num_samples_per_prompt_rollout": 8, "total_episodes": 12_800},
        ),
        ({"max_steps": -1, "num_generations": 4}, {}),
        ({"max_steps": 100, "num_train_epochs": 3}, {"total_episodes": 6400}),
        ({"reward_weights": [1, 0.5]}, {"reward_weights": (1.0, 0.5)}),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}, {}),
    ],
)
def test_other_names_mean_what_they_mean_there(given, expected):
    """A translated flag that trains something else is worse than one that is refused."""
    default = flat(from_values({}))
    assert changed(from_values(given)) == {name: value for name, value in expected.items() if default[name] != value}


@pytest.mark.parametrize(
    ("given", "ranks", "prompts", "parts"),
    [
        ({"num_generations": 8, "generation_batch_size": 64}, 1, 8, 8),
        ({"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}, 1, 8, 1),
        ({"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}, 4, 32, 1),
        ({"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_generations": 8}, 1, 8, 4),
        ({"generation_batch_size": 64, "per_device_train_batch_size": 4, "num_generations": 8}, 2, 8, 8),
        ({"generation_batch_size": 64, "per_device_train_batch_size": 4}, 2, 16, 8),
        # A quarter of the ranks hold different data.
        (
            {
                "generation_batch_size": 64,
                "per_device_train_batch_size": 4,
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
            },
            8,
            16,
            8,
        ),
        # Without TRL's batch names the word is Open Instruct's.
        ({"num_generations": 8, "num_unique_prompts_rollout": 5, "per_device_train_batch_size": 1}, 1, 5, 1),
        ({"num_generations": 8}, 1, 16, 1),
        ({"preset": "trl_main"}, 4, 4, 1),
        ({"preset": "trl_main", "num_unique_prompts_rollout": 5}, 1, 5, 1),
        (
            {"preset": "trl_main", "num_unique_prompts_rollout": 16, "per_device_train_batch_size": 4},
            2,
            16,
            16,
        ),
        (
            {
                "preset": "trl_seed",
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 4,
                "world_size": 2,
            },
            1,
            8,
            1,
        ),
    ],
)
def test_the_batch_of_trl_becomes_prompts_and_mini_batches(given, ranks, prompts, parts):
    """A wrong number would silently train with another batch size or another number of optimizer steps."""
    config = from_values(given, world_size=ranks)
    assert (config.rollout.num_unique_prompts_rollout, config.algorithm.num_mini_batches) == (prompts, parts)
    # TRL's bnpo averages over the sequences of one device.
    in_trl = "num_unique_prompts_rollout" not in given or "preset" in given
    assert config.loss.local_batch_size == (given.get("per_device_train_batch_size", 8) if in_trl else 8)


@pytest.fixture
def model(tmp_path):
    """Settings of a run that lacks nothing."""
    (tmp_path / "config.json").write_text("{}")
    return {"model_name_or_path": str(tmp_path), "dataset_mixer_list": ["a", "1.0"]}


def test_the_batch_holds_for_the_ranks_it_was_computed_for(model):
    """A config made on a login node for 1 rank and started on 8 would have another batch than the script says."""
    config = from_values(model | {"generation_batch_size": 64, "num_generations": 8}, world_size=2)
    assert problems(config, world_size=2) == []
    (found,) = problems(config, world_size=4)
    assert found.startswith("world_size=2 is what batch and layout were computed for, but 4 learner ranks were started")


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
    ("given", "words"),
    [
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "say the same; give one of them"),
        # (24 % 8) x 4 is 0, but 24 is not a multiple of 8 x 4.
        (
            {"generation_batch_size": 24, "per_device_train_batch_size": 8, "world_size": 4},
            "generation_batch_size=24 must be a multiple of per_device_train_batch_size 8 x 4 data-parallel ranks = 32",
        ),
        (
            {"generation_batch_size": 16, "num_generations": 3},
            "generation_batch_size=16 must be a multiple of num_generations=3; num_generations may be 2, 4, 8, 16",
        ),
        (
            {"generation_batch_size": 24, "gradient_accumulation_steps": 2},
            "3 micro-steps (per_device_train_batch_size 8 x 1 data-parallel ranks), which gradient_accumulation_steps=2",
        ),
        ({"num_generations": 1}, "num_generations=1 must be at least 2"),
        ({"generation_batch_size": -8}, "generation_batch_size=-8 must be at least 1"),
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size=8 is refused: a micro-batch is one pack"),
        (
            {"eval_strategy": "steps", "num_generations": 3},
            "per_device_eval_batch_size x data-parallel ranks = 8 must be a multiple of the 3 completions",
        ),
        ({"eval_strategy": "epoch"}, "eval_strategy=epoch does not exist; use steps with local_eval_every"),
        ({"save_strategy": "epoch"}, "save_strategy=epoch does not exist; use steps with save_freq"),
        ({"save_steps": 0.1}, "save_steps=0.1 is a share of the run; give save_freq"),
        ({"eval_steps": "inf"}, "eval_steps=inf must be a finite number of steps"),
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
        (
            {"fsdp": "hybrid_shard"},
            "fsdp=hybrid_shard does not say how many ranks share each parameter; give --fsdp_shard",
        ),
        (
            {"fsdp": "no_shard"},
            "fsdp=no_shard is refused: choose from full_shard, shard_grad_op, hybrid_shard; use zero_stage=0",
        ),
        (
            {"fsdp": "full_shard offload"},
            "fsdp=offload is refused: choose from full_shard, shard_grad_op, hybrid_shard; weights",
        ),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "optimizer_cpu_offload moves the optimizer's states"),
        ({"fsdp": True, "fsdp_config": "fsdp.json"}, "fsdp_config=fsdp.json must be a JSON object"),
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
        ({"loss_type": "cispo"}, "loss_type=cispo needs epsilon_high"),
        ({"loss_type": "cispo", "epsilon": 0.2}, "--epsilon_high 5.0"),
        ({"max_prompt_length": None}, "max_prompt_length=none is refused: a length needs a limit here"),
        ({"max_steps": 10}, "max_steps=10 is refused: tools and environments do not exist yet"),
        ({"num_train_epochs": 3}, "set total_episodes to passes x rows x num_samples_per_prompt_rollout"),
        (
            {"vllm_importance_sampling_clip_min": 3, "vllm_importance_sampling_clip_max": 3},
            "vllm_importance_sampling_clip_min=3 must be below vllm_importance_sampling_clip_max=3",
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "vllm_importance_sampling_mode=token_truncate needs a bound",
        ),
        (
            {"vllm_importance_sampling_cap": 2, "vllm_importance_sampling_clip_max": 3},
            "vllm_importance_sampling_cap=2 and vllm_importance_sampling_clip_max=3 are the same setting",
        ),
        ({"vllm_mode": "colocated"}, "vllm_mode must be one of server, colocate, got 'colocated'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        ({"masked_mean_axis": 0}, "masked_mean_axis must be 1 or none, got"),
        ({"preset": "dpo"}, "preset=dpo does not exist; choose from mgrpo, seed, open_instruct_main"),
    ],
)
def test_what_the_other_trainer_refuses_is_refused_in_its_words(given, words):
    """The user knows the other trainer's names; a sentence about ours alone would not be understood."""
    assert words in "\n".join(problems_of(given))


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
            {"gradient_checkpointing": True, "activation_memory_budget": 0.5},
            "activation_memory_budget means recompute_granularity=selective, but gradient_checkpointing means full",
        ),
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


def test_flags_with_trl_batch_names_win_over_a_saved_file(tmp_path):
    """config.yaml of a run holds every setting, so a flag must also override its prompts and mini-batches."""
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(from_values({})))
    flags = ["--num_generations", "8", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4"]
    config = parse([str(path), *flags])
    assert (config.rollout.num_unique_prompts_rollout, config.algorithm.num_mini_batches) == (4, 1)


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
        ("mgrpo", (1, 1.0, 0.05, 0.2, 4, "standard", False)),
        ("seed", (1, 0.7, 0.05, 0.2, 4, "standard", False)),
        ("open_instruct_main", (42, 1.0, 0.05, 0.272, 4, "centered", True)),
        ("trl_seed", (42, 1.0, 0.0, 0.2, 8, "standard", False)),
        ("trl_main", (42, 1.0, 0.0, 0.2, 8, "standard", True)),
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
    ) == expected
    assert config.rollout.async_steps == 0


def test_an_open_instruct_denominator_wins_over_a_trl_preset():
    """`--loss_denominator` under a preset whose aggregation is fixed would otherwise be ignored."""
    for given in ({"loss_denominator": "token"}, {"loss_fn": "dapo"}):
        assert from_values({"preset": "trl_seed"} | given).loss.effective_aggregation == "token"
    assert from_values({"preset": "trl_seed", "loss_denominator": "9"}).loss.constant == 9.0


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
        "rho_mask_upper_bound": 6.1, "rho_mask_tv_divergence": True, "off_policy_mask_threshold": 0.6,
        "loss_denominator": "9", "local_batch_size": 3,
    }  # fmt: skip
    found = from_values(given).loss
    assert [name for name, value in given.items() if getattr(found, name) != value] == []
    plain = LossConfig()
    assert [name for name in LossConfig.__slots__ if getattr(found, name) == getattr(plain, name)] == []
    assert from_values({}).loss == plain
    by_number = from_values({"loss_denominator": "12.5"}).loss
    assert (by_number.effective_aggregation, by_number.constant) == ("constant", 12.5)

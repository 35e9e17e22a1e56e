"""What TRL's names come to, and what is refused of them."""

from __future__ import annotations

import json

import pytest
from alias_cases import assert_means, problems_of

from mgrpo.config import to_yaml
from mgrpo.config.validate import problems
from mgrpo.moving import from_values, parse

TRL_RHO = {
    "use_rho_correction": True,
    "rho_level": "sequence_sum",
    "rho_mask_level": "sequence_sum",
    "rho_clamp_lower_bound": 0.0,
    "rho_clamp_upper_bound": 0.0,
    "rho_mask_lower_bound": 0.0,
    "rho_mask_upper_bound": 3.0,
}


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
        ({"loss_type": "grpo"}, {"aggregation": "seq_mean"}),
        ({"loss_type": "bnpo"}, {"aggregation": "local_token"}),
        ({"loss_type": "dr_grpo"}, {"aggregation": "dr_grpo"}),
        ({"loss_type": "dapo"}, {"aggregation": "token"}),
        ({"loss_type": "sapo"}, {"policy_loss": "sapo", "aggregation": "seq_mean"}),
        ({"loss_type": "vespo"}, {"policy_loss": "vespo", "aggregation": "token", "rho_level": "token"}),
        ({"loss_type": "luspo"}, {"aggregation": "luspo", "ratio_level": "token"}),
        ({"importance_sampling_level": "sequence"}, {"ratio_level": "sequence"}),
        (
            {"scale_rewards": True},
            {"advantage_std": "trl"},
        ),
        (
            {"scale_rewards": "none"},
            {"advantage_normalization_type": "centered", "advantage_std": "trl"},
        ),
        (
            {"scale_rewards": "batch"},
            {"advantage_normalization_type": "batch_std", "advantage_std": "trl"},
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            {"advantage_normalization_type": "gdpo", "advantage_std": "trl"},
        ),
        ({"multi_objective_aggregation": "sum_then_normalize"}, {}),
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
        ({"num_iterations": 2}, {"num_epochs": 2}),
        ({"num_generations": 8}, {"num_samples_per_prompt_rollout": 8}),
        ({"sync_ref_model": True, "ref_model_sync_steps": 64}, {"ref_policy_update_freq": 64}),
        (
            {"sync_ref_model": True, "num_mini_batches": 4, "num_epochs": 2},
            {"ref_policy_update_freq": 64, "num_mini_batches": 4, "num_epochs": 2},
        ),
        ({"sync_ref_model": False, "ref_model_sync_steps": 64}, {}),
        ({"ref_model_mixup_alpha": 0.9}, {"alpha": 0.9}),
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
        ({"bf16": False}, {"model_dtype": "float32"}),
        ({"fp16": True}, {"model_dtype": "float16"}),
        ({"bf16": False, "fp16": True}, {"model_dtype": "float16"}),
        ({"bf16": True, "fp16": False}, {"model_dtype": "bfloat16"}),
        ({"bf16": False, "fp16": False}, {"model_dtype": "float32"}),
        ({"fp16": False}, {}),
        ({"bf16": None, "dtype": None, "num_generations": None}, {}),
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
def test_trl_names_mean_what_they_mean_there(given, expected):
    """A translated flag that trains something else is worse than one that is refused."""
    assert_means(given, expected)


@pytest.mark.parametrize(
    ("given", "ranks", "prompts", "parts"),
    [
        ({"num_generations": 8, "generation_batch_size": 64}, 1, 8, 8),
        ({"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}, 1, 8, 1),
        ({"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}, 4, 32, 1),
        ({"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_generations": 8}, 1, 8, 4),
        # Four generation batches of the same weights in one optimizer step.
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 8, "num_generations": 8}, 1, 8, 1),
        ({"generation_batch_size": 32, "gradient_accumulation_steps": 8, "num_generations": 8}, 2, 16, 1),
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


def test_the_batch_holds_for_the_ranks_it_was_computed_for(model):
    """A config made on a login node for 1 rank and started on 8 would have another batch than the script says."""
    config = from_values(model | {"generation_batch_size": 64, "num_generations": 8}, world_size=2)
    assert problems(config, world_size=2) == []
    (found,) = problems(config, world_size=4)
    assert found.startswith("world_size=2 is what batch and layout were computed for, but 4 learner ranks were started")


def test_flags_with_trl_batch_names_win_over_a_saved_file(tmp_path):
    """config.yaml of a run holds every setting, so a flag must also override its prompts and mini-batches."""
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(from_values({})))
    flags = ["--num_generations", "8", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "4"]
    config = parse([str(path), *flags])
    assert (config.rollout.num_unique_prompts_rollout, config.algorithm.num_mini_batches) == (4, 1)


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
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 3}, "an optimizer step would mix two batches"),
        (
            {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "num_iterations": 2},
            "an optimizer step would mix two batches",
        ),
        ({"num_generations": 1}, "num_generations=1 must be at least 2"),
        ({"generation_batch_size": -8}, "generation_batch_size=-8 must be at least 1"),
        (
            {"eval_strategy": "steps", "num_generations": 3},
            "per_device_eval_batch_size x data-parallel ranks = 8 must be a multiple of the 3 completions",
        ),
        ({"save_strategy": "best"}, "save_strategy=best does not exist; use steps with save_freq"),
        (
            {"num_train_epochs": 2, "total_episodes": 640},
            "num_train_epochs=2 and total_episodes (argument) both say how long the run is; keep one of them",
        ),
        ({"eval_steps": "inf"}, "eval_steps=inf must be a finite number of steps"),
        (
            {"fsdp": "hybrid_shard"},
            "fsdp=hybrid_shard does not say how many ranks share each parameter; give fsdp_shard",
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
        ({"loss_type": "cispo"}, "loss_type=cispo needs epsilon_high"),
        ({"loss_type": "cispo", "epsilon": 0.2}, "is usual: epsilon_high=5.0"),
        ({"max_prompt_length": None}, "max_prompt_length=none is refused: a length needs a limit here"),
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
        ({"vllm_mode": "colocated"}, "vllm_mode must be one of ray, server, colocate, got 'colocated'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        (
            {"bf16": True, "fp16": True},
            "bf16 means model_dtype=bfloat16, but fp16 means float16 (",
        ),
    ],
)
def test_what_trl_refuses_is_refused_in_its_words(given, words):
    """The user knows the other trainer's names; a sentence about ours alone would not be understood."""
    assert words in "\n".join(problems_of(given))


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ({"vllm_server_host": "10.0.0.1", "vllm_server_port": 9000}, ("http://10.0.0.1:9000",)),
        ({"vllm_server_host": "0.0.0.0"}, ("http://127.0.0.1:8000",)),
        ({"vllm_server_port": 9000}, ("http://127.0.0.1:9000",)),
        (
            {"vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_base_url": "http://a:1"},
            ("http://a:1",),
        ),
        ({"vllm_server_base_url": "http://a:1,http://b:2"}, ("http://a:1", "http://b:2")),
    ],
)
def test_servers_are_named_as_in_trl(given, urls):
    """By address, or by host and port; each is an engine."""
    config = from_values({"vllm_mode": "server", **given})
    assert config.engine.vllm_server_base_url == urls and config.engine.vllm_num_engines == len(urls)


def test_the_defaults_of_trl_do_not_ask_for_a_server():
    """TRL writes them into every configuration that it saves."""
    written = {
        "vllm_mode": "colocate",
        "vllm_server_base_url": None,
        "vllm_server_host": "0.0.0.0",
        "vllm_server_port": 8000,
        "vllm_server_timeout": 240.0,
    }
    config = from_values(written)
    assert not config.notes and not config.engine.vllm_server_base_url and config.engine.vllm_num_engines == 1
    (note,) = from_values({**written, "vllm_server_host": "10.0.0.1"}).notes
    assert note == "vllm_server_host has no effect without vllm_mode=server"


ZERO = {"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}, "bf16": {"enabled": "auto"}}


def test_a_configuration_of_deepspeed_is_read(tmp_path):
    """TRL's scripts hand over the file that accelerate wrote; what it says of stage and offload exists here."""
    assert_means({"deepspeed": ZERO}, {"zero_stage": 2})
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}))
    assert_means({"deepspeed": str(path)}, {"zero_stage": 1, "optimizer_cpu_offload": True})
    assert_means({"deepspeed": None}, {})
    for given, words in (
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "offload_param is refused: weights stay",
        ),
        ({"zero_optimization": {"stage": "auto"}}, "stage=auto must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer to nvme is refused"),
        ({"zero_optimization": 3}, "must be a JSON object, or the path of a file of one"),
        ("missing.json", "deepspeed=missing.json must be a JSON object, or the path of a file of one"),
    ):
        assert any(words in problem for problem in problems_of({"deepspeed": given}))

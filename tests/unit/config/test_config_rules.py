"""The rules: each fires on its mistake with its sentence, and on nothing else."""

from __future__ import annotations

import pytest

from mgrpo.config import Config, ConfigError
from mgrpo.config.validate import problems, too_few_prompts
from mgrpo.moving import from_values, parse


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return str(folder)


def found_in(model, values, *, world_size=1, **context):
    base = {"model_name_or_path": model, "dataset_mixer_list": ["a", "1.0"], "output_dir": f"{model}/out"}
    try:
        config = from_values(base | values, world_size=world_size)
    except ConfigError as err:
        return list(err.problems)
    return problems(config, world_size=world_size, **context)


RHO = {"use_rho_correction": True}
OFF = {"use_rho_correction": False}
RULES = [
    (
        "R1",
        {"use_vllm_logprobs": True, "use_rho_correction": True},
        "use_vllm_logprobs=true makes the engine's logprobs",
    ),
    ("R1", {"use_vllm_logprobs": True, "preset": "open_instruct_main"}, "set one of them to false"),
    ("R1", {"use_vllm_logprobs": True, "truncated_importance_sampling_ratio_cap": 2}, "use_vllm_logprobs=true makes"),
    ("R2", {"loss_denominator": "0"}, "loss_denominator='0' must be token or a finite number above 0"),
    ("R2", {"loss_denominator": "nan"}, "loss_denominator='nan' must be token or"),
    ("R2", {"loss_denominator": "many"}, "loss_denominator='many' must be token or"),
    ("R3", {"checkpoint_state_dir": "/states"}, "checkpoint_state_dir=/states needs checkpoint_state_freq above"),
    ("R3", {"checkpoint_state_dir": "/s", "checkpoint_state_freq": 0}, "needs checkpoint_state_freq above 0, got 0"),
    ("R3", {"gs_checkpoint_state_dir": "gs://b/s"}, "(checkpoint_state_dir was given as gs_checkpoint_state_dir)"),
    ("R3", {"gs_bucket_path": "gs://b", "checkpoint_state_dir": "s"}, "checkpoint_state_dir=gs://b/s needs checkpoint"),
    ("R3", {"checkpoint_state_freq": 5, "checkpoint_state_dir": ""}, "checkpoint_state_dir is empty; name a folder"),
    ("R3", {"keep_last_n_checkpoints": 0}, "keep_last_n_checkpoints=0 would keep no state"),
    ("R3", {"keep_last_n_checkpoints": -2}, "keep_last_n_checkpoints=-2 must be at least -1"),
    ("R5", {"load_ref_policy": False}, "beta=0.05 needs the reference model, but load_ref_policy=false"),
    ("R5", {"load_ref_policy": False, "beta": 0, "log_ref_kl": True}, "log_ref_kl=true needs the reference model"),
    (
        "R5",
        {"ref_policy_update_freq": 4, "beta": 0},
        "ref_policy_update_freq=4 updates a reference model, which is not loaded",
    ),
    ("sync", {"sync_ref_model": True, "beta": 0}, "(ref_policy_update_freq was given as sync_ref_model)"),
    ("profile", {"profile_steps": [3, 0]}, "profile_steps: 0 is no step of this run, which has steps 1 to"),
    ("profile", {"profile_steps": [10**9]}, "profile_steps: 1000000000 is no step of this run, which has steps 1 to"),
    ("servers", {"vllm_mode": "server"}, "vllm_mode=server needs vllm_server_base_url, the addresses of vLLM servers"),
    ("servers", {"vllm_server_base_url": ["http://a:1"]}, "is used with vllm_mode=server, but it is ray; change it"),
    (
        "servers",
        {"vllm_mode": "server", "vllm_server_base_url": ["http://a:1", "http://a:1/"]},
        "names a server twice; each of them is one engine",
    ),
    (
        "servers",
        {"vllm_mode": "server", "vllm_server_base_url": ["http://a:1"], "vllm_num_engines": 2},
        "vllm_num_engines=2 differs from the 1 addresses in vllm_server_base_url",
    ),
    (
        "servers",
        {"vllm_mode": "server", "vllm_server_base_url": ["http://a:1"], "vllm_data_parallel_size": 2},
        "vllm_data_parallel_size=2 with vllm_mode=server is for a mixture and vllm_enable_expert_parallel=true; start 2 times as many servers",
    ),
    ("servers", {"vllm_server_timeout": 0}, "vllm_server_timeout=0.0 must be above 0 and finite"),
    ("old names", {"accumulate_inference_batches_timeout": float("nan")}, "rollout_timeout=nan must be a whole number"),
    ("R6", {"pack_length": 511}, "pack_length=511 cannot hold max_prompt_token_length 256 + response_length 256"),
    ("R7", {"num_samples_per_prompt_rollout": 0}, "num_samples_per_prompt_rollout=0 must be at least 1"),
    (
        "R7",
        {"num_samples_per_prompt_rollout": 1, "filter_zero_std_samples": True},
        "num_samples_per_prompt_rollout=1 makes every group's rewards equal",
    ),
    (
        "R7",
        {"num_samples_per_prompt_rollout": 1, "num_unique_prompts_rollout": 1, "filter_zero_std_samples": False},
        "num_samples_per_prompt_rollout=1 compares completions within the batch, but num_unique_prompts_rollout=1",
    ),
    (
        "R7",
        {"advantage_normalization_type": "reinforce_plus_plus"},
        "advantage_normalization_type=reinforce_plus_plus compares all completions of the batch",
    ),
    (
        "R7",
        {"advantage_normalization_type": "rlo"},
        "advantage_normalization_type=rlo is unknown; choose one of standard, centered, batch_std, rloo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, gdpo, or name a function of yours",
    ),
    (
        "R8",
        {"active_sampling": True, "filter_zero_std_samples": False},
        "active_sampling=true replaces the groups that filter_zero_std_samples leaves out, but that is false",
    ),
    (
        "cache",
        {"vllm_kv_cache_dtype": "fp8", "use_rho_correction": False},
        "vllm_kv_cache_dtype=fp8 samples from a policy with rounded keys and values, which needs a correction: use_rho_corr",
    ),
    (
        "cache",
        {"use_fp8_kv_cache": True, "truncated_importance_sampling_ratio_cap": 0},
        "vllm_kv_cache_dtype=fp8 samples from a policy with rounded keys and values, which needs a correction",
    ),
    ("cache", RHO | {"vllm_kv_cache_dtype": "fp8", "rho_clamp_upper_bound": 0}, "which needs a correction"),
    (
        "cache",
        {"vllm_kv_cache_dtype": "fp8_e5m2", "use_vllm_logprobs": True, "policy_loss": "reinforce"},
        "a correction, and policy_loss=reinforce has no ratio to which use_vllm_logprobs=true could matter; use use_rho",
    ),
    (
        "cache",
        {"vllm_kv_cache_dtype": "fp8", "async_steps": 1, "use_rho_correction": False},
        "a step older and vllm_kv_cache_dtype=fp8 samples from a policy with rounded keys and values, which needs a corr",
    ),
    (
        "async",
        OFF | {"async_steps": 2},
        "async_steps=2 trains on tokens of policies up to 2 steps older, which needs a corr",
    ),
    (
        "async",
        OFF | {"async_steps": 1},
        "a step older, which needs a correction: use_rho_correction=true with rho_clamp_upper",
    ),
    (
        "async",
        OFF | {"async_steps": 1, "max_staleness": 4},
        "async_steps=1 trains on tokens of policies up to 4 steps older",
    ),
    (
        "async",
        OFF | {"async_steps": 1},
        "or use_vllm_logprobs=true, which compares the policy with the one that sampled",
    ),
    (
        "async",
        OFF | {"max_staleness": 4},
        "async_steps=2 trains on tokens of policies up to 4 steps older, which needs a corr",
    ),
    ("async", RHO | {"async_steps": 1, "rho_clamp_upper_bound": 0}, "which needs a correction"),
    (
        "async",
        OFF | {"active_sampling": True, "active_sampling_oversample": 0.5},
        "active_sampling_oversample=0.5 trains on tokens of policies a step older",
    ),
    (
        "async",
        {"async_steps": 1, "policy_loss": "reinforce", "use_vllm_logprobs": True},
        "a correction, and policy_loss=reinforce has no ratio to which use_vllm_logprobs=true could matter; use use_rho",
    ),
    (
        "async",
        RHO | {"async_steps": 4, "max_staleness": 3},
        "max_staleness=3 must be at least async_steps=4, because a group may wait that long for its step; use 4 or more",
    ),
    (
        "async",
        RHO | {"async_steps": 2, "max_staleness": 3, "active_sampling": True, "active_sampling_oversample": 1.5},
        "max_staleness=3 must be at least async_steps=2 + active_sampling_oversample=1.5 rounded up, because",
    ),
    (
        "async",
        RHO | {"async_steps": 1, "weight_sync_steps": 4, "max_staleness": 3},
        "max_staleness=3 must be at least async_steps=1 + weight_sync_steps=4 less 1, because a group may wait that long for its step, "
        "and engines for new weights; use 4 or more",
    ),
    (
        "async",
        OFF | {"weight_sync_steps": 4},
        "weight_sync_steps=4 trains on tokens of policies up to 3 steps older, which needs a correction",
    ),
    (
        "async",
        OFF | {"weight_sync_steps": 2, "async_steps": 1},
        "async_steps=1 with weight_sync_steps=2 trains on tokens of policies up to 2 steps older",
    ),
    (
        "weight syncs",
        RHO | {"weight_sync_steps": 3, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
        "weight_sync_steps=3 with vllm_enable_sleep_mode=true: engines that sleep drop their weights",
    ),
    (
        "weight syncs",
        RHO | {"weight_sync_steps": 3, "checkpoint_state_freq": 10},
        "checkpoint_state_freq=10 must be a multiple of weight_sync_steps=3: from a state between two weight syncs a run would go on with "
        "other weights in its engines than it had; use checkpoint_state_freq=12",
    ),
    (
        "async",
        {"active_sampling_oversample": 0.5},
        "replaces nothing without active_sampling; set active_sampling true",
    ),
    (
        "async",
        {"inflight_updates": True, "async_steps": 0},
        "inflight_updates=true needs completions that are under way when the weights",
    ),
    (
        "engines",
        {"min_engines": 3, "vllm_num_engines": 2},
        "min_engines=3 is more than vllm_num_engines=2, and the run",
    ),
    ("async", {"max_staleness": -1}, "max_staleness=-1 must be at least 0"),
    ("R9", {"apply_verifiable_reward": False}, "no reward is on"),
    ("R13", {"use_rho_correction": True, "rho_clamp_lower_bound": 1}, "rho_clamp_lower_bound=1 must be below 1"),
    ("R13", {"use_rho_correction": True, "rho_mask_lower_bound": 2}, "rho_mask_lower_bound=2 must be below 1"),
    ("R13", {"use_rho_correction": True, "rho_clamp_upper_bound": 0.5}, "rho_clamp_upper_bound=0.5 must be above 1"),
    ("R13", {"use_rho_correction": True, "rho_mask_upper_bound": 1}, "rho_mask_upper_bound=1 must be above 1"),
    ("R13", {"use_rho_correction": True, "rho_mask_upper_bound": -1}, "rho_mask_upper_bound=-1.0 must be at least 0"),
    (
        "R13",
        {"use_rho_correction": True, "rho_mask_level": "divergence"},
        "rho_mask_level=divergence needs a bound of the divergence",
    ),
    (
        "R13",
        {
            "use_rho_correction": True,
            "rho_mask_level": "divergence",
            "rho_mask_upper_bound": 0.1,
            "rho_mask_lower_bound": 0.1,
        },
        "rho_mask_lower_bound=0.1 would drop the smallest divergences",
    ),
    ("R14", {"gs_bucket_path": "s3://x"}, "gs_bucket_path=s3://x must begin with gs://"),
    ("R14", {"gs_bucket_path": "gs://x"}, "gs_bucket_path=gs://x needs checkpoint_state_dir, the folder in it"),
    (
        "R14",
        {"gs_checkpoint_state_dir": "/states", "checkpoint_state_freq": 5},
        "gs_checkpoint_state_dir=/states must begin with gs://",
    ),
    ("R18", {"tensor_model_parallel_size": 2}, "1 learner rank cannot be split into tensor 2"),
    (
        "R18",
        {"num_learners_per_node": [8, 8]},
        "num_learners_per_node=8 8 asks for 16 learner ranks, but 1 was started",
    ),
    ("R18", {"num_learners_per_node": [0, 1]}, "num_learners_per_node=0 1 must be numbers above 0"),
    (
        "R18",
        {"world_size": 4},
        "world_size=4 is what batch and layout were computed for, but 1 learner rank was started; start 4 (--nproc-per-node 4)",
    ),
    (
        "R18",
        {"num_nodes": 3, "num_learners_per_node": [1]},
        "num_nodes=3 differs from the 1 entries of num_learners_per_node",
    ),
    ("R21", {"temperature": 0}, "temperature=0.0 must be in [0.01, 2.0]"),
    ("R21", {"temperature": 2.5}, "temperature=2.5 must be in [0.01, 2.0]"),
    ("R21", {"eval_temperature": 2.5}, "eval_temperature=2.5 must be in [0, 2.0]"),
    ("R22", {"vllm_top_p": 0.9}, "top_p=0.9 leaves a part of the vocabulary to sample from"),
    ("R22", {"min_p": 0.1}, "min_p=0.1 leaves a part of the vocabulary to sample from"),
    ("R22", {"vllm_structured_outputs_regex": "a*"}, "vllm_guided_decoding_regex leaves a part of the vocabulary"),
    ("R22", {"top_k": 1, "top_p": 0.9}, "top_k=1 leaves one token to sample"),
    (
        "R22",
        {"top_p": 0.9},
        "give top_k with it, 2 to 64 (engines on GPUs, which the run starts itself, take up to 2048",
    ),
    ("R22", {"top_k": 2049, "min_p": 0.1}, "top_k=2049 must be at most 2048, and 64 on a CPU"),
    (
        "R22",
        {"top_k": 65, "eval_temperature": 0},
        "eval_temperature=0 is greedy, which an engine that returns sampling",
    ),
    ("R22", {"top_k": 8, "top_p": 0}, "top_p=0.0 must be in (0, 1]"),
    ("R22", {"top_k": 8, "min_p": 1.5}, "min_p=1.5 must be in [0, 1]"),
    (
        "R22",
        {"top_k": 8, "vllm_guided_decoding_regex": "("},
        "vllm_guided_decoding_regex=( is not a regular expression",
    ),
    ("R22", {"top_k": 8, "vllm_guided_decoding_regex": ""}, "vllm_guided_decoding_regex is empty"),
    (
        "R22",
        {"top_k": 8, "tools": ["search"], "mask_tool_use": False},
        "mask_tool_use=false trains on tokens that were not",
    ),
    ("R22", {"repetition_penalty": 1.1}, "repetition_penalty=1.1 is refused"),
    (
        "R24",
        {"single_gpu_mode": True, "vllm_num_engines": 2},
        "single_gpu_mode=true has one GPU, for one learner and one engine; vllm_num_engines=2 must be 1",
    ),
    (
        "R24",
        {"vllm_mode": "colocate", "async_steps": 1, "use_rho_correction": True},
        "cannot work at the same time; set async_steps=0, or vllm_mode=ray",
    ),
    ("R25", {"resume_from_checkpoint": "x"}, "resume=x must be auto, intact, never, or the path of a training state"),
    ("R25", {"resume": "no/such/step_3"}, "resume=no/such/step_3 is not a folder; check the path"),
    ("R25", {"resume": "gs://b/step_2000"}, "is step 2000, but the run has 1562 training steps; raise total_episodes"),
    ("R26", {"reward_weights": [1, 2]}, "reward_weights has 2 entries for 0 reward functions"),
    ("R26", {"reward_weights": ["nan"]}, "reward_weights=nan must be finite numbers"),
    ("R27", {"kl_estimator": 4}, "kl_estimator must be one of 0, 1, 2, 3, got '4'"),
    ("R28", {"zero_stage": 1, "fsdp_shard_degree": 4}, "fsdp_shard_degree=4 needs zero_stage=3, got 1"),
    ("R28", {"fsdp_num_replicas": 3}, "fsdp_num_replicas=3 does not divide the 1 data- and context-parallel ranks"),
    ("R31", {"deepspeed_stage": 4}, "deepspeed_stage must be one of 0, 1, 2, 3, got '4'"),
    ("R32", {"deepspeed_stage": 3, "deepspeed_zpg": 5}, "(fsdp_shard_degree was given as deepspeed_zpg)"),
    ("R32", {"deepspeed_stage": 3, "deepspeed_zpg": 0}, "fsdp_shard_degree=0 must be at least 1"),
    ("offload", {"deepspeed_offload_param": True}, "deepspeed_offload_param=true is refused: weights stay on the GPU"),
    ("offload", {"optimizer_offload_fraction": 0}, "optimizer_offload_fraction=0.0 must be in (0, 1]"),
    (
        "offload",
        {"activation_offloading": True, "fp8": "hybrid", "recompute_granularity": "selective"},
        "activation_offloading=true with fp8=hybrid needs recompute_granularity=full, got selective, which saves 8-bit copies",
    ),
    *(
        (
            "offload",
            {"optimizer_cpu_offload": True, "zero_stage": stage},
            f"optimizer_cpu_offload=true needs zero_stage=1 (Megatron's distributed optimizer), got {stage}; "
            f"use zero_stage=1, or zero_stage={stage} without it",
        )
        for stage in (0, 2, 3)
    ),
    (
        "precision",
        {"use_precision_aware_optimizer": True, "zero_stage": 0},
        "use_precision_aware_optimizer=true needs a zero_stage of at least 1, got 0",
    ),
    (
        "precision",
        {"use_precision_aware_optimizer": True, "model_dtype": "float16"},
        "use_precision_aware_optimizer=true cannot be combined with model_dtype=float16",
    ),
    (
        "precision",
        {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True},
        "use_precision_aware_optimizer=true cannot be combined with optimizer_cpu_offload=true",
    ),
    ("precision", {"exp_avg_dtype": "fp8"}, "exp_avg_dtype must be one of float32, float16, bfloat16, got 'fp8'"),
    (
        "recompute",
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "core_attention"]},
        "recompute_modules=core_attention must be of core_attn, mlp, moe; did you mean core_attn?",
    ),
    ("recompute", {"recompute_modules": "mpl"}, "did you mean mlp?"),
    ("recompute", {"recompute_modules": "head"}, "recompute_modules=head must be of core_attn, mlp, moe"),
    (
        "recompute",
        {"recompute_granularity": "selective", "recompute_modules": []},
        "recompute_granularity=selective recomputes nothing without recompute_modules; name some of core_attn",
    ),
    (
        "fp8",
        {"fp8": "hybrid", "transformer_impl": "local"},
        "fp8=hybrid is in Transformer Engine's products, got transformer_impl=local",
    ),
    (
        "fp8",
        {"fp8": "e4m3", "model_dtype": "float16"},
        "fp8=e4m3 needs bfloat16, got model_dtype=float16",
    ),
    ("fp8", {"fp8": "hybrid", "zero_stage": 3}, "fp8=hybrid needs zero_stage 0 or 1, got 3"),
    ("fp8", {"fp8": "hybrid", "use_peft": True}, "fp8=hybrid needs Transformer Engine's layers, and use_peft=true"),
    (
        "fp8",
        {"fp8": "hybrid", "use_rho_correction": False},
        "fp8=hybrid trains a policy with rounded products, which engines do not",
    ),
    ("fp8", {"fp8_recipe": "delayed"}, "fp8_recipe must be one of tensorwise, blockwise, mxfp8, got 'delayed'"),
    (
        "overlap",
        {"tp_comm_overlap": True},
        "tp_comm_overlap=true has nothing to overlap with tensor_model_parallel_size=1",
    ),
    (
        "one copy",
        {"moe_token_dispatcher_type": "hybridep"},
        "expert_model_parallel_size=1 keeps all experts on each of them",
    ),
    ("layers", {"num_layers_in_first_pipeline_stage": 0}, "num_layers_in_first_pipeline_stage=0 must be at least 1"),
    ("layers", {"num_layers_in_last_pipeline_stage": 3}, "needs pipeline_model_parallel_size > 1"),
    ("chunks", {"virtual_pipeline_model_parallel_size": 0}, "virtual_pipeline_model_parallel_size=0 must be at"),
    (
        "R34",
        {"policy_loss": "vespo", "use_rho_correction": True, "rho_level": "sequence_sum"},
        "policy_loss=vespo includes the rho of each token in its own weight, got rho_level=sequence_sum",
    ),
    ("R12", {"eval_top_p": 0}, "eval_top_p=0.0 must be in (0, 1]"),
    ("greedy", {"eval_temperature": 0, "eval_pass_at_k": 4}, "4 samples of eval_temperature=0 are all the same"),
    ("remap", {"remap_verifier": "math"}, "remap_verifier=math must be old=new"),
    ("weights", {"verifier_weights": ["math=x"]}, "verifier_weights=math=x must be name=weight"),
    ("weights", {"verifier_weights": ["a=1", "b=1", "A=3"]}, "verifier_weights=a=1 b=1 A=3 weighs a twice"),
    ("tokenizer", {"tokenizer_name_or_path": "/nowhere"}, "tokenizer_name_or_path=/nowhere is not a folder"),
    ("stop", {"stop_strings": ["a", ""]}, "stop_strings holds an empty text"),
    ("delta", {"delta": 3, "policy_loss": "cispo"}, "delta=3 belongs to policy_loss=ppo_clip, got cispo"),
    ("dual clip", {"dual_clip": 1}, "dual_clip=1.0 must be above 1"),
    ("constant", {"aggregation": "constant"}, "aggregation=constant needs the number to divide by"),
    (
        "constant",
        {"aggregation": "token", "loss_denominator": "9"},
        "loss_denominator=9 is a constant divisor, but aggregation=token",
    ),
    (
        "entropy",
        {"use_adaptive_entropy": True, "entropy_coef_min": 0.1},
        "entropy_coef=0 must lie between entropy_coef_min=0.1 and entropy_coef_max=1",
    ),
    ("overlong", {"overlong_cache_length": 300}, "overlong_cache_length=300 must be at most response_length=256"),
    ("score", {"max_possible_score": 1}, "max_possible_score=1.0 follows from other settings and is 10"),
    (
        "length",
        {"vllm_max_model_length": 100},
        "vllm_max_model_length=100 is less than max_prompt_token_length + response_length = 512",
    ),
    ("eval", {"eval_pass_at_k": 0}, "eval_pass_at_k=0 must be at least 1"),
    ("alpha", {"alpha": 0}, "alpha=0.0 must be in (0, 1]"),
    ("weights", {"top_entropy_quantile": 0}, "top_entropy_quantile=0.0 must be in (0, 1]"),
]


@pytest.mark.parametrize(("rule", "values", "words"), RULES, ids=[f"{rule}-{i}" for i, (rule, *_) in enumerate(RULES)])
def test_a_rule_fires_on_its_mistake_alone(model, rule, values, words):
    """Each of these would fail hours later, or train something that was not asked for."""
    found = found_in(model, values)
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.parametrize(
    "values",
    [
        {"use_vllm_logprobs": True},
        {"use_vllm_logprobs": True, "truncated_importance_sampling_ratio_cap": 0},
        {"clip_lower": 0, "clip_higher": 0.28},
        {"aggregation": "constant", "loss_denominator": "1000"},
        {"aggregation": "dr_grpo", "policy_loss": "sapo"},
        {
            "use_rho_correction": True,
            "rho_clamp_upper_bound": 0,
            "rho_mask_lower_bound": 0.5,
            "rho_mask_upper_bound": 5,
        },
        {"use_rho_correction": True, "rho_mask_level": "divergence", "rho_mask_upper_bound": 0.1},
        {"use_rho_correction": False, "rho_clamp_upper_bound": 0.5},
        {"policy_loss": "vespo", "use_rho_correction": True},
        {"active_sampling": True, "no_resampling_pass_rate": 0.875},
        {"num_samples_per_prompt_rollout": 1, "filter_zero_std_samples": False},
        {
            "num_samples_per_prompt_rollout": 1,
            "num_unique_prompts_rollout": 1,
            "filter_zero_std_samples": False,
            "advantage_normalization_type": "package.module:f",
        },
        {"ref_policy_update_freq": 4},
        {"ref_policy_update_freq": 4, "beta": 0, "log_ref_kl": True},
        {"delta": 3, "dual_clip": 3},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1},
        {"overlong_cache_length": 256},
        {"num_learners_per_node": [1], "num_nodes": 1, "world_size": 1},
        {"lr_scheduler_type": "cosine_with_restarts"},
        {"lr_scheduler_type": "polynomial"},
        {"lr_scheduler_type": "constant_with_warmup"},
        {"max_possible_score": 10, "num_training_steps": 1562, "vllm_max_model_length": 4096},
        {"async_steps": 0, "inflight_updates": False, "vllm_sync_backend": "nccl", "gather_whole_model": True},
        RHO | {"async_steps": 1},
        RHO | {"async_steps": 2, "max_staleness": 4, "inflight_updates": True, "inflight_kv": "keep"},
        RHO | {"async_steps": 2, "rho_clamp_upper_bound": 0, "rho_mask_upper_bound": 3},
        RHO | {"async_steps": 4, "policy_loss": "reinforce"},
        RHO | {"active_sampling": True, "active_sampling_oversample": 1.5},
        RHO | {"active_sampling": True, "active_sampling_oversample": 1.5, "async_steps": 2, "max_staleness": 4},
        {"use_vllm_logprobs": True, "async_steps": 8},
        {"use_vllm_logprobs": True, "weight_sync_steps": 4, "async_steps": 1, "max_staleness": 4},
        RHO | {"weight_sync_steps": 3, "checkpoint_state_freq": 9, "local_eval_every": 4, "vllm_mode": "colocate"},
        {"async_steps": 0, "max_staleness": 4},
        {"async_steps": 2, "policy_loss": "package.module:loss"},
        {"preset": "open_instruct_main", "async_steps": 0},
        {"preset": "seed", "async_steps": 4, "use_vllm_logprobs": True},
        {"r1_style_format_reward": 0.5, "apply_r1_style_format_reward": True},
        {"eval_top_p": 1.0, "top_k": 0, "min_p": None, "use_vllm": True, "deepspeed_zpg": 8},
        {"top_k": None, "top_p": 1.0, "min_p": 0},
        {"top_k": -1},
        {"top_k": 20, "vllm_top_p": 0.95, "min_p": 0.02, "vllm_structured_outputs_regex": "[0-9]+"},
        {"top_k": 2, "use_vllm_logprobs": True},
        {"top_k": 64, "eval_top_p": 0.5, "eval_temperature": 0},
        {"top_k": 65, "eval_top_p": 0.5, "eval_temperature": 1e-6},
        {"top_k": 2048, "top_p": 0.9, "vllm_structured_outputs_regex": "[0-9]+"},
        {"zero_stage": 0},
        {"zero_stage": 2, "gradient_checkpointing": True},
        {"deepspeed_stage": 3, "deepspeed_zpg": 8, "router_aux_loss_coef": 0.01},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "zero_stage": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
        {"shared_prompt_packing": True},
    ],
)
def test_what_is_sound_is_accepted(model, values):
    """A rule that is too strict keeps a sound run from starting."""
    assert found_in(model, values) == []


def test_the_quickstart_becomes_asynchronous_by_one_flag():
    """The first thing that a reader of README.md tries."""
    assert problems(parse(["examples/configs/quickstart.yaml", "--async_steps", "1"]), world_size=1) == []


def test_weights_are_counted_against_the_functions(model):
    """A weight too many would shift all the others."""
    assert found_in(model, {"reward_weights": [1, 2]}, num_reward_funcs=2) == []
    assert len(found_in(model, {"reward_weights": [1, 2]}, num_reward_funcs=3)) == 1


def test_a_batch_smaller_than_the_ranks_is_refused(model):
    """Ranks without a completion would train on nothing in every step."""
    (found,) = found_in(model, {"num_unique_prompts_rollout": 2, "num_samples_per_prompt_rollout": 2}, world_size=8)
    assert found.startswith("4 completions per step")


def test_shared_prompts_and_context_parallel_ranks_are_refused_together(model):
    """Packing would refuse them too, but after the engines have started and sampled a batch."""
    found = found_in(model, {"shared_prompt_packing": True, "context_parallel_size": 2}, world_size=2)
    assert found == [
        "shared_prompt_packing=true cannot be combined with context_parallel_size=2, whose ranks share each document; use "
        "auto or false"
    ]
    for value in (False, "auto"):
        assert found_in(model, {"shared_prompt_packing": value, "context_parallel_size": 2}, world_size=2) == []


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({"context_parallel_size": 2, "cp_comm_type": "a2a"}, 4),
        ({"expert_model_parallel_size": 4}, 4),
        ({"expert_model_parallel_size": 4, "moe_token_dispatcher_type": "deepep"}, 4),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, 4),
        ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}, 2),
        ({"zero_stage": 3, "fsdp_shard_degree": 2, "context_parallel_size": 2}, 4),
        ({"sequence_parallel_size": 2, "deepspeed_stage": 3}, 4),
    ],
)
def test_every_axis_is_open(model, values, ranks):
    """A rule that is left over from when an axis did not exist would keep it closed."""
    assert found_in(model, values, world_size=ranks) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sequence_parallel": False}, "gathers and scatters a sequence, got sequence_parallel=false"),
        ({"transformer_impl": "local"}, "is in Transformer Engine's products, got transformer_impl=local"),
        ({"model_dtype": "float16"}, "tp_comm_overlap=true needs bfloat16, got model_dtype=float16"),
        ({"zero_stage": 2}, "tp_comm_overlap=true needs zero_stage 0 or 1, got 2"),
        ({"use_peft": True}, "tp_comm_overlap=true needs Transformer Engine's layers"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, "cannot send blocks of fp8_recipe=blockwise"),
        ({"num_learners_per_node": (1, 1)}, "sends within a node, but tensor_model_parallel_size=2 does not divide"),
        ({"teacher_model_name_or_path": ("t",)}, "has buffers of the policy's width, got teacher_mode=learner"),
    ],
)
def test_overlap_wants_buffers_of_one_size_within_a_node(values, words):
    """Each would end in the first product, or be without effect."""
    config = from_values({"tp_comm_overlap": True, "tensor_model_parallel_size": 2, **values})
    found = [each for each in problems(config, world_size=2) if each.startswith("tp_comm_overlap")]
    assert len(found) == 1 and words in found[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_dtype": "float32"}, "sends bfloat16 only, got model_dtype=float32"),
        (
            {"expert_model_parallel_size": 3},
            "moe_token_dispatcher_type=deepep has no kernels for 3 ranks that share experts",
        ),
    ],
)
def test_what_deepep_cannot_send_is_refused(model, values, words):
    """Its kernels would say so in the first step."""
    own = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "deepep"} | values
    ranks = own["expert_model_parallel_size"]
    (sentence,) = found_in(model, own, world_size=ranks)
    assert words in sentence


def test_a_dataset_smaller_than_a_step_is_refused():
    """The same prompt twice in a step is two groups of one prompt."""
    assert too_few_prompts(Config(), 16) == []
    assert "has 15 prompts, but a step takes num_unique_prompts_rollout=16" in too_few_prompts(Config(), 15)[0]


def test_reading_and_judging_report_together(model):
    """A user would otherwise repair the flags first and meet the rules after."""
    argv = f"--model_name_or_path {model} --dataset_mixer_list a 1.0 --use_dora --tempratur 1 --temperature x --beta -1"
    config = parse([*argv.split(), "--tensor_model_parallel_size", "2"], defer=True)
    found = problems(config, world_size=1)
    assert [sentence.split(" ")[0] for sentence in found] == [
        "unknown", "temperature", "use_dora=true", "beta=-0.1"[:4] + "=-1.0", "1",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        parse(argv.split())
    assert list(caught.value.problems) == found[:3]


@pytest.mark.parametrize(
    ("learners", "workers", "words"),
    [
        ([2, 1], 1, "expected equally many learners on all nodes"),
        ([3, 3], 2, "use a size that divides the learners of a node"),
        ([4, 4], 2, None),
    ],
)
def test_an_engine_on_the_learners_gpus_stays_on_one_node(learners, workers, words):
    """Its workers get their weights through memory that no other node reaches."""
    values = {"vllm_mode": "colocate", "num_learners_per_node": learners, "vllm_tensor_parallel_size": workers}
    found = [said for said in problems(from_values(values), world_size=sum(learners)) if "colocate" in said]
    assert len(found) == (words is not None) and all(words in said for said in found)

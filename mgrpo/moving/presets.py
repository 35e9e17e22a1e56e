"""Named sets of defaults: the values of settings that neither a file nor a flag gives.

`mgrpo` is the schema's own defaults. The others are those of another trainer, where they differ and exist here.
"""

from __future__ import annotations

_TRL_COMMON: dict[str, object] = {
    "seed": 42,
    "num_train_epochs": 3.0,
    "num_samples_per_prompt_rollout": 8,
    "learning_rate": 1e-6,
    "beta": 0.0,
    "advantage_std": "trl",
    "max_prompt_token_length": 512,
    "filter_zero_std_samples": False,
    "local_eval_every": -1,
    "save_freq": 500,
    "vllm_gpu_memory_utilization": 0.3,
    "max_tool_calls": None,
}
_TRL_MAIN: dict[str, object] = _TRL_COMMON | {
    "aggregation": "token",
    "response_length": 512,
    "recompute_granularity": "full",
    "output_dir": "trainer_output",
    "hub_strategy": "every_save",
    "keep_last_n_checkpoints": -1,
}
_OPEN_INSTRUCT_TOOLS: dict[str, object] = {"tool_parser_type": "legacy", "scored_text": "all"}

PRESETS: dict[str, dict[str, object]] = {
    "mgrpo": {},
    "seed": _OPEN_INSTRUCT_TOOLS | {"temperature": 0.7, "async_steps": 1},
    "open_instruct_main": _OPEN_INSTRUCT_TOOLS
    | {
        "seed": 42,
        "clip_higher": 0.272,
        "advantage_normalization_type": "centered",
        "use_rho_correction": True,
        "remap_verifier": ("math=math_open_instruct",),
        "async_steps": 8,
        "inflight_updates": True,
        "inflight_kv": "keep",
    },
    "trl_seed": _TRL_COMMON | {"aggregation": "local_token"},
    "trl_main": _TRL_MAIN
    | {
        "use_rho_correction": True,
        "rho_level": "sequence_sum",
        "rho_clamp_upper_bound": 0.0,
        "rho_mask_level": "sequence_sum",
        "rho_mask_upper_bound": 3.0,
        "kl_bias_correction": True,
    },
    "trl_async": _TRL_MAIN
    | {
        "advantage_std": "population",
        "lr_scheduler_type": "constant",
        "max_staleness": 4,
        "response_length": 2048,
        "use_vllm_logprobs": True,
    },
}
"""Values of settings by preset."""

PRESET_NOTES: dict[str, tuple[str, ...]] = {
    "open_instruct_main": (
        "preset open_instruct_main: a step waits for what would become older than async_steps, where Open Instruct drops it",
    ),
    "trl_async": (
        "preset trl_async: a step waits for what would become older than max_staleness, where TRL drops it, and takes "
        "per_device_train_batch_size x gradient_accumulation_steps completions of each rank, where TRL takes as many as fit into "
        "token_budget; its tokens have one average, where TRL averages each micro-batch",
    ),
    "trl_seed": ("preset trl_seed: prompts beyond max_prompt_token_length are left out, where TRL cuts them",),
}
"""Differences of a preset from its trainer."""

KEPT: dict[str, dict[str, str]] = {
    "trl_main": {
        "vllm_mode": "colocate applies there with use_vllm=True; engines here are always vLLM's, and on the learners' GPUs they need vllm_kv_cache_mb",
        "report_to": "TensorBoard's files are written into output_dir, and nothing is sent anywhere",
        "ddp_timeout": "learners first meet when the data are read and the engines have started, for which half an hour may be too short",
        "hub_private_repo": "a repository that an upload makes is private unless false is given",
    },
    "trl_async": {
        "dtype": "weights are float32 there and products bfloat16 (bf16), as here",
        "remove_unused_columns": "reward functions get every column, there as well",
        "vllm_server_base_url": "the run starts its engines where no server is given",
        "weight_sync_timeout": "an engine that has not taken the weights after two minutes counts as dead",
    },
    "open_instruct_main": {
        "output_dir": "the same folder",
        "report_to": "it applies there with with_tracking; TensorBoard's files are written into output_dir, and nothing is sent anywhere",
        "set_weight_decay_on_bias_and_norm": "true leaves them out of the decay there, as false does here",
        "num_learners_per_node": "as many learners as were started",
        "deepspeed_stage": "the gradient is the same; ranks share the optimizer's states",
        "push_to_hub": "nothing leaves the machine unasked; a run with hf_entity or hf_repo_id says so",
        "checkpoint_state_freq": "states are saved there with checkpoint_state_dir alone, with which it is 200 here as well",
        "dataset_mixer_list": "data have to be named",
        "dataset_local_cache_dir": "in the user's cache folder",
        "llm_judge_model": "a judge has to be named",
        "code_api_url": "programs run in a sandbox on the same machine where no service is named",
        "max_possible_score": "it follows from other settings, there as well",
        "rollouts_save_path": "the folder there is one of its authors' machines; here output_dir/rollouts",
        "vllm_enable_prefix_caching": "completions are the same, and prompts are computed once",
    },
}
"""Defaults of a trainer that its preset does not take, by that trainer's name, with the reason."""

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
    "advantage_ddof": 1,
    "advantage_eps": 1e-4,
    "max_prompt_token_length": 512,
    "filter_zero_std_samples": False,
    "local_eval_every": -1,
    "save_freq": 500,
    "vllm_gpu_memory_utilization": 0.3,
    "max_tool_calls": None,
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
        "remap_verifier": "math=math_open_instruct",
        "async_steps": 8,
        "inflight_updates": True,
        "inflight_kv": "keep",
    },
    "trl_seed": _TRL_COMMON | {"aggregation": "local_token"},
    "trl_main": _TRL_COMMON
    | {
        "aggregation": "token",
        "response_length": 512,
        "use_rho_correction": True,
        "rho_level": "sequence_sum",
        "rho_clamp_upper_bound": 0.0,
        "rho_mask_level": "sequence_sum",
        "rho_mask_upper_bound": 3.0,
        "recompute_granularity": "full",
        "kl_bias_correction": True,
    },
}
"""Values of settings by preset."""

PRESET_NOTES: dict[str, tuple[str, ...]] = {
    "open_instruct_main": (
        "preset open_instruct_main: a step waits for what would become older than async_steps, where Open Instruct drops it",
    ),
    "trl_seed": ("preset trl_seed: prompts beyond max_prompt_token_length are left out, where TRL cuts them",),
    "trl_main": ("preset trl_main: prompts beyond max_prompt_token_length are left out, where TRL has no limit",),
}
"""Where a preset differs from its trainer."""

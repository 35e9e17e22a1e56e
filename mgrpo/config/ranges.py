"""Which numbers each field may hold."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The finite numbers a field may hold."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return (
            above and below and abs(value) <= sys.float_info.max
        )  # also false for nan, and for ints no float can hold

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"{'above' if self.low_open else 'at least'} {self.low} and finite"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}{')' if self.high_open else ']'}"


ANY = Range()
POSITIVE = Range(low=0, low_open=True)
NOT_NEGATIVE = Range(low=0)
ONE_OR_MORE = Range(low=1)
SHARE = Range(low=0, high=1, high_open=True)

RANGES = {
    "seed": Range(low=0, high=2**32 - 1),
    "total_episodes": ONE_OR_MORE,
    "local_eval_every": ANY,
    "backend_timeout": ONE_OR_MORE,
    "max_prompt_token_length": ONE_OR_MORE,
    "num_unique_prompts_rollout": ONE_OR_MORE,
    "num_samples_per_prompt_rollout": ONE_OR_MORE,
    "response_length": ONE_OR_MORE,
    "temperature": POSITIVE,
    "async_steps": NOT_NEGATIVE,
    "eval_pass_at_k": ONE_OR_MORE,
    "eval_temperature": NOT_NEGATIVE,
    "eval_top_p": Range(low=0, high=1, low_open=True),
    "eval_response_length": ONE_OR_MORE,
    "dataset_num_proc": NOT_NEGATIVE,
    "rollout_timeout": ONE_OR_MORE,
    "verification_reward": POSITIVE,
    "r1_style_format_reward": POSITIVE,
    "non_stop_penalty_value": ANY,
    "max_length_verifier_max_length": ONE_OR_MORE,
    "code_max_execution_time": POSITIVE,
    "code_pass_rate_reward_threshold": Range(low=0, high=1),
    "code_sandbox_memory_mb": Range(low=64),
    "llm_judge_max_tokens": ONE_OR_MORE,
    "llm_judge_max_context_length": ONE_OR_MORE,
    "llm_judge_temperature": NOT_NEGATIVE,
    "llm_judge_timeout": ONE_OR_MORE,
    "remote_verifier_concurrency": ONE_OR_MORE,
    "verifier_memory_mb": Range(low=256),
    "verifier_timeout": POSITIVE,
    "verifier_workers": ONE_OR_MORE,
    "clip_lower": SHARE,
    "clip_higher": POSITIVE,
    "local_batch_size": ONE_OR_MORE,
    "delta": POSITIVE,
    "dual_clip": Range(low=1, low_open=True),
    "sapo_temperature_pos": POSITIVE,
    "sapo_temperature_neg": POSITIVE,
    "vespo_k_pos": NOT_NEGATIVE,
    "vespo_lambda_pos": NOT_NEGATIVE,
    "vespo_k_neg": NOT_NEGATIVE,
    "vespo_lambda_neg": NOT_NEGATIVE,
    "alpha": Range(low=0, high=1, low_open=True),
    "ref_policy_update_freq": ONE_OR_MORE,
    "rho_clamp_lower_bound": NOT_NEGATIVE,
    "rho_clamp_upper_bound": NOT_NEGATIVE,
    "rho_mask_lower_bound": NOT_NEGATIVE,
    "rho_mask_upper_bound": NOT_NEGATIVE,
    "off_policy_mask_threshold": NOT_NEGATIVE,
    "advantage_eps": NOT_NEGATIVE,
    "active_sampling_max_rounds": ONE_OR_MORE,
    "no_resampling_pass_rate": Range(low=0, high=1, low_open=True),
    "overlong_cache_length": ONE_OR_MORE,
    "top_entropy_quantile": Range(low=0, high=1, low_open=True),
    "entropy_coef": NOT_NEGATIVE,
    "entropy_coef_min": NOT_NEGATIVE,
    "entropy_coef_max": NOT_NEGATIVE,
    "entropy_coef_delta": NOT_NEGATIVE,
    "entropy_target": NOT_NEGATIVE,
    "beta": NOT_NEGATIVE,
    "num_epochs": ONE_OR_MORE,
    "num_mini_batches": ONE_OR_MORE,
    "learning_rate": POSITIVE,
    "warm_up_steps": NOT_NEGATIVE,
    "warmup_ratio": SHARE,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "adam_beta1": SHARE,
    "adam_beta2": SHARE,
    "adam_epsilon": POSITIVE,
    "tensor_model_parallel_size": ONE_OR_MORE,
    "pipeline_model_parallel_size": ONE_OR_MORE,
    "context_parallel_size": ONE_OR_MORE,
    "expert_model_parallel_size": ONE_OR_MORE,
    "virtual_pipeline_model_parallel_size": ONE_OR_MORE,
    "num_layers_in_first_pipeline_stage": ONE_OR_MORE,
    "num_layers_in_last_pipeline_stage": ONE_OR_MORE,
    "fsdp_shard_degree": ONE_OR_MORE,
    "optimizer_offload_fraction": Range(low=0, high=1, low_open=True),
    "pack_length": ONE_OR_MORE,
    "logits_chunk": NOT_NEGATIVE,
    "vllm_num_engines": ONE_OR_MORE,
    "vllm_tensor_parallel_size": ONE_OR_MORE,
    "vllm_gpu_memory_utilization": Range(low=0, high=1, low_open=True),
    "vllm_kv_cache_mb": ONE_OR_MORE,
    "vllm_max_num_seqs": ONE_OR_MORE,
    "engine_start_timeout": ONE_OR_MORE,
    "weight_sync_bucket_mb": ONE_OR_MORE,
    "weight_sync_timeout": ONE_OR_MORE,
    "weight_sync_check_every": NOT_NEGATIVE,
    "save_freq": ANY,
    "checkpoint_state_freq": ANY,
    "keep_last_n_checkpoints": Range(low=-1),
}
"""Range of every field that holds a number; one that may also be none or auto is not judged then."""

REASONS = {
    "model_dtype": "float16 needs loss scaling, which does not exist here",
    "temperature": "the training logits are divided by it",
}
"""Why a field's values are what they are, where the range alone does not say it."""

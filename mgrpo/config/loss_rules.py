"""Rules between the settings of the loss and the algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mgrpo.config.loss import NAMED_LOSSES
from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config


def _reference(config: Config) -> Iterator[str]:
    own, beta = config.algorithm, config.loss.beta
    measured = [name for name, on in ((f"beta={beta}", beta != 0), ("log_ref_kl=true", own.log_ref_kl)) if on]
    if measured and not config.provenance.expected.get("load_ref_policy", True):
        yield (
            f"{' and '.join(measured)} needs the reference model, but load_ref_policy=false; "
            "set beta to 0 and log_ref_kl to false, or load_ref_policy to true"
        )
    elif own.ref_policy_update_freq is not None and not measured:
        yield (
            f"ref_policy_update_freq={own.ref_policy_update_freq} updates a reference model, which is not loaded with beta=0; "
            "leave it out, or set beta above 0"
        )


def _old_logprobs(config: Config) -> Iterator[str]:
    if config.algorithm.use_vllm_logprobs and config.loss.use_rho_correction:
        yield (
            "use_vllm_logprobs=true makes the engine's logprobs the old ones, so use_rho_correction=true (rho is the "
            "ratio of the two) has nothing to correct; set one of them to false"
        )


def _rho_bounds(config: Config) -> Iterator[str]:
    own = config.loss
    if not own.use_rho_correction:
        return
    for name in ("rho_clamp_lower_bound", "rho_mask_lower_bound"):
        bound = getattr(own, name)
        if own.rho_mask_tv_divergence and name == "rho_mask_lower_bound" and bound > 0:
            yield f"{name}={bound:g} would drop the smallest divergences (rho_mask_tv_divergence=true); set it to 0"
        elif bound >= 1:
            yield f"{name}={bound:g} must be below 1, the ratio of equal policies; 0 is off"
    for name in ("rho_clamp_upper_bound", "rho_mask_upper_bound"):
        bound = getattr(own, name)
        bounds_ratio = name == "rho_clamp_upper_bound" or not own.rho_mask_tv_divergence
        if bounds_ratio and 0 < bound <= 1:
            yield f"{name}={bound:g} must be above 1, the ratio of equal policies; 0 is off"
    if own.rho_mask_tv_divergence and own.rho_mask_upper_bound == 0:
        yield "rho_mask_tv_divergence=true needs a bound of the divergence: --rho_mask_upper_bound 0.1"


def _uncorrected(config: Config) -> Iterator[str]:
    """Tokens of other policies than the one that is trained, and nothing in the loss that knows it."""
    rollout, loss = config.rollout, config.loss
    has_rho = loss.use_rho_correction and (loss.rho_clamp_upper_bound or loss.rho_mask_upper_bound)
    if has_rho or loss.is_own_function:
        return
    causes = []
    if config.max_age and (rollout.async_steps or config.algorithm.active_sampling):
        cause = f"async_steps={rollout.async_steps}"
        if not rollout.async_steps:
            cause = f"active_sampling_oversample={config.algorithm.active_sampling_oversample:g}"
        age = "a step" if config.max_age == 1 else f"up to {config.max_age} steps"
        causes.append(f"{cause} trains on tokens of policies {age} older")
    if replays := config.algorithm.replay_buffer_size:
        causes.append(f"replay_buffer_size={replays} trains on tokens of older policies")
    if config.engine.vllm_kv_cache_dtype != "auto":
        dtype = config.engine.vllm_kv_cache_dtype
        causes.append(f"vllm_kv_cache_dtype={dtype} samples from a policy with rounded keys and values")
    if not causes:
        return
    needs = f"{' and '.join(causes)}, which needs a correction"
    by_rho = "use_rho_correction=true with rho_clamp_upper_bound above 1 (2.0 is usual), which weighs each token"
    if not config.algorithm.use_vllm_logprobs:
        yield f"{needs}: {by_rho}, or use_vllm_logprobs=true, which compares the policy with the one that sampled"
    elif loss.policy_loss == "reinforce":
        yield (
            f"{needs}, and policy_loss=reinforce has no ratio to which use_vllm_logprobs=true could matter; use "
            f"{by_rho}, in its place, or a policy_loss with a ratio"
        )


def _surrogate(config: Config) -> Iterator[str]:
    own = config.loss
    if own.is_own_function:
        return
    if own.policy_loss not in NAMED_LOSSES:
        yield (
            f"policy_loss={own.policy_loss} is unknown; choose one of {', '.join(NAMED_LOSSES)}, or name a function of "
            "yours: file.py:function or package.module:function"
        )
    for name in ("delta", "dual_clip"):
        if getattr(own, name) is not None and own.policy_loss != "ppo_clip":
            yield f"{name}={getattr(own, name):g} belongs to policy_loss=ppo_clip, got {own.policy_loss}; leave it out"
    if own.policy_loss == "vespo" and own.use_rho_correction and own.rho_level != "token":
        yield (
            f"policy_loss=vespo includes the rho of each token in its own weight, got rho_level={own.rho_level}; "
            "set rho_level to token (vllm_importance_sampling_mode token_truncate or token_mask)"
        )


def _denominator(config: Config) -> Iterator[str]:
    own = config.loss
    is_number = own.loss_denominator != "token"
    if own.aggregation == "constant" and not is_number:
        yield "aggregation=constant needs the number to divide by: --loss_denominator N"
    elif is_number and own.aggregation not in (None, "constant"):
        yield (
            f"loss_denominator={own.loss_denominator} is a constant divisor, but aggregation={own.aggregation}; "
            "leave one of them out"
        )


def _groups(config: Config) -> Iterator[str]:
    own, rollout = config.algorithm, config.rollout
    if own.active_sampling and not own.filter_zero_std_samples:
        yield (
            "active_sampling=true replaces the groups that filter_zero_std_samples leaves out, but that is false; "
            "set both to true or both to false"
        )
    if own.replay_buffer_size and not own.filter_zero_std_samples:
        yield (
            f"replay_buffer_size={own.replay_buffer_size} replaces the groups that filter_zero_std_samples leaves out, but that is "
            "false; set it to true, or replay_buffer_size to 0"
        )
    if own.replay_buffer_size and own.active_sampling:
        yield (
            f"replay_buffer_size={own.replay_buffer_size} and active_sampling=true both replace the groups left out, one by old "
            "groups and one by new ones; turn one of them off"
        )
    if rollout.num_samples_per_prompt_rollout > 1:
        return
    if own.filter_zero_std_samples:
        yield (
            "num_samples_per_prompt_rollout=1 makes every group's rewards equal, so filter_zero_std_samples=true would "
            "leave nothing; set it to false, or sample at least 2"
        )
    if rollout.num_unique_prompts_rollout == 1:
        yield (
            "num_samples_per_prompt_rollout=1 compares completions within the batch, but num_unique_prompts_rollout=1 "
            "makes a batch of one; sample at least 2 of one of them"
        )


def _entropy(config: Config) -> Iterator[str]:
    own = config.algorithm
    if own.use_adaptive_entropy and not own.entropy_coef_min <= own.entropy_coef <= own.entropy_coef_max:
        yield (
            f"entropy_coef={own.entropy_coef:g} must lie between entropy_coef_min={own.entropy_coef_min:g} and "
            f"entropy_coef_max={own.entropy_coef_max:g} with use_adaptive_entropy=true"
        )


def _overlong(config: Config) -> Iterator[str]:
    cache, length = config.algorithm.overlong_cache_length, config.rollout.response_length
    if cache is not None and cache > length:
        yield f"overlong_cache_length={cache} must be at most response_length={length}, in whose last tokens it applies"


def weight_problems(config: Config, num_reward_funcs: int) -> Iterator[str]:
    """Rules about the number of reward functions: one weight for each, and what needs or excludes them."""
    weights = config.algorithm.reward_weights
    if config.algorithm.advantage_normalization_type == "gdpo" and not num_reward_funcs:
        yield (
            "advantage_normalization_type=gdpo weighs reward functions (reward_funcs), but there are none; choose "
            "standard, centered or batch_std"
        )
    if config.algorithm.no_resampling_pass_rate is not None and num_reward_funcs:
        yield (
            f"no_resampling_pass_rate={config.algorithm.no_resampling_pass_rate:g} is a share of the highest reward, but "
            "reward functions have none; leave it out"
        )
    if not all(math.isfinite(weight) for weight in weights):
        yield f"reward_weights={' '.join(map(str, weights))} must be finite numbers"
    elif weights and len(weights) != num_reward_funcs:
        yield (
            f"reward_weights has {len(weights)} entries for {num_reward_funcs} reward functions "
            "(reward_funcs); give one for each, or none"
        )


LOSS_RULES: tuple[Rule, ...] = (
    (("beta", "log_ref_kl", "ref_policy_update_freq"), _reference),
    (("use_vllm_logprobs", "use_rho_correction"), _old_logprobs),
    (
        (
            "async_steps",
            "max_staleness",
            "active_sampling",
            "active_sampling_oversample",
            "replay_buffer_size",
            "vllm_kv_cache_dtype",
            "use_vllm_logprobs",
            "use_rho_correction",
            "rho_clamp_upper_bound",
            "rho_mask_upper_bound",
            "policy_loss",
        ),
        _uncorrected,
    ),
    (
        (
            "use_rho_correction",
            "rho_clamp_lower_bound",
            "rho_clamp_upper_bound",
            "rho_mask_lower_bound",
            "rho_mask_upper_bound",
            "rho_mask_tv_divergence",
        ),
        _rho_bounds,
    ),
    (("policy_loss", "delta", "dual_clip", "use_rho_correction", "rho_level"), _surrogate),
    (("aggregation", "loss_denominator"), _denominator),
    (
        (
            "active_sampling",
            "filter_zero_std_samples",
            "replay_buffer_size",
            "num_samples_per_prompt_rollout",
            "num_unique_prompts_rollout",
        ),
        _groups,
    ),
    (("use_adaptive_entropy", "entropy_coef", "entropy_coef_min", "entropy_coef_max"), _entropy),
    (("overlong_cache_length", "response_length"), _overlong),
)
"""Each rule with the fields that must be sound before it is checked."""

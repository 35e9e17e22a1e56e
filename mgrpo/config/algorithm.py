"""The algorithm section: the reference model, advantages, which groups are trained on, entropy, and passes over a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from mgrpo.config.annotations import NOT_NEGATIVE, ONE_OR_MORE, OPEN_INSTRUCT, SHARE, TRL, Needs, Rule

NamedEstimator = Literal[
    "standard", "centered", "batch_std", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"
]
NAMED_ESTIMATORS: tuple[str, ...] = get_args(NamedEstimator)
STANDARD_DEVIATIONS = {"population": (0, 1e-8), "sample": (1, 1e-8), "verl": (1, 1e-6), "trl": (1, 1e-4)}
"""`advantage_std` as (delta degrees of freedom, addend)."""
BY_NAME = Needs("a named advantage_normalization_type", lambda is_own_estimator: not is_own_estimator)
MOVING_REFERENCE = Needs("ref_policy_update_freq", lambda ref_policy_update_freq: ref_policy_update_freq is not None)
ADAPTIVE = Needs("use_adaptive_entropy=true", lambda use_adaptive_entropy: use_adaptive_entropy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    log_ref_kl: bool = False
    """Measure the KL to the reference model even when beta is 0."""
    alpha: Annotated[float, SHARE, OPEN_INSTRUCT, MOVING_REFERENCE] = 0.6
    """Weight of the policy in each update of the reference model: reference <- alpha x policy + (1 - alpha) x reference."""
    ref_policy_update_freq: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """Training steps between these updates; none: the reference never changes."""
    use_vllm_logprobs: Annotated[bool, OPEN_INSTRUCT] = False
    """Use the engine's logprobs as the old logprobs instead of computing these again."""
    advantage_normalization_type: Annotated[NamedEstimator | str, OPEN_INSTRUCT] = "standard"
    """standard: (reward - mean) / (std + eps) within the group; centered: reward - mean; batch_std: the std of the batch;
    rloo: reward - mean of the group's other completions; reinforce_plus_plus: (reward - mean) / (std + eps) over all tokens of
    the batch; reinforce_plus_plus_baseline: the same of centered; gdpo: standard for each reward function, then their weighted
    sum over the batch; or your own, file.py:function or package.module:function."""
    advantage_std: Annotated[Literal["population", "sample", "verl", "trl"], BY_NAME] = "population"
    """The standard deviation divides by the number n of rewards, or of tokens (population), or by n - 1 (the others); eps is 1e-8, with
    verl 1e-6 and with trl 1e-4, as these trainers have it."""
    reward_weights: Annotated[tuple[float, ...], TRL] = ()
    """Weight of each reward function; empty: 1 for each."""
    filter_zero_std_samples: Annotated[bool, OPEN_INSTRUCT] = True
    """Leave out groups whose rewards are all equal."""
    active_sampling: Annotated[bool, OPEN_INSTRUCT] = False
    """Sample further prompts to replace the groups left out, until the batch is full or ten steps' worth have been sampled."""
    active_sampling_oversample: Annotated[float, NOT_NEGATIVE] = 0.0
    """Prompts that are sampled in addition, as a share of a step's, so that groups left out are replaced at once."""
    replay_buffer_size: Annotated[int, NOT_NEGATIVE, TRL] = 0
    """Groups of earlier steps to keep, those whose rewards differ most, which take the place of groups left out; 0: none. Their
    tokens are of older policies, for which the loss needs a correction; max_staleness limits their age."""
    no_resampling_pass_rate: Annotated[float | None, SHARE, OPEN_INSTRUCT] = None
    """A prompt whose mean reward reaches this share of the highest one is never sampled again; none: off."""
    mask_truncated_completions: Annotated[bool, OPEN_INSTRUCT, TRL] = False
    """Do not train on truncated completions; they still count in the mean and standard deviation of their group."""
    overlong_cache_length: Annotated[int | None, ONE_OR_MORE] = None
    """Soft penalty for length: it grows from 0 to -1 over this many tokens before response_length; none: off."""
    top_entropy_quantile: Annotated[float, SHARE, TRL] = 1.0
    """Train only on this share of the tokens, those with the highest entropy; 1: all."""
    entropy_coef: Annotated[float, NOT_NEGATIVE, TRL] = 0.0
    """Weight of the entropy bonus."""
    use_adaptive_entropy: Annotated[bool, TRL] = False
    """Change entropy_coef by entropy_coef_delta after each optimizer step: up below entropy_target, otherwise down."""
    entropy_coef_min: Annotated[float, NOT_NEGATIVE, TRL, ADAPTIVE] = 0.0
    """Lower limit of the adapted entropy_coef."""
    entropy_coef_max: Annotated[float, NOT_NEGATIVE, TRL, ADAPTIVE] = 1.0
    """Upper limit of the adapted entropy_coef."""
    entropy_coef_delta: Annotated[float, NOT_NEGATIVE, TRL, ADAPTIVE] = 0.005
    """Change of entropy_coef per optimizer step."""
    entropy_target: Annotated[float, NOT_NEGATIVE, TRL, ADAPTIVE] = 0.2
    """Mean entropy per token to aim for."""
    num_epochs: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Passes over each rollout batch."""
    num_mini_batches: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Optimizer steps per pass."""

    @property
    def advantage_ddof(self) -> int:
        """Delta degrees of freedom: the variance is divided by the number of rewards minus this."""
        return STANDARD_DEVIATIONS[self.advantage_std][0]

    @property
    def advantage_eps(self) -> float:
        """Addend of the standard deviation."""
        return STANDARD_DEVIATIONS[self.advantage_std][1]

    @property
    def is_own_estimator(self) -> bool:
        """True if `advantage_normalization_type` names a user's function, `module:function`."""
        module, _, name = self.advantage_normalization_type.rpartition(":")
        return bool(module and name)


def _estimator(advantage_normalization_type: str, is_own_estimator: bool) -> Iterator[str]:
    if not is_own_estimator and advantage_normalization_type not in NAMED_ESTIMATORS:
        yield (
            f"advantage_normalization_type={advantage_normalization_type} is unknown; choose one of "
            f"{', '.join(NAMED_ESTIMATORS)}, or name a function of yours: file.py:function or package.module:function"
        )


def _mini_batches(num_mini_batches: int, num_unique_prompts_rollout: int) -> Iterator[str]:
    prompts = num_unique_prompts_rollout
    if num_mini_batches > prompts:
        yield (
            f"num_mini_batches={num_mini_batches} is more than the {prompts} prompts of a step, whose "
            f"groups may stay together; use at most {prompts}"
        )


def _groups(
    active_sampling: bool,
    filter_zero_std_samples: bool,
    replay_buffer_size: int,
    distills: bool,
    is_own_estimator: bool,
    num_samples_per_prompt_rollout: int,
    num_unique_prompts_rollout: int,
) -> Iterator[str]:
    if active_sampling and not filter_zero_std_samples:
        yield (
            "active_sampling=true replaces the groups that filter_zero_std_samples leaves out, but that is false; "
            "set both to true or both to false"
        )
    if replay_buffer_size and not filter_zero_std_samples:
        yield (
            f"replay_buffer_size={replay_buffer_size} replaces the groups that filter_zero_std_samples leaves out, but that is "
            "false; set it to true, or replay_buffer_size to 0"
        )
    if replay_buffer_size and active_sampling:
        yield (
            f"replay_buffer_size={replay_buffer_size} and active_sampling=true both replace the groups left out, one by old "
            "groups and one by new ones; turn one of them off"
        )
    if num_samples_per_prompt_rollout > 1:
        return
    if filter_zero_std_samples and not distills:
        yield (
            "num_samples_per_prompt_rollout=1 makes every group's rewards equal, so filter_zero_std_samples=true would "
            "leave nothing; set it to false, or sample at least 2"
        )
    if num_unique_prompts_rollout == 1 and not is_own_estimator:
        yield (
            "num_samples_per_prompt_rollout=1 compares completions within the batch, but num_unique_prompts_rollout=1 "
            "makes a batch of one; sample at least 2 of one of them"
        )


def _equal_rewards(
    advantage_normalization_type: str,
    active_sampling: bool,
    filter_zero_std_samples: bool,
    num_samples_per_prompt_rollout: int,
) -> Iterator[str]:
    is_left_out = filter_zero_std_samples and not active_sampling and num_samples_per_prompt_rollout > 1
    if advantage_normalization_type == "reinforce_plus_plus" and is_left_out:
        yield (
            "advantage_normalization_type=reinforce_plus_plus compares all completions of the batch, so that groups whose rewards "
            "are all equal teach something as well, but filter_zero_std_samples=true leaves them out; set it to false, or "
            "active_sampling to true, which puts others in their place"
        )


def _entropy(
    use_adaptive_entropy: bool, entropy_coef: float, entropy_coef_min: float, entropy_coef_max: float
) -> Iterator[str]:
    if use_adaptive_entropy and not entropy_coef_min <= entropy_coef <= entropy_coef_max:
        yield (
            f"entropy_coef={entropy_coef:g} must lie between entropy_coef_min={entropy_coef_min:g} and "
            f"entropy_coef_max={entropy_coef_max:g} with use_adaptive_entropy=true"
        )


def _overlong(overlong_cache_length: int | None, response_length: int) -> Iterator[str]:
    if overlong_cache_length is not None and overlong_cache_length > response_length:
        yield (
            f"overlong_cache_length={overlong_cache_length} must be at most response_length={response_length}, in whose "
            "last tokens it applies"
        )


def _weighed_advantages(advantage_normalization_type: str, num_reward_funcs: int) -> Iterator[str]:
    if advantage_normalization_type == "gdpo" and not num_reward_funcs:
        yield (
            "advantage_normalization_type=gdpo weighs reward functions (reward_funcs), but there are none; choose "
            "another"
        )


def _pass_rate(no_resampling_pass_rate: float | None, num_reward_funcs: int) -> Iterator[str]:
    if no_resampling_pass_rate is not None and num_reward_funcs:
        yield (
            f"no_resampling_pass_rate={no_resampling_pass_rate:g} is a share of the highest reward, but "
            "reward functions have none; leave it out"
        )


def _weights(reward_weights: tuple[float, ...], num_reward_funcs: int) -> Iterator[str]:
    if not all(math.isfinite(weight) for weight in reward_weights):
        yield f"reward_weights={' '.join(map(str, reward_weights))} must be finite numbers"
    elif reward_weights and len(reward_weights) != num_reward_funcs:
        yield (
            f"reward_weights has {len(reward_weights)} entries for {num_reward_funcs} reward functions "
            "(reward_funcs); give one for each, or none"
        )


RULES: tuple[Rule, ...] = (_estimator, _mini_batches)
GROUPS: tuple[Rule, ...] = (_groups, _equal_rewards, _entropy, _overlong)
REWARD_FUNCTIONS: tuple[Rule, ...] = (_weighed_advantages, _pass_rate, _weights)

"""The loss section: independent axes that every named loss is a combination of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from mgrpo.config.annotations import (
    BELOW_ONE,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    POSITIVE,
    TRL,
    Form,
    Needs,
    Range,
    Rule,
)
from mgrpo.config.provenance import Provenance

Aggregation = Literal["token", "constant", "seq_mean", "local_token", "dr_grpo", "luspo"]
NamedLoss = Literal["ppo_clip", "cispo", "sapo", "vespo", "reinforce"]
NAMED_LOSSES: tuple[str, ...] = get_args(NamedLoss)
Level = Literal["token", "sequence_mean", "sequence_sum"]
"""Where the ratio of trainer to engine is computed: per token, or as exp of the mean or sum over a sequence."""
DIVERGENCE = "divergence"
"""The level of the mask that compares the total variation in place of the ratio."""


def _is_denominator(text: str) -> bool:
    try:
        return text == "token" or POSITIVE.holds(float(text))
    except ValueError:
        return False


DENOMINATOR = Form("token or a finite number above 0", _is_denominator)
WITH_RHO = Needs("use_rho_correction=true", lambda use_rho_correction: use_rho_correction)
WITH_CLIP = Needs(
    "policy_loss=ppo_clip", lambda policy_loss, is_own_function: policy_loss == "ppo_clip" or is_own_function
)
WITH_LOWER_CLIP = Needs(
    "policy_loss=ppo_clip, or cispo with cispo_two_sided=true",
    lambda policy_loss, cispo_two_sided, is_own_function: (
        policy_loss == "ppo_clip" or (policy_loss == "cispo" and cispo_two_sided) or is_own_function
    ),
)
WITH_CISPO = Needs("policy_loss=cispo", lambda policy_loss: policy_loss == "cispo")
WITH_CAP = Needs(
    "policy_loss=ppo_clip or cispo",
    lambda policy_loss, is_own_function: policy_loss in ("ppo_clip", "cispo") or is_own_function,
)
WITH_RATIO = Needs("a policy_loss with a ratio", lambda policy_loss: policy_loss not in ("vespo", "reinforce"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Settings of `mgrpo.algo.policy_loss`. Formulas: its docstring."""

    policy_loss: NamedLoss | str = "ppo_clip"
    """ppo_clip: clipped ratio; cispo: capped weight; sapo: soft gate; vespo: sequence gate; reinforce: no ratio; or your own,
    file.py:function or package.module:function."""
    ratio_level: Annotated[Literal["token", "sequence", "sequence_token"], WITH_RATIO] = "token"
    """token: one ratio per token; sequence: one per completion (GSPO); sequence_token: its value with each token's gradient."""
    aggregation: Aggregation | None = None
    """Divisor of the sum over tokens; none: token or constant, as loss_denominator says."""
    loss_denominator: Annotated[str, DENOMINATOR, OPEN_INSTRUCT] = "token"
    """token: mean over the response tokens of the mini-batch; a number: divide the sum by it (Dr. GRPO)."""
    local_batch_size: Annotated[int, ONE_OR_MORE] = 8
    """With aggregation local_token: completions in one mean over tokens, however they are packed."""
    clip_lower: Annotated[float, BELOW_ONE, OPEN_INSTRUCT, WITH_LOWER_CLIP] = 0.2
    """The ratio is clipped below at 1 - clip_lower."""
    clip_higher: Annotated[float, POSITIVE, OPEN_INSTRUCT, WITH_CAP] = 0.2
    """The ratio is clipped above at 1 + clip_higher, which is also CISPO's cap."""
    cispo_two_sided: Annotated[bool, WITH_CISPO] = False
    """CISPO's weight is also at least 1 - clip_lower, as in verl and slime."""
    delta: Annotated[float | None, POSITIVE, TRL, WITH_CLIP] = None
    """Two-sided clip: upper bound of the unclipped ratio."""
    dual_clip: Annotated[float | None, Range(low=1, low_open=True), WITH_CLIP] = None
    """Dual clip: the loss of a token with advantage A < 0 is at most dual_clip x |A|."""
    sapo_temperature_pos: Annotated[float, POSITIVE, TRL] = 1.0
    """SAPO's temperature where the advantage is above 0."""
    sapo_temperature_neg: Annotated[float, POSITIVE, TRL] = 1.05
    """SAPO's temperature elsewhere."""
    vespo_k_pos: Annotated[float, NOT_NEGATIVE, TRL] = 2.0
    """VESPO's exponent of the sequence ratio, advantage >= 0."""
    vespo_lambda_pos: Annotated[float, NOT_NEGATIVE, TRL] = 3.0
    """VESPO's decay, advantage >= 0."""
    vespo_k_neg: Annotated[float, NOT_NEGATIVE, TRL] = 3.0
    """VESPO's exponent of the sequence ratio, advantage < 0."""
    vespo_lambda_neg: Annotated[float, NOT_NEGATIVE, TRL] = 2.0
    """VESPO's decay, advantage < 0."""
    beta: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, TRL] = 0.05
    """Weight of the KL penalty towards the reference model; 0: no reference is loaded unless log_ref_kl is set."""
    kl_estimator: Annotated[Literal[0, 1, 2, 3], OPEN_INSTRUCT] = 2
    """0: d; 1: d^2/2; 2: exp(-d) - 1 + d; 3: ratio x d, where d = logprob - reference logprob."""
    kl_bias_correction: bool = False
    """Multiply the KL estimate by the ratio, including its gradient."""
    use_rho_correction: Annotated[bool, OPEN_INSTRUCT] = False
    """Multiply the policy loss by rho = exp(old logprob - engine's logprob), bounded by the rho settings."""
    rho_level: Annotated[Level, WITH_RHO] = "token"
    """Level of the rho that multiplies: token, or exp of the mean or of the sum over the completion."""
    rho_clamp_lower_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, WITH_RHO] = 0.0
    """Smallest rho that multiplies; 0: no bound."""
    rho_clamp_upper_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, WITH_RHO] = 2.0
    """Largest rho that multiplies (truncated importance sampling); 0: no bound."""
    rho_mask_level: Annotated[Literal["token", "sequence_mean", "sequence_sum", "divergence"], WITH_RHO] = "token"
    """Level of the rho that decides what is dropped; divergence: the upper bound is one of the completion's mean |rho - 1|, and only
    tokens whose update would raise that are dropped."""
    rho_mask_lower_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, WITH_RHO] = 0.0
    """The policy loss is dropped where rho is below this; 0: no bound."""
    rho_mask_upper_bound: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, WITH_RHO] = 0.0
    """The policy loss is dropped where rho is above this; 0: no bound."""
    off_policy_mask_threshold: Annotated[float | None, NOT_NEGATIVE, TRL] = None
    """Drop completions with advantage < 0 whose mean of engine's minus current logprob is above this; none: off."""

    @property
    def is_own_function(self) -> bool:
        """Whether `policy_loss` names a user's function, `module:function`."""
        module, _, name = self.policy_loss.rpartition(":")
        return bool(module and name)

    @property
    def effective_aggregation(self) -> Aggregation:
        """`aggregation`, or what `loss_denominator` implies."""
        return self.aggregation or ("token" if self.loss_denominator == "token" else "constant")

    @property
    def constant(self) -> float | None:
        """The number in `loss_denominator`; None where it is "token"."""
        return None if self.loss_denominator == "token" else float(self.loss_denominator)


def _reference(
    beta: float, log_ref_kl: bool, ref_policy_update_freq: int | None, provenance: Provenance
) -> Iterator[str]:
    measured = [name for name, on in ((f"beta={beta}", beta != 0), ("log_ref_kl=true", log_ref_kl)) if on]
    if measured and not provenance.expected.get("load_ref_policy", True):
        yield (
            f"{' and '.join(measured)} needs the reference model, but load_ref_policy=false; "
            "set beta to 0 and log_ref_kl to false, or load_ref_policy to true"
        )
    elif ref_policy_update_freq is not None and not measured:
        yield (
            f"ref_policy_update_freq={ref_policy_update_freq} updates a reference model, which is not loaded with beta=0; "
            "leave it out, or set beta above 0"
        )


def _old_logprobs(use_vllm_logprobs: bool, use_rho_correction: bool) -> Iterator[str]:
    if use_vllm_logprobs and use_rho_correction:
        yield (
            "use_vllm_logprobs=true makes the engine's logprobs the old ones, so use_rho_correction=true (rho is the "
            "ratio of the two) has nothing to correct; set one of them to false"
        )


def _uncorrected(
    async_steps: int,
    max_age: int,
    active_sampling: bool,
    active_sampling_oversample: float,
    weight_sync_steps: int,
    replay_buffer_size: int,
    vllm_kv_cache_dtype: str,
    fp8: str,
    use_vllm_logprobs: bool,
    use_rho_correction: bool,
    rho_clamp_upper_bound: float,
    rho_mask_upper_bound: float,
    policy_loss: str,
    is_own_function: bool,
) -> Iterator[str]:
    """Tokens of other policies than the one that is trained need a correction in the loss."""
    has_rho = use_rho_correction and (rho_clamp_upper_bound or rho_mask_upper_bound)
    if has_rho or is_own_function:
        return
    causes = []
    extra = 0 if async_steps or not active_sampling else active_sampling_oversample
    older = [
        f"{name}={value:g}"
        for name, value, is_on in (
            ("async_steps", async_steps, async_steps > 0),
            ("active_sampling_oversample", extra, extra > 0),
            ("weight_sync_steps", weight_sync_steps, weight_sync_steps > 1),
        )
        if is_on
    ]
    if max_age and older:
        age = "a step" if max_age == 1 else f"up to {max_age} steps"
        causes.append(f"{' with '.join(older)} trains on tokens of policies {age} older")
    if replay_buffer_size:
        causes.append(f"replay_buffer_size={replay_buffer_size} trains on tokens of older policies")
    if vllm_kv_cache_dtype != "auto":
        causes.append(f"vllm_kv_cache_dtype={vllm_kv_cache_dtype} samples from a policy with rounded keys and values")
    if fp8 != "none":
        causes.append(f"fp8={fp8} trains a policy with rounded products, which engines do not sample from")
    if not causes:
        return
    needs = f"{' and '.join(causes)}, which needs a correction"
    by_rho = "use_rho_correction=true with rho_clamp_upper_bound above 1 (2.0 is usual), which weighs each token"
    if not use_vllm_logprobs:
        yield f"{needs}: {by_rho}, or use_vllm_logprobs=true, which compares the policy with the one that sampled"
    elif policy_loss == "reinforce":
        yield (
            f"{needs}, and policy_loss=reinforce has no ratio to which use_vllm_logprobs=true could matter; use "
            f"{by_rho}, in its place, or a policy_loss with a ratio"
        )


def _rho_bounds(
    use_rho_correction: bool,
    rho_clamp_lower_bound: float,
    rho_clamp_upper_bound: float,
    rho_mask_lower_bound: float,
    rho_mask_upper_bound: float,
    rho_mask_level: str,
) -> Iterator[str]:
    if not use_rho_correction:
        return
    bounds_divergence = rho_mask_level == DIVERGENCE
    for name, bound in (
        ("rho_clamp_lower_bound", rho_clamp_lower_bound),
        ("rho_mask_lower_bound", rho_mask_lower_bound),
    ):
        if bounds_divergence and name == "rho_mask_lower_bound" and bound > 0:
            yield f"{name}={bound:g} would drop the smallest divergences (rho_mask_level=divergence); set it to 0"
        elif bound >= 1:
            yield f"{name}={bound:g} must be below 1, the ratio of equal policies; 0 is off"
    for name, bound in (
        ("rho_clamp_upper_bound", rho_clamp_upper_bound),
        ("rho_mask_upper_bound", rho_mask_upper_bound),
    ):
        bounds_ratio = name == "rho_clamp_upper_bound" or not bounds_divergence
        if bounds_ratio and 0 < bound <= 1:
            yield f"{name}={bound:g} must be above 1, the ratio of equal policies; 0 is off"
    if bounds_divergence and rho_mask_upper_bound == 0:
        yield "rho_mask_level=divergence needs a bound of the divergence: --rho_mask_upper_bound 0.1"


def _surrogate(
    policy_loss: str,
    is_own_function: bool,
    delta: float | None,
    dual_clip: float | None,
    use_rho_correction: bool,
    rho_level: str,
) -> Iterator[str]:
    if is_own_function:
        return
    if policy_loss not in NAMED_LOSSES:
        yield (
            f"policy_loss={policy_loss} is unknown; choose one of {', '.join(NAMED_LOSSES)}, or name a function of "
            "yours: file.py:function or package.module:function"
        )
    for name, bound in (("delta", delta), ("dual_clip", dual_clip)):
        if bound is not None and policy_loss != "ppo_clip":
            yield f"{name}={bound:g} belongs to policy_loss=ppo_clip, got {policy_loss}; leave it out"
    if policy_loss == "vespo" and use_rho_correction and rho_level != "token":
        yield (
            f"policy_loss=vespo includes the rho of each token in its own weight, got rho_level={rho_level}; "
            "set rho_level to token (vllm_importance_sampling_mode token_truncate or token_mask)"
        )


def _denominator(aggregation: str | None, loss_denominator: str) -> Iterator[str]:
    is_number = loss_denominator != "token"
    if aggregation == "constant" and not is_number:
        yield "aggregation=constant needs the number to divide by: --loss_denominator N"
    elif is_number and aggregation not in (None, "constant"):
        yield (
            f"loss_denominator={loss_denominator} is a constant divisor, but aggregation={aggregation}; "
            "leave one of them out"
        )


RULES: tuple[Rule, ...] = (_reference, _old_logprobs, _uncorrected, _rho_bounds, _surrogate, _denominator)


def _early_clip(delta: float | None, clip_higher: float) -> Iterator[str]:
    if delta is not None and delta <= 1 + clip_higher:
        yield f"delta={delta:g} is not above 1 + clip_higher = {1 + clip_higher:g}, so it clips before clip_higher does"


def _token_ratios(aggregation: str | None, ratio_level: str) -> Iterator[str]:
    if aggregation == "luspo" and ratio_level != "sequence":
        yield f"aggregation=luspo is meant for ratio_level=sequence, got {ratio_level}"


def _baseline(num_samples_per_prompt_rollout: int, is_own_estimator: bool) -> Iterator[str]:
    if num_samples_per_prompt_rollout == 1 and not is_own_estimator:
        yield "num_samples_per_prompt_rollout=1: the baseline is the mean of the batch, as in REINFORCE"


def _own_correction(
    policy_loss: str,
    is_own_function: bool,
    is_off_policy: bool,
    max_age: int,
    replay_buffer_size: int,
    vllm_kv_cache_dtype: str,
) -> Iterator[str]:
    if is_own_function and is_off_policy:
        older = (
            f"older policies (replay_buffer_size={replay_buffer_size})"
            if replay_buffer_size
            else f"policies up to {max_age} steps older"
        )
        yield (
            f"policy_loss={policy_loss} is trained on tokens of {older} and has to "
            "correct for that itself; rollout_logprobs are those of the policy that sampled"
        )
    if is_own_function and vllm_kv_cache_dtype != "auto":
        yield (
            f"policy_loss={policy_loss} is trained on tokens of engines that round keys and values (vllm_kv_cache_dtype="
            f"{vllm_kv_cache_dtype}) and has to correct for that itself by rollout_logprobs"
        )


WARNINGS: tuple[Rule, ...] = (_early_clip, _token_ratios, _baseline, _own_correction)

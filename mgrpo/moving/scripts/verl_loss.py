"""The loss of verl's commands: the joint meaning of its names, by verl's own functions."""

from __future__ import annotations

from mgrpo.moving.command_words import words
from mgrpo.moving.scripts.command_config import NOTHING, Given, clip_bounds

ACTOR = "actor_rollout_ref.actor."
POLICY_LOSSES: dict[str, dict[str, str]] = {
    "vanilla": {},
    "gspo": {"ratio_level": "sequence_token", "aggregation": "seq_mean"},
    "sapo": {"policy_loss": "sapo", "aggregation": "seq_mean"},
    "cispo": {"policy_loss": "cispo"},
}
"""The settings of each loss_mode; those with an aggregation average the policy term so, for any loss_agg_mode."""

ADVANTAGES: dict[str, str] = {
    "grpo": "",
    "grpo_vectorized": "",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
"""advantage_normalization_type for each adv_estimator; that of grpo depends on norm_adv_by_std_in_grpo."""


def set_loss(given: Given) -> None:
    """Set loss, advantages and correction, and refuse terms with another average here."""
    values = given.values
    has_kl = given.is_on(f"{ACTOR}use_kl_loss")
    values["beta"] = given.text(f"{ACTOR}kl_loss_coef") if has_kl else 0.0
    losses = given.choice(f"{ACTOR}policy_loss.loss_mode", POLICY_LOSSES)
    if isinstance(losses, dict):
        values |= losses
        _clips(given, has_dual=not losses)
    if losses and given.is_on("algorithm.rollout_correction.bypass_mode"):
        mode = f"{ACTOR}policy_loss.loss_mode"
        given.refuse(
            words("verl")[mode], given.text(mode), "with bypass_mode verl puts vanilla in its place; leave one out"
        )
    _average(given, has_kl=has_kl)
    kind = given.choice("algorithm.adv_estimator", ADVANTAGES)
    if kind is not None:
        by_std = given.is_on("algorithm.norm_adv_by_std_in_grpo")
        values["advantage_normalization_type"] = kind or ("standard" if by_std else "centered")
        # Over the batch verl divides by sqrt(variance + 1e-8).
        values["advantage_std"] = "sample" if kind else "verl"
    # There every group is trained on, also one whose advantages are all 0.
    values["filter_zero_std_samples"] = values.get("active_sampling", False)
    level = given.choice(
        "algorithm.rollout_correction.rollout_is", {"null": "", "": "", "token": "token", "sequence": "sequence_sum"}
    )
    if level:
        cap = given.text("algorithm.rollout_correction.rollout_is_threshold")
        values |= {"use_rho_correction": True, "rho_level": level, "rho_clamp_upper_bound": cap}
    if given.is_on("reward_model.reward_kwargs.overlong_buffer_cfg.enable"):
        values["overlong_cache_length"] = given.count("reward_model.reward_kwargs.overlong_buffer_cfg.len")


def _clips(given: Given, *, has_dual: bool) -> None:
    """The bounds of the ratio. Both sides have defaults, and so clip_ratio is read in place of a null only."""
    mode, either = given.text(f"{ACTOR}policy_loss.loss_mode").lower(), f"{ACTOR}clip_ratio"
    low, high = (
        either if given.text(f"{either}_{side}").lower() in NOTHING else f"{either}_{side}" for side in ("low", "high")
    )
    if mode == "sapo":
        given.leave_out([either, f"{either}_low", f"{either}_high"], "loss_mode=sapo has no clip")
    else:
        clip_bounds(given, low, high)
    if either not in (low, high):
        given.leave_out(
            [either], "verl reads clip_ratio_low and clip_ratio_high, which are 0.2 where they are not given"
        )
    if not has_dual:
        given.values.pop("dual_clip", None)
        given.leave_out([f"{ACTOR}clip_ratio_c"], f"loss_mode={mode} has no dual clip")


def _average(given: Given, *, has_kl: bool) -> None:
    """Refuse terms of the loss that have a separate average there."""
    word, mode = words("verl")[f"{ACTOR}loss_agg_mode"], given.text(f"{ACTOR}loss_agg_mode")
    loss = given.text(f"{ACTOR}policy_loss.loss_mode").lower()
    averages_itself = "aggregation" in POLICY_LOSSES.get(loss, {})
    if averages_itself and has_kl and given.number(f"{ACTOR}kl_loss_coef") and mode != "seq-mean-token-mean":
        given.refuse(
            word,
            mode,
            f"loss_mode={loss} averages over each sequence first, whatever this is, but the KL term does as this says, and here both "
            "have one average; give seq-mean-token-mean, or turn the KL term off",
        )
    elif averages_itself and mode != "seq-mean-token-mean":
        given.notes.append(
            f"aggregation is seq_mean: loss_mode={loss} averages over each sequence first, whatever loss_agg_mode is"
        )
    if given.number(f"{ACTOR}entropy_coeff") and mode != "token-mean":
        given.refuse_entropy(words("verl")[f"{ACTOR}entropy_coeff"], f"loss_agg_mode={mode}")

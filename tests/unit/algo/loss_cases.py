"""A batch for the tests of the policy loss, and the definition of that loss as loops over Python floats.

`loop_loss` shares no line with the package: no tensors, no broadcasting, one formula a branch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from mgrpo.algo import LossConfig, loss_denominator, metric_sums, reduce_metrics

LENGTHS = [3, 1, 7, 2, 5, 4]
RESPONSE_LENGTH = 40.0
"""What aggregation dr_grpo multiplies the number of sequences by."""
VESPO_LOG_MIN = math.log(1e-8)


def loss_config(**settings: Any) -> LossConfig:
    """`LossConfig` with neither the KL penalty nor the clamp of rho that its defaults have."""
    return LossConfig(**({"beta": 0.0, "rho_clamp_upper_bound": 0.0} | settings))


def reduced(metrics: dict[str, torch.Tensor], maxima: dict[str, torch.Tensor] | None = None) -> dict[str, float]:
    """The logged values of a `PolicyLoss`."""
    return reduce_metrics(metric_sums(metrics, maxima or {}))


def whole_denominator(b: dict[str, torch.Tensor], config: LossConfig) -> float:
    """The denominator of the whole batch."""
    return loss_denominator(
        int(b["loss_mask"].sum()), config, num_seqs=len(b["cu_seqlens"]) - 1, response_length=RESPONSE_LENGTH
    )


def batch(
    seed: int = 0, dtype: torch.dtype = torch.float64, lengths: list[int] | None = None
) -> dict[str, torch.Tensor]:
    """Ragged sequences, off-policy enough that a good part of the tokens is clipped, some tokens untrained."""
    lengths = LENGTHS if lengths is None else lengths
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    logprobs = -2.0 + noise(0.5)
    mask = torch.rand(tokens, generator=generator) < 0.8
    values = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + noise(0.3),
        "ref_logprobs": logprobs + noise(0.4),
        "rollout_logprobs": logprobs + noise(0.1),
        "advantages": torch.randn(len(lengths), generator=generator, dtype=torch.float64),
    }
    values = {name: value.to(dtype) for name, value in values.items()}
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return {**values, "loss_mask": mask, "cu_seqlens": cu_seqlens}


def plain(b: dict[str, torch.Tensor]) -> dict[str, list]:
    """The batch as lists."""
    return {name: tensor.tolist() for name, tensor in b.items()}


def select(b: dict[str, torch.Tensor], sequences: list[int]) -> dict[str, torch.Tensor]:
    """Some sequences of a batch, in the order given."""
    ends = b["cu_seqlens"].tolist()
    rows = torch.tensor([t for s in sequences for t in range(ends[s], ends[s + 1])], dtype=torch.int64)
    chosen = {}
    for name, value in b.items():
        if name == "cu_seqlens":
            chosen[name] = torch.tensor([0, *(ends[s + 1] - ends[s] for s in sequences)]).cumsum(0).int()
        elif len(value) == ends[-1]:
            chosen[name] = value[rows]
        else:
            chosen[name] = value[torch.tensor(sequences, dtype=torch.int64)]
    return chosen


def held(x: float, limit: float) -> float:
    return min(max(x, -limit), limit)


def loop_loss(
    b: dict[str, list], config: LossConfig, *, denominator: float | None = None, live: list[float] | None = None
) -> tuple[float, dict[str, float]]:
    """Loss and metrics of the batch.

    `live` stands for the logprobs wherever the loss has a gradient, and `b["logprobs"]` where it has none (a ratio that only
    weighs): the derivative in `live` is the gradient.
    """
    fixed, old, ref, roll = b["logprobs"], b["old_logprobs"], b["ref_logprobs"], b["rollout_logprobs"]
    live = fixed if live is None else live
    spans = list(zip(b["cu_seqlens"], b["cu_seqlens"][1:], strict=False))
    trained = [[t for t in range(*span) if b["loss_mask"][t]] for span in spans]
    num_trained, num_seqs = sum(map(len, trained)), len(spans)
    low_clip, high_clip = 1 - config.clip_lower, 1 + config.clip_higher
    sums: dict[str, float] = defaultdict(float)
    ratios, mismatches = [], []
    loss = 0.0

    for s, tokens in enumerate(trained):
        n = len(tokens)
        if n == 0:
            continue
        seq_live = sum(live[t] - old[t] for t in tokens) / n
        seq_fixed = sum(fixed[t] - old[t] for t in tokens) / n
        log_rho = {t: held(old[t] - roll[t], 10) for t in tokens}
        total_rho = sum(log_rho.values())
        variation = sum(abs(math.exp(x) - 1) for x in log_rho.values()) / n
        drift = sum(roll[t] - fixed[t] for t in tokens) / n

        def advantage(t: int, s: int = s) -> float:
            return b["advantages"][t if len(b["advantages"]) == len(fixed) else s]

        def rho_at(level: str, t: int, log_rho: dict = log_rho, total: float = total_rho, n: int = n) -> float:
            return math.exp(held({"token": log_rho[t], "sequence_mean": total / n, "sequence_sum": total}[level], 10))

        weight, is_low, is_high, was_clamped = {}, {}, {}, {}
        for t in tokens:
            free = rho_at(config.rho_level, t)
            clamped = max(free, config.rho_clamp_lower_bound) if config.rho_clamp_lower_bound else free
            clamped = min(clamped, config.rho_clamp_upper_bound) if config.rho_clamp_upper_bound else clamped
            judged = rho_at("token" if config.rho_mask_level == "divergence" else config.rho_mask_level, t)
            is_low[t] = config.rho_mask_lower_bound > 0 and judged < config.rho_mask_lower_bound
            is_high[t] = config.rho_mask_upper_bound > 0 and judged > config.rho_mask_upper_bound
            if config.rho_mask_level == "divergence":
                is_low[t] = False
                is_high[t] = variation > config.rho_mask_upper_bound and log_rho[t] * advantage(t) > 0
            was_clamped[t] = clamped != free
            weight[t] = 0.0 if is_low[t] or is_high[t] else clamped

        log_w = 0.0
        for t in tokens:
            log_w += held(fixed[t] - old[t], 20)
            if config.use_rho_correction:
                log_w += max(math.log(weight[t]), VESPO_LOG_MIN) if weight[t] else VESPO_LOG_MIN
        log_w = min(max(log_w, VESPO_LOG_MIN), 20.0)

        for t in tokens:
            a = advantage(t)
            if config.ratio_level == "token":
                r, r_fixed = math.exp(held(live[t] - old[t], 40)), math.exp(held(fixed[t] - old[t], 40))
            elif config.ratio_level == "sequence":
                r, r_fixed = math.exp(seq_live), math.exp(seq_fixed)
            else:
                r, r_fixed = math.exp(seq_fixed) * math.exp(live[t] - fixed[t]), math.exp(seq_fixed)

            clipped_low = clipped_high = bounded = False
            if config.policy_loss == "ppo_clip":
                inside = min(max(r, low_clip), high_clip) * a
                outside = (r if config.delta is None else min(r, config.delta)) * a
                policy = -min(inside, outside)
                if inside < outside:
                    clipped_low, clipped_high = r < low_clip, r > high_clip
                elif config.delta is not None and r > config.delta and a != 0:
                    bounded = True
                if config.dual_clip is not None and a < 0 and policy > -a * config.dual_clip:
                    policy, bounded = -a * config.dual_clip, True
            elif config.policy_loss == "cispo":
                floor = low_clip if config.cispo_two_sided else 0.0
                policy = -a * max(min(r_fixed, high_clip), floor) * live[t]
                clipped_low, clipped_high = r_fixed < floor, r_fixed > high_clip
            elif config.policy_loss == "sapo":
                tau = config.sapo_temperature_pos if a > 0 else config.sapo_temperature_neg
                policy = -a * (4 / tau) / (1 + math.exp(-tau * (r - 1)))
            elif config.policy_loss == "vespo":
                k, lam = (
                    (config.vespo_k_pos, config.vespo_lambda_pos)
                    if a >= 0
                    else (config.vespo_k_neg, config.vespo_lambda_neg)
                )
                policy = -a * math.exp(lam + k * log_w - lam * math.exp(log_w)) * live[t]
            else:
                policy = -a * live[t]

            factor = 1.0
            if config.use_rho_correction and config.policy_loss != "vespo":
                factor *= weight[t]
            is_off = config.off_policy_mask_threshold is not None and a < 0 and drift > config.off_policy_mask_threshold
            factor = 0.0 if is_off else factor
            policy = factor * policy if factor else 0.0
            if not factor:
                clipped_low = clipped_high = bounded = False

            d = held(live[t] - ref[t], 40)
            kls = [d, d * d / 2, math.exp(-d) - 1 + d, r * d]
            penalty = config.beta * kls[config.kl_estimator] * (r if config.kl_bias_correction else 1.0)
            share = {
                "token": num_trained,
                "local_token": num_trained,
                "constant": config.constant,
                "dr_grpo": num_seqs * RESPONSE_LENGTH,
                "seq_mean": num_seqs,
                "luspo": num_seqs,
            }[config.effective_aggregation]
            share = share if denominator is None else denominator
            loss += (policy + penalty) / share / (n if config.aggregation == "seq_mean" else 1)

            ratios.append(r)
            mismatches.append(abs(old[t] - roll[t]))
            for name, x in {
                "loss/policy_avg": policy,
                "loss/kl_avg": penalty,
                "loss/total_avg": policy + penalty,
                "policy/clipfrac_avg": clipped_low or clipped_high,
                "clip_ratio/low_mean": clipped_low,
                "clip_ratio/high_mean": clipped_high,
                "policy/bounded_frac": bounded,
                "policy/approxkl_avg": 0.5 * (live[t] - old[t]) ** 2,
                "val/ratio": r,
                "debug/vllm_vs_local_logprob_diff_mean": mismatches[-1],
                "debug/vllm_local_reverse_kl": roll[t] - live[t],
                "debug/vllm_vs_local_ratio_tail_frac": not 0.9 <= math.exp(log_rho[t]) <= 1.1,
                **{f"objective/kl{k}_avg": kls[k] for k in range(4)},
                "val/rho_weight": weight[t],
                "val/rho_clipfrac": was_clamped[t],
                "val/rho_drop_frac": is_low[t] or is_high[t],
                "val/rho_drop_low_frac": is_low[t],
                "val/rho_drop_high_frac": is_high[t],
            }.items():
                if config.use_rho_correction or not name.startswith("val/rho"):
                    sums[name] += float(x)
            keeps = config.off_policy_mask_threshold is not None
            if keeps:
                sums["val/policy_term_drop_frac"] += float(is_off)

    metrics: dict[str, Any] = {name: x / num_trained for name, x in sums.items()}
    mean, mean_mismatch = sum(ratios) / num_trained, sum(mismatches) / num_trained
    metrics["val/ratio_var"] = sum((r - mean) ** 2 for r in ratios) / num_trained
    metrics["debug/vllm_vs_local_logprob_diff_std"] = (
        sum((x - mean_mismatch) ** 2 for x in mismatches) / num_trained
    ) ** 0.5
    metrics["debug/vllm_vs_local_logprob_diff_max"] = max(mismatches)
    return loss, metrics

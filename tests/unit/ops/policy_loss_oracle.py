"""policy_loss a third time: one token after the other in Python's floats, without a line of the kernel or the reference."""

from __future__ import annotations

import itertools
import math

import torch
from policy_loss_cases import Result, chosen
from torch import Tensor

from mgrpo.ops import COLUMNS


def python_loss(operands: dict[str, Tensor], settings: dict) -> Result:
    """Loss, gradients by central differences, and sums, one token after the other in Python's floats."""
    operands, settings = chosen(operands, settings)
    lists = {name: x.tolist() for name, x in operands.items()}
    cu_seqlens = lists.pop("cu_seqlens")
    grad, seq_grad, sums = [0.0] * cu_seqlens[-1], [], []
    for s, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        seq_grad.append(0.0)
        sums.append(dict.fromkeys(COLUMNS, 0.0) | {"mismatch_max": -math.inf})
        for i in range(begin, end):
            if lists["weights"][i] == 0:
                continue
            token = {name: x[s if name.startswith("seq_") else i] for name, x in lists.items()}
            at = token["logprobs"], token.get("seq_log_ratio", 0.0)
            for name, value in token_columns(token, settings, *at).items():
                sums[s][name] = max(sums[s][name], value) if name == "mismatch_max" else sums[s][name] + value
            grad[i] += slope(token, settings, at, (1e-6, 0.0))
            seq_grad[s] += slope(token, settings, at, (0.0, 1e-6))
    table = torch.tensor([list(row.values()) for row in sums], dtype=torch.float64)
    return Result(table[:, 0].sum(), torch.tensor(grad).double(), torch.tensor(seq_grad, dtype=torch.float64), table)


def slope(token: dict[str, float], settings: dict, at: tuple[float, float], step: tuple[float, float]) -> float:
    """Derivative of a token's loss along step. The two terms are taken separately: next to a loss of e^40 a penalty has no digits."""
    ahead = token_columns(token, settings, at[0] + step[0], at[1] + step[1])
    behind = token_columns(token, settings, at[0] - step[0], at[1] - step[1])
    return token["weights"] * sum((ahead[name] - behind[name]) / (2 * sum(step)) for name in ("policy", "penalty"))


def token_columns(token: dict[str, float], settings: dict, logprob: float, seq_log_ratio: float) -> dict[str, float]:
    """What a trained token adds to each column that it adds to. `token` holds the operands, among them the values of
    logprob and seq_log_ratio to take where no gradient flows."""
    fixed = token["logprobs"]
    old = token["old_logprobs"] if math.isfinite(token["old_logprobs"]) else fixed
    advantage, weight = token["advantages"], token["weights"]
    columns: dict[str, float] = {}

    def held(x: float, limit: float = 40.0) -> float:
        return max(-limit, min(limit, x))

    level = settings["ratio_level"]
    if level == "token":
        r, fixed_r = math.exp(held(logprob - old)), math.exp(held(fixed - old))
    elif level == "sequence":
        r, fixed_r = math.exp(held(seq_log_ratio)), math.exp(held(token["seq_log_ratio"]))
    else:
        fixed_r = math.exp(held(token["seq_log_ratio"]))
        r = fixed_r * math.exp(logprob - fixed)

    low, high, delta, dual = (settings[name] for name in ("ratio_low", "ratio_high", "delta", "dual_clip"))
    sides = dict.fromkeys(("clipped_low", "clipped_high", "bounded"), False)
    if settings["surrogate"] == "reinforce":
        policy = -advantage * logprob
    elif settings["surrogate"] == "cispo":
        policy = -advantage * max(low, min(fixed_r, high)) * logprob
        sides["clipped_low"], sides["clipped_high"] = fixed_r < low, fixed_r > high
    elif advantage >= 0:
        policy = -advantage * min(r, high)
        sides["clipped_high"] = advantage > 0 and r > high
    else:
        policy = -advantage * max(r, low)
        sides["clipped_low"] = r < low
        for bound in (delta, dual):
            if bound and policy > -advantage * bound:
                policy = -advantage * bound
                sides["bounded"] = True

    log_rho = 0.0
    if "rollout_logprobs" in token and math.isfinite(token["rollout_logprobs"]):
        mismatch = old - token["rollout_logprobs"]
        log_rho = mismatch
        columns["known_rollout"] = 1.0
        columns["mismatch"] = columns["mismatch_max"] = abs(mismatch)
        columns["mismatch_square"] = mismatch**2
        columns["mismatch_tail"] = float(not math.log(0.9) <= mismatch <= math.log(1.1))
        columns["rollout_kl"] = token["rollout_logprobs"] - fixed
    factor = token.get("keep", 1.0)
    if settings["use_rho"]:
        clamp_low, clamp_high, mask_low, mask_high = (
            settings[f"rho_{name}"] for name in ("clamp_low", "clamp_high", "mask_low", "mask_high")
        )
        rho = math.exp(held(token.get("seq_log_rho", log_rho), 10.0))
        judged = math.exp(held(token.get("seq_log_rho_mask", log_rho), 10.0))
        used = max(rho, clamp_low) if clamp_low else rho
        used = min(used, clamp_high) if clamp_high else used
        is_low, is_high = bool(mask_low) and judged < mask_low, bool(mask_high) and judged > mask_high
        columns["rho"] = 0.0 if is_low or is_high else used
        columns["rho_clamped"], columns["rho_dropped_low"] = float(used != rho), float(is_low)
        columns["rho_dropped_high"] = float(is_high)
        factor *= columns["rho"]
    policy *= factor
    columns |= {name: float(is_there and factor != 0) for name, is_there in sides.items()}

    penalty = 0.0
    if "ref_logprobs" in token:
        d = held(logprob - token["ref_logprobs"])
        kls = d, d * d / 2, math.expm1(-d) + d, r * d
        columns |= {f"kl{k}": kl for k, kl in enumerate(kls)}
        penalty = settings["beta"] * kls[settings["kl_estimator"]] * (r if settings["kl_bias_correction"] else 1.0)

    columns |= {"loss": weight * (policy + penalty), "count": 1.0, "policy": policy, "penalty": penalty}
    columns |= {"ratio": r, "ratio_deviation": (r - 1) ** 2, "approx_kl": (fixed - old) ** 2 / 2}
    return columns

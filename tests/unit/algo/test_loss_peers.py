"""The losses of Open Instruct and TRL, written down as they compute them: padded rows `[sequences, longest]`, autograd.

Each of their names is one row of `PEERS`: the axes of ours it expands to. Our packed result has to be theirs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mgrpo.algo import LossConfig, entropy_bonus, entropy_threshold, policy_loss, top_entropy_keep
from tests.unit.algo.loss_cases import LENGTHS, batch, loss_config

SEED = 305
MAX_LENGTH = 32
RHO_2 = {"use_rho_correction": True, "rho_clamp_upper_bound": 2.0}
TRL_MASK = {"use_rho_correction": True, "rho_mask_lower_bound": 0.75, "rho_mask_upper_bound": 1.3}
TRL_CLAMP = {"use_rho_correction": True, "rho_clamp_lower_bound": 0.75, "rho_clamp_upper_bound": 1.3}

PEERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (arguments of the peer's formula below, our axes)
    "oi dapo": ({"loss_fn": "dapo"}, {}),
    "oi cispo": ({"loss_fn": "cispo"}, {"policy_loss": "cispo"}),
    "oi dapo, constant": (
        {"loss_fn": "dapo", "denominator": 100.0},
        {"aggregation": "constant", "loss_denominator": "100"},
    ),
    "oi dapo, rho": ({"loss_fn": "dapo", "clamp_upper": 2.0}, RHO_2),
    "oi cispo, rho": ({"loss_fn": "cispo", "clamp_upper": 2.0}, {"policy_loss": "cispo", **RHO_2}),
    "oi dapo, IcePop": (
        {"loss_fn": "dapo", "mask_lower": 0.5, "mask_upper": 1.4},
        {"use_rho_correction": True, "rho_mask_lower_bound": 0.5, "rho_mask_upper_bound": 1.4},
    ),
    "oi dapo, rho_mask_sequence_level": (
        {"loss_fn": "dapo", "mask_upper": 1.1, "clamp_upper": 1.05, "sequence_level": True},
        {
            "use_rho_correction": True,
            "rho_mask_upper_bound": 1.1,
            "rho_clamp_upper_bound": 1.05,
            "rho_level": "sequence_mean",
            "rho_mask_level": "sequence_mean",
        },
    ),
    "oi dapo, rho_mask_tv_divergence": (
        {"loss_fn": "dapo", "mask_upper": 0.2, "clamp_upper": 2.0, "tv": True},
        {"rho_mask_level": "divergence", "rho_mask_upper_bound": 0.2, **RHO_2},
    ),
    "trl grpo": ({"loss_type": "grpo"}, {"aggregation": "seq_mean"}),
    "trl bnpo": ({"loss_type": "bnpo"}, {"aggregation": "local_token"}),
    "trl dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "dr_grpo"}),
    "trl dapo": ({"loss_type": "dapo"}, {}),
    "trl cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, {"policy_loss": "cispo", "clip_higher": 0.5}),
    "trl sapo": ({"loss_type": "sapo"}, {"policy_loss": "sapo", "aggregation": "seq_mean"}),
    "trl vespo": ({"loss_type": "vespo"}, {"policy_loss": "vespo"}),
    "trl luspo": (
        {"loss_type": "luspo", "level": "sequence"},
        {"ratio_level": "sequence", "aggregation": "luspo"},
    ),
    "trl grpo, sequence level (GSPO)": (
        {"loss_type": "grpo", "level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"ratio_level": "sequence", "aggregation": "seq_mean", "clip_lower": 0.03, "clip_higher": 0.04},
    ),
    "trl gspo_token": (
        {"loss_type": "grpo", "level": "sequence_token"},
        {"ratio_level": "sequence_token", "aggregation": "seq_mean"},
    ),
    "trl dapo, delta": ({"loss_type": "dapo", "delta": 1.25}, {"delta": 1.25}),
    "trl dapo, token_truncate": ({"loss_type": "dapo", "mode": "token_truncate"}, TRL_CLAMP),
    "trl dapo, token_mask": ({"loss_type": "dapo", "mode": "token_mask"}, TRL_MASK),
    "trl dapo, sequence_truncate": (
        {"loss_type": "dapo", "mode": "sequence_truncate"},
        {"rho_level": "sequence_sum", **TRL_CLAMP},
    ),
    "trl dapo, sequence_mask": (
        {"loss_type": "dapo", "mode": "sequence_mask"},
        {"rho_level": "sequence_sum", "rho_mask_level": "sequence_sum", **TRL_MASK},
    ),
    "trl grpo, sequence level, sequence_mask": (
        {"loss_type": "grpo", "level": "sequence", "mode": "sequence_mask"},
        {
            "ratio_level": "sequence",
            "aggregation": "seq_mean",
            "rho_level": "sequence_sum",
            "rho_mask_level": "sequence_sum",
            **TRL_MASK,
        },
    ),
    "trl vespo, token_truncate": (
        {"loss_type": "vespo", "mode": "token_truncate"},
        {"policy_loss": "vespo", **TRL_CLAMP},
    ),
    "trl vespo, token_mask": ({"loss_type": "vespo", "mode": "token_mask"}, {"policy_loss": "vespo", **TRL_MASK}),
    "trl dapo, off_policy_mask_threshold": (
        {"loss_type": "dapo", "off_policy": -0.05},
        {"off_policy_mask_threshold": -0.05},
    ),
    "trl dapo, use_bias_correction_kl": (
        {"loss_type": "dapo", "beta": 0.3, "bias_correction": True},
        {"beta": 0.3, "kl_bias_correction": True},
    ),
    "trl grpo, beta": ({"loss_type": "grpo", "beta": 0.3}, {"aggregation": "seq_mean", "beta": 0.3}),
    "trl grpo, sequence level, beta, use_bias_correction_kl": (
        {"loss_type": "grpo", "level": "sequence", "beta": 0.3, "bias_correction": True},
        {"ratio_level": "sequence", "aggregation": "seq_mean", "beta": 0.3, "kl_bias_correction": True},
    ),
}


def pad(values: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)


def padded(b: dict[str, Tensor]) -> dict[str, Tensor]:
    """`[sequences, longest]`, zeros behind each sequence; advantages `[sequences, 1]`, the mask as numbers."""
    rows = {name: pad(b[name]) for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")}
    return {**rows, "mask": pad(b["loss_mask"].to(b["logprobs"].dtype)), "advantages": b["advantages"][:, None]}


def open_instruct(
    p: dict[str, Tensor],
    *,
    loss_fn: str,
    denominator: float | None = None,
    clamp_upper: float = 0.0,
    mask_lower: float = 0.0,
    mask_upper: float = 0.0,
    sequence_level: bool = False,
    tv: bool = False,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Tensor:
    """One row per document: with several in a row its sequence levels would mix them."""
    mask = p["mask"].bool()
    diff = torch.where(mask, (p["old_logprobs"] - p["rollout_logprobs"]).clamp(-10, 10), 0.0)

    def row_mean(x: Tensor) -> Tensor:
        return ((x * p["mask"]).sum(-1, keepdim=True) / p["mask"].sum(-1, keepdim=True).clamp_min(1)).expand_as(x)

    rho = row_mean(diff).exp() if sequence_level else diff.exp()
    judged = row_mean((diff.exp() - 1).abs()) if tv else rho
    dropped = torch.zeros_like(mask)
    if mask_lower > 0:
        dropped |= judged < mask_lower
    if mask_upper > 0:
        dropped |= judged > mask_upper
    if tv:
        dropped &= diff.sign() * p["advantages"] > 0
    weight = rho.clamp(max=clamp_upper) if clamp_upper > 0 else rho
    weight = torch.where(dropped, 0.0, weight) if clamp_upper or mask_lower or mask_upper else torch.ones_like(rho)

    ratio = (p["logprobs"] - p["old_logprobs"]).exp()
    if loss_fn == "dapo":
        clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
        losses = torch.max(-p["advantages"] * ratio, -p["advantages"] * clipped)
    else:
        losses = -p["advantages"] * ratio.detach().clamp(max=1 + clip[1]) * p["logprobs"]
    total = (losses * weight * p["mask"]).sum()
    return total / (p["mask"].sum() if denominator is None else denominator)


def trl(
    p: dict[str, Tensor],
    *,
    loss_type: str,
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    mode: str | None = None,
    off_policy: float | None = None,
    beta: float = 0.0,
    bias_correction: bool = False,
    entropy_mask: Tensor | None = None,
) -> Tensor:
    """One process, one micro-batch but for bnpo, which has two of three sequences."""
    mask, advantages, logprobs = p["mask"], p["advantages"], p["logprobs"]
    log_ratio = logprobs - p["old_logprobs"]
    mean_log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    weights = {
        "token": log_ratio,
        "sequence": mean_log_ratio,
        "sequence_token": logprobs - logprobs.detach() + mean_log_ratio.detach(),
    }
    ratio = weights[level].exp()

    importance = None
    if mode is not None:
        gap = (p["old_logprobs"] - p["rollout_logprobs"]) * mask
        importance = (gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap).exp()
        if mode.endswith("truncate"):
            importance = importance.clamp(0.75, 1.3)
        else:
            importance = importance.masked_fill((importance < 0.75) | (importance > 1.3), 0.0)

    if loss_type == "cispo":
        losses = -ratio.clamp(max=epsilon_high).detach() * advantages * logprobs
    elif loss_type == "sapo":
        tau = torch.where(advantages > 0, 1.0, 1.05)
        losses = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    elif loss_type == "vespo":
        with torch.no_grad():
            log_w = (log_ratio.clamp(-20, 20) * mask).sum(-1, keepdim=True)
            if importance is not None:
                log_w = log_w + importance.log().clamp(math.log(1e-8), 20).sum(-1, keepdim=True)
            log_w = log_w.clamp(math.log(1e-8), 20)
            k, lam = torch.where(advantages >= 0, 2.0, 3.0), torch.where(advantages >= 0, 3.0, 2.0)
            phi = (lam + k * log_w - lam * log_w.exp()).exp()
        losses = -phi * advantages * logprobs
    else:
        capped = ratio if delta is None else ratio.clamp(max=delta)
        losses = -torch.min(capped * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)

    if off_policy is not None:
        gap = ((p["rollout_logprobs"] - logprobs.detach()) * mask).sum(-1, keepdim=True)
        losses = losses * ((advantages >= 0) | (gap / mask.sum(-1, keepdim=True).clamp(min=1.0) <= off_policy))
    if entropy_mask is not None:
        losses = losses * entropy_mask
    if importance is not None and loss_type != "vespo":
        losses = losses * importance
    if beta:
        gap = p["ref_logprobs"] - logprobs
        kl = gap.exp() - gap - 1
        losses = losses + beta * (kl * ratio if bias_correction else kl)

    if loss_type in ("grpo", "sapo"):
        return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "bnpo":
        parts = [(losses[i : i + 3] * mask[i : i + 3]).sum() / mask[i : i + 3].sum().clamp(min=1.0) for i in (0, 3)]
        return (parts[0] + parts[1]) / 2
    if loss_type == "dr_grpo":
        return (losses * mask).sum() / (len(mask) * MAX_LENGTH)
    if loss_type == "luspo":
        return (losses * mask.sum(1, keepdim=True)).mean()
    return (losses * mask).sum() / mask.sum()


def assert_same(b: dict[str, Tensor], want: Tensor, rows: Tensor, config: LossConfig, **ours: Any) -> None:
    """Our packed loss and gradient against the peer's, in fp32."""
    want_grad = torch.autograd.grad(want, rows)[0]
    want_grad = torch.cat([row[:n] for row, n in zip(want_grad, LENGTHS, strict=True)])
    inputs = {**b, "logprobs": b["logprobs"].clone().requires_grad_()}
    got = policy_loss(**inputs, config=config, **ours)
    got.loss.backward()
    torch.testing.assert_close(got.loss, want.detach(), rtol=1e-5, atol=1e-6)
    scale = want_grad.abs().max().item()
    assert scale > 0
    torch.testing.assert_close(inputs["logprobs"].grad, want_grad, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("name", PEERS)
def test_the_name_of_a_peer_expands_to_axes_that_compute_the_same(name):
    """A run brought over from another trainer would silently train something else under the same name."""
    arguments, axes = PEERS[name]
    b = batch(SEED, dtype=torch.float32)
    p = padded(b)
    p["logprobs"].requires_grad_()
    want = (open_instruct if name.startswith("oi ") else trl)(p, **arguments)
    ours = {}
    if arguments.get("loss_type") == "bnpo":
        # Tokens of each sequence's micro-batch x micro-batches.
        per_sequence = p["mask"].sum(1)
        ours["denominator"] = 2 * per_sequence.view(2, 3).sum(1).repeat_interleave(3)
    if arguments.get("loss_type") == "dr_grpo":
        ours["denominator"] = len(LENGTHS) * float(MAX_LENGTH)
    assert_same(b, want, p["logprobs"], loss_config(**axes), **ours)


def test_the_top_entropy_mask_of_trl_is_our_keep():
    """80 % of the tokens would be left out by another rule, and the penalty with them."""
    b = batch(SEED, dtype=torch.float32)
    entropy = torch.rand(len(b["logprobs"]), generator=torch.Generator().manual_seed(1))
    p = padded(b)
    p["logprobs"].requires_grad_()
    threshold = torch.quantile(entropy[b["loss_mask"]], 1 - 0.4)
    want = trl(p, loss_type="dapo", beta=0.3, entropy_mask=(pad(entropy) * p["mask"] >= threshold) & (p["mask"] > 0))
    keep = top_entropy_keep(entropy, entropy_threshold(entropy[b["loss_mask"]], top_entropy_quantile=0.4))
    assert_same(b, want, p["logprobs"], loss_config(beta=0.3), keep=keep)


def test_the_entropy_bonus_is_the_mean_per_token_of_trl():
    """The bonus would scale with the length of the batch."""
    b = batch(SEED, dtype=torch.float32)
    entropy = torch.rand(len(b["logprobs"]), generator=torch.Generator().manual_seed(1))
    mask = pad(b["loss_mask"].float())
    want = 0.02 * (pad(entropy) * mask).sum() / mask.sum()
    got = entropy_bonus(entropy, b["loss_mask"], coef=0.02, num_trained_tokens=int(b["loss_mask"].sum()))
    torch.testing.assert_close(got, want)


def test_open_instructs_rows_mix_documents_and_ours_do_not():
    """Where a row is a pack, one document that the engine got wrong changes the weight of its neighbour."""
    b = batch(SEED, dtype=torch.float32)
    settings = {"loss_fn": "dapo", "mask_upper": 1.1, "clamp_upper": 1.05, "sequence_level": True}
    by_document = open_instruct(padded(b), **settings)
    one_row = {name: b[name][None] for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")}
    one_row["mask"] = b["loss_mask"].float()[None]
    one_row["advantages"] = b["advantages"].repeat_interleave(torch.tensor(LENGTHS))[None]
    by_pack = open_instruct(one_row, **settings)
    assert abs(by_document.item() - by_pack.item()) > 1e-3
    axes = PEERS["oi dapo, rho_mask_sequence_level"][1]
    torch.testing.assert_close(policy_loss(**b, config=loss_config(**axes)).loss, by_document, rtol=1e-5, atol=1e-6)

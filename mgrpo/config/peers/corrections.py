"""Corrections for the engine's probabilities under other trainers' names, and where one is on without being asked for."""

from __future__ import annotations

from mgrpo.config.fields import shown
from mgrpo.config.resolution import PRESET, Resolution


def apply(r: Resolution) -> None:
    """Truncated importance sampling, and TRL's four modes of it."""
    cap = "truncated_importance_sampling_ratio_cap"
    if cap in r.peers:
        r.put("use_rho_correction", r.peer(cap) > 0, cap)
        if r.peer(cap) > 0:
            r.put("rho_clamp_upper_bound", r.peer(cap), cap)
    if "rho_mask_sequence_level" in r.peers:
        level = "sequence_mean" if r.peer("rho_mask_sequence_level") else "token"
        # Despite its name it also decides which rho multiplies the loss.
        r.put("rho_level", level, "rho_mask_sequence_level")
        r.put("rho_mask_level", level, "rho_mask_sequence_level")
    prefix = "vllm_importance_sampling_"
    names = [prefix + ending for ending in ("correction", "mode", "clip_max", "clip_min", "cap")]
    given = [name for name in names if name in r.peers]
    if not given:
        return
    if not r.peer(names[0], True):
        r.put("use_rho_correction", False, names[0])
        return
    old, new = r.peer(f"{prefix}cap"), r.peer(f"{prefix}clip_max")
    if old is not None and new is not None and old != new:
        r.problems.append(
            f"{prefix}cap={old:g} and {prefix}clip_max={new:g} are the same setting; give only {prefix}clip_max"
        )
        return
    default = None if f"{prefix}clip_max" in given else 3.0
    _put_bounds(r, given, mode=r.peer(f"{prefix}mode", "sequence_mask"), low=r.peer(f"{prefix}clip_min"), high=new or old or default)  # fmt: skip


def _put_bounds(r: Resolution, given: list[str], *, mode: str, low: float | None, high: float | None) -> None:
    prefix = "vllm_importance_sampling_"
    if low is not None and high is not None and low >= high:
        r.problems.append(f"{prefix}clip_min={low:g} must be below {prefix}clip_max={high:g}")
        return
    unit, action = mode.split("_")
    if action == "truncate" and low is None and high is None:
        r.problems.append(f"{prefix}mode={mode} needs a bound: --{prefix}clip_max 3.0")
        return
    level = "token" if unit == "token" else "sequence_sum"
    r.put("use_rho_correction", True, *given)
    r.put("rho_level", level, *given)
    r.put("rho_mask_level", level, *given)
    for target, wanted in (("clamp", "truncate"), ("mask", "mask")):
        r.put(f"rho_{target}_lower_bound", (low or 0.0) if action == wanted else 0.0, *given)
        r.put(f"rho_{target}_upper_bound", (high or 0.0) if action == wanted else 0.0, *given)


def of_older_tokens(r: Resolution) -> None:
    """Steps that train on tokens of older policies: without a choice, the correction is on."""
    ahead, extra = r.value("async_steps"), r.value("active_sampling") and r.value("active_sampling_oversample")
    replays, limit = r.value("replay_buffer_size"), r.value("max_staleness")
    if not (ahead > 0 or extra or replays) or (limit == 0 and not ahead) or _is_corrected(r):
        return
    if r.rank("use_rho_correction") <= PRESET:
        names = ("async_steps", ahead), ("active_sampling_oversample", extra), ("replay_buffer_size", replays)
        given = " and ".join(f"{name}={shown(value)}" for name, value in names if value)
        r.derive(
            "use_rho_correction",
            True,
            f"use_rho_correction is true: {given} trains on tokens of older policies, which needs a correction; "
            "use_vllm_logprobs=true is another one",
        )


def _is_corrected(r: Resolution) -> bool:
    is_own = ":" in r.value("policy_loss")
    return bool(r.value("use_rho_correction") or r.value("use_vllm_logprobs") or is_own)


def of_rounded_cache(r: Resolution) -> None:
    """Engines that round keys and values sample from another policy: without a choice, the correction is on."""
    dtype = r.value("vllm_kv_cache_dtype")
    if dtype != "auto" and not _is_corrected(r) and r.rank("use_rho_correction") <= PRESET:
        r.derive(
            "use_rho_correction",
            True,
            f"use_rho_correction is true: with vllm_kv_cache_dtype={dtype} the engines sample from another policy than the one "
            "that is trained",
        )

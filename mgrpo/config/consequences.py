"""Settings that follow from others where nobody has given them, each with a note that says why.

The places where values come from have been added to the `Resolution` before; a room above puts other trainers' names in between.
"""

from __future__ import annotations

from mgrpo.config.fields import shown
from mgrpo.config.resolution import PRESET, Resolution
from mgrpo.models.peft import stored_lora


def asynchrony(r: Resolution) -> None:
    """Steps ahead, where only a limit of age or updates in flight are given; presets of asynchronous trainers also hold for runs that are not."""
    oldest, between = r.value("max_staleness"), r.value("weight_sync_steps") - 1
    if oldest is not None and oldest > between and not r.rank("async_steps"):
        half = -(-(oldest - between) // 2)
        rest = f" less the {between} between weight syncs" if between else ""
        r.derive(
            "async_steps",
            half,
            f"async_steps is {half}, half of max_staleness={oldest}{rest}: steps then take what has finished first, where "
            f"async_steps={oldest - between} would take groups in order and wait for the slowest",
        )
    if r.value("async_steps"):
        return
    if r.rank("inflight_updates") == PRESET and r.value("inflight_updates"):
        r.derive("inflight_updates", False, "inflight_updates is false, because async_steps is 0")
    elif r.value("inflight_updates") and not r.rank("async_steps"):
        note = "async_steps is 1: inflight_updates needs completions that are under way when the weights change"
        r.derive("async_steps", 1, note)


def correction_of_older_tokens(r: Resolution) -> None:
    """Steps that train on tokens of older policies: without a choice, the correction is on."""
    ahead, extra = r.value("async_steps"), r.value("active_sampling") and r.value("active_sampling_oversample")
    replays, limit, syncs = r.value("replay_buffer_size"), r.value("max_staleness"), r.value("weight_sync_steps")
    if not (ahead > 0 or extra or replays or syncs > 1) or (limit == 0 and not ahead) or _is_corrected(r):
        return
    if r.rank("use_rho_correction") <= PRESET:
        names = (
            *(("async_steps", ahead), ("active_sampling_oversample", extra), ("replay_buffer_size", replays)),
            ("weight_sync_steps", syncs if syncs > 1 else 0),
        )
        given = " and ".join(f"{name}={shown(value)}" for name, value in names if value)
        r.derive(
            "use_rho_correction",
            True,
            f"use_rho_correction is true: {given} trains on tokens of older policies, which needs a correction; "
            "use_vllm_logprobs=true is another one",
        )


def correction_of_rounded_cache(r: Resolution) -> None:
    """Engines that round keys and values sample from another policy: without a choice, the correction is on."""
    dtype = r.value("vllm_kv_cache_dtype")
    if dtype != "auto" and not _is_corrected(r) and r.rank("use_rho_correction") <= PRESET:
        r.derive(
            "use_rho_correction",
            True,
            f"use_rho_correction is true: with vllm_kv_cache_dtype={dtype} the engines sample from another policy than the one "
            "that is trained",
        )


def correction_of_rounded_products(r: Resolution) -> None:
    """A learner that rounds trains another policy than the engines sample from: without a choice, the correction is on."""
    fp8 = r.value("fp8")
    if fp8 != "none" and not _is_corrected(r) and r.rank("use_rho_correction") <= PRESET:
        r.derive(
            "use_rho_correction",
            True,
            f"use_rho_correction is true: with fp8={fp8} the policy that is trained is another one than engines sample from",
        )


def _is_corrected(r: Resolution) -> bool:
    is_own = ":" in r.value("policy_loss")
    return bool(r.value("use_rho_correction") or r.value("use_vllm_logprobs") or is_own)


def server_engines(r: Resolution) -> None:
    """As many engines as there are addresses of servers."""
    count, given = len(r.value("vllm_server_base_url")), r.given.get("vllm_num_engines")
    if given is not None and given.rank > PRESET and given.value != count:
        r.problems.append(
            f"vllm_num_engines={given.value} differs from the {count} addresses in vllm_server_base_url, each of which is an "
            "engine; leave it out"
        )
        r.unsound.add("vllm_num_engines")
    elif count > 1:
        r.derive("vllm_num_engines", count, f"vllm_server_base_url -> vllm_num_engines ({count})")


def passes(r: Resolution) -> None:
    """A number of passes, unless completions or steps are given at a place of higher rank."""
    epochs, episodes = (r.given.get(name) for name in ("num_train_epochs", "total_episodes"))
    if epochs is None or epochs.value is None or episodes is None:
        return
    by = f"{episodes.via or 'total_episodes'} ({episodes.origin})"
    if episodes.rank > epochs.rank or "max_steps" in episodes.via:
        r.given.pop("num_train_epochs")
        if epochs.rank > PRESET:
            r.notes.append(f"num_train_epochs={shown(epochs.value)} has no effect: {by} overrides it")
    elif epochs.rank > episodes.rank:
        r.given.pop("total_episodes")
        r.notes.append(f"{by} has no effect: num_train_epochs={shown(epochs.value)} ({epochs.origin}) overrides it")
    else:
        r.problems.append(
            f"num_train_epochs={shown(epochs.value)} and {by} both say how long the run is; keep one of them"
        )


def tool_limits(r: Resolution) -> None:
    """A limit of turns is the only one, unless one of calls is given as well."""
    turns = r.value("max_tool_calling_iterations")
    if turns is not None and r.value("max_tool_calls") is not None and r.rank("max_tool_calls") <= PRESET:
        r.derive(
            "max_tool_calls", None, f"max_tool_calls is none, because max_tool_calling_iterations={turns} is given"
        )


def stored_adapter(r: Resolution) -> None:
    """The sizes of the adapter to start from."""
    folder = r.value("lora_adapter_path")
    if not (folder and r.value("use_peft")):
        return
    try:
        stored = stored_lora(folder)
    except ValueError:  # which the check of the model reports
        return
    for name, value in (
        ("lora_r", stored.rank),
        ("lora_alpha", int(stored.alpha)),
        ("lora_target_modules", stored.targets),
        ("use_rslora", stored.use_rslora),
    ):
        if not r.rank(name) and r.value(name) != value:
            r.derive(name, value, f"{name} is {shown(value)}, that of the adapter in lora_adapter_path={folder}")

"""Names of Open Instruct that count in other units or mean several settings, those of its old scripts among them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mgrpo.config.annotations import NO_ENTRIES, JSONObject
from mgrpo.config.resolution import FILE, PRESET, Resolution
from mgrpo.config.reward import replacements
from mgrpo.config.tools import PYTHON, SEARCH, settings_of

CALLS = 5
"""Open Instruct's default of max_steps."""
MIXERS = {"dataset_mixer": "dataset_mixer_list", "dataset_eval_mixer": "dataset_mixer_eval_list"}
"""A mix as a JSON object, by the list that took its place."""
SERVICES = {"code_tool_api_endpoint": PYTHON, "search_api_endpoint": SEARCH}
"""The tools that call the service of each name."""


def data(r: Resolution) -> None:
    """Mixes as objects, and a split for each of several datasets that are fewer now."""
    for name, target in MIXERS.items():
        if mix := r.peer_object(name):
            r.put(target, tuple(word for pair in mix.items() for word in map(str, pair)), name)
        splits, count = r.value(f"{target}_splits"), len(r.value(target)) // 2
        if len(splits) > 1 and len(splits) != count > 0 and len(set(splits)) == 1:
            note = f"{target}_splits is {splits[0]} for each dataset: it is given {len(splits)} times for {count}"
            r.derive(f"{target}_splits", splits[:1], note)


def services(r: Resolution) -> None:
    """Addresses of services, as settings of the tools that call them."""
    given = [name for name in SERVICES if r.peer(name) is not None]
    r.services = {name: r.peer(name) for name in given}
    tools = r.value("tools")
    configs = list(r.value("tool_configs") or (NO_ENTRIES,) * len(tools))
    if not given or len(configs) != len(tools):  # which the rule reports
        return
    for name in given:
        places = [number for number, tool in enumerate(tools) if tool in SERVICES[name]]
        if not places:
            r.notes.append(f"{name} has no effect without the tool {name.partition('_')[0]}")
        for number in places:
            try:
                own = settings_of(tools[number], configs[number])
            except ValueError:  # which the rule reports
                continue
            if own.setdefault("endpoint", url := r.peer(name)) != url:
                r.problems.append(
                    f"tool_configs gives {tools[number]} the endpoint {own['endpoint']}, but {name}={url}; keep one of them"
                )
            configs[number] = JSONObject(json.dumps(own))
    if any(config != NO_ENTRIES for config in configs):
        r.given.pop("tool_configs", None)
        r.put("tool_configs", tuple(configs), *given)


def clip(r: Resolution) -> None:
    """One limit for both sides."""
    if (limit := r.peer("cliprange")) is not None:
        r.put("clip_lower", limit, "cliprange")
        r.put("clip_higher", limit, "cliprange", weak=True)


def corrections(r: Resolution) -> None:
    """Truncated importance sampling, and the level of its masks."""
    cap = "truncated_importance_sampling_ratio_cap"
    if cap in r.peers:
        r.put("use_rho_correction", r.peer(cap) > 0, cap)
        if r.peer(cap) > 0:
            r.put("rho_clamp_upper_bound", r.peer(cap), cap)
    if "rho_mask_sequence_level" in r.peers:
        level = "sequence_mean" if r.peer("rho_mask_sequence_level") else "token"
        # Despite its name it also decides which rho multiplies the loss.
        r.put("rho_level", level, "rho_mask_sequence_level")
        if not r.peer("rho_mask_tv_divergence"):
            r.put("rho_mask_level", level, "rho_mask_sequence_level")
    if r.peer("rho_mask_tv_divergence"):
        r.put("rho_mask_level", "divergence", "rho_mask_tv_divergence")


def one_gpu(r: Resolution) -> None:
    """Open Instruct's engine runs ahead on the learner's own GPU; here they take turns, so that every token is of the newest policy."""
    if not r.peer("single_gpu_mode"):
        return
    r.put("vllm_mode", "colocate", "single_gpu_mode")
    r.put("vllm_enable_sleep_mode", True, "single_gpu_mode", weak=True)
    r.expected["world_size"] = 1
    for name in ("vllm_num_engines", "vllm_tensor_parallel_size"):
        if r.value(name) != 1:
            r.problems.append(
                f"single_gpu_mode=true has one GPU, for one learner and one engine; {name}={r.value(name)} must be 1"
            )
    if not r.rank("vllm_kv_cache_mb"):
        r.notes.append(
            "single_gpu_mode needs vllm_kv_cache_mb on a GPU, the MiB of the engine's KV cache, in place of "
            "vllm_gpu_memory_utilization; `mgrpo plan` shows what fits"
        )
    if ahead := r.value("async_steps"):
        r.derive(
            "async_steps",
            0,
            f"async_steps is 0 in place of {ahead}: with single_gpu_mode learner and engine take turns",
        )
    if r.value("inflight_updates"):
        r.derive(
            "inflight_updates", False, "inflight_updates is false: with single_gpu_mode weights change between steps"
        )


def asynchrony(r: Resolution) -> None:
    """async_mode: training on the completions of the previous policy."""
    if (runs_ahead := r.peer("async_mode")) is not None:
        r.put("async_steps", int(runs_ahead), "async_mode", weak=True)


def batch(r: Resolution) -> None:
    """Prompts by learner rank, and completions of an optimizer step by learner rank."""
    prompts, part = r.peer("local_rollout_batch_size"), r.peer("local_mini_batch_size")
    if prompts is not None and prompts > 0:
        r.expected.setdefault("world_size", r.world_size)
        r.put("num_unique_prompts_rollout", prompts * r.world_size, "local_rollout_batch_size")
    elif prompts is not None:
        r.problems.append(f"local_rollout_batch_size={prompts} must be at least 1")
    if part is None or (prompts is not None and prompts < 1):
        return
    if prompts is None:
        r.problems.append(
            f"local_mini_batch_size={part} is a part of local_rollout_batch_size, which is not given; give "
            "num_mini_batches, the optimizer steps of a batch"
        )
        return
    completions = prompts * r.value("num_samples_per_prompt_rollout")
    if part < 1 or completions % part:
        r.problems.append(
            f"local_mini_batch_size={part} must divide the {completions} completions of a rank, local_rollout_batch_size="
            f"{prompts} prompts x {r.value('num_samples_per_prompt_rollout')}"
        )
    else:
        r.put("num_mini_batches", completions // part, "local_mini_batch_size")


def evaluations(r: Resolution) -> None:
    """The number of evaluations, evenly over the run."""
    count, size = r.peer("num_evals"), r.value("num_unique_prompts_rollout") * r.value("num_samples_per_prompt_rollout")
    if count is not None and count < 1:
        r.problems.append(
            f"num_evals={count} must be at least 1; local_eval_every=-1 evaluates only before and after training"
        )
    elif count is not None and size > 0:
        r.put("local_eval_every", max(r.value("total_episodes") // size // count, 1), "num_evals")


def exports(r: Resolution) -> None:
    """Exports were made for Beaker's evaluations; where the frequency of exports is given, there are no others."""
    steps = r.peer("beaker_eval_freq")
    if steps is None:
        return
    if r.rank("save_freq") >= r.rank("beaker_eval_freq"):
        r.notes.append("beaker_eval_freq has no effect beside save_freq: nothing is evaluated on Beaker")
    else:
        r.put("save_freq", steps, "beaker_eval_freq")


def repository(r: Resolution) -> None:
    """hf_entity and hf_repo_id, which may hold the owner as well, as one name on the Hub."""
    owner, name = r.peer("hf_entity"), r.peer("hf_repo_id")
    if owner is None and name is None:
        return
    name = name or f"{r.value('exp_name')}__{r.value('seed')}"
    r.put("hub_model_id", f"{owner}/{name}" if owner and "/" not in name else name, "hf_entity", "hf_repo_id")
    if not r.rank("push_to_hub"):
        r.notes.append(
            f"{' and '.join(name for name in ('hf_entity', 'hf_repo_id') if name in r.peers)}: nothing is uploaded to "
            f"{r.value('hub_model_id')}, because push_to_hub is true by default in Open Instruct and false here; give push_to_hub=true"
        )


def max_steps(r: Resolution) -> None:
    """The calls of a completion, where `tools` or the length of the run show that it is not TRL's name for the latter."""
    steps = r.peer("max_steps")
    if r.value("tools") or r.rank("total_episodes") >= FILE:
        r.put("max_tool_calls", steps, "max_steps")
    elif steps != CALLS:
        r.problems.append(
            f"max_steps={steps} is refused: without tools there are no calls to limit (Open Instruct's meaning); the length of "
            "a run is total_episodes"
        )


def packs_per_micro_batch(r: Resolution, count: int | None) -> None:
    """Packs of one forward pass of a learner: a matter of memory alone, where the batch is known."""
    if count in (None, 1):
        return
    if r.rank("num_unique_prompts_rollout") > PRESET:
        r.notes.append(
            "per_device_train_batch_size has no effect: beside num_unique_prompts_rollout it counts packs, and a micro-batch is "
            "always one pack of pack_length tokens; the gradient is the same"
        )
        return
    r.problems.append(
        f"per_device_train_batch_size={count} is refused: a micro-batch is one pack of pack_length tokens (Open "
        "Instruct's meaning); for TRL's meaning, sequences, also give num_generations or choose a trl preset; leave it out or give 1"
    )


def remapped(r: Resolution) -> None:
    """A script's pair goes with the preset's, without which the name in it would be another verifier than there."""
    theirs = r.defaults.get("remap_verifier", ())
    if not isinstance(theirs, tuple) or r.rank("remap_verifier") <= PRESET:
        return
    own = r.given["remap_verifier"]
    try:
        before, given = replacements(theirs), replacements(own.value)
    except ValueError:  # which the rule reports
        return
    pairs = {**before, **{old: new if old in before else before.get(new, new) for old, new in given.items()}}
    if pairs == given:
        return
    value = tuple(f"{old}={new}" for old, new in pairs.items())
    r.given["remap_verifier"] = replace(own, value=value)
    r.notes.append(
        f"remap_verifier is {' '.join(value)}: {' '.join(theirs)} of preset {r.preset} stays beside what is given"
    )


def reward_model(r: Resolution) -> None:
    """The model of a reward that counts nothing."""
    for name in ("reward_model_path", "reward_model_revision"):
        if is_unrewarded(r) and r.peer(name) is not None:
            r.notes.append(f"{name} has no effect with reward_model_multiplier=0")


def is_unrewarded(r: Resolution) -> bool:
    """True if `reward_model_multiplier` is given as 0."""
    given: Any = r.peers.get("reward_model_multiplier")
    return given is not None and given.value == 0

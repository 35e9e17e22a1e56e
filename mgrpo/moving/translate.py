"""The meaning of each alias: renames, and the arithmetic where the other trainer counts in other units.

A translation reads the given values from the resolution, and sets settings there. It also makes the checks that need the
other trainer's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mgrpo.config import consequences
from mgrpo.config.fields import BOOLEANS
from mgrpo.config.resolution import Resolution
from mgrpo.config.tracking import EVERY, NO
from mgrpo.moving import open_instruct_fields as open_instruct
from mgrpo.moving import parallel_sizes
from mgrpo.moving import trl_fields as trl
from mgrpo.moving.foreign_names import table
from mgrpo.moving.trl_fields import has_trl_defaults, training_steps

LOSS_TYPES = {
    "grpo": ("ppo_clip", "seq_mean"),
    "bnpo": ("ppo_clip", "local_token"),
    "dr_grpo": ("ppo_clip", "dr_grpo"),
    "dapo": ("ppo_clip", "token"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "seq_mean"),
    "luspo": ("ppo_clip", "luspo"),
    "vespo": ("vespo", "token"),
}
"""TRL's loss_type as (policy_loss, aggregation)."""

CONVERT: dict[str, Callable[[Any], object]] = {
    "no_filter_zero_std_samples": lambda value: not value,
    "dtype": lambda value: value.removeprefix("torch."),
    "torch_dtype": lambda value: value.removeprefix("torch."),
    "ddp_timeout": lambda value: -(-value // 60),
    "reward_model_name_or_path": lambda value: (value,),
    "cp_strategy": lambda value: "a2a" if value == "ulysses" else "all_gather",
    "use_fp8_kv_cache": lambda value: "fp8" if value else "auto",
    "inflight_updates_recompute_kv_cache": lambda value: "recompute" if value else "keep",
    "masked_mean_denominator": str,
    "moe_enable_routing_replay": lambda value: "learner" if value else "none",
    "accumulate_inference_batches_timeout": lambda value: math.ceil(value) if math.isfinite(value) else value,
}
"""Value of the target, for renames that change it."""

TRL_MICRO_BATCH = 8
"""TRL's per_device_train_batch_size when it is not given."""
TRL_SYNC_STEPS = 512
TRL_EVAL_STEPS = 10
TRL_PROJECT = "huggingface"
"""TRL's project when none is given."""


def apply(r: Resolution) -> None:
    """Apply all translations, and the settings that follow from others, each after those whose results it needs."""
    renames(r)
    open_instruct.data(r)
    open_instruct.services(r)
    precision(r)
    loss(r)
    clip(r)
    advantages(r)
    open_instruct.corrections(r)
    trl.corrections(r)
    open_instruct.asynchrony(r)
    open_instruct.one_gpu(r)
    consequences.asynchrony(r)
    consequences.correction_of_older_tokens(r)
    consequences.correction_of_rounded_cache(r)
    consequences.correction_of_rounded_products(r)
    warm_up(r)
    parallel_sizes.apply(r)
    trl.model_arguments(r)
    trl.schedule_arguments(r)
    trl.cuts(r)
    lengths(r)
    engines(r)
    open_instruct.batch(r)
    batch(r)
    exports(r)
    open_instruct.exports(r)
    states(r)
    best_export(r)
    evaluations(r)
    open_instruct.evaluations(r)
    open_instruct.remapped(r)
    open_instruct.reward_model(r)
    reference(r)
    trl.max_steps(r)
    consequences.passes(r)
    consequences.tool_limits(r)
    dropout_of_adapters(r)
    consequences.stored_adapter(r)
    open_instruct.repository(r)
    trackers(r)


def renames(r: Resolution) -> None:
    """Aliases that set one setting, perhaps to a converted value."""
    for name, given in r.peers.items():
        entry = table()[name]
        if entry.status == "alias" and given.value is not None:
            r.put(entry.targets[0], CONVERT.get(name, lambda value: value)(given.value), name)
    if r.peer("num_generations", 2) < 2:
        r.problems.append(
            f"num_generations={r.peer('num_generations')} must be at least 2, because completions are compared within "
            "their group; num_samples_per_prompt_rollout may be 1, which compares them within the whole batch"
        )


def precision(r: Resolution) -> None:
    """TRL's two switches, of which at most one may be on; without either, as TRL has it, float32 only where bf16 is false."""
    half, brain = r.peer("fp16"), r.peer("bf16")
    if half:
        r.put("model_dtype", "float16", "fp16")
    if brain or (brain is False and not half):
        r.put("model_dtype", "bfloat16" if brain else "float32", "bf16")


def loss(r: Resolution) -> None:
    """Names of whole losses, which set several settings each."""
    if loss_fn := r.peer("loss_fn"):
        r.put("policy_loss", {"dapo": "ppo_clip", "cispo": "cispo"}[loss_fn], "loss_fn")
        # Open Instruct's names do not include the denominator, which is loss_denominator's.
        r.put("aggregation", None, "loss_fn", weak=True)
    elif r.rank("loss_denominator") > r.rank("aggregation") > 0:
        r.given.pop("aggregation")
    if loss_type := r.peer("loss_type"):
        policy_loss, aggregation = LOSS_TYPES[loss_type]
        r.put("policy_loss", policy_loss, "loss_type")
        r.put("aggregation", aggregation, "loss_type")
    if loss_type == "vespo" and not r.peer("use_vllm") and not any(n.startswith("vllm_importance") for n in r.peers):
        # There is no correction there without use_vllm; the engines here have one, which VESPO takes token by token.
        r.put("rho_level", "token", "loss_type", weak=True)
    if "masked_mean_axis" in r.peers:
        r.put("aggregation", "token" if r.peer("masked_mean_axis") is None else "seq_mean", "masked_mean_axis")


def clip(r: Resolution) -> None:
    """TRL's epsilons; its CISPO has an absolute cap where ours is 1 + clip_higher."""
    open_instruct.clip(r)
    low, high = r.peer("epsilon"), r.peer("epsilon_high")
    if low is not None:
        r.put("clip_lower", low, "epsilon")
    if r.value("policy_loss") != "cispo":
        if high is not None:
            r.put("clip_higher", high, "epsilon_high")
        elif low is not None:
            r.put("clip_higher", low, "epsilon", weak=True)
    elif high is not None:
        r.put("clip_higher", high - 1, "epsilon_high")
    elif r.peer("loss_type") == "cispo" and r.rank("clip_higher") <= 1:
        r.problems.append(
            "loss_type=cispo needs epsilon_high: TRL would cap every ratio at epsilon, 0.2, and the loss with it; "
            "5.0 is usual: --epsilon_high 5.0"
        )
        r.unsound.add("clip_higher")


def advantages(r: Resolution) -> None:
    """TRL divides by the sample standard deviation + 1e-4."""
    names = {True: "standard", "group": "standard", False: "centered", "none": "centered", "batch": "batch_std"}
    if r.peer("multi_objective_aggregation") == "normalize_then_sum":
        kind, alias = "gdpo", "multi_objective_aggregation"
    elif "scale_rewards" in r.peers:
        kind, alias = names[r.peer("scale_rewards")], "scale_rewards"
    else:
        return
    r.put("advantage_normalization_type", kind, alias)
    r.put("advantage_std", "trl", alias)


def warm_up(r: Resolution) -> None:
    """Warm-up steps; in transformers 5 a number below 1 is a share of all steps."""
    steps = _finite(r, "warmup_steps")
    if steps is not None and 0 < steps < 1:
        r.put("warmup_ratio", steps, "warmup_steps")
    elif steps is not None:
        r.put("warm_up_steps", int(steps), "warmup_steps")


def lengths(r: Resolution) -> None:
    """TRL limits prompt and completion; a pack must hold both."""
    aliases = {"max_completion_length": "response_length", "max_prompt_length": "max_prompt_token_length"}
    for alias, target in aliases.items():
        if r.peer(alias) is not None:
            r.put(target, r.peer(alias), alias)
            if alias == "max_prompt_length":
                r.put("overlong_prompt_policy", "truncate_left", alias, weak=True)
        elif alias in r.peers and not (alias == "max_prompt_length" and has_trl_defaults(r)):
            r.problems.append(f"{alias}=none is refused: a length needs a limit here; give --{target} N")
    # In TRL's main version only the model limits a prompt.
    r.has_prompt_limit = r.preset not in ("trl_main", "trl_async") or r.rank("max_prompt_token_length") > 1
    need = sum(map(r.value, aliases.values()))
    asks = has_trl_defaults(r) or aliases.keys() & r.peers.keys()
    if asks and r.rank("pack_length") <= 1 and need > r.value("pack_length"):
        r.derive("pack_length", need, f"pack_length is {need}, to hold the longest prompt and completion")


def engines(r: Resolution) -> None:
    """Servers, and copies of the model, which are separate engines unless they share out experts; see also `model_rules`."""
    if r.preset == "trl_async" and r.value("vllm_server_base_url") and not r.rank("vllm_mode"):
        r.derive("vllm_mode", "server", "vllm_mode is server, the only one of TRL's asynchronous trainer")
    place = [name for name in ("vllm_server_host", "vllm_server_port") if name in r.peers]
    if r.value("vllm_mode") != "server":
        idle = [name for name in place if r.peer(name) not in (None, *table()[name].neutral)]
        r.notes.extend(f"{name} has no effect without vllm_mode=server" for name in idle)
    has_servers = r.value("vllm_mode") == "server"
    if has_servers:
        _servers(r)
    copies = r.value("vllm_data_parallel_size")
    if copies <= 1 or r.value("vllm_enable_expert_parallel"):
        return
    if has_servers:
        r.problems.append(
            f"vllm_data_parallel_size={copies} with vllm_mode=server is for a mixture and vllm_enable_expert_parallel=true; start "
            f"{copies} times as many servers"
        )
        return
    engines = copies * r.value("vllm_num_engines")
    r.expected["vllm_data_parallel_size"] = copies
    r.derive("vllm_data_parallel_size", 1, f"vllm_data_parallel_size={copies} -> vllm_num_engines ({engines})")
    r.derive("vllm_num_engines", engines, f"vllm_data_parallel_size={copies} -> vllm_num_engines ({engines})")


def _servers(r: Resolution) -> None:
    host, port = r.peer("vllm_server_host"), r.peer("vllm_server_port")
    if (host or port) and not r.value("vllm_server_base_url"):
        # TRL's default is the address on which its server listens.
        place = f"http://{'127.0.0.1' if host in (None, '0.0.0.0') else host}:{port or 8000}"
        r.put("vllm_server_base_url", (place,), "vllm_server_host", "vllm_server_port")
    consequences.server_engines(r)


def batch(r: Resolution) -> None:
    """TRL's batch of sequences, as prompts and mini-batches.

    With d data-parallel ranks: generation_batch_size = per_device x d x steps_per_generation completions are sampled at
    once, and an optimizer step takes per_device x d x gradient_accumulation_steps of them.
    """
    whole, steps = r.peer("generation_batch_size"), r.peer("steps_per_generation")
    own, accumulated = r.peer("per_device_train_batch_size"), r.peer("gradient_accumulation_steps")
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    given = [name for name in ("generation_batch_size", "steps_per_generation", *sizes) if r.peer(name) is not None]
    has_prompts = r.rank("num_unique_prompts_rollout") >= max(r.rank(*given), 2)
    is_trl = has_trl_defaults(r) or whole or steps or (r.peer("num_generations") and given and not has_prompts)
    if not is_trl:
        _open_instruct_batch(r, own, accumulated)
        return
    if own:
        r.put("local_batch_size", own, "per_device_train_batch_size")
    if not given and has_prompts:
        return
    if any(r.peer(name) < 1 for name in given):
        r.problems.extend(f"{name}={r.peer(name)} must be at least 1" for name in given if r.peer(name) < 1)
        return
    if whole and steps:
        r.problems.append(
            f"generation_batch_size={whole} and steps_per_generation={steps} say the same; give one of them"
        )
        return
    ranks, group = r.data_parallel, r.value("num_samples_per_prompt_rollout")
    if ranks is None or group < 1:
        return  # validate reports the layout and the group
    r.expected.setdefault("world_size", r.world_size)
    step = (own or TRL_MICRO_BATCH) * ranks
    if whole is None and steps is None and has_prompts:
        whole = r.value("num_unique_prompts_rollout") * group
    total = whole or step * (steps or accumulated or 1)
    name = f"generation_batch_size={total}"
    factors = f"per_device_train_batch_size {own or TRL_MICRO_BATCH} x {ranks} data-parallel ranks"
    if total % step:
        r.problems.append(f"{name} must be a multiple of {factors} = {step}")
    elif total % group:
        sizes_ = ", ".join(str(size) for size in range(2, min(total, 256) + 1) if total % size == 0)
        r.problems.append(f"{name} must be a multiple of num_generations={group}; num_generations may be {sizes_}")
    elif (
        accumulated and accumulated % (total // step) == 0 and total < step * accumulated and r.value("num_epochs") == 1
    ):
        # No step lies between them: the same weights have sampled all that an optimizer step takes.
        r.put("num_unique_prompts_rollout", step * accumulated // group, *given)
        r.put("num_mini_batches", 1, *given)
    elif (total // step) % (accumulated or 1):
        r.problems.append(
            f"{name} makes {total // step} micro-steps ({factors}), which gradient_accumulation_steps={accumulated} "
            "does not divide, so an optimizer step would mix two batches"
        )
    else:
        r.put("num_unique_prompts_rollout", total // group, *given)
        r.put("num_mini_batches", total // step // (accumulated or 1), *given, weak=not (own or accumulated or steps))


def _open_instruct_batch(r: Resolution, own: int | None, accumulated: int | None) -> None:
    open_instruct.packs_per_micro_batch(r, own)
    if accumulated not in (None, 1):
        r.notes.append(
            "gradient_accumulation_steps has no effect, as in Open Instruct: micro-batches follow from the packs"
        )


def exports(r: Resolution) -> None:
    """Frequency of exports of the model."""
    strategy, steps = r.peer("save_strategy"), _finite(r, "save_steps")
    if strategy == "best":
        r.problems.append("save_strategy=best does not exist; use steps with save_freq, and load_best_model_at_end")
    elif strategy == "epoch":
        r.put_when_counted("save_freq", "save_strategy")
    elif strategy == "no":
        r.put("save_freq", -1, "save_strategy")
    elif steps is not None and 0 < steps < 1:
        r.put_when_counted("save_freq", "save_steps", share=steps)
    elif steps is not None:
        r.put("save_freq", training_steps(r, int(steps)), "save_steps")


def states(r: Resolution) -> None:
    """Folder and number of the training states, and the one from which a run resumes."""
    word = r.peer("resume_from_checkpoint", "")
    path = BOOLEANS.get(word.lower(), word)
    if path:
        r.put("resume", "auto" if path is True else path, "resume_from_checkpoint")
    if "save_total_limit" in r.peers:
        r.put("keep_last_n_checkpoints", max(r.peer("save_total_limit", 0), 0) or -1, "save_total_limit")
    _put_bucket(r)
    folder = r.value("checkpoint_state_dir")
    if r.preset == "open_instruct_main" and folder and not r.rank("checkpoint_state_freq"):
        r.derive("checkpoint_state_freq", 200, "checkpoint_state_freq is 200, Open Instruct's default")


def _put_bucket(r: Resolution) -> None:
    """The folder of states on Google Cloud Storage, by its URL or in a bucket."""
    url, bucket, folder = r.peer("gs_checkpoint_state_dir"), r.peer("gs_bucket_path"), r.value("checkpoint_state_dir")
    name = "gs_bucket_path" if url is None else "gs_checkpoint_state_dir"
    place = bucket if url is None else url
    if place is None:
        return
    if not place.startswith("gs://"):
        r.problems.append(f"{name}={place} must begin with gs://; checkpoint_state_dir takes any other URL")
        return
    if url is None and not folder:
        r.problems.append(f"gs_bucket_path={bucket} needs checkpoint_state_dir, the folder in it")
        return
    if url is not None and folder and bucket is None:
        r.notes.append(f"checkpoint_state_dir={folder} has no effect: gs_checkpoint_state_dir={url} goes before it")
    r.given.pop("checkpoint_state_dir", None)
    r.put("checkpoint_state_dir", url or f"{bucket.rstrip('/')}/{folder.strip('/')}", name)


def best_export(r: Resolution) -> None:
    """The sign of the metric."""
    name = r.value("metric_for_best_model")
    is_greater, has_sign = r.peer("greater_is_better"), name.startswith("-")
    if is_greater and has_sign:
        r.problems.append(
            f"greater_is_better=true, but metric_for_best_model={name} takes the least value for the best; leave out "
            "greater_is_better or the minus sign"
        )
    if is_greater is not False or has_sign:
        return
    r.given.pop("metric_for_best_model", None)
    r.put("metric_for_best_model", f"-{name}", "greater_is_better")


def evaluations(r: Resolution) -> None:
    """Frequency of evaluations on held-out prompts."""
    strategy, steps = r.peer("eval_strategy"), _finite(r, "eval_steps")
    if strategy == "epoch":
        r.put_when_counted("local_eval_every", "eval_strategy")
    elif strategy == "no":
        r.put("local_eval_every", -1, "eval_strategy")
    elif steps is not None and 0 < steps < 1:
        r.put_when_counted("local_eval_every", "eval_steps", share=steps)
    elif steps is not None:
        r.put("local_eval_every", training_steps(r, int(steps)), "eval_steps")
    elif strategy == "steps":
        r.put(
            "local_eval_every", training_steps(r, int(_finite(r, "logging_steps") or TRL_EVAL_STEPS)), "eval_strategy"
        )
    if strategy in ("steps", "epoch") and r.data_parallel:
        size = r.peer("per_device_eval_batch_size", 8) * r.data_parallel
        group = r.peer("num_generations_eval") or r.value("num_samples_per_prompt_rollout")
        if group > 0 and size % group:
            r.problems.append(
                f"per_device_eval_batch_size x data-parallel ranks = {size} must be a multiple of the {group} "
                "completions per prompt (num_generations_eval, else num_generations); leave eval_strategy out and give "
                "local_eval_every, which has no such rule"
            )
    if r.peer("eval_on_step_0") and r.value("local_eval_every") <= 0:
        r.problems.append(
            f"eval_on_step_0=true needs local_eval_every above 0, got {r.value('local_eval_every')}; leave it out, "
            "held-out data is always evaluated before training"
        )
    top_p = r.peer("eval_top_p")
    if top_p is not None and not _is_share(top_p):
        r.problems.append(f"eval_top_p={top_p:g} must be in (0, 1]; leave it out")


def reference(r: Resolution) -> None:
    """Frequency of updates of the reference model."""
    sync, steps = r.peer("sync_ref_model"), r.peer("ref_model_sync_steps")
    if sync:
        r.put("ref_policy_update_freq", training_steps(r, steps or TRL_SYNC_STEPS), "sync_ref_model", "ref_model_sync_steps")  # fmt: skip
    elif sync is not None:
        r.put("ref_policy_update_freq", None, "sync_ref_model")
    elif steps is not None:
        r.notes.append("ref_model_sync_steps has no effect without sync_ref_model=true")


def dropout_of_adapters(r: Resolution) -> None:
    """A dropout that other trainers have by default."""
    if r.value("use_peft") and r.peer("lora_dropout", 0) in table()["lora_dropout"].neutral and r.peer("lora_dropout"):
        r.notes.append(f"lora_dropout has no effect: {table()['lora_dropout'].sentence}")


def trackers(r: Resolution) -> None:
    """Open Instruct's switch for Weights & Biases, and TRL's name of a project."""
    if r.peer("with_tracking"):
        own = tuple(name for name in r.value("report_to") if name)
        if "wandb" not in own and EVERY not in own:
            # Beside other trackers of the same rank it adds one; `none` contradicts it.
            if r.rank("report_to") <= r.rank("with_tracking") and own and NO not in own:
                r.given.pop("report_to", None)
            r.put("report_to", (*own, "wandb") if NO not in own else ("wandb",), "with_tracking")
    for name in ("wandb_project_name", "project"):
        project = r.peer(name)
        if project is not None and not (name == "project" and project == TRL_PROJECT):
            r.put("wandb_project", project, name)


def is_excused(r: Resolution, name: str) -> bool:
    """True if a refused name is not reported as such: another name overrides it, or `apply` reports it better."""
    if name in ("reward_model_path", "reward_model_revision"):
        return open_instruct.is_unrewarded(r)
    return name == "eval_top_p" and not _is_share(r.peer(name))


def _is_share(value: float) -> bool:
    return 0 < value <= 1


def _finite(r: Resolution, name: str) -> float | None:
    """The number of steps given under `name`; None where none was given or it is not finite, which is a problem."""
    value = r.peer(name)
    if value is None or math.isfinite(value):
        return value
    r.problems.append(f"{name}={value:g} must be a finite number of steps")
    return None

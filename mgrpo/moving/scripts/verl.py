"""verl's commands: words a.b.c=value, as Hydra reads them, or its YAML files; and what several of its names mean together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from mgrpo.config.errors import ConfigError
from mgrpo.config.schema import Config
from mgrpo.moving.scripts.command_config import Given, Text, config_of, precision_of_moments
from mgrpo.moving.scripts.command_line import arguments_of, command_of

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
TEMPLATE_KWARGS = "data.apply_chat_template_kwargs"
POLICY_LOSSES: dict[str, dict[str, str]] = {
    "vanilla": {},
    "gspo": {"ratio_level": "sequence"},
    "sapo": {"policy_loss": "sapo"},
    "cispo": {"policy_loss": "cispo"},
}
SCHEDULES: dict[str, str] = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def read(settings: str | Path | Sequence[str] | Mapping[str, object], fields: Mapping[str, object]) -> Config:
    """Config of a command line or script, its words, a YAML file or a mapping, nested or with dots in its names; `fields` on top.

    Raises:
        ConfigError: everything in them that cannot be done here.
    """
    return config_of("verl", _with_template_kwargs(texts_of(settings)), fields, combine=combine)


def texts_of(settings: str | Path | Sequence[str] | Mapping[str, object]) -> dict[str, Text]:
    """The text of each name."""
    if isinstance(settings, Mapping):
        return _flat(settings)
    if isinstance(settings, (str, Path)) and Path(settings).suffix in (".yaml", ".yml"):
        try:
            loaded = yaml.load(Path(settings).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        except (OSError, ValueError, yaml.YAMLError) as err:
            raise ConfigError([f"cannot read the YAML file {settings}: {err}"]) from None
        return _flat(loaded if isinstance(loaded, Mapping) else {})
    found: dict[str, Text] = {}
    for word in arguments_of(command_of(settings, trainer="main_")):
        name, equals, text = word.lstrip("+~").partition("=")
        if word.startswith("--config-name") and "megatron" in word:
            found[f"{ACTOR}strategy"] = "megatron"
        elif equals and "." in name and not word.startswith("-"):
            found |= _flat({name: _value(text)})
    return found


def _with_template_kwargs(texts: dict[str, Text]) -> dict[str, Text]:
    """The variables of the chat template, which are names of their own there, as one JSON object."""
    prefix = f"{TEMPLATE_KWARGS}."
    variables = {
        name.removeprefix(prefix): yaml.safe_load(text) if isinstance(text, str) else list(text)
        for name, text in texts.items()
        if name.startswith(prefix)
    }
    rest = {name: text for name, text in texts.items() if not name.startswith(prefix)}
    return rest | {TEMPLATE_KWARGS: json.dumps(variables)} if variables else rest


def _value(text: str) -> object:
    """A value as Hydra writes it: text, or a list or a mapping of texts."""
    try:
        return yaml.load(text, Loader=yaml.BaseLoader) if text[:1] in ("[", "{", "'", '"') else text
    except yaml.YAMLError:
        return text


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, Text]:
    found: dict[str, Text] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            found[name] = tuple(map(str, value))
        elif not str(value).startswith(("${oc.", "${.", "???")) and key not in ("_target_", "defaults"):
            # Files hold references to other names, which are defaults.
            found[name] = "null" if value is None else str(value)
    return found


def combine(given: Given) -> None:
    """What follows from several names."""
    _gpus(given)
    _batch(given)
    _loss(given)
    _optimizer(given)
    precision_of_moments(given, f"{ACTOR}optim.override_optimizer_config.use_precision_aware_optimizer")
    _data(given)
    values = given.values
    if ranks := int(given.number(f"{MODEL}lora_rank") or given.number(f"{MODEL}lora.rank") or 0):
        alpha = f"{MODEL}lora.alpha" if given.has(f"{MODEL}lora.alpha") else f"{MODEL}lora_alpha"
        # Megatron-FSDP shards no adapters.
        values |= {"zero_stage": 1, "use_peft": True, "lora_r": ranks, "lora_alpha": given.text(alpha)}
        values["lora_target_modules"] = given.texts.get(f"{MODEL}target_modules", "all-linear")
    greedy = not given.is_on(f"{ROLLOUT}val_kwargs.do_sample")
    values["eval_temperature"] = "0" if greedy else given.text(f"{ROLLOUT}val_kwargs.temperature")
    resume = given.choice("trainer.resume_mode", {"auto": "auto", "disable": "never", "resume_path": "path"})
    values["resume"] = given.text("trainer.resume_from_path") if resume == "path" else resume
    values["save_freq"] = -1
    given.trackers(given.text("trainer.logger").split(), project="trainer.project_name")


def _gpus(given: Given) -> None:
    """Learners and engines share all GPUs."""
    values = given.values
    gpus, nodes = given.count("trainer.n_gpus_per_node"), given.count("trainer.nnodes")
    tensor = given.count(f"{ROLLOUT}tensor_model_parallel_size")
    if gpus is None or nodes is None or tensor is None:
        return
    values |= {"num_learners_per_node": [gpus] * nodes, "vllm_tensor_parallel_size": tensor, "vllm_mode": "colocate"}
    values["vllm_enable_sleep_mode"] = given.is_on(f"{ROLLOUT}free_cache_engine")
    engines = given.part(
        "trainer.n_gpus_per_node x nnodes", f"{ROLLOUT}tensor_model_parallel_size", gpus * nodes, tensor
    )
    values["vllm_num_engines"] = engines
    is_megatron = given.text(f"{ACTOR}strategy") == "megatron" or any(
        ".actor.megatron." in name for name in given.texts
    )
    values["zero_stage"] = 1 if is_megatron else 3
    size = given.number(f"{ACTOR}fsdp_config.fsdp_size")
    if size and size > 1:
        values["fsdp_shard_degree"] = int(size)
    if (ulysses := given.count(f"{ACTOR}ulysses_sequence_parallel_size")) and ulysses > 1:
        values |= {"context_parallel_size": ulysses, "cp_comm_type": "a2a"}


def _batch(given: Given) -> None:
    values = given.values
    prompts, samples = given.count("data.train_batch_size"), given.count(f"{ROLLOUT}n")
    values["num_mini_batches"] = given.part(
        "data.train_batch_size", f"{ACTOR}ppo_mini_batch_size", prompts, given.count(f"{ACTOR}ppo_mini_batch_size")
    )
    longest = (given.count("data.max_prompt_length") or 0) + (given.count("data.max_response_length") or 0)
    ranks = int(str(values.get("context_parallel_size", 1)))
    tokens = given.count(f"{ACTOR}ppo_max_token_len_per_gpu") if given.is_on(f"{ACTOR}use_dynamic_bsz") else None
    values["pack_length"] = max(longest, (tokens or 0) * ranks)
    steps = given.count("trainer.total_training_steps")
    if steps is not None and prompts and samples:
        values["total_episodes"] = steps * prompts * samples
    else:
        values["num_train_epochs"] = given.text("trainer.total_epochs")


def _loss(given: Given) -> None:
    values = given.values
    values["beta"] = given.text(f"{ACTOR}kl_loss_coef") if given.is_on(f"{ACTOR}use_kl_loss") else 0.0
    for side, name in (("clip_lower", "clip_ratio_low"), ("clip_higher", "clip_ratio_high")):
        values[side] = given.text(f"{ACTOR}{name if given.has(f'{ACTOR}{name}') else 'clip_ratio'}")
    losses = given.choice(f"{ACTOR}policy_loss.loss_mode", POLICY_LOSSES)
    if isinstance(losses, dict):
        values |= losses
        if "policy_loss" in losses:
            values.pop("dual_clip", None)
    if given.choice("algorithm.adv_estimator", {"grpo": True}):
        by_std = given.is_on("algorithm.norm_adv_by_std_in_grpo")
        values |= {"advantage_normalization_type": "standard" if by_std else "centered"}
        values |= {"advantage_ddof": 1, "advantage_eps": 1e-6}
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


def _optimizer(given: Given) -> None:
    names = [f"{ACTOR}optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    schedule = next((name for name in names if given.has(name)), None)
    given.values["lr_scheduler_type"] = given.choice(schedule, SCHEDULES) if schedule else SCHEDULES["constant"]
    if (
        not {"warm_up_steps", "warmup_ratio"} & given.values.keys()
        and given.values["lr_scheduler_type"] == SCHEDULES["constant"]
    ):
        given.values["lr_scheduler_type"] = "constant"
    if schedule and given.values["lr_scheduler_type"] in ("linear", "cosine"):
        share, peak = given.number(f"{ACTOR}optim.min_lr_ratio"), given.number(f"{ACTOR}optim.lr")
        given.values["min_lr"] = share * peak if share and peak else given.number(f"{ACTOR}optim.min_lr")


def _data(given: Given) -> None:
    policies = {"error": "error", "left": "truncate_left"}
    policy = given.choice("data.truncation", policies)
    given.values["overlong_prompt_policy"] = "filter" if given.is_on("data.filter_overlong_prompts") else policy

"""Whether a configuration can run: every problem in one list, each a sentence that says how to fix it.

Changes nothing and never raises, whatever the fields hold. A rule between several fields is checked only if each of them
is sound, so that one mistake makes one sentence. Ranges are in the schema, the rules in the modules whose tables are joined
in `problems`, and in `model_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mgrpo.config.adapter_rules import ADAPTER_RULES, FIELDS, LARGE, adapter_model_problems, adapter_warnings
from mgrpo.config.annotations import POSITIVE
from mgrpo.config.best_rules import BEST_RULES, held_out_problems
from mgrpo.config.derived import layout_of
from mgrpo.config.errors import ConfigError
from mgrpo.config.fields import describe, fits, flat, settings, shown
from mgrpo.config.hub_rules import HUB_RULES
from mgrpo.config.loss_rules import LOSS_RULES, weight_problems
from mgrpo.config.model_rules import longest_sequence, model_problems
from mgrpo.config.reward_rules import REWARD_RULES
from mgrpo.config.rules import REWARD_SWITCHES, RULES, pairs, reward_problems
from mgrpo.config.sampling_rules import SAMPLING_RULES
from mgrpo.config.schema import Config
from mgrpo.config.tool_rules import TOOL_NEEDS, TOOL_RULES, tool_warnings
from mgrpo.config.tools import SOURCES
from mgrpo.config.tracking_rules import TRACKING_NEEDS, TRACKING_RULES
from mgrpo.models.cuts import num_experts, size_of

LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "fsdp_shard_degree",
    "sequence_parallel",
    "zero_stage",
)
MODEL_FIELDS = ("vllm_tensor_parallel_size", "max_prompt_token_length", "response_length", "eval_response_length")


def check(
    config: Config,
    *,
    world_size: int,
    hf_config: Mapping[str, Any] | None = None,
    has_dataset: bool = False,
    has_eval_dataset: bool = False,
    num_reward_funcs: int = 0,
) -> None:
    """Raise ConfigError with everything that `problems` finds."""
    found = problems(
        config,
        world_size=world_size,
        hf_config=hf_config,
        has_dataset=has_dataset,
        has_eval_dataset=has_eval_dataset,
        num_reward_funcs=num_reward_funcs,
    )
    if found:
        raise ConfigError(found)


def problems(
    config: Config,
    *,
    world_size: int,
    hf_config: Mapping[str, Any] | None = None,
    has_dataset: bool = False,
    has_eval_dataset: bool = False,
    num_reward_funcs: int = 0,
) -> list[str]:
    """Everything that prevents this run, one sentence each; problems found while reading come first.

    Args:
        world_size: learner ranks, torchrun's WORLD_SIZE.
        hf_config: the model's config.json; without it the model is not checked.
        has_dataset: the caller passes training data, so `dataset_mixer_list` may be empty.
        has_eval_dataset: the caller passes held-out data.
        num_reward_funcs: reward functions that the caller passes in place of reward_funcs.
    """
    by_field = _field_problems(config)
    found = list(by_field.values())
    unsound = by_field.keys() | config.provenance.unsound

    def sound(*names: str) -> bool:
        return not unsound & set(names)

    rules = (
        *RULES,
        *SAMPLING_RULES,
        *LOSS_RULES,
        *REWARD_RULES,
        *TOOL_RULES,
        *ADAPTER_RULES,
        *BEST_RULES,
        *HUB_RULES,
        *TRACKING_RULES,
    )
    for names, rule in rules:
        if sound(*names):
            found.extend(rule(config))
    if sound("reward_funcs"):
        num_reward_funcs = num_reward_funcs or len(config.reward.reward_funcs)
    if sound("dataset_mixer_list") and not config.data.dataset_mixer_list and not has_dataset:
        found.append("dataset_mixer_list is empty; name the training data: --dataset_mixer_list PATH 1.0")
    if sound("dataset_mixer_eval_list", "load_best_model_at_end") and not has_eval_dataset:
        found.extend(held_out_problems(config))
    # An environment may reward by itself.
    if sound(*REWARD_SWITCHES, *SOURCES) and not num_reward_funcs and not config.tools.is_on:
        found.extend(reward_problems(config))
    if sound("reward_weights"):
        found.extend(weight_problems(config, num_reward_funcs))
    if sound("profile_ranks"):
        found.extend(_profile_problems(config, world_size))
    if sound(*LAYOUT_FIELDS):
        about_layout = layout_of(config, world_size).problems()
        found.extend(about_layout)
        if sound("num_learners_per_node"):
            found.extend(_learner_problems(config, world_size))
        if sound(*settings()) and not about_layout:
            found.extend(_derived_problems(config, world_size))
    if hf_config is not None and sound(*LAYOUT_FIELDS, *MODEL_FIELDS):
        found.extend(model_problems(config, hf_config))
    if hf_config is not None and sound(*LAYOUT_FIELDS, "use_peft", *FIELDS):
        found.extend(adapter_model_problems(config, hf_config))
    return [*config.provenance.problems, *(_with_alias(sentence, config) for sentence in found)]


def warnings(
    config: Config, *, world_size: int, hf_config: Mapping[str, Any] | None = None, num_reward_funcs: int = 0
) -> list[str]:
    """What is probably not intended in a sound configuration, one sentence each. Call it after `check`."""
    found = [
        *_data_warnings(config),
        *_loss_warnings(config),
        *_state_warnings(config),
        *tool_warnings(config),
        *_idle(config, num_reward_funcs),
        *_layout_warnings(config, world_size),
        *_model_warnings(config, hf_config),
        *adapter_warnings(config, hf_config),
    ]
    if config.optimizer.warmup_ratio > 0 and config.optimizer.warm_up_steps > 0:
        found.append(
            f"warm_up_steps={config.optimizer.warm_up_steps} is ignored, because warmup_ratio={config.optimizer.warmup_ratio} overrides it"
        )
    return found


def _field_problems(config: Config) -> dict[str, str]:
    """The first problem of each field by itself."""
    found = {}
    for name, value in flat(config).items():
        setting = settings()[name]
        reason = f"; {setting.reason}" if setting.reason else ""
        if not fits(value, setting.type):
            found[name] = f"{name}={value!r} must be {describe(setting.type)}{reason}"
        elif setting.range and isinstance(value, (int, float)) and not setting.range.holds(value):
            found[name] = f"{name}={value} must be {setting.range}{reason}"
        elif name == "loss_denominator" and not _is_denominator(str(value)):
            found[name] = f"{name}={value!r} must be token or a finite number above 0"
    return found


def _is_denominator(value: str) -> bool:
    try:
        return value == "token" or POSITIVE.holds(float(value))
    except ValueError:
        return False


def _profile_problems(config: Config, world_size: int) -> Iterator[str]:
    ranks = config.experiment.profile_ranks
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        yield f"profile_ranks: {outside[0]} is no learner rank of this run, which has ranks 0 to {world_size - 1}"
    if config.experiment.profile_steps and not ranks:
        yield "profile_ranks is empty, so profile_steps would profile nothing; name ranks, for example 0"


def _learner_problems(config: Config, world_size: int) -> Iterator[str]:
    counts = config.parallel.num_learners_per_node
    if any(count < 1 for count in counts):
        yield f"num_learners_per_node={' '.join(map(str, counts))} must be numbers above 0"
    elif counts and sum(counts) != world_size:
        yield (
            f"num_learners_per_node={' '.join(map(str, counts))} asks for {sum(counts)} learner ranks, but {world_size} "
            f"{_were(world_size)} started; start each node with its number of ranks: mgrpo launch --learner-nodes {len(counts)} "
            f"--nproc-per-node {counts[0]}, or leave it out"
        )


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _derived_problems(config: Config, world_size: int) -> Iterator[str]:
    """Values that were given although they follow from others, and a batch that leaves ranks idle."""
    expected, data_parallel_size = config.provenance.expected, layout_of(config, world_size).data
    if expected.get("world_size", world_size) != world_size and not config.parallel.num_learners_per_node:
        yield (
            f"world_size={expected['world_size']} is what batch and layout were computed for, but {world_size} learner "
            f"rank{'s' * (world_size != 1)} {_were(world_size)} started; start {expected['world_size']} "
            f"(--nproc-per-node {expected['world_size']}), or leave world_size out"
        )
    nodes = len(config.parallel.num_learners_per_node)
    if nodes and expected.get("num_nodes", nodes) not in (1, nodes):
        yield f"num_nodes={expected['num_nodes']} differs from the {nodes} entries of num_learners_per_node; leave it out"
    highest = config.reward.max_possible_score
    if expected.get("max_possible_score", highest) != highest:
        yield f"max_possible_score={expected['max_possible_score']} follows from other settings and is {highest}; leave it out"
    if expected.get("vllm_max_model_length", config.max_model_length) < config.max_model_length:
        yield (
            f"vllm_max_model_length={expected['vllm_max_model_length']} is less than "
            f"{longest_sequence(config)} = {config.max_model_length}; leave it out"
        )
    if config.batch_size < data_parallel_size:
        yield (
            f"{config.batch_size} completions per step (num_unique_prompts_rollout x num_samples_per_prompt_rollout) leave "
            f"some of {data_parallel_size} data-parallel ranks without any; sample at least one for each"
        )


def _with_alias(sentence: str, config: Config) -> str:
    """Adds the alias by which the user gave the field that the sentence begins with."""
    name = sentence.partition("=")[0]
    source = config.provenance.sources.get(name, "")
    return f"{sentence} ({name} was given as {source.split()[1]})" if source.startswith("alias ") else sentence


def _data_warnings(config: Config) -> Iterator[str]:
    for mixer in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name, amount in pairs(getattr(config.data, mixer)):
            if amount == "1":
                yield f"{mixer}: amount 1 of {name} means a single row; 1.0 is the whole dataset"
    if config.rollout.num_unique_prompts_rollout < config.engine.vllm_num_engines:
        yield (
            f"num_unique_prompts_rollout={config.rollout.num_unique_prompts_rollout} leaves some of "
            f"vllm_num_engines={config.engine.vllm_num_engines} without work"
        )


def _loss_warnings(config: Config) -> Iterator[str]:
    own = config.loss
    if own.delta is not None and own.delta <= 1 + own.clip_higher:
        yield f"delta={own.delta:g} is not above 1 + clip_higher = {1 + own.clip_higher:g}, so it clips before clip_higher does"
    if own.aggregation == "luspo" and own.ratio_level != "sequence":
        yield f"aggregation=luspo is meant for ratio_level=sequence, got {own.ratio_level}"
    if config.rollout.num_samples_per_prompt_rollout == 1:
        yield "num_samples_per_prompt_rollout=1: the baseline is the mean of the batch, as in REINFORCE"
    if own.is_own_function and config.is_off_policy:
        replays = config.algorithm.replay_buffer_size
        older = (
            f"older policies (replay_buffer_size={replays})"
            if replays
            else f"policies up to {config.max_age} steps older"
        )
        yield (
            f"policy_loss={own.policy_loss} is trained on tokens of {older} and has to "
            "correct for that itself; rollout_logprobs are those of the policy that sampled"
        )
    if own.is_own_function and config.engine.vllm_kv_cache_dtype != "auto":
        yield (
            f"policy_loss={own.policy_loss} is trained on tokens of engines that round keys and values (vllm_kv_cache_dtype="
            f"{config.engine.vllm_kv_cache_dtype}) and has to correct for that itself by rollout_logprobs"
        )


def _state_warnings(config: Config) -> Iterator[str]:
    own = config.checkpoint
    is_folder_of_bucket = "gs_bucket_path" in config.provenance.sources.get("gs_checkpoint_state_dir", "")
    if own.gs_checkpoint_state_dir and own.checkpoint_state_dir and not is_folder_of_bucket:
        yield (
            f"checkpoint_state_dir={own.checkpoint_state_dir} is ignored, because training states are written to "
            f"gs_checkpoint_state_dir={own.gs_checkpoint_state_dir}"
        )


_RHO = (
    "rho_level rho_clamp_lower_bound rho_clamp_upper_bound rho_mask_level rho_mask_lower_bound rho_mask_upper_bound "
    "rho_mask_tv_divergence"
)
_ADAPTIVE = "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
_NEEDS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    (_RHO, "use_rho_correction=true", lambda c: c.loss.use_rho_correction),
    (_ADAPTIVE, "use_adaptive_entropy=true", lambda c: c.algorithm.use_adaptive_entropy),
    (
        "keep_last_n_checkpoints checkpoint_async",
        "checkpoint_state_freq above 0",
        lambda c: c.checkpoint.checkpoint_state_freq > 0,
    ),
    (
        "metric_for_best_model greater_is_better",
        "load_best_model_at_end=true",
        lambda c: c.checkpoint.load_best_model_at_end,
    ),
    (
        "load_best_model_at_end",
        "a save_freq below the steps of the run: there is one export",
        lambda c: c.checkpoint.save_freq < c.num_training_steps,
    ),
    ("alpha", "ref_policy_update_freq", lambda c: c.algorithm.ref_policy_update_freq is not None),
    ("reshuffle_mini_batches", "num_epochs above 1", lambda c: c.algorithm.num_epochs > 1),
    ("active_sampling_max_rounds", "active_sampling=true", lambda c: c.algorithm.active_sampling),
    (
        "max_staleness",
        "async_steps above 0 (or active_sampling_oversample, or replay_buffer_size)",
        lambda c: c.rollout.async_steps + c.algorithm.active_sampling_oversample + c.algorithm.replay_buffer_size > 0,
    ),
    ("inflight_kv", "inflight_updates=true", lambda c: c.rollout.inflight_updates),
    (
        "clip_lower delta dual_clip",
        "policy_loss=ppo_clip",
        lambda c: c.loss.policy_loss == "ppo_clip" or c.loss.is_own_function,
    ),
    (
        "clip_higher",
        "policy_loss=ppo_clip or cispo",
        lambda c: c.loss.policy_loss in ("ppo_clip", "cispo") or c.loss.is_own_function,
    ),
    ("ratio_level", "a policy_loss with a ratio", lambda c: c.loss.policy_loss not in ("vespo", "reinforce")),
    (
        "warm_up_steps warmup_ratio",
        "another lr_scheduler_type, for example constant_with_warmup",
        lambda c: c.optimizer.lr_scheduler_type != "constant",
    ),
    (
        "min_lr",
        "an lr_scheduler_type that falls, for example cosine",
        lambda c: not c.optimizer.lr_scheduler_type.startswith("constant"),
    ),
    (
        "cast_lm_head_to_fp32",
        "a model_dtype of 16 bits: in a float32 model the head is in float32",
        lambda c: c.model.model_dtype != "float32",
    ),
    ("vllm_enable_sleep_mode", "vllm_mode=colocate", lambda c: c.engine.shares_gpus),
    (
        "vllm_gpu_memory_utilization vllm_kv_cache_mb vllm_enforce_eager vllm_enable_prefix_caching vllm_extra_args "
        "ray_address engine_start_timeout",
        "engines that the run starts (vllm_mode=ray or colocate); a server has its own command line",
        lambda c: c.engine.vllm_mode != "server",
    ),
    (
        "vllm_server_timeout vllm_server_allow_public",
        "vllm_mode=server",
        lambda c: c.engine.vllm_mode == "server",
    ),
    ("cp_comm_type", "context_parallel_size above 1", lambda c: c.parallel.context_parallel_size > 1),
    (
        "recompute_modules",
        "recompute_granularity=selective",
        lambda c: c.parallel.recompute_granularity == "selective",
    ),
    ("overlap_grad_reduce", "zero_stage 0 or 1", lambda c: c.parallel.zero_stage < 2),
    ("overlap_param_gather", "zero_stage=1", lambda c: c.parallel.zero_stage == 1),
    ("optimizer_offload_fraction", "optimizer_cpu_offload=true", lambda c: c.parallel.optimizer_cpu_offload),
    (
        "exp_avg_dtype exp_avg_sq_dtype",
        "use_precision_aware_optimizer=true",
        lambda c: c.parallel.use_precision_aware_optimizer,
    ),
    (
        "moe_enable_routing_replay",
        "a second optimizer step on the same batch (num_epochs, num_mini_batches)",
        lambda c: c.algorithm.num_epochs * c.algorithm.num_mini_batches > 1,
    ),
    (
        "moe_enable_routing_replay",
        "use_vllm_logprobs=false, because the policy does not score the batch",
        lambda c: not c.algorithm.use_vllm_logprobs,
    ),
    *TOOL_NEEDS,
    *TRACKING_NEEDS,
)
"""Settings that have an effect only under a condition."""
_USED_BY_FUNCTIONS = (
    "reward_funcs_timeout",
    "apply_verifiable_reward",
    "verifier_memory_mb",
    "verifier_timeout",
    "verifier_workers",
)
"""Reward settings that apply to reward functions as well: limits of the workers, and turning verifiers off."""


def _idle(config: Config, num_reward_funcs: int) -> Iterator[str]:
    """Settings that were given and have no effect."""
    given = {name for name, source in config.provenance.sources.items() if not source.startswith("preset")}
    values = flat(config)
    for names, condition, holds in _NEEDS:
        idle = [name for name in names.split() if name in given and values[name] != settings()[name].default]
        if idle and not holds(config):
            yield f"{', '.join(f'{name}={shown(values[name])}' for name in idle)} has no effect without {condition}"
    used = _USED_BY_FUNCTIONS if num_reward_funcs else (*_USED_BY_FUNCTIONS, "reward_funcs")
    replaced = sorted(
        name
        for name in given
        if settings()[name].section == "reward" and name not in used and values[name] != settings()[name].default
    )
    if (num_reward_funcs or config.reward.reward_funcs) and replaced:
        functions = "the functions passed to mgrpo.train" if num_reward_funcs else "reward_funcs"
        yield f"{', '.join(replaced)} has no effect: rewards come from {functions} alone"


def _layout_warnings(config: Config, world_size: int) -> Iterator[str]:
    layout = layout_of(config, world_size)
    parts = config.algorithm.num_mini_batches
    if config.batch_size < layout.data * parts:
        yield (
            f"{config.batch_size} completions per step in num_mini_batches={parts} parts "
            f"leave some of {layout.data} data-parallel ranks without work"
        )
    elif layout.pipeline > 1 and config.batch_size < layout.data * parts * layout.pipeline:
        interleaved = "interleaved stages take that many at a time, so some are empty"
        yield (
            f"{config.batch_size} completions per step make fewer micro-batches than pipeline_model_parallel_size="
            f"{layout.pipeline} on each of {layout.data} data-parallel ranks; "
            f"{interleaved if layout.virtual_pipeline > 1 else 'so stages are idle part of the time'}"
        )
    length, multiple = config.parallel.pack_length, layout.pack_multiple_of
    if length % multiple:
        yield (
            f"pack_length={length} is rounded up to {layout.round_up(length)}, a multiple of {multiple}: every "
            "context-parallel and, under sequence parallelism, tensor-parallel rank takes an equal share of a pack"
        )
    if layout.sharding != layout.zero_stage:
        yield (
            f"zero_stage={layout.zero_stage} has only one data- and context-parallel rank, so there is nothing to shard; it runs "
            f"as zero_stage={layout.sharding}, which takes the same memory"
        )
    if any(count % layout.tensor for count in config.parallel.num_learners_per_node):
        yield (
            f"tensor_model_parallel_size={layout.tensor} does not divide every entry of num_learners_per_node="
            f"{' '.join(map(str, config.parallel.num_learners_per_node))}: some matrices are split across nodes, which is slow"
        )


def _model_warnings(config: Config, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    if hf_config is None:
        return
    highest, usual = (5e-5, "5e-6 to 2e-5") if config.adapter.use_peft else (5e-6, "5e-7 to 2e-6")
    if (size_of(hf_config, "hidden_size") or 0) >= LARGE and config.optimizer.learning_rate > highest:
        yield f"learning_rate={config.optimizer.learning_rate} is high for a model of this size; {usual} is usual"
    if not num_experts(hf_config):
        if config.parallel.moe_enable_routing_replay:
            yield "moe_enable_routing_replay=true has no effect on a model without experts"
        if config.parallel.recompute_granularity == "selective" and "moe" in config.parallel.recompute_modules:
            yield "recompute_modules: moe has no effect on a model without experts"

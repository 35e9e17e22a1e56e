"""Rules between several fields, except for those of the algorithm. Each is checked only if its fields are sound."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator

from mgrpo.config.annotations import POSITIVE
from mgrpo.config.schema import Config, Data
from mgrpo.models.family import is_hub_name, no_model

Rule = tuple[tuple[str, ...], Callable[[Config], Iterator[str]]]
"""The fields that must be sound, and the rule: one sentence per violation."""


def _output_dir(config: Config) -> Iterator[str]:
    if not config.experiment.output_dir:
        yield "output_dir is empty; name a folder"
    elif os.path.isfile(config.experiment.output_dir):
        yield f"output_dir={config.experiment.output_dir} is a file; name a folder"


def _model_path(config: Config) -> Iterator[str]:
    name = config.model.model_name_or_path
    if not name:
        yield "model_name_or_path is not set; give the folder of a Hugging Face checkpoint, or a name on the Hub"
    elif not os.path.isfile(os.path.join(name, "config.json")) and (os.path.isdir(name) or not is_hub_name(name)):
        # What a plan is made for need not be here.
        yield f"model_name_or_path={no_model(name)}"


def _data(config: Config) -> Iterator[str]:
    for mixer in MIXERS:
        yield from mixer_problems(config.data, mixer)


MIXERS = ("dataset_mixer_list", "dataset_mixer_eval_list")


def mixer_problems(data: Data, mixer: str) -> Iterator[str]:
    """What is wrong with the words of a mix, whatever lies behind them."""
    words, splits = getattr(data, mixer), getattr(data, f"{mixer}_splits")
    if len(words) % 2:
        count = "1 word" if len(words) == 1 else f"{len(words)} words"
        yield f"{mixer} has {count} ({' '.join(words)}), expected pairs of dataset and amount: PATH 1.0 PATH 500"
        return
    for name, amount in pairs(words):
        if not _is_amount(amount):
            yield (
                f"{mixer}: amount {amount!r} of {name} must be a share with a decimal point (1.0 is all of it) "
                "or a number of rows, above 0"
            )
    if words and len(splits) not in (1, len(words) // 2):
        yield f"{mixer}_splits has {len(splits)} entries, expected 1 or one for each of {len(words) // 2} datasets"


def pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Dataset and amount, from a mixer list."""
    return list(zip(words[::2], words[1::2], strict=False))


def _is_amount(amount: str) -> bool:
    try:
        return POSITIVE.holds(float(amount) if "." in amount else int(amount))
    except ValueError:
        return False


REWARD_SWITCHES = ("apply_verifiable_reward", "apply_r1_style_format_reward", "non_stop_penalty")


def reward_problems(config: Config) -> Iterator[str]:
    """Whether anything is rewarded if the caller passes no functions."""
    if not any(getattr(config.reward, switch) for switch in REWARD_SWITCHES):
        yield f"no reward is on, so nothing can be learned; turn on one of {', '.join(REWARD_SWITCHES)}"


def _engines(config: Config) -> Iterator[str]:
    engine = config.engine
    if engine.min_engines > engine.vllm_num_engines:
        yield (
            f"min_engines={engine.min_engines} is more than vllm_num_engines={engine.vllm_num_engines}, and the run would wait "
            "for ever; lower it, or start more engines"
        )


def _asynchrony(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    oversample = algorithm.active_sampling_oversample
    least = rollout.async_steps + math.ceil(oversample)
    if oversample and not algorithm.active_sampling:
        yield f"active_sampling_oversample={oversample:g} replaces nothing without active_sampling; set active_sampling true"
        return
    if config.max_age < least:
        filled = f" + active_sampling_oversample={oversample:g} rounded up" if oversample else ""
        yield (
            f"max_staleness={rollout.max_staleness} must be at least async_steps={rollout.async_steps}{filled}, because a "
            f"group may wait that long for its step; use {least} or more"
        )
    if rollout.async_steps == 0 and rollout.inflight_updates:
        yield (
            "inflight_updates=true needs completions that are under way when the weights change, and async_steps=0 has none; "
            "set async_steps to 1 or more"
        )
    if algorithm.replay_buffer_size and rollout.max_staleness == 0:
        yield (
            f"replay_buffer_size={algorithm.replay_buffer_size} replays groups of earlier steps, which max_staleness=0 forbids; "
            "leave one of them out"
        )


def _servers(config: Config) -> Iterator[str]:
    mode, urls = config.engine.vllm_mode, config.engine.vllm_server_base_url
    if mode == "server" and not urls:
        yield "vllm_mode=server needs vllm_server_base_url, the addresses of vLLM servers: http://HOST:PORT; docs/servers.md starts one"
    elif urls and mode != "server":
        yield f"vllm_server_base_url={' '.join(urls)} is used with vllm_mode=server, but it is {mode}; change it, or leave the addresses out"
    elif len({url.rstrip("/") for url in urls}) < len(urls):
        yield f"vllm_server_base_url={' '.join(urls)} names a server twice; each of them is one engine"


def _pack_length(config: Config) -> Iterator[str]:
    prompt, response = config.data.max_prompt_token_length, config.rollout.response_length
    if config.parallel.pack_length < prompt + response:
        yield (
            f"pack_length={config.parallel.pack_length} cannot hold max_prompt_token_length {prompt} "
            f"+ response_length {response}; use at least {prompt + response}"
        )


RECOMPUTABLE = ("core_attn", "mlp", "moe")


def _recompute_modules(config: Config) -> Iterator[str]:
    modules, granularity = config.parallel.recompute_modules, config.parallel.recompute_granularity
    for module in modules:
        if module not in RECOMPUTABLE:
            near = difflib.get_close_matches(module, RECOMPUTABLE, n=1)
            advice = f"did you mean {near[0]}?" if near else "name some of these"
            yield f"recompute_modules={module} must be of {', '.join(RECOMPUTABLE)}; {advice}"
    if granularity == "selective" and not modules:
        yield f"recompute_granularity=selective recomputes nothing without recompute_modules; name some of {', '.join(RECOMPUTABLE)}"


def _routing_replay(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if not parallel.moe_enable_routing_replay or parallel.pipeline_model_parallel_size == 1:
        return
    if parallel.recomputes("moe"):
        yield (
            "moe_enable_routing_replay=true cannot be combined with pipeline_model_parallel_size="
            f"{parallel.pipeline_model_parallel_size} and recomputed routers, which would replay the choices of another pack; "
            "use recompute_granularity=selective with recompute_modules core_attn"
        )


def _optimizer_memory(config: Config) -> Iterator[str]:
    stage, is_precision_aware = config.parallel.zero_stage, config.parallel.use_precision_aware_optimizer
    if config.parallel.optimizer_cpu_offload and stage != 1:
        yield (
            f"optimizer_cpu_offload=true needs zero_stage=1 (Megatron's distributed optimizer), got {stage}; "
            f"use zero_stage=1, or zero_stage={stage} without it"
        )
    frequency = config.checkpoint.checkpoint_state_freq
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(config.parallel, name) and frequency > 0:
            yield (
                f"{name}=true cannot be combined with checkpoint_state_freq={frequency}: its state cannot be resumed "
                "yet; turn one of them off"
            )
    if is_precision_aware and stage == 0:
        yield "use_precision_aware_optimizer=true needs a zero_stage of at least 1, got 0"
    if is_precision_aware and config.model.model_dtype == "float16":
        yield (
            "use_precision_aware_optimizer=true cannot be combined with model_dtype=float16, whose scaled gradients it keeps "
            "where the loss scale does not reach them; use bfloat16, or leave it out"
        )
    if is_precision_aware and config.parallel.optimizer_cpu_offload:
        yield (
            "use_precision_aware_optimizer=true cannot be combined with optimizer_cpu_offload=true, whose optimizer keeps "
            "float32 moments on host and device; leave one of them out"
        )


def _shared_prompts(config: Config) -> Iterator[str]:
    if config.parallel.shared_prompt_packing is True and config.parallel.context_parallel_size > 1:
        yield (
            "shared_prompt_packing=true cannot be combined with context_parallel_size="
            f"{config.parallel.context_parallel_size}, whose ranks share each document; use auto or false"
        )


def _num_steps(config: Config) -> Iterator[str]:
    if not config.has_length:
        return
    if config.num_training_steps < 1:
        yield (
            f"total_episodes={config.experiment.total_episodes} is less than one step of "
            f"{config.rollout.num_unique_prompts_rollout} prompts x {config.rollout.num_samples_per_prompt_rollout} "
            f"samples; use at least {config.batch_size}"
        )
    elif config.optimizer.warmup_ratio == 0 and config.optimizer.warm_up_steps > config.num_optimizer_steps:
        yield (
            f"warm_up_steps={config.optimizer.warm_up_steps} is more than the run's {config.num_optimizer_steps} "
            "optimizer steps; shorten it or raise total_episodes"
        )


def _rates(config: Config) -> Iterator[str]:
    own = config.optimizer
    if own.min_lr > own.learning_rate:
        yield f"min_lr={own.min_lr:g} is above learning_rate={own.learning_rate:g}, from which the rate falls; lower it"
    if own.lr_scheduler_type == "cosine_with_min_lr" and own.min_lr == 0:
        yield "lr_scheduler_type=cosine_with_min_lr needs min_lr above 0; give it, or use cosine, which ends at 0"


def _profile_steps(config: Config) -> Iterator[str]:
    if not config.has_length:
        return
    last = config.num_training_steps
    outside = [step for step in config.experiment.profile_steps if not 1 <= step <= last]
    if outside and last >= 1:
        yield f"profile_steps: {outside[0]} is no step of this run, which has steps 1 to {last}"


def _mini_batches(config: Config) -> Iterator[str]:
    prompts = config.rollout.num_unique_prompts_rollout
    if config.algorithm.num_mini_batches > prompts:
        yield (
            f"num_mini_batches={config.algorithm.num_mini_batches} is more than the {prompts} prompts of a step, whose "
            f"groups may stay together; use at most {prompts}"
        )


def _states(config: Config) -> Iterator[str]:
    own = config.checkpoint
    for name in ("checkpoint_state_dir", "gs_checkpoint_state_dir"):
        folder = getattr(own, name)
        if folder == "":
            yield f"{name} is empty; name a folder or leave it out"
        elif folder and name.startswith("gs_") and not folder.startswith("gs://"):
            yield f"{name}={folder} must begin with gs://; checkpoint_state_dir takes folders and other URLs"
        elif folder and own.checkpoint_state_freq <= 0:
            yield f"{name}={folder} needs checkpoint_state_freq above 0, got {own.checkpoint_state_freq}; or leave it out"
            break
    if own.keep_last_n_checkpoints == 0:
        yield "keep_last_n_checkpoints=0 would keep no state; give 1 or more, -1 for all, or checkpoint_state_freq=-1"


def _resume(config: Config) -> Iterator[str]:
    path = config.checkpoint.resume
    if path in ("auto", "intact", "never"):
        return
    step = re.search(r"(?:^|/)step_([0-9]{1,18})/*$", path)
    if not step:
        yield f"resume={path} must be auto, intact, never, or the path of a training state, .../checkpoints/step_N"
    elif "://" not in path and not os.path.isdir(path):
        yield f"resume={path} is not a folder; check the path (it is used as given, ~ is not expanded)"
    elif config.has_length and int(step[1]) > config.num_training_steps:
        yield (
            f"resume={path} is step {int(step[1])}, but the run has {config.num_training_steps} training steps; "
            "raise total_episodes"
        )


def too_few_prompts(config: Config, num_prompts: int) -> list[str]:
    """Whether `num_prompts` training rows fill a step."""
    wanted = config.rollout.num_unique_prompts_rollout
    if num_prompts >= wanted:
        return []
    count = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
    return [
        f"dataset_mixer_list has {count}, but a step takes num_unique_prompts_rollout={wanted} different "
        "ones; give more rows or lower it"
    ]


def _colocation(config: Config) -> Iterator[str]:
    engine, parallel = config.engine, config.parallel
    if not engine.shares_gpus:
        return
    if config.rollout.async_steps:
        yield (
            f"vllm_mode=colocate with async_steps={config.rollout.async_steps}: learners and engines of the same GPUs cannot "
            "work at the same time; set async_steps=0, or vllm_mode=ray with GPUs for each"
        )
    if len(parallel.num_learners_per_node) > 1:
        yield (
            f"vllm_mode=colocate with num_learners_per_node={' '.join(map(str, parallel.num_learners_per_node))}: learners and "
            "engines exchange weights through the memory of one machine's GPUs; use one node, or vllm_mode=ray"
        )
    if engine.ray_address is not None:
        yield f"ray_address={engine.ray_address}: with vllm_mode=colocate engines run on the learners' machine; leave it out"


STATE_FIELDS = ("checkpoint_state_freq", "checkpoint_state_dir", "gs_checkpoint_state_dir", "keep_last_n_checkpoints")
BATCH_FIELDS = ("num_unique_prompts_rollout", "num_samples_per_prompt_rollout")

RULES: tuple[Rule, ...] = (
    (("output_dir",), _output_dir),
    (("model_name_or_path",), _model_path),
    (
        (
            "dataset_mixer_list",
            "dataset_mixer_eval_list",
            "dataset_mixer_list_splits",
            "dataset_mixer_eval_list_splits",
        ),
        _data,
    ),
    (
        (
            "async_steps",
            "max_staleness",
            "replay_buffer_size",
            "inflight_updates",
            "active_sampling",
            "active_sampling_oversample",
        ),
        _asynchrony,
    ),
    (("vllm_mode", "vllm_server_base_url"), _servers),
    (("min_engines", "vllm_num_engines"), _engines),
    (
        ("pack_length", "max_prompt_token_length", "response_length"),
        _pack_length,
    ),
    (("recompute_modules", "recompute_granularity"), _recompute_modules),
    (
        (
            "moe_enable_routing_replay",
            "pipeline_model_parallel_size",
            "recompute_granularity",
            "recompute_modules",
        ),
        _routing_replay,
    ),
    (
        (
            "zero_stage",
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
            "checkpoint_state_freq",
            "model_dtype",
        ),
        _optimizer_memory,
    ),
    (("shared_prompt_packing", "context_parallel_size"), _shared_prompts),
    (
        (
            "vllm_mode",
            "async_steps",
            "num_learners_per_node",
            "ray_address",
        ),
        _colocation,
    ),
    (
        (
            *BATCH_FIELDS,
            "total_episodes",
            "num_train_epochs",
            "num_epochs",
            "num_mini_batches",
            "warm_up_steps",
            "warmup_ratio",
        ),
        _num_steps,
    ),
    (("lr_scheduler_type", "learning_rate", "min_lr"), _rates),
    ((*BATCH_FIELDS, "total_episodes", "num_train_epochs", "profile_steps"), _profile_steps),
    ((*BATCH_FIELDS, "num_mini_batches"), _mini_batches),
    (STATE_FIELDS, _states),
    ((*BATCH_FIELDS, "total_episodes", "num_train_epochs", "resume"), _resume),
)
"""Each rule with the fields that must be sound before it is checked."""

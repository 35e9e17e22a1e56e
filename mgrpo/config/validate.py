"""What is impossible about a configuration: every problem in one list, each a sentence that says how to fix it.

Pure and total: reads no environment, changes nothing, never raises whatever the fields hold. A question that needs
several fields is asked only when each of them is sound, so one mistake makes one sentence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgrpo.config.errors import ConfigError
from mgrpo.config.fields import describe, fits, flat, settings
from mgrpo.config.schema import Config
from mgrpo.layout import VOCAB_MULTIPLE, Layout


def check(
    config: Config,
    *,
    world_size: int,
    hf_config: Mapping[str, Any] | None = None,
    has_dataset: bool = False,
    has_reward_funcs: bool = False,
) -> None:
    """Raise ConfigError with everything that `problems` finds."""
    found = problems(
        config,
        world_size=world_size,
        hf_config=hf_config,
        has_dataset=has_dataset,
        has_reward_funcs=has_reward_funcs,
    )
    if found:
        raise ConfigError(found)


def problems(
    config: Config,
    *,
    world_size: int,
    hf_config: Mapping[str, Any] | None = None,
    has_dataset: bool = False,
    has_reward_funcs: bool = False,
) -> list[str]:
    """Everything that keeps this run from starting, one sentence each.

    Args:
        world_size: learner ranks, torchrun's WORLD_SIZE.
        hf_config: the model's config.json; without it nothing is said about how the model splits.
        has_dataset: the caller brings training data of its own, so `dataset_mixer_list` may be empty.
        has_reward_funcs: the caller brings rewards of its own.
    """
    by_field = _field_problems(config)
    found = list(by_field.values())

    def sound(*names: str) -> bool:
        return not by_field.keys() & set(names)

    for names, rule in RULES:
        if sound(*names):
            found.extend(rule(config))
    if sound("dataset_mixer_list") and not config.data.dataset_mixer_list and not has_dataset:
        found.append("dataset_mixer_list is empty; name the training data: --dataset_mixer_list PATH 1.0")
    if sound(*REWARD_SWITCHES) and not has_reward_funcs:
        found.extend(_reward_problems(config))
    if sound(*LAYOUT_FIELDS):
        found.extend(layout_of(config, world_size).problems())
    if hf_config is not None and sound(*LAYOUT_FIELDS, *MODEL_FIELDS):
        found.extend(_model_problems(config, hf_config))
    return found


def warnings(config: Config, *, world_size: int, hf_config: Mapping[str, Any] | None = None) -> list[str]:
    """What a sound configuration probably does not mean, one sentence each. Call it after `check`."""
    found = []
    for mixer in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name, amount in _pairs(getattr(config.data, mixer)):
            if amount == "1":
                found.append(f"{mixer}: amount 1 of {name} is a single row; 1.0 is the whole dataset")
    if config.optimizer.warmup_ratio > 0 and config.optimizer.warm_up_steps > 0:
        found.append(
            f"warm_up_steps={config.optimizer.warm_up_steps} is not used, warmup_ratio={config.optimizer.warmup_ratio} wins"
        )
    if config.rollout.num_unique_prompts_rollout < config.engine.vllm_num_engines:
        found.append(
            f"num_unique_prompts_rollout={config.rollout.num_unique_prompts_rollout} leaves some of "
            f"vllm_num_engines={config.engine.vllm_num_engines} without work"
        )
    data = layout_of(config, world_size).data
    if config.batch_size < data * config.algorithm.num_mini_batches:
        found.append(
            f"{config.batch_size} completions a step in num_mini_batches={config.algorithm.num_mini_batches} parts "
            f"leave some of {data} data-parallel ranks without work"
        )
    if (_size(hf_config, "hidden_size") or 0) >= 2048 and config.optimizer.learning_rate > 5e-6:
        found.append(
            f"learning_rate={config.optimizer.learning_rate} is high for a model of this size; 5e-7 to 2e-6 is usual"
        )
    return found


def layout_of(config: Config, world_size: int) -> Layout:
    """The training layout that the parallel section asks of `world_size` learner ranks."""
    parallel = config.parallel
    sequence_parallel = parallel.sequence_parallel
    return Layout(
        world_size=world_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=parallel.tensor_model_parallel_size > 1 if sequence_parallel == "auto" else sequence_parallel,
        zero_stage=parallel.zero_stage,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The finite numbers a field may hold."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and (isinstance(value, int) or math.isfinite(value))

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"{'above' if self.low_open else 'at least'} {self.low} and finite"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}{')' if self.high_open else ']'}"


ANY = Range()
POSITIVE = Range(low=0, low_open=True)
NOT_NEGATIVE = Range(low=0)
ONE_OR_MORE = Range(low=1)
SHARE = Range(low=0, high=1, high_open=True)

RANGES = {
    "seed": Range(low=0, high=2**32 - 1),
    "total_episodes": ONE_OR_MORE,
    "local_eval_every": ANY,
    "backend_timeout": ONE_OR_MORE,
    "max_prompt_token_length": ONE_OR_MORE,
    "num_unique_prompts_rollout": ONE_OR_MORE,
    "num_samples_per_prompt_rollout": ONE_OR_MORE,
    "response_length": ONE_OR_MORE,
    "temperature": POSITIVE,
    "async_steps": NOT_NEGATIVE,
    "eval_pass_at_k": ONE_OR_MORE,
    "rollout_timeout": ONE_OR_MORE,
    "verification_reward": POSITIVE,
    "r1_style_format_reward": POSITIVE,
    "non_stop_penalty_value": ANY,
    "verifier_timeout": POSITIVE,
    "verifier_workers": ONE_OR_MORE,
    "clip_lower": Range(low=0, high=1, low_open=True, high_open=True),
    "clip_higher": POSITIVE,
    "beta": NOT_NEGATIVE,
    "num_epochs": ONE_OR_MORE,
    "num_mini_batches": ONE_OR_MORE,
    "learning_rate": POSITIVE,
    "warm_up_steps": NOT_NEGATIVE,
    "warmup_ratio": SHARE,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "adam_beta1": SHARE,
    "adam_beta2": SHARE,
    "adam_epsilon": POSITIVE,
    "tensor_model_parallel_size": ONE_OR_MORE,
    "pipeline_model_parallel_size": ONE_OR_MORE,
    "context_parallel_size": ONE_OR_MORE,
    "expert_model_parallel_size": ONE_OR_MORE,
    "virtual_pipeline_model_parallel_size": ONE_OR_MORE,
    "pack_length": ONE_OR_MORE,
    "vllm_num_engines": ONE_OR_MORE,
    "vllm_tensor_parallel_size": ONE_OR_MORE,
    "vllm_gpu_memory_utilization": Range(low=0, high=1, low_open=True),
    "vllm_kv_cache_mb": ONE_OR_MORE,
    "vllm_max_num_seqs": ONE_OR_MORE,
    "engine_start_timeout": ONE_OR_MORE,
    "weight_sync_bucket_mb": ONE_OR_MORE,
    "weight_sync_timeout": ONE_OR_MORE,
    "weight_sync_check_every": NOT_NEGATIVE,
    "save_freq": ANY,
}
"""Range of every field of type int or float."""

REASONS = {
    "model_dtype": "float16 needs loss scaling, which does not exist here",
    "temperature": "the training logits are divided by it",
}
"""Why a field's values are what they are, where the range alone does not say it."""


def _field_problems(config: Config) -> dict[str, str]:
    """The first problem of each field by itself."""
    found = {}
    for name, value in flat(config).items():
        expected = settings()[name].type
        reason = f"; {REASONS[name]}" if name in REASONS else ""
        if not fits(value, expected):
            found[name] = f"{name}={value!r} must be {describe(expected)}{reason}"
        elif name in RANGES and not RANGES[name].holds(value):
            found[name] = f"{name}={value} must be {RANGES[name]}{reason}"
        elif name == "loss_denominator" and not _is_denominator(value):
            found[name] = f"{name}={value!r} must be token or a finite number above 0"
    return found


def _is_denominator(value: str) -> bool:
    try:
        return value == "token" or POSITIVE.holds(float(value))
    except ValueError:
        return False


def _output_dir(config: Config) -> Iterator[str]:
    if not config.experiment.output_dir:
        yield "output_dir is empty; name a folder"
    elif os.path.isfile(config.experiment.output_dir):
        yield f"output_dir={config.experiment.output_dir} is a file; name a folder"


def _model_path(config: Config) -> Iterator[str]:
    name = config.model.model_name_or_path
    if not name:
        yield "model_name_or_path is not set; give the folder of a Hugging Face checkpoint"
    elif os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            yield f"model_name_or_path={name} has no config.json; give the folder of a Hugging Face checkpoint"
    elif name.startswith(("/", ".", "~")) or name.count("/") != 1:
        yield f"model_name_or_path={name} is not a folder; check the path (it is used as given, ~ is not expanded)"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    for mixer, splits in (
        ("dataset_mixer_list", data.dataset_mixer_list_splits),
        ("dataset_mixer_eval_list", data.dataset_mixer_eval_list_splits),
    ):
        words = getattr(data, mixer)
        if len(words) % 2:
            yield f"{mixer} has {len(words)} words, expected pairs of dataset and amount: PATH 1.0 PATH 500"
            continue
        for name, amount in _pairs(words):
            if not _is_amount(amount):
                yield (
                    f"{mixer}: amount {amount!r} of {name} must be a share with a point (1.0 is all of it) "
                    "or a count of rows, above 0"
                )
        if words and len(splits) not in (1, len(words) // 2):
            yield f"{mixer}_splits has {len(splits)} entries, expected 1 or one for each of {len(words) // 2} datasets"


def _pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=False))


def _is_amount(amount: str) -> bool:
    try:
        return POSITIVE.holds(float(amount) if "." in amount else int(amount))
    except ValueError:
        return False


REWARD_SWITCHES = ("apply_verifiable_reward", "apply_r1_style_format_reward", "non_stop_penalty")


def _reward_problems(config: Config) -> Iterator[str]:
    if not any(getattr(config.reward, switch) for switch in REWARD_SWITCHES):
        yield f"no reward is on, so nothing can be learned; turn on one of {', '.join(REWARD_SWITCHES)}"


def _asynchrony(config: Config) -> Iterator[str]:
    if config.rollout.async_steps:
        yield f"async_steps={config.rollout.async_steps} is not implemented yet; use 0"


def _pack_length(config: Config) -> Iterator[str]:
    prompt, response = config.data.max_prompt_token_length, config.rollout.response_length
    if config.parallel.pack_length < prompt + response:
        yield (
            f"pack_length={config.parallel.pack_length} cannot hold max_prompt_token_length {prompt} "
            f"+ response_length {response}; use at least {prompt + response}"
        )


def _reference(config: Config) -> Iterator[str]:
    if not config.model.load_ref_policy and config.algorithm.beta != 0:
        yield (
            f"beta={config.algorithm.beta} needs the reference model, but load_ref_policy=false; "
            "set beta to 0 or load_ref_policy to true"
        )


def _num_steps(config: Config) -> Iterator[str]:
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


def _mini_batches(config: Config) -> Iterator[str]:
    prompts = config.rollout.num_unique_prompts_rollout
    if config.algorithm.num_mini_batches > prompts:
        yield (
            f"num_mini_batches={config.algorithm.num_mini_batches} is more than the {prompts} prompts of a step, whose "
            f"groups may stay together; use at most {prompts}"
        )


BATCH_FIELDS = ("num_unique_prompts_rollout", "num_samples_per_prompt_rollout")

RULES: tuple[tuple[tuple[str, ...], Callable[[Config], Iterator[str]]], ...] = (
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
    (("async_steps",), _asynchrony),
    (
        (
            "pack_length",
            "max_prompt_token_length",
            "response_length",
            "tensor_model_parallel_size",
            "sequence_parallel",
        ),
        _pack_length,
    ),
    (("load_ref_policy", "beta"), _reference),
    ((*BATCH_FIELDS, "total_episodes", "num_epochs", "num_mini_batches", "warm_up_steps", "warmup_ratio"), _num_steps),
    ((*BATCH_FIELDS, "num_mini_batches"), _mini_batches),
)
"""Questions about several fields, each with the fields that must be sound before it is asked."""

LAYOUT_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
    "zero_stage",
)
MODEL_FIELDS = ("vllm_tensor_parallel_size", "max_prompt_token_length", "response_length")


def _model_problems(config: Config, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Whether the model can be cut as asked."""
    training = ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "padded vocabulary")
    inference = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    yield from _split_problems(
        "tensor_model_parallel_size", config.parallel.tensor_model_parallel_size, _parts(hf_config, training)
    )
    yield from _split_problems(
        "vllm_tensor_parallel_size", config.engine.vllm_tensor_parallel_size, _parts(hf_config, inference)
    )
    yield from _split_problems(
        "pipeline_model_parallel_size",
        config.parallel.pipeline_model_parallel_size,
        _parts(hf_config, ("num_hidden_layers",)),
    )
    positions = _size(hf_config, "max_position_embeddings")
    longest = config.data.max_prompt_token_length + config.rollout.response_length
    if positions and longest > positions:
        yield (
            f"max_prompt_token_length + response_length = {longest} is more than the model's "
            f"max_position_embeddings={positions}; shorten one of them"
        )


def _parts(hf_config: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Sizes that must split evenly, of those that the model's config names."""
    sizes = {name: _size(hf_config, name) for name in names}
    if "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    if "padded vocabulary" in sizes:
        vocab = _size(hf_config, "vocab_size")
        sizes["padded vocabulary"] = vocab and math.ceil(vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return {name: size for name, size in sizes.items() if size}


def _split_problems(field: str, value: int, parts: Mapping[str, int]) -> Iterator[str]:
    if not parts:
        return
    limit = parts.get("num_attention_heads") or parts.get("num_hidden_layers") or 64
    choices = [str(size) for size in range(1, limit + 1) if all(_splits(name, parts[name], size) for name in parts)]
    for name, size in parts.items():
        if not _splits(name, size, value):
            verb = "neither divides nor is a multiple of" if name == "num_key_value_heads" else "does not divide"
            yield f"{field}={value} {verb} {name}={size}; choose from {{{', '.join(choices)}}}"


def _splits(name: str, size: int, ranks: int) -> bool:
    """Key-value heads may also be copied: several ranks hold the same one."""
    return size % ranks == 0 or (name == "num_key_value_heads" and ranks % size == 0)


def _size(hf_config: Mapping[str, Any] | None, name: str) -> int | None:
    value = (hf_config or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

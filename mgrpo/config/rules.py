"""Questions about several fields of a run, the algorithm's apart. Each is asked only when its fields are sound."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from mgrpo.config.ranges import POSITIVE
from mgrpo.config.schema import Config

Rule = tuple[tuple[str, ...], Callable[[Config], Iterator[str]]]
"""The fields that must be sound, and the question."""


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
        for name, amount in pairs(words):
            if not _is_amount(amount):
                yield (
                    f"{mixer}: amount {amount!r} of {name} must be a share with a point (1.0 is all of it) "
                    "or a count of rows, above 0"
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
    """Whether anything is rewarded, when the caller brings no functions."""
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


def too_few_prompts(config: Config, num_prompts: int) -> list[str]:
    """Whether `num_prompts` training rows fill a step."""
    wanted = config.rollout.num_unique_prompts_rollout
    if num_prompts >= wanted:
        return []
    return [
        f"dataset_mixer_list has {num_prompts} prompts, but a step takes num_unique_prompts_rollout={wanted} different "
        "ones; give more rows or lower it"
    ]


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
    ((*BATCH_FIELDS, "total_episodes", "num_epochs", "num_mini_batches", "warm_up_steps", "warmup_ratio"), _num_steps),
    ((*BATCH_FIELDS, "num_mini_batches"), _mini_batches),
)
"""Questions about several fields, each with the fields that must be sound before it is asked."""

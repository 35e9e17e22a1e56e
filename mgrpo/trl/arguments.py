"""The trainer's arguments that are not settings, and the checks of TRL's constructor for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mgrpo.config import Config
from mgrpo.rewards.function_calls import innermost
from mgrpo.trl.loaded import is_model, name_of

BY_TOKEN = ("bnpo", "dr_grpo", "dapo", "cispo")
"""Losses that add up tokens, so that a long completion counts more than a short one."""


def listed(given: Any) -> list[Any]:
    """One, several or none as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def function_name(function: Any) -> str:
    """TRL's name of a reward function or model, under which its values are logged."""
    if isinstance(function, str) or is_model(function):
        return name_of(function)
    inner = innermost(function)
    return getattr(inner, "__name__", type(inner).__name__)


def argument_problems(
    given: Mapping[str, object],
    functions: Sequence[Any],
    tokenizers: Sequence[Any],
    train_dataset: Any,
    environment_factory: Any,
) -> Iterator[str]:
    """Problems that TRL's constructor would report as well.

    Args:
        given: the fields of the script.
        tokenizers: of reward models, one for each function.
    """
    environment_factory = environment_factory or given.get("environment_factory")
    if not (
        functions or given.get("reward_funcs") or _may_reward(environment_factory) or names_verifiers(train_dataset)
    ):
        yield (
            "No reward source provided: give reward_funcs, an environment_factory whose environment has get_reward, or rows "
            "that name verifiers in the column dataset"
        )
    if len(tokenizers) != len(functions):
        yield (
            f"reward_processing_classes has {len(tokenizers)} entries, which must match the {len(functions)} of reward_funcs; "
            "give one for each, None where it is no reward model"
        )
    if given.get("logging_steps") == 0 and given.get("logging_strategy", "steps") == "steps":
        yield "logging_steps=0 must be above 0 with logging_strategy=steps; logging_strategy=no logs nothing"
    if is_streamed(train_dataset) and _accelerator(given.get("accelerator_config")).get("dispatch_batches"):
        yield "Iterable datasets require `dispatch_batches=False`; leave it out of accelerator_config, rank 0 alone reads them"
    if train_dataset is not None or given.get("dataset_mixer_list"):
        return
    if environment_factory is None:
        yield "`train_dataset` is required, as there is no environment_factory that gives the prompts"
    elif isinstance(environment_factory, Mapping):
        yield (
            "environment_factory with several environments requires a `train_dataset`, whose column environment says which "
            "of them a row belongs to"
        )
    elif not isinstance(steps := given.get("max_steps"), int) or steps <= 0:
        yield f"max_steps={steps} must be above 0 without a train_dataset, because nothing else says how long the run is"


def warnings_of(args: Any) -> Iterator[str]:
    """Warnings about combinations that are accepted."""
    if getattr(args, "importance_sampling_level", "token") == "sequence" and args.loss_type in BY_TOKEN:
        yield (
            f"loss_type={args.loss_type} with importance_sampling_level=sequence weights each sequence by its completion length, "
            "unlike GSPO; loss_type=grpo does not"
        )


def is_streamed(dataset: Any) -> bool:
    """True if the number of its rows is not known."""
    return dataset is not None and not hasattr(dataset, "__len__")


def settle_streaming(args: Any) -> None:
    """Set the arguments as TRL does for a streamed dataset, which no other process reads or divides."""
    args.dataloader_num_workers = 0
    args.accelerator_config = SimpleNamespace(**_accelerator(args.accelerator_config) | {"dispatch_batches": False})


def placeholder_rows(config: Config) -> list[dict[str, Any]]:
    """Rows without a prompt, which the environment gives: those of one training step."""
    return [{"prompt": [{"role": "user", "content": ""}]} for _ in range(config.rollout.num_unique_prompts_rollout)]


def _may_reward(environment_factory: Any) -> bool:
    """True if an environment may give the reward; a function's environments are not known before its call."""
    factories = (
        list(environment_factory.values()) if isinstance(environment_factory, Mapping) else [environment_factory]
    )
    return any(
        hasattr(factory, "get_reward") if inspect.isclass(factory) else factory is not None for factory in factories
    )


def _accelerator(config: Any) -> dict[str, Any]:
    return dict(config if isinstance(config, Mapping) else getattr(config, "__dict__", {}))


def names_verifiers(dataset: Any) -> bool:
    """True if rows name verifiers of this project, which then score them if no functions are given."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and isinstance(dataset, Sequence) and dataset:
        columns = dataset[0]
    return "dataset" in (columns or ())

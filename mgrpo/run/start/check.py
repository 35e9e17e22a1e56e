"""All problems of a run, found before anything is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import (
    bounded,
    counted,
    fitted,
    num_gpus_of,
    routing_problems,
    widest_cut,
    with_routing,
    with_saves,
)
from mgrpo.config.distillation import TEACHERS
from mgrpo.config.validate import problems as found_problems
from mgrpo.config.validate import too_few_prompts, warnings
from mgrpo.models.cuts import size_of
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import HfConfig, read_hf_config
from mgrpo.models.hf_files.checksums import sum_problems
from mgrpo.models.hf_files.weight_files import files_beside, is_hf_format, left_out, left_out_note, weight_problems
from mgrpo.models.shape import ModelShape
from mgrpo.rollout.start import machine_problems, serving_gpus
from mgrpo.run.inputs.continuing import Continued, changes, resume_problems, saved_adapters
from mgrpo.run.inputs.disk_space import output_problems, room_notes
from mgrpo.run.inputs.prompts import make_prompts, vocabulary_notes
from mgrpo.run.inputs.reading import Inputs, read_inputs
from mgrpo.run.inputs.teachers import teacher_problems
from mgrpo.run.ranks.process import num_local_learners, prepare_environment, rank, world_size
from mgrpo.run.report.trackers import tracker_problems
from mgrpo.run.report.upload import token_problems, token_warning

if TYPE_CHECKING:
    from mgrpo.algo import AdvantageFunction, LossFunction


def check_run(
    config: Config,
    continued: Continued | None,
    about_state: str,
    *,
    functions: list[str | Callable],
    dataset: Iterable[Mapping] | None,
    eval_dataset: Iterable[Mapping] | Mapping[str, Iterable[Mapping]] | None,
    loss: LossFunction | None,
    advantage_fn: AdvantageFunction | None = None,
) -> tuple[Config, Inputs | None]:
    """Check the configuration on every rank; on rank 0 read and check data and rewards as well, and return them.

    Args:
        continued, about_state: rank 0's result of `look_for_state`.
    Returns:
        The configuration, on rank 0 with its length, which other ranks lack if it follows from the data.
    Raises:
        ConfigError: every problem at once.
    """
    hf_config, shape, about_model = _model(config)
    config = bounded(config, size_of(hf_config or {}, "max_position_embeddings"))
    on_gpu = bool(serving_gpus())
    if on_gpu:
        config = widest_cut(config, size_of(hf_config or {}, "vocab_size"))
        config = with_saves(config, num_gpus_of(config, world_size()))
    config = with_routing(config, hf_config, on_gpu=on_gpu)
    find = partial(
        found_problems,
        world_size=world_size(),
        hf_config=hf_config,
        has_dataset=dataset is not None,
        has_eval_dataset=eval_dataset is not None,
        num_reward_funcs=len(functions),
    )
    problems = find(config) + routing_problems(config, hf_config, on_gpu=on_gpu)
    if not any("model_name_or_path" in problem for problem in problems):
        problems += about_model
    problems += _loss_problems(config, loss)
    if rank() != 0:
        if problems:
            raise ConfigError(problems)
        return config, None
    advantage_fn, found = _advantages(config, advantage_fn)
    problems += found
    # Derived settings can be computed only if each setting is sound.
    is_sound = not problems
    inputs, found = read_inputs(config, functions=functions, dataset=dataset, eval_dataset=eval_dataset)
    problems += [problem for problem in found if problem not in problems]
    problems += too_few_prompts(config, len(inputs.train)) if inputs and len(inputs.train) else []
    problems += [*tracker_problems(config), *token_problems(config)]
    if hf_config:
        problems += file_problems(config, shape)
        # Importing a tokenizer takes seconds, which a misspelt name should not; and transformers prints much about config.json of
        # models that cannot be built here.
        if shape is not None and not config.provenance.problems:
            inputs = with_prompts(config, inputs, hf_config, problems)
            if config.distillation.loaded_teachers and os.path.isdir(config.tokenizer_path):
                problems += teacher_problems(config, shape)
    if not problems:
        config = _counted(config, inputs)
        problems = find(config)
    problems += output_problems(config, shape if is_sound and config.has_length else None)
    remarks: list[str] = []
    if is_sound:
        found = [about_state] if about_state else []
        if continued:
            found, remarks = _about(continued, config, shape, inputs)
        problems += [problem for problem in found if problem not in problems]
    if problems:
        raise ConfigError(problems)
    assert inputs is not None and shape is not None, "there would be problems with them"
    inputs = replace(inputs, advantage_fn=advantage_fn)
    for sentence in (
        *config.notes,
        *warnings(config, world_size=world_size(), hf_config=hf_config, num_reward_funcs=len(functions)),
        *inputs.notes(config),
        *_left_out_notes(config, shape),
        *room_notes(config, shape),
        *(vocabulary_notes(inputs.prompts.tokenizer, shape.vocab) if inputs.prompts else ()),
        *remarks,
        *filter(None, [token_warning(config)]),
    ):
        print(f"mgrpo: {sentence}", file=sys.stderr)
    return config, inputs


def _model(config: Config) -> tuple[HfConfig | None, ModelShape | None, list[str]]:
    """The model's config.json and its shape, None if unreadable; and problems with training it on this machine."""
    hf_config: HfConfig | None = None
    shape: ModelShape | None = None
    try:
        hf_config = read_hf_config(config.model_path)
        shape = shape_of(hf_config)
        about_model = machine_problems(
            config,
            num_local_learners=num_local_learners(),
            hf_config={**hf_config, "head_dim": shape.head_dim},
            starts_engines=rank() == 0,
        )
    except ValueError as err:
        about_model = [str(err) if hf_config else f"model_name_or_path={err}"]
    return hf_config, shape, about_model


def with_length(config: Config) -> Config:
    """`config` with the number of its steps, if its data and its tokenizer can be read; else as it is."""
    try:
        hf_config = read_hf_config(config.model.model_name_or_path or "")
    except ValueError:
        return config
    config = bounded(config, size_of(hf_config, "max_position_embeddings"))
    inputs, problems = read_inputs(config)
    inputs = with_prompts(config, inputs, hf_config, problems) if not problems else None
    return _counted(config, inputs)


def _counted(config: Config, inputs: Inputs | None) -> Config:
    prompts = inputs.prompts if inputs else None
    if prompts is None or prompts.train is None:
        return config
    return counted(fitted(config, prompts.longest), len(prompts.train))


def file_problems(config: Config, shape: ModelShape | None) -> list[str]:
    """Problems of the model's weight files, and of files that an export copies. The weights' values are checked when they load.

    Args:
        shape: None for a model that vLLM may serve but that cannot be built here.
    """
    folder = Path(config.model_path)
    try:
        if not is_hf_format(folder):
            return []
    except ValueError as err:
        return [f"model_name_or_path={err}"]
    found = list(weight_problems(config.model_path, shape))
    try:
        files_beside(folder)
    except ValueError as err:
        found.append(str(err))
    return [f"model_name_or_path={problem}" for problem in found] + changed_files(config, of_weights=False)


def _left_out_notes(config: Config, shape: ModelShape) -> list[str]:
    names = left_out(config.model_path, shape) if is_hf_format(config.model_path) else ()
    return [left_out_note(names, config.model_path)] if names else []


def changed_files(config: Config, *, of_weights: bool, rank: int = 0, world_size: int = 1) -> list[str]:
    """Problems of files that differ from those of an export; see `sum_problems`. No weights are loaded from the tokenizer's folder."""
    adapter = config.provenance.folder("lora_adapter_path", config.adapter.lora_adapter_path)
    settings: dict[str | None, str] = dict.fromkeys(
        map(config.teacher_path, config.distillation.loaded_teachers), TEACHERS
    )
    settings |= {adapter: "lora_adapter_path", config.model_path: "model_name_or_path"}
    if not of_weights:
        settings = {config.tokenizer_path: "tokenizer_name_or_path", **settings}
    return [
        f"{name}={problem}"
        for path, name in settings.items()
        if path
        for problem in sum_problems(Path(path), of_weights=of_weights, rank=rank, world_size=world_size)
    ]


def with_prompts(config: Config, inputs: Inputs | None, hf_config: HfConfig, problems: list[str]) -> Inputs | None:
    """`inputs` with its prompts, whose problems are added to `problems`."""
    if not os.path.isdir(config.tokenizer_path):
        return inputs  # which the rules have said
    vocab = size_of(hf_config, "vocab_size")
    mixtures = (inputs.train, inputs.held_out) if inputs else ()
    toolset = inputs.toolset if inputs else None
    prompts, found = make_prompts(config, mixtures, toolset=toolset, vocab=vocab, is_sound=not problems)
    problems += [problem for problem in found if problem not in problems]
    return replace(inputs, prompts=prompts) if inputs else None


def _about(
    continued: Continued, config: Config, shape: ModelShape | None, inputs: Inputs | None
) -> tuple[list[str], list[str]]:
    """Problems of the state that the run continues, and notes on it for the user."""
    problems = resume_problems(
        config,
        continued,
        shape=shape,
        data=inputs.train.content if inputs else None,
        base=_base(config, shape) if shape and config.adapter.lora and saved_adapters(continued) else None,
    )
    return list(problems), [*continued.passed_over, *changes(config, continued)]


def _base(config: Config, shape: ModelShape) -> str | None:
    """Fingerprint of the weights that adapters belong to; None: unreadable, which is reported elsewhere."""
    prepare_environment(config)
    from mgrpo.model_io.model_reader import fingerprint, model_reader

    try:
        return fingerprint(model_reader(config.model_path, shape), shape)
    except ValueError:
        return None


def _loss_problems(config: Config, loss: LossFunction | None) -> list[str]:
    """Problems of the user's own loss, whose module imports torch; checking a named loss does not need that."""
    if loss is None and not config.loss.is_own_function:
        return []
    prepare_environment(config)
    from mgrpo.algo import loss_problems

    return loss_problems(config.loss, loss)


def _advantages(config: Config, function: AdvantageFunction | None) -> tuple[AdvantageFunction | None, list[str]]:
    """The user's own estimator (None: a named one), and problems with it. Named ones need no import of torch."""
    if not config.algorithm.is_own_estimator:
        return None, []
    prepare_environment(config)
    from mgrpo.algo import check_advantages, load_advantages

    try:
        if function is None:
            return load_advantages(config.algorithm), []
        check_advantages(function)
    except ValueError as err:
        return None, [str(err)]
    return function, []

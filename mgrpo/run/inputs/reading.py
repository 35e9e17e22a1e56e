"""A user's data, verifiers, templates and reward functions, read for a run; and every problem with them."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgrpo.config import Config
from mgrpo.config.data import MIXERS, mixer_problems
from mgrpo.data.mixture import BadData, open_data
from mgrpo.data.templates import check_name
from mgrpo.rewards.registry import add_modules, find
from mgrpo.rewards.rubrics.criteria import RUBRIC
from mgrpo.run.inputs.prompt_notes import prompt_notes
from mgrpo.run.inputs.row_labels import looked_at
from mgrpo.run.inputs.row_teachers import row_teacher_problems
from mgrpo.run.inputs.toolset import Toolset, read_tools, row_problems

if TYPE_CHECKING:
    from mgrpo.data.mixture import Mixture
    from mgrpo.run.inputs.prompts import Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Rank 0's data and reward functions, checked."""

    train: Mixture
    """Empty if a model is only evaluated."""
    held_out: Mixture
    evaluates: bool = True
    """True if the held-out prompts are sampled; False in a dry run."""
    functions: tuple[str | Callable, ...] = ()
    """Reward functions, or their names; empty: the rows' verifiers score."""
    advantage_fn: Callable | None = None
    """Computes the advantages in place of the named estimator."""
    about_labels: tuple[str, ...] = ()
    """Notes on parts of labels that verifiers ignore."""
    toolset: Toolset | None = None
    """None: every completion is one turn."""
    prompts: Prompts | None = None
    """The rows as tokens; None until they are made."""

    def notes(self, config: Config) -> list[str]:
        """Notes on verifiers and prompts, printed at start-up."""
        found = list(prompt_notes(config, self.prompts, self.functions)) if self.prompts else []
        if not self.functions and config.reward.apply_verifiable_reward:
            found += [note for name in self.verifiers(config) for note in find(name).notes(config.reward)]
            found += self.about_labels
        return list(dict.fromkeys(found))

    def verifiers(self, config: Config) -> list[str]:
        """Names of the rows' verifiers, in lower case."""
        return sorted(_asked(self.train, self.held_out, config))


def as_functions(given: Sequence[str | Callable] | str | Callable | None) -> list[str | Callable]:
    """The caller's `reward_funcs` (one, several or none) as a list."""
    return [given] if callable(given) or isinstance(given, str) else list(given or ())


def read_inputs(
    config: Config,
    *,
    functions: Sequence[str | Callable] = (),
    dataset: Iterable[Mapping] | None = None,
    eval_dataset: Iterable[Mapping] | Mapping[str, Iterable[Mapping]] | None = None,
) -> tuple[Inputs | None, list[str]]:
    """The inputs, None if the data are unreadable, and every problem with them, one sentence each.

    Args:
        functions: the caller's reward functions, in place of the configuration's `reward_funcs`.
        dataset, eval_dataset: the caller's training rows and held-out rows.
    """
    reward, problems = config.reward, []
    for check in (
        lambda: check_name(config.data.chat_template_name),
        lambda: reward.verifier_replacements,
        lambda: reward.weight_by_verifier,
        lambda: add_modules(reward.verifier_modules),
    ):
        try:
            check()
        except ValueError as err:
            problems.append(str(err))
    functions = tuple(functions or reward.reward_funcs)
    if functions:
        from mgrpo.rewards.function_catalog import check_functions

        problems += check_functions(functions)
    verifies = reward.apply_verifiable_reward and not functions
    # The rules report malformed mixes.
    malformed: dict[str, Any] = {mixer: () for mixer in MIXERS if any(mixer_problems(config.data, mixer))}
    toolset, about_tools = read_tools(config)
    problems += about_tools
    try:
        data = replace(config.data, **malformed)
        train, held_out = open_data(data, need_verifiers=verifies, dataset=dataset, eval_dataset=eval_dataset)
    except BadData as err:
        asked = _replaced(err.verifiers, config)
        about_verifiers = _verifier_problems(asked, config) if verifies and not problems else []
        return None, [*problems, str(err), *about_verifiers, *_folder_problems(config)]
    if malformed:
        return None, [*problems, *_folder_problems(config)]
    if functions and not problems:
        problems += _function_problems(functions, train, held_out, has_environments=config.has_turns)
    about_labels: list[str] = []
    if verifies and not problems:
        problems += _unasked_problems(train, held_out, config)
        problems += _rubric_problems(train, config)
        problems += _verifier_problems(_asked(train, held_out, config), config)
    if verifies and not problems:
        verifier_of = partial(_replacement, config=config)
        labels = chain.from_iterable(
            rows.labels(lambda name: find(verifier_of(name)).checks_labels()) for rows in (train, held_out)
        )
        problems, about_labels = looked_at(labels, verifier_of)
    problems += row_problems(toolset, (train, held_out)) if toolset else []
    problems += row_teacher_problems(config, train)
    inputs = Inputs(
        train=train, held_out=held_out, functions=functions, toolset=toolset, about_labels=tuple(about_labels)
    )
    return inputs, [*problems, *_folder_problems(config)]


def _folder_problems(config: Config) -> Iterator[str]:
    """Problems of folders that cannot be written to. Missing ones are created."""
    traces = config.rollout.rollouts_save_path if config.rollout.save_traces else None
    for setting, folder in (
        ("dataset_local_cache_dir", config.data.dataset_local_cache_dir),
        ("rollouts_save_path", traces),
        ("cache_evolving_rubric_data_dir", config.reward.cache_evolving_rubric_data_dir),
    ):
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except (OSError, ValueError) as err:
            # Data that were prepared elsewhere may be read-only here.
            if setting != "dataset_local_cache_dir" or not _holds_prepared_data(folder):
                why = "it is a file" if os.path.isfile(folder) else err
                yield f"{setting}={folder} cannot be written to ({why}); name another folder"


def _holds_prepared_data(folder: str) -> bool:
    try:
        return any(Path(folder).glob("*/manifest.json"))
    except (OSError, ValueError):
        return False


def _function_problems(
    functions: Sequence[str | Callable], train: Mixture, held_out: Mixture, *, has_environments: bool
) -> list[str]:
    """Problems of columns that the functions need and the data lack."""
    from mgrpo.rewards.function_catalog import load_functions
    from mgrpo.rewards.reward_functions import missing_arguments

    loaded, problems = load_functions(functions, max_completion_length=1), []
    for mixture in (train, held_out):
        problems += (
            missing_arguments(loaded, mixture.columns, has_environments=has_environments) if len(mixture) else []
        )
    return list(dict.fromkeys(problems))


def _asked(train: Mixture, held_out: Mixture, config: Config) -> dict[str, str]:
    """The rows' verifiers after `remap_verifier`, each with the row that names it first."""
    return _replaced(train.verifiers | held_out.verifiers, config)


def _replaced(verifiers: Mapping[str, str], config: Config) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, origin in verifiers.items():
        found.setdefault(_replacement(name, config), origin)
    return found


def _replacement(name: str, config: Config) -> str:
    """Name of a verifier after `remap_verifier`, in lower case."""
    return config.reward.verifier_replacements.get(name.lower(), name.lower())


def _unasked_problems(train: Mixture, held_out: Mixture, config: Config) -> list[str]:
    """Problems of weights and replacements of verifiers that no row names.

    Without training rows they may belong to the data that the model was trained on.
    """
    reward, problems = config.reward, []
    named = {name.lower() for name in train.verifiers | held_out.verifiers}
    by_preset = config.provenance.defaults.get("remap_verifier")
    for pair in reward.remap_verifier:
        old = pair.partition("=")[0].strip().lower()
        if len(train) and old not in named and not (isinstance(by_preset, tuple) and pair in by_preset):
            problems.append(f"remap_verifier={pair}: {_unasked(old, named)}")
    asked = _asked(train, held_out, config)
    after = f" (after remap_verifier={' '.join(reward.remap_verifier)})" if reward.remap_verifier else ""
    for name, weight in reward.weight_by_verifier.items():
        if name in asked:
            continue
        if len(train):
            problems.append(f"verifier_weights={name}={weight:g}: {_unasked(name, asked)}{after}")
            continue
        try:
            find(name)
        except ValueError as err:
            problems.append(f"verifier_weights={name}={weight:g}: {err}")
    return problems


def _unasked(name: str, asked: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(asked), n=3, cutoff=0.5)
    return f"no row asks for {name}; rows ask for {', '.join([*near, *sorted(set(asked) - set(near))])}"


def _rubric_problems(train: Mixture, config: Config) -> Iterator[str]:
    """Problem of evolving rubrics without a training row that has one."""
    asked = _replaced(train.verifiers, config)
    if config.reward.apply_evolving_rubric_reward and asked and RUBRIC not in asked:
        yield (
            f"apply_evolving_rubric_reward=true: no training row asks for the verifier {RUBRIC}, of which rubrics are labels; rows "
            f"ask for {', '.join(sorted(asked))}; name it in the rows, or by remap_verifier"
        )


def _verifier_problems(asked: Mapping[str, str], config: Config) -> list[str]:
    problems = []
    for name, origin in asked.items():
        try:
            found = find(name).problems(config.reward)
        except ValueError as err:
            found = [f"{err} (first seen in {origin})"]
        problems += [problem for problem in found if problem not in problems]
    return problems

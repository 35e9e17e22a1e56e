"""The data section: training and held-out rows, and how they become prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import (
    NO_ENTRIES,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    POSITIVE,
    TRL,
    JSONObject,
    Rule,
)
from mgrpo.models.hf_config import is_hub_name

MIXERS = ("dataset_mixer_list", "dataset_mixer_eval_list")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    dataset_mixer_list: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """Training data: path or dataset name, amount, path, amount, ... An amount with a decimal point is a share, one without
    is a number of rows."""
    dataset_mixer_eval_list: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """Held-out data, in the same form; empty: no evaluation."""
    dataset_mixer_list_splits: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ("train",)
    """Split of each training dataset: one for all of them, or one each."""
    dataset_mixer_eval_list_splits: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ("test",)
    """Split of each held-out dataset: one for all of them, or one each."""
    ground_truths_key: Annotated[str, OPEN_INSTRUCT] = "ground_truth"
    """Column with the ground truth that the verifier compares with, or the path of a value inside one: reward_model.ground_truth."""
    sft_messages_key: Annotated[str, OPEN_INSTRUCT] = "messages"
    """Column with the messages."""
    max_prompt_token_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 256
    """Maximum tokens of a prompt; overlong_prompt_policy decides about longer ones."""
    overlong_prompt_policy: Literal["filter", "truncate_left", "error"] = "filter"
    """filter: leave them out and count them; truncate_left: keep their last tokens; error: do not start the run."""
    tokenizer_name_or_path: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder of the tokenizer, or its name on the Hub; none: the model's."""
    chat_template_name: Annotated[str, OPEN_INSTRUCT] = "auto"
    """For rows with `messages`: auto is the tokenizer's own template, none joins the contents as plain text; otherwise a
    name from docs/data.md or the path of a Jinja file."""
    chat_template_kwargs: Annotated[JSONObject, TRL] = NO_ENTRIES
    """More variables for the template, as a JSON object, for example {"enable_thinking": false}."""
    add_bos: Annotated[bool, OPEN_INSTRUCT] = False
    """Begin every prompt with the tokenizer's bos token; an error if the template already writes it."""
    system_prompt_override_file: Annotated[str | None, OPEN_INSTRUCT] = None
    """File with a system prompt that replaces that of every row."""
    shuffle_dataset: Annotated[bool, TRL] = True
    """Shuffle the prompts in every epoch; false: keep the order of the data."""
    dataset_local_cache_dir: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder for prepared data; none: mgrpo/datasets in the user's cache folder."""
    dataset_skip_cache: Annotated[bool, OPEN_INSTRUCT] = False
    """Prepare the data again even if prepared data exists."""


def mixer_problems(data: Data, mixer: str) -> Iterator[str]:
    """Problems with the words of a mix, one of `MIXERS`, whatever lies behind them."""
    return _mix(mixer, getattr(data, mixer), getattr(data, f"{mixer}_splits"))


def _mix(mixer: str, words: tuple[str, ...], splits: tuple[str, ...]) -> Iterator[str]:
    if len(words) % 2:
        count = "1 word" if len(words) == 1 else f"{len(words)} words"
        yield f"{mixer} has {count} ({' '.join(words)}), expected pairs of dataset and amount: PATH 1.0 PATH 500"
        return
    for name, amount in _pairs(words):
        if not _is_amount(amount):
            yield (
                f"{mixer}: amount {amount!r} of {name} must be a share with a decimal point (1.0 is all of it) "
                "or a number of rows, above 0"
            )
    if words and len(splits) not in (1, len(words) // 2):
        yield f"{mixer}_splits has {len(splits)} entries, expected 1 or one for each of {len(words) // 2} datasets"


def _pairs(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Dataset and amount."""
    return zip(words[::2], words[1::2], strict=False)


def _is_amount(amount: str) -> bool:
    try:
        return POSITIVE.holds(float(amount) if "." in amount else int(amount))
    except ValueError:
        return False


def _mixes(
    dataset_mixer_list: tuple[str, ...],
    dataset_mixer_list_splits: tuple[str, ...],
    dataset_mixer_eval_list: tuple[str, ...],
    dataset_mixer_eval_list_splits: tuple[str, ...],
) -> Iterator[str]:
    yield from _mix("dataset_mixer_list", dataset_mixer_list, dataset_mixer_list_splits)
    yield from _mix("dataset_mixer_eval_list", dataset_mixer_eval_list, dataset_mixer_eval_list_splits)


def _tokenizer(tokenizer_name_or_path: str | None) -> Iterator[str]:
    path = tokenizer_name_or_path
    if path is not None and not os.path.isdir(path) and not is_hub_name(path):
        yield f"tokenizer_name_or_path={path} is not a folder; give the folder of the tokenizer's files, or a name on the Hub"


def _training_data(dataset_mixer_list: tuple[str, ...], has_dataset: bool) -> Iterator[str]:
    if not dataset_mixer_list and not has_dataset:
        yield "dataset_mixer_list is empty; name the training data: --dataset_mixer_list PATH 1.0"


RULES: tuple[Rule, ...] = (_mixes,)
TOKENIZER: tuple[Rule, ...] = (_tokenizer,)
TRAINING_DATA: tuple[Rule, ...] = (_training_data,)


def _single_rows(dataset_mixer_list: tuple[str, ...], dataset_mixer_eval_list: tuple[str, ...]) -> Iterator[str]:
    for mixer, words in zip(MIXERS, (dataset_mixer_list, dataset_mixer_eval_list), strict=True):
        for name, amount in _pairs(words):
            if amount == "1":
                yield f"{mixer}: amount 1 of {name} means a single row; 1.0 is the whole dataset"


WARNINGS: tuple[Rule, ...] = (_single_rows,)

"""Checks of teachers whose weights a run loads: tokenizer, vocabulary, length and weights must fit the policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mgrpo.config import Config
from mgrpo.config.distillation import TEACHERS
from mgrpo.config.validate import held_problems
from mgrpo.data.tokenizer import first_difference, load_tokenizer
from mgrpo.models.cuts import size_of
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.weight_files import is_hf_format, weight_problems
from mgrpo.models.shape import ModelShape
from mgrpo.run.ranks.process import world_size


def teacher_problems(config: Config, shape: ModelShape | None) -> list[str]:
    """Problems of teachers that cannot score this policy's tokens, or cannot be loaded. Imports transformers.

    Args:
        shape: shape of the policy; None: unknown.
    """
    found = [
        f"{TEACHERS}={problem}"
        for teacher in config.distillation.loaded_teachers
        if Path(config.teacher_path(teacher)).is_dir()
        for problem in _problems(config, config.teacher_path(teacher), shape)
    ]
    return list(dict.fromkeys(found))


def _problems(config: Config, path: str, shape: ModelShape | None) -> Iterator[str]:
    try:
        hf_config = read_hf_config(path)
    except ValueError as err:
        yield str(err)
        return
    yield from _sizes(config, path, vocab=size_of(hf_config, "vocab_size"), shape=shape)
    positions = size_of(hf_config, "max_position_embeddings")
    if positions and positions < config.max_model_length:
        yield (
            f"{path} has {positions} positions (max_position_embeddings), and sequences of this run up to {config.max_model_length} tokens; "
            "shorten prompts or completions, or take another teacher"
        )
    own, is_held = None, config.distillation.teacher_mode == "learner"
    try:
        own = shape_of(hf_config)
    except ValueError as err:
        if is_held:  # an engine may serve models that cannot be built here
            yield f"{path}: {err}"
    if is_held:
        for problem in held_problems(config, world_size=world_size(), hf_config=hf_config):
            yield f"{path}: {problem}"
    try:
        if is_hf_format(path):
            yield from weight_problems(path, own)
        tokenizer, other = load_tokenizer(config.tokenizer_path), load_tokenizer(path)
    except ValueError as err:
        yield str(err)
        return
    if difference := first_difference(tokenizer, other):
        number, token, theirs = difference
        yield (
            f"{path} has another tokenizer: id {number} is {theirs!r} there and {token!r} here, so its log-probabilities would be of other "
            "texts; take a teacher of the policy's family"
        )


def _sizes(config: Config, path: str, *, vocab: int | None, shape: ModelShape | None) -> Iterator[str]:
    if vocab and shape and vocab < shape.vocab:
        yield (
            f"{path} has {vocab} tokens (vocab_size), and the policy {shape.vocab}: it could not read all that the policy may sample; take a "
            "teacher with as many"
        )

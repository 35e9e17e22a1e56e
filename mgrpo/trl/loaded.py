"""Objects of transformers and peft that a script has loaded, as folders that ranks, engines and workers read."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mgrpo.models.hf_config import is_on_hub
from mgrpo.models.hf_files.hub import fetch
from mgrpo.run.ranks.process import rank, world_size

_NUMBERS = itertools.count()
"""The numbers of the folders that rank 0 has written, which share torchrun's store."""
WAIT_S = 1800.0
"""Seconds that rank 0 may take to write one."""


def written(write: Callable[[Path], object], folder: Path) -> str:
    """Write `folder` anew on rank 0, for all ranks, and return it; the others wait for it. Every rank must call."""
    if rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(folder)
    if world_size() > 1:
        from torch.distributed import PrefixStore

        from mgrpo.parallel import backend

        store = backend.meeting_store(rank=rank(), world_size=world_size(), timeout_s=WAIT_S, socket=None)
        store = PrefixStore(f"folder {next(_NUMBERS)}", store)
        if rank() == 0:
            store.set("written", str(folder))
        store.get("written")
    return str(folder)


def is_model(value: object) -> bool:
    """True for a model of transformers or peft, and not for a name or a function."""
    return hasattr(value, "save_pretrained") and hasattr(value, "config")


def name_of(model: object) -> str:
    """The last part of a model's name, by which TRL calls it; of an object without one that of its class."""
    name = str(model) if isinstance(model, (str, Path)) else getattr(model.config, "_name_or_path", "")  # type: ignore[attr-defined]
    return Path(name).name or type(model).__name__


def as_reward_functions(functions: Sequence[Any], tokenizers: Sequence[Any], folder: Path) -> list[Any]:
    """`functions` with a folder in place of each reward model: an object, or a name on the Hub.

    Args:
        tokenizers: one for each function, None: the model's own.
        folder: where rank 0 makes the folders.
    """
    return [
        str(_reward_model(function, tokenizer, folder / f"{number}" / name_of(function)))
        if is_model(function) or (isinstance(function, str) and (tokenizer is not None or is_on_hub(function)))
        else function
        for number, (function, tokenizer) in enumerate(zip(functions, tokenizers, strict=True))
    ]


def _reward_model(model: Any, tokenizer: Any, folder: Path) -> Path:
    if rank() != 0:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if is_model(model):
        model.save_pretrained(folder)
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    else:
        source = fetch(model).folder if is_on_hub(model) else Path(model)
        for path in source.iterdir() if tokenizer is None else (source / "config.json", *source.glob("*.safetensors*")):
            os.symlink(path.resolve(), folder / path.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder

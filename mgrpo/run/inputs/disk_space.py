"""The folders of a run before it starts: whether they can be written to, are in use by another run, and have room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mgrpo.checkpoint.folder import LocalFolder, check_root, open_folder, unwritable
from mgrpo.checkpoint.space import free_bytes, nearest_folder, words
from mgrpo.config import Config
from mgrpo.config.derived import num_exports, num_states, state_root
from mgrpo.models.memory import DTYPE_BYTES, export_bytes, training_state_bytes
from mgrpo.models.shape import ModelShape
from mgrpo.run.inputs.lock import ADVICE, in_use


def owned_folders(config: Config) -> list[str]:
    """The folders that the run must have for itself: its own, and that of its states if it lies elsewhere."""
    folders = [config.experiment.output_dir]
    given = config.checkpoint.checkpoint_state_dir
    states = open_folder(given) if given and state_root(config) == given else None
    if isinstance(states, LocalFolder) and states.path.resolve() != Path(folders[0]).resolve():
        folders.append(str(states.path))
    return folders


def output_problems(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """All problems of the folders.

    Args:
        shape: shape of the model; None: unreadable.
    """
    folder, root = config.experiment.output_dir, state_root(config)
    if not folder or os.path.isfile(folder):
        return  # a problem of the configuration, reported already
    if why := unwritable(folder):
        yield f"output_dir={folder} cannot be written to: {why}; name another folder"
        return
    if config.checkpoint.saves_states or config.checkpoint.resume != "never":
        try:
            check_root(root)
        except ValueError as err:
            yield str(err)
            return
    for owned in owned_folders(config):
        if other := in_use(owned):
            yield f"{owned} is in use by another run: {other}; {ADVICE}"
    if shape is not None:
        yield from _room_problems(config, shape)


def room_notes(config: Config, shape: ModelShape) -> Iterator[str]:
    """Notes on file systems that the whole run may fill, although its first files fit."""
    for place, (needed, _) in _needed(config, shape, exports=num_exports(config), states=num_states(config)).items():
        if needed > free_bytes(place):
            yield (
                f"{place} has {words(free_bytes(place))} free, and this run will write up to {words(needed)} there; exports are "
                "never deleted: export less often (save_freq) or keep fewer states (keep_last_n_checkpoints)"
            )


def _room_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    own = config.checkpoint
    exports = int(own.save_final or 0 < own.save_freq < config.num_training_steps)
    states = int(bool(own.save_every_minutes) or 0 < own.checkpoint_state_freq <= config.num_training_steps)
    for place, (needed, what) in _needed(config, shape, exports=exports, states=states).items():
        if needed > free_bytes(place):
            yield (
                f"{place} has {words(free_bytes(place))} free, but {words(needed)} are needed for {what}; make room or name "
                f"another folder{_or_no_states(config) if states else ''}"
            )


def _or_no_states(config: Config) -> str:
    is_derived = config.provenance.sources.get("save_every_minutes") == "derived"
    return ", or save no states: save_every_minutes=0" if is_derived else ""


def _needed(config: Config, shape: ModelShape, *, exports: int, states: int) -> dict[str, tuple[int, str]]:
    """Bytes and their purpose, by folder; folders on one file system count as one."""
    lora = config.adapter.lora
    export = export_bytes(shape, dtype_bytes=DTYPE_BYTES[config.model.model_dtype], lora=lora)
    state = training_state_bytes(
        shape,
        reference_moves=config.algorithm.ref_policy_update_freq is not None,
        lora=lora,
        averages=config.distillation.averages,
    )
    found: dict[str, tuple[int, str]] = {}
    by_device: dict[int, str] = {}
    for place, num_bytes, what in (
        (config.experiment.output_dir, exports * export, "an exported model"),
        (state_root(config), states * state, "a training state"),
    ):
        folder = open_folder(place)
        if not num_bytes or not isinstance(folder, LocalFolder):
            continue
        first = by_device.setdefault(nearest_folder(folder.path).stat().st_dev, place)
        before, words_before = found.get(first, (0, ""))
        found[first] = before + num_bytes, f"{words_before} and {what}" if words_before else what
    return found

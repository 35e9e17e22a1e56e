"""Configurations made in Python, of this project's settings or another trainer's: `mgrpo.GRPOConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mgrpo.config.schema import Config
from mgrpo.moving.config_doors import from_values, parse
from mgrpo.moving.foreign_names import accepted
from mgrpo.moving.scripts import slime, verl
from mgrpo.moving.scripts.command_line import words_of
from mgrpo.moving.trl_config import TrlConfig, defaults_of, recorded_defaults

if TYPE_CHECKING:
    from mgrpo.moving.keywords import Keywords


class ConfigDoor:
    """Makes a `Config` for `mgrpo.train` from this project's settings, or from another trainer's.

    `GRPOConfig(learning_rate=1e-6)` takes the names and defaults of a configuration file; `from_trl`,
    `from_open_instruct`, `from_verl` and `from_slime` take the defaults of that trainer. Each returns a config whose `notes`
    give the meaning of every name, and raises `ConfigError` with all problems and their reasons.
    """

    def __call__(self, settings: Mapping[str, object] | None = None, /, **fields: Unpack[Keywords]) -> Config:
        """Config of settings by keyword, of a mapping, or of one with keywords on top; `preset` names other defaults."""
        return from_values({**(settings or {}), **fields})

    @staticmethod
    def from_trl(config: object = None, /, *, preset: str | None = None, **fields: object) -> Config:
        """Config of TRL's fields by keyword, of a mapping, of a `trl.GRPOConfig`, or of one with keywords on top.

        Args:
            config: a mapping, or a dataclass object, of which a field that has TRL's default counts as not given; other defaults of a
                class derived from TRL's count as given.
            preset: the defaults to take, `trl_seed`, `trl_main` or `trl_async`; by default those of the object's version and class, else
                main.
        Fields of this project may be given as well: `from_trl(trl_config, tensor_model_parallel_size=4)`.
        """
        if isinstance(config, Mapping):
            return from_values({**config, **fields}, preset=preset or "trl_main")
        given = given_fields(config) if config is not None else {}
        ranks = getattr(config, "world_size", None)
        return from_values(
            given | fields, preset=preset or preset_of(config), world_size=ranks if isinstance(ranks, int) else None
        )

    @staticmethod
    def from_open_instruct(
        settings: str | Path | Sequence[str] | Mapping[str, object] | object, /, *, preset: str = "open_instruct_main"
    ) -> Config:
        """Config of the flags of an Open Instruct script: a command line, its words, a mapping, or a dataclass object.

        Args:
            settings: a command line may be a whole script with launchers, comments and other commands around the trainer's, or
                the path of one; also in `from_verl` and `from_slime`. Words without a flag are an error. Of an object, all counts
                as given that is not Open Instruct's default.
            preset: the defaults to take; `seed` has those of February 2026.
        """
        if isinstance(settings, (str, Path, Sequence)):
            return parse(words_of(settings), preset=preset)
        given = settings if isinstance(settings, Mapping) else changed_fields(settings, package="open_instruct")
        return from_values(given, preset=preset)

    @staticmethod
    def from_verl(settings: str | Path | Sequence[str] | Mapping[str, object], /, **fields: object) -> Config:
        """Config of verl's words `a.b.c=value`: a command line or script, its words, a YAML file, or a mapping.

        Names that are not given have verl's defaults. Fields of this project may be given as well and override:
        `from_verl(command, reward_funcs="reward.py:score")`.
        """
        return verl.read(settings, fields)

    @staticmethod
    def from_slime(settings: str | Path | Sequence[str] | Mapping[str, object], /, **fields: object) -> Config:
        """Config of slime's flags: a command line or script, its words, or a mapping of names.

        Names that are not given have slime's defaults, or Megatron's. Fields of this project may be given as well and override.
        """
        return slime.read(settings, fields)


GRPOConfig = ConfigDoor()
"""The only instance; called like a class, it makes a `Config`."""


def given_fields(config: object) -> dict[str, object]:
    """Fields that a script has set, of a config object of TRL or of this package."""
    if isinstance(config, TrlConfig):
        return config.given()
    given = changed_fields(config, package="trl", defaults=recorded_defaults(preset_of(config)))
    # TRL stores both in the object and computes one from the other.
    if {"generation_batch_size", "steps_per_generation"} <= given.keys():
        del given["generation_batch_size"]
    return given


def changed_fields(config: Any, *, package: str, defaults: Mapping[str, object] | None = None) -> dict[str, object]:
    """Values of a dataclass object that are not its trainer's defaults, except for those that the machine decides.

    Args:
        package: the trainer's, whose own class has its defaults; a class derived from that may have others, which count as given.
        defaults: those of the preset: of another version of the trainer, values that differ from them count as given.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"expected a dataclass object, such as trl.GRPOConfig(...), got {type(config).__name__}")
    kind = _class_of_trainer(config, package)
    own, theirs = defaults_of(config), defaults_of(kind) if kind else {}
    recorded = {**theirs, **(defaults or {})}
    changed = {}
    for name in dict.fromkeys([*own, *(name for name in getattr(config, "__dict__", {}) if name in accepted())]):
        value = getattr(config, name)
        if name in _SET_BY_TRANSFORMERS:
            continue
        if name in recorded:
            is_default = value == recorded[name] == theirs.get(name, value)
        else:
            # Of a class of the script's: a setting, or a field that is its own affair.
            is_default = value is None or (name not in accepted() and value == own[name])
        if not is_default:
            changed[name] = value
    return changed


def _class_of_trainer(config: object, package: str) -> type | None:
    """The class of the trainer that `config` has or derives from."""
    kinds = [kind for kind in type(config).__mro__ if kind.__module__.partition(".")[0] == package]
    return next((kind for kind in kinds if package != "trl" or kind.__name__ in _OF_TRL), None)


_OF_TRL = ("GRPOConfig", "AsyncGRPOConfig")
"""The classes of TRL whose defaults presets have."""
_SET_BY_TRANSFORMERS = (
    "accelerator_config",
    "debug",
    "disable_tqdm",
    "logging_dir",
    "local_rank",
    "dataloader_pin_memory",
)
"""Fields that TrainingArguments fills in itself."""


def preset_of(config: Any) -> str:
    """The preset for the class and version of TRL that made `config`: the default of loss_type was bnpo first, and is dapo now."""
    if isinstance(config, TrlConfig):
        return config.trl_preset
    if any(kind.__name__ == "AsyncGRPOConfig" for kind in type(config).__mro__):
        return "trl_async"
    kind = _class_of_trainer(config, "trl") or type(config)
    is_old = dataclasses.is_dataclass(kind) and defaults_of(kind).get("loss_type") == "bnpo"
    return "trl_seed" if is_old else "trl_main"

"""Configurations made in Python, of this project's settings or another trainer's: `mgrpo.GRPOConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mgrpo.config.schema import Config
from mgrpo.moving.config_doors import from_values, parse
from mgrpo.moving.scripts import slime, verl
from mgrpo.moving.scripts.command_line import words_of
from mgrpo.moving.trl_config import GRPOConfig as TrlConfig

if TYPE_CHECKING:
    from mgrpo.moving.keywords import Keywords


class ConfigDoor:
    """Makes a `Config` for `mgrpo.train` from this project's settings, or from another trainer's.

    `GRPOConfig(learning_rate=1e-6)` takes the names and defaults of a configuration file; `from_trl`,
    `from_open_instruct`, `from_verl` and `from_slime` take the defaults of that trainer. Each returns a config whose `notes`
    say how every name was understood, and raises `ConfigError` with all that cannot be done here, and why.
    """

    def __call__(self, settings: Mapping[str, object] | None = None, /, **fields: Unpack[Keywords]) -> Config:
        """Config of settings by keyword, of a mapping, or of one with keywords on top; `preset` names other defaults."""
        return from_values({**(settings or {}), **fields})

    @staticmethod
    def from_trl(config: object = None, /, *, preset: str | None = None, **fields: object) -> Config:
        """Config of TRL's fields by keyword, of a mapping, of a `trl.GRPOConfig`, or of one with keywords on top.

        Args:
            config: a mapping, or a dataclass object, of which a field that has its class's default counts as not given.
            preset: the defaults to take, `trl_seed` or `trl_main`; by default those of the object's version, else main.
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
                the path of one (.sh); also in `from_verl` and `from_slime`.
            preset: the defaults to take; `seed` has those of February 2026.
        """
        if isinstance(settings, (str, Path, Sequence)):
            return parse(words_of(settings), preset=preset)
        given = settings if isinstance(settings, Mapping) else changed_fields(settings)
        return from_values(given, preset=preset)

    @staticmethod
    def from_verl(settings: str | Path | Sequence[str] | Mapping[str, object], /, **fields: object) -> Config:
        """Config of verl's words `a.b.c=value`: a command line or script, its words, a YAML file, or a mapping.

        What is not given has verl's default. Fields of this project may be given as well and override:
        `from_verl(command, reward_funcs="reward.py:score")`.
        """
        return verl.read(settings, fields)

    @staticmethod
    def from_slime(settings: str | Path | Sequence[str] | Mapping[str, object], /, **fields: object) -> Config:
        """Config of slime's flags: a command line or script, its words, or a mapping of names.

        What is not given has slime's default, or Megatron's. Fields of this project may be given as well and override.
        """
        return slime.read(settings, fields)


GRPOConfig = ConfigDoor()
"""The one there is; called like a class, it makes a `Config`."""


def given_fields(config: object) -> dict[str, object]:
    """What a script has given of an object of TRL's class or of ours; of TRL's, the fields that differ from their defaults."""
    if isinstance(config, TrlConfig):
        return config.given()
    given = changed_fields(config)
    # TRL stores both in the object and computes one from the other.
    if {"generation_batch_size", "steps_per_generation"} <= given.keys():
        del given["generation_batch_size"]
    return given


def changed_fields(config: Any) -> dict[str, object]:
    """Fields of a dataclass object that differ from its class's defaults, except for those that the machine decides."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"expected a dataclass object, such as trl.GRPOConfig(...), got {type(config).__name__}")
    changed = {}
    for field in dataclasses.fields(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(config, field.name)
        is_given = value != default and field.name not in _SET_BY_TRANSFORMERS
        if field.init and (is_given or field.name in _KEEPS_DEFAULT):
            changed[field.name] = value
    return changed


_SET_BY_TRANSFORMERS = (
    "accelerator_config",
    "debug",
    "disable_tqdm",
    "logging_dir",
    "local_rank",
    "dataloader_pin_memory",
)
"""Fields that TrainingArguments fills in itself."""


_KEEPS_DEFAULT = ("use_bias_correction_kl", "gradient_checkpointing", "max_staleness", "replay_buffer_size")
"""Fields whose default no preset has: it changed between versions, or belongs to TRL's asynchronous trainer alone."""


def preset_of(config: Any) -> str:
    """The preset for the version of TRL that made `config`: the default of loss_type was bnpo first, and is dapo now."""
    if isinstance(config, TrlConfig) or not dataclasses.is_dataclass(config):
        return "trl_main"
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    return "trl_seed" if fields.get("loss_type") == "bnpo" else "trl_main"

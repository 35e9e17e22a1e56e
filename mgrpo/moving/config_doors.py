"""A `Config` from a command line, a YAML file or Python values, in this project's words or another trainer's, with every problem at once.

`config.validate` checks the values against each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgrpo.config.fields import Setting, Text, settings, shown
from mgrpo.config.load import (
    SettingNames,
    raise_problems,
    read_file,
    read_flags,
    read_values,
    split_argv,
    started_ranks,
)
from mgrpo.config.resolution import Layer, Resolution
from mgrpo.config.schema import Config
from mgrpo.moving import translate
from mgrpo.moving.foreign_names import SECRETS, SPELLINGS, table
from mgrpo.moving.name_hints import unknown
from mgrpo.moving.presets import PRESET_NOTES, PRESETS

EXPLAINED = (
    "sequence_parallel_size",
    "max_prompt_length",
    "rho_mask_sequence_level",
    "activation_memory_budget",
    "cp_strategy",
    "deepspeed_zpg",
)
"""Aliases whose sentence is repeated in every run: the word has another meaning elsewhere."""
OTHER_NAMES = "Names of Open Instruct and TRL are also accepted: docs/config.md."


class EveryName(SettingNames):
    """The settings' own names, and those of the table."""

    def setting_of(self, name: str) -> Setting | None:
        return settings().get(name) or (table()[name].setting if name in table() else None)

    def targets_of(self, name: str) -> tuple[str, ...]:
        return (name,) if name in settings() else table()[name].targets

    def spelled(self, name: str, text: Text) -> Text:
        return text if isinstance(text, tuple) else SPELLINGS.get(name, {}).get(text, text)

    def is_secret(self, name: str) -> bool:
        return name in SECRETS

    def unknown(self, name: str, where: str) -> str:
        return unknown(name, where)


NAMES = EveryName()


def parse(
    argv: Sequence[str],
    *,
    prog: str | None = None,
    preset: str | None = None,
    world_size: int | None = None,
    defer: bool = False,
) -> Config:
    """Config of `[FILE.yaml | --config FILE.yaml] [--preset NAME] [--name value | --name=value ...]`.

    Args:
        preset: the one to use if neither the file nor a flag names one.
        world_size: learner ranks, for names that count per rank; by default those that torchrun started.
        defer: leave problems in `provenance.problems`, which `validate` adds to its own, instead of raising.
    Prints settings and exits on -h and --help [TOPIC]. Raises ConfigError with all problems of file and flags.
    """
    if asked := next((number for number, word in enumerate(argv, 1) if word in ("-h", "--help")), 0):
        from mgrpo.config.help import help_text

        topic = next((word for word in argv[asked : asked + 1] if not word.startswith("-")), "")
        sys.stdout.write(help_text(prog, topic=topic, presets=PRESETS, other_names=OTHER_NAMES))
        raise SystemExit(0)
    problems: list[str] = []
    general, flags = split_argv(argv, NAMES, problems)
    layers = []
    if general["config"]:
        layer, named = read_file(Path(general["config"]), NAMES, problems)
        layers.append(layer)
        preset = named or preset
    layers.append(read_flags(flags, NAMES, problems))
    config = _resolved(layers, preset=general["preset"] or preset, world_size=world_size, problems=problems)
    return config if defer else raise_problems(config)


def load_file(path: str | Path, *, world_size: int | None = None) -> Config:
    """Config of one YAML file."""
    problems: list[str] = []
    layer, preset = read_file(Path(path), NAMES, problems)
    return raise_problems(_resolved([layer], preset=preset, world_size=world_size, problems=problems))


def from_values(values: Mapping[str, object], *, preset: str | None = None, world_size: int | None = None) -> Config:
    """Config of flat Python values, `{"seed": 2, "beta": 0.0}`, by the same rules as a file."""
    problems: list[str] = []
    layer, named = read_values(values, NAMES, problems)
    config = _resolved([layer], preset=named or preset, world_size=world_size, problems=problems)
    return raise_problems(replace(config, provenance=replace(config.provenance, is_python=True)))


def as_config(config: Config | Mapping[str, object] | str | Path) -> Config:
    """The given config, or that of settings by name or of a YAML file."""
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return from_values(config)
    if isinstance(config, (str, Path)):
        return load_file(config)
    raise TypeError(
        f"config must be an mgrpo.GRPOConfig(...), a dict of settings or the path of a YAML file, got {type(config).__name__}"
    )


def with_tools(config: Config, given: Mapping[str, object]) -> Config:
    """`config` with a caller's tools, environment_factory or rollout_func in place of its own; None: unchanged.

    Addresses of services that aliases gave are those of the caller's tools.

    Raises:
        ConfigError: a function that other processes cannot find.
    """
    values = {name: value for name, value in given.items() if value is not None}
    before, changed, notes = config.provenance, dict[str, Any](), config.notes
    if "tools" in values:
        if config.tools.tools:
            # Those are of the tools that are replaced.
            changed |= {"tool_call_names": (), "tool_configs": ()}
        elif config.tools.tool_configs:
            values["tool_configs"] = config.tools.tool_configs
        values |= before.services
    brought = from_values(values)
    if "tools" in values:
        about_services = tuple(before.services)
        kept = [note for note in notes if not (about_services and note.startswith(about_services))]
        notes = (*kept, *brought.notes)
    changed |= {name: getattr(brought.tools, name) for name in brought.provenance.sources}
    sources = {**before.sources, **brought.provenance.sources}
    return replace(
        config, tools=replace(config.tools, **changed), provenance=replace(before, sources=sources, notes=notes)
    )


def _resolved(
    layers: Iterable[Layer], *, preset: str | None, world_size: int | None, problems: Sequence[str]
) -> Config:
    """The config that `layers` and `preset` come to, its provenance with every note and problem."""
    preset = preset or "mgrpo"
    known = preset if preset in PRESETS else "mgrpo"
    found = Resolution(
        world_size=world_size or started_ranks(),
        preset=known,
        defaults=PRESETS[known],
        notes=PRESET_NOTES.get(known, ()),
    )
    found.problems.extend(problems)
    if preset != known:
        found.problems.append(f"preset={preset} does not exist; choose from {', '.join(PRESETS)}")
    for layer in layers:
        found.add(layer)
    _check_names(found)
    translate.apply(found)
    return found.config(explained={name: table()[name].sentence for name in EXPLAINED})


def _check_names(found: Resolution) -> None:
    """The table's rule for each name, independent of the others."""
    for name, given in found.peers.items():
        entry = table()[name]
        if given.value in entry.neutral:
            continue
        if entry.status == "refused" and not translate.is_excused(found, name):
            advice = (
                f"leave it out or give {shown(entry.neutral[0])}"
                if entry.neutral and entry.neutral[0] != ()
                else "leave it out"
            )
            found.problems.append(f"{name}={shown(given.value)} is refused: {entry.sentence}; {advice}")
        elif entry.status == "no effect":
            found.notes.append(f"{name} has no effect: {entry.sentence}")
        elif entry.status == "derived":
            found.expected[name] = given.value

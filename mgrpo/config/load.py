"""The texts of a command line, a YAML file or Python values as values of the right types, with every problem collected.

Which names may be given, and what those mean that are no settings, is `SettingNames`'s matter; what follows from the values is `Resolution`'s.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from mgrpo.config.errors import ConfigError
from mgrpo.config.fields import Setting, Text, describe, in_python, mismatch, read, settings
from mgrpo.config.resolution import FILE, FLAG, Layer
from mgrpo.config.schema import Config
from mgrpo.config.tools import SOURCES
from mgrpo.config.user_functions import as_names

GENERAL = ("config", "preset")
"""Flags that are not settings."""
SWITCHES = ("--show_config", "--dry_run")
"""Such flags of the train command alone, without a value."""
YAML_ENDINGS = (".yaml", ".yml")
OVERRIDE = re.compile(r"[+~]{0,2}(?P<name>[A-Za-z_]\w*(\.\w+)+)=")
"""A setting as Hydra writes it, `a.b.c=value`."""


PYTHON = "a Python value"
"""Where a value stands that is not in a file or a flag."""
HIDDEN = "(hidden)"
"""Stands for a value that must not be repeated."""


class SettingNames:
    """The names that may be given: those of the settings. Other trainers' names are added by a room above."""

    def setting_of(self, name: str) -> Setting | None:
        """How the text of `name` is read; None for an unknown name."""
        return settings().get(name)

    def targets_of(self, name: str) -> tuple[str, ...]:
        """The settings that a known name sets."""
        return (name,)

    def spelled(self, name: str, text: Text) -> Text:
        """The text in the words of this project."""
        return text

    def is_secret(self, name: str) -> bool:
        """Whether the name's value must not be repeated."""
        return False

    def unknown(self, name: str, where: str) -> str:
        """The sentence for a name that is not accepted; a flag is given with its dashes."""
        return f"unknown setting {name} ({where})"


def started_ranks() -> int:
    """Learner ranks that torchrun started; 1 without torchrun."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def raise_problems(config: Config) -> Config:
    """`config`, or ConfigError if reading it found problems."""
    found = config.provenance.problems
    if found:
        raise ConfigError([*map(in_python, found)] if config.provenance.is_python else found)
    return config


def read_values(values: Mapping[str, object], names: SettingNames, problems: list[str]) -> tuple[Layer, str | None]:
    """Python values by name, and the preset among them."""
    layer, preset = Layer(rank=FLAG, origin="argument"), None
    for name, value in values.items():
        if name == "preset":
            preset = str(value)
            continue
        try:
            text = _as_text(as_names(value) if name in SOURCES else value)
        except ValueError as err:
            problems.append(f"{name}: {err}")
            continue
        _take(str(name), text, PYTHON, layer, names, problems)
    return layer, preset


def _take(name: str, text: Text, where: str, layer: Layer, names: SettingNames, problems: list[str]) -> None:
    """Put the value of `text` into `layer`, or a sentence into `problems`."""
    setting = names.setting_of(name)
    if setting is None:
        problems.append(names.unknown(name, where))
        return
    if names.is_secret(name) and text is not None:
        text = HIDDEN
    text = names.spelled(name, text)
    try:
        layer.values[name] = read(text, setting.type)
    except ValueError:
        reason = f"; {setting.reason}" if setting.is_choice and setting.reason else ""
        problems.append(mismatch(setting, text, where) + reason)
        layer.unsound.update(names.targets_of(name))


def _as_text(value: object) -> Text:
    """A Python value as a file would hold it."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return json.dumps(value, default=str)
    if isinstance(value, (list, tuple)):
        return tuple(str(_as_text(item)) for item in value)
    return str(getattr(value, "value", value))  # of an enum, its value


def split_argv(
    argv: Sequence[str], names: SettingNames, problems: list[str]
) -> tuple[dict[str, str | None], list[tuple[str, list[str]]]]:
    """The flags that are not settings, and `(name, values)` of every other flag.

    Not by argparse, which stops at the first problem. A word that begins with two dashes is a flag, so `--save_freq -1` and
    `--learning_rate -1e-5` carry values; a value that begins with dashes is written `--name=--value`. Dashes within a name
    are underscores.
    """
    found: dict[str, list[str]] = {name: [] for name in GENERAL}
    flags: list[tuple[str, list[str]]] = []
    words = list(argv)
    if words and not words[0].startswith("-") and (words[0].endswith(YAML_ENDINGS) or Path(words[0]).is_file()):
        found["config"].append(words.pop(0))
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif override := OVERRIDE.match(word):
            problems.append(names.unknown(override["name"], "command line") + "; settings are written --name value")
        elif flags:
            flags[-1][1].append(word)
        else:
            problems.append(f"unexpected {word!r}: write settings as --name value, after a YAML file, FILE.yaml")
    for name, values in [flag for flag in flags if flag[0] in GENERAL]:
        found[name].extend(values)
        if not values:
            what = "the path of a YAML file" if name == "config" else "the name of a preset"
            problems.append(f"--{name} needs a value, {what}")
    for name, what in (("config", "YAML file"), ("preset", "preset")):
        if len(found[name]) > 1:
            problems.append(f"one {what} can be given, got {', '.join(found[name])}")
            del found[name][1:]
    general = {name: values[0] if values else None for name, values in found.items()}
    return general, [flag for flag in flags if flag[0] not in GENERAL]


def read_flags(flags: Iterable[tuple[str, list[str]]], names: SettingNames, problems: list[str]) -> Layer:
    """A flag given again replaces what was given before: scripts end in "$@" so that their settings can be changed."""
    layer = Layer(rank=FLAG, origin="flag")
    given: dict[str, list[list[str]]] = {}
    for name, words in flags:
        given.setdefault(name, []).append([HIDDEN] if names.is_secret(name) and words else words)
    for name, values in given.items():
        setting = names.setting_of(name)
        if setting is None:
            problems.append(names.unknown(f"--{name}", "command line"))
            continue
        if any(words != values[-1] for words in values):
            times = ", then ".join(" ".join(words) or "nothing" for words in values)
            layer.notes.append(f"--{name} is given {len(values)} times ({times}); the last one counts")
        _read_flag(setting, values[-1], layer, names, problems)
    return layer


def _read_flag(setting: Setting, words: list[str], layer: Layer, names: SettingNames, problems: list[str]) -> None:
    where = "command line"
    if not words and setting.is_switch:
        layer.values[setting.name] = True
        return
    if words and (setting.is_list or len(words) == 1):
        # A comma separates the words of a list, but not those of a JSON object.
        several = tuple(words) if setting.is_list_of_mappings and len(words) > 1 else ",".join(words)
        _take(setting.name, several, where, layer, names, problems)
        return
    if not words:
        problems.append(f"--{setting.name} needs a value, {describe(setting.type)}")
    else:
        problems.append(f"--{setting.name} takes one value, got {len(words)}: {' '.join(words)}")
    layer.unsound.update(names.targets_of(setting.name))


def read_file(path: Path, names: SettingNames, problems: list[str]) -> tuple[Layer, str | None]:
    """Values of a flat YAML file, and the preset that it names.

    The file is read as a tree of text, not as YAML's own types: YAML 1.1 would make a string of `2e-5`, a date of
    `2026-01-01` and 80 of `1:20`, and would keep the last of two equal keys. Nothing else can be checked
    without the file, so that error is raised at once.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as err:
        raise ConfigError(
            [*problems, f"cannot read the YAML file {path}: {err.strerror or err}; check the path"]
        ) from None
    except RecursionError:
        raise ConfigError(
            [
                *problems,
                f"{path} holds lists or mappings within each other, deeper than any setting; settings are `name: value` lines",
            ]
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ConfigError([*problems, f"{path} is not valid YAML: {' '.join(str(err).split())}"]) from None
    layer, preset = Layer(rank=FILE, origin=f"file {path}"), None
    if root is None:
        return layer, preset
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([*problems, f"{path} must hold `name: value` lines, got {_kind(root)}"])
    seen: dict[str, int] = {}
    for key, node in root.value:
        name, line = str(key.value), key.start_mark.line + 1
        where = f"{path}, line {line}"
        if name in seen:
            problems.append(f"{name} is given twice ({path}, lines {seen[name]} and {line}); keep one")
        elif name == "preset":
            preset = str(node.value)
        else:
            _read_node(name, node, where, layer, names, problems)
        seen.setdefault(name, line)
    return layer, preset


def _kind(node: yaml.Node) -> str:
    return "a sequence" if isinstance(node, yaml.SequenceNode) else "a scalar"


def _read_node(name: str, node: yaml.Node, where: str, layer: Layer, names: SettingNames, problems: list[str]) -> None:
    setting = names.setting_of(name)
    if isinstance(node, yaml.MappingNode) and not (setting and setting.is_mapping):
        problems.append(f"{name} holds a mapping ({where}); settings are flat: write them at the top level")
    elif setting is None or isinstance(node, yaml.ScalarNode):
        is_null = node.tag == "tag:yaml.org,2002:null"
        _take(name, None if is_null else str(node.value), where, layer, names, problems)
        return
    elif isinstance(node, yaml.MappingNode):
        layer.values[name] = read(_json(node), setting.type)
        return
    elif all(isinstance(item, yaml.ScalarNode) for item in node.value):
        _take(name, tuple(item.value for item in node.value), where, layer, names, problems)
        return
    elif setting.is_list_of_mappings and not any(isinstance(item, yaml.SequenceNode) for item in node.value):
        _take(name, tuple(_json(item) for item in node.value), where, layer, names, problems)
        return
    else:
        problems.append(f"{name} must be {describe(setting.type)}, got a list of lists or mappings ({where})")
    layer.unsound.update(names.targets_of(name) if setting else ())


def _json(node: yaml.Node) -> str:
    """The text that a scalar is, or a mapping as JSON."""
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    return json.dumps(yaml.SafeLoader("").construct_document(node), default=str)

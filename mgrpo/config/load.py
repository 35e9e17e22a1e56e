"""From a command line, a YAML file or Python values to a `Config`, with every problem reported at once.

Types are settled here; whether the values make sense together is `validate`'s question.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from mgrpo.config.errors import ConfigError
from mgrpo.config.fields import Setting, Text, build, describe, mismatch, read, settings, unknown
from mgrpo.config.schema import Config


def parse(argv: Sequence[str], *, prog: str | None = None) -> tuple[Config, dict[str, str]]:
    """Config of `[FILE.yaml | --config FILE.yaml] [--name value | --name=value ...]`; flags win over the file.

    Returns:
        The config, and for each setting where its value came from: "default", "file" or "flag".
    Prints the settings and exits on -h and --help; raises ConfigError with all problems of file and flags.
    """
    if "-h" in argv or "--help" in argv:
        from mgrpo.config.help import help_text

        sys.stdout.write(help_text(prog))
        raise SystemExit(0)
    problems: list[str] = []
    path, flags = _split_argv(argv, problems)
    from_file = _read_file(Path(path), problems) if path else {}
    from_flags = _read_flags(flags, problems)
    if problems:
        raise ConfigError(problems)
    sources = {
        name: "flag" if name in from_flags else "file" if name in from_file else "default" for name in settings()
    }
    return build(from_file | from_flags), sources


def load_file(path: str | Path) -> Config:
    """Config of one YAML file."""
    problems: list[str] = []
    values = _read_file(Path(path), problems)
    if problems:
        raise ConfigError(problems)
    return build(values)


def from_values(values: Mapping[str, object]) -> Config:
    """Config of flat Python values, `{"seed": 2, "beta": 0.0}`, by the same rules as a file."""
    problems: list[str] = []
    where = "a Python value"
    known = {}
    for name, value in values.items():
        if name not in settings():
            problems.append(unknown(str(name), where))
        elif isinstance(value, Mapping):
            problems.append(mismatch(settings()[name], value, where))
        else:
            _take(settings()[name], _as_text(value), where, known, problems)
    if problems:
        raise ConfigError(problems)
    return build(known)


def _take(setting: Setting, text: Text, where: str, values: dict[str, object], problems: list[str]) -> None:
    try:
        values[setting.name] = read(text, setting.type)
    except ValueError:
        problems.append(mismatch(setting, text, where))


def _as_text(value: object) -> Text:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(str(item) for item in value)
    return str(value)


def _split_argv(argv: Sequence[str], problems: list[str]) -> tuple[str | None, list[tuple[str, list[str]]]]:
    """The file's path and `(name, values)` of every flag.

    Not argparse: it stops at the first problem. A word that opens with two dashes is a flag, so `--save_freq -1` and
    `--learning_rate -1e-5` carry values; a value that opens so is written `--name=--value`.
    """
    files: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    words = list(argv)
    if words and not words[0].startswith("-"):
        files.append(words.pop(0))
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            problems.append(f"unexpected {word!r}: settings are written --name value, a YAML file comes first")
    for _, values in [flag for flag in flags if flag[0] == "config"]:
        files.extend(values)
        if not values:
            problems.append("--config needs a value, the path of a YAML file")
    if len(files) > 1:
        problems.append(f"one YAML file can be given, got {', '.join(files)}")
        files.clear()
    return (files[0] if files else None), [flag for flag in flags if flag[0] != "config"]


def _read_flags(flags: Iterable[tuple[str, list[str]]], problems: list[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    seen: set[str] = set()
    for name, words in flags:
        setting = settings().get(name)
        if setting is None:
            problems.append(unknown(f"--{name}", "command line").replace("did you mean ", "did you mean --"))
        elif name in seen:
            problems.append(f"--{name} is given more than once on the command line; give it once")
        else:
            _read_flag(setting, words, values, problems)
        seen.add(name)
    return values


def _read_flag(setting: Setting, words: list[str], values: dict[str, object], problems: list[str]) -> None:
    where = "command line"
    if not words and setting.is_switch:
        values[setting.name] = True
    elif not words:
        problems.append(f"--{setting.name} needs a value, {describe(setting.type)}")
    elif setting.is_list:
        _take(setting, ",".join(words), where, values, problems)
    elif len(words) > 1:
        problems.append(f"--{setting.name} takes one value, got {len(words)}: {' '.join(words)}")
    else:
        _take(setting, words[0], where, values, problems)


def _read_file(path: Path, problems: list[str]) -> dict[str, object]:
    """Values of a flat YAML file.

    The file is read as a tree of text, not as YAML's own types: YAML 1.1 would make a string of `2e-5`, a date of
    `2026-01-01` and 80 of `1:20`, and would keep the last of two equal keys.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as err:
        problems.append(f"cannot read the YAML file {path}: {err.strerror or err}; check the path")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        problems.append(f"{path} is not valid YAML: {' '.join(str(err).split())}")
        return {}
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        problems.append(f"{path} must hold `name: value` lines, got a {root.id}")
        return {}
    values: dict[str, object] = {}
    seen: dict[str, int] = {}
    for key, node in root.value:
        name, line = str(key.value), key.start_mark.line + 1
        where = f"{path}, line {line}"
        if name in seen:
            problems.append(f"{name} is given twice ({path}, lines {seen[name]} and {line}); keep one")
        elif isinstance(node, yaml.MappingNode):
            problems.append(f"{name} holds a mapping ({where}); settings are flat: write them at the top level")
        elif name not in settings():
            problems.append(unknown(name, where))
        else:
            _read_node(settings()[name], node, where, values, problems)
        seen.setdefault(name, line)
    return values


def _read_node(setting: Setting, node: yaml.Node, where: str, values: dict[str, object], problems: list[str]) -> None:
    if isinstance(node, yaml.ScalarNode):
        text = None if node.tag == "tag:yaml.org,2002:null" else node.value
        _take(setting, text, where, values, problems)
    elif all(isinstance(item, yaml.ScalarNode) for item in node.value):
        _take(setting, tuple(item.value for item in node.value), where, values, problems)
    else:
        problems.append(f"{setting.name} must be {describe(setting.type)}, got a list of lists or mappings ({where})")

"""The words that a launch script gives to a trainer: from a command line as it stands in a shell, or from its words.

Reads what such scripts are made of: continued lines, comments, several commands, variables that the same text or the
environment sets, and launchers which take the command behind `--`. Nothing is run: what only a shell could compute is an error.
"""

from __future__ import annotations

import math
import os
import random
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from mgrpo.config.errors import ConfigError

LAUNCHERS = ("mason.py", "torchrun.py", "launch.py")
"""Programs that start others."""
COMMENT = re.compile(r"(?m)^[ \t]*#.*$|[ \t]#[^\"'\n]*$")
CONTINUED = re.compile(r"\\\n(?:[ \t]*\n)*|\n\s*(?=-)")
ASSIGNMENT = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?P<value>(?:\"[^\"]*\"|'[^']*'|\$\([^)]*\)|\$(?!\()|[^\s;&|\"'$])*)[ \t]*"
)
QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|(?:\\.|[^'\"\\])+|.", re.DOTALL)
VARIABLE = re.compile(r"(?<!\\)\$(?:(?P<bare>\w+|[@*#?!])|\{(?P<name>[^{}:]*)(?::-(?P<default>[^{}]*))?\})")
DATE = re.compile(r"\$\(date \+[\"']?(?P<format>[^)\"']*)[\"']?\)")
PRODUCT = re.compile(r"\$\(\((?P<factors>[\d* ]*\d[\d* ]*)\)\)")
COMPUTED = re.compile(rf"(?<!\\)(?:\$\(|`)|{VARIABLE.pattern}")
DEEPEST = 8
"""Variables within values of variables."""
ARGUMENTS = re.compile(r"[ \t]\"?\$[@*]\"?(?=\s|$)")
"""What the script itself was given."""
REDIRECTION = re.compile(r"[ \t]\d?>&\d")
OPERATOR = re.compile(r"[;&|<>()]+")
UNKNOWN = "\0"
"""Stands before what was not computed."""


def words_of(text: str) -> list[str]:
    """The flags in a command line or a script that starts one trainer; of a text without a program, all of it.

    Raises:
        ConfigError: several trainers, or words that only a shell could compute.
    """
    text = CONTINUED.sub(" ", COMMENT.sub("", text.replace("\r\n", "\n")))
    has_program = ".py" in text
    variables = {"RANDOM": str(random.randrange(1 << 15)), **os.environ}
    commands: list[list[str]] = []
    for line in text.split("\n") if has_program else [text.replace("\n", " ")]:
        if assigned := ASSIGNMENT.fullmatch(line):
            variables[assigned["name"]] = "".join(shlex.split(_expanded(assigned["value"], variables)))
        elif not has_program or ".py" in line:
            commands += _commands(_expanded(REDIRECTION.sub("", ARGUMENTS.sub("", line)), variables))
    trainers = [command for command in commands if _script_at(command) is not None]
    if len(trainers) > 1:
        trainers = [command for command in trainers if any("grpo" in word and word.endswith(".py") for word in command)]
    if len(trainers) > 1:
        raise ConfigError([f"the text starts {len(trainers)} trainers; give one command at a time"])
    return flags_of(trainers[0] if trainers else [word for command in commands for word in command])


def flags_of(words: Sequence[str]) -> list[str]:
    """The words after the program and its launcher's arguments, from the first flag or YAML file on.

    Raises:
        ConfigError: words that only a shell could compute.
    """
    script = _script_at(words)
    if script is not None and "--" in words[:script]:
        # The launcher joins them with blanks for another shell.
        words = [part for word in words for part in ([word] if "{" in word else _split(_expanded(word, os.environ)))]
        script = _script_at(words)
    words = words[script + 1 :] if script is not None else words
    words = words[: next((i for i, word in enumerate(words) if OPERATOR.fullmatch(word)), len(words))]
    starts = (i for i, word in enumerate(words) if word.startswith("--") or word.endswith((".yaml", ".yml")))
    flags = list(words[next(starts, len(words)) :])
    if unknown := [word.replace(UNKNOWN, "") for word in flags if UNKNOWN in word]:
        raise ConfigError([f"{word!r} has a value that only a shell knows; write it out" for word in unknown])
    return flags


def _script_at(words: Sequence[str]) -> int | None:
    """Where the trainer's program stands: the first that starts no other."""
    scripts = (i for i, word in enumerate(words) if word.endswith(".py") and PurePath(word).name not in LAUNCHERS)
    return next(scripts, None)


def _commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, up to the operator behind each; a launcher's own, before its script, are part of its command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as err:
        raise ConfigError([f"the command line cannot be read: {err}; check its quotes"]) from None
    command: list[str] = []
    for word in words:
        if OPERATOR.fullmatch(word) and _script_at(command) is not None:
            yield command
            command = []
        else:
            command.append(word)
    yield command


def _split(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError:
        return [word]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` with the values of variables, or their defaults, the date and products, except between single quotes."""
    return "".join(part if part.startswith("'") else _computed(part, variables) for part in QUOTED.findall(text))


def _computed(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"] or ""
        return variables.get(name, match[0] if match["default"] is None else match["default"])

    text = DATE.sub(lambda match: time.strftime(match["format"]), text)
    for _ in range(DEEPEST):  # from the inside out
        text = VARIABLE.sub(value, text)
    text = PRODUCT.sub(lambda match: str(math.prod(map(int, match["factors"].replace("*", " ").split()))), text)
    return COMPUTED.sub(lambda match: UNKNOWN + match[0], text)

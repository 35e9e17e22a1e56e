"""The words that a launch script gives to a trainer: from a command line as it stands in a shell, or from its words.

Reads what such scripts are made of: continued lines, comments, several commands, variables and lists that the same text or the
environment sets, sums of whole numbers, and launchers which take the command behind `--`. Nothing is run.
"""

from __future__ import annotations

import ast
import operator
import os
import random
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePath

from mgrpo.config.errors import ConfigError

LAUNCHERS = ("mason.py", "torchrun.py", "launch.py")
"""Programs that start others."""
JOINING = "mason.py"
"""The one that joins the words behind `--` with blanks, for another shell."""
PROGRAM = re.compile(r"(?<![^\s\"'])(?:[^\s\"'=]*\.py|\w+(?:\.\w+)*\.main\w*)(?![^\s\"';&|)])")
"""A script, or a module whose name begins with main."""
COMMENT = re.compile(r"(?m)^[ \t]*#.*$|[ \t]#[^\"'\n]*$")
CONTINUED = re.compile(r"\\\n(?:[ \t]*\n)*|\n\s*(?=-|[+~]*\w+(?:\.\w+)+=)")
ASSIGNMENT = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?P<value>(?:\"[^\"]*\"|'[^']*'|\$\(\(.*?\)\)|\$\([^)]*\)|\$(?!\()|[^\s;&|\"'$])*)[ \t]*"
)
LIST = re.compile(r"(?m)^[ \t]*(?P<name>[A-Za-z_]\w*)\+?=\((?P<words>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)[ \t]*$")
LIST_USED = re.compile(r"\"?\$\{(?P<name>\w+)\[[@*]\]\}\"?")
QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|(?:\\.|[^'\"\\])+|.", re.DOTALL)
VARIABLE = re.compile(r"(?<!\\)\$(?:(?P<bare>\w+|[@*#?!])|\{(?P<name>[^{}:]*)(?::-(?P<default>[^{}]*))?\})")
DATE = re.compile(r"\$\(date \+[\"']?(?P<format>[^)\"']*)[\"']?\)")
SUM = re.compile(r"\$\(\((?P<sum>[^$`]*?)\)\)(?!\))")
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPUTED = re.compile(rf"(?<!\\)(?:\$\(|`)|{VARIABLE.pattern}")
DEEPEST = 8
"""Variables within values of variables."""
ARGUMENTS = re.compile(r"[ \t]\"?\$[@*]\"?(?=\s|$)")
"""What the script itself was given."""
REDIRECTION = re.compile(r"[ \t]\d?>&\d")
OPERATOR = re.compile(r"[;&|<>()]+")
UNKNOWN = "\0"
"""Stands before what was not computed."""


def words_of(given: str | Path | Sequence[str]) -> list[str]:
    """The flags in a command line, a script or the words of a command that starts a trainer of Open Instruct; else all words.

    Raises:
        ConfigError: several trainers, a script that cannot be read, or words that only a shell could compute.
    """
    return flags_of(command_of(given, trainer="grpo"))


def command_of(given: str | Path | Sequence[str], *, trainer: str) -> list[str]:
    """The words of the command that starts a trainer.

    Args:
        given: a command line, a script, the path of a script (.sh), or words, which are returned as they are.
        trainer: a part of the program's name, by which it is told from others that the text starts.
    Returns:
        With `UNKNOWN` before what only a shell could compute.
    Raises:
        ConfigError: several trainers, or a script that cannot be read.
    """
    if not isinstance(given, (str, Path)):
        return list(given)
    text = _text_of(given)
    has_program = PROGRAM.search(text) is not None
    variables = {"RANDOM": str(random.randrange(1 << 15)), **os.environ}
    lists: dict[str, str] = {}
    commands: list[list[str]] = []
    for line in text.split("\n") if has_program else [text.replace("\n", " ")]:
        if listed := LIST.fullmatch(line):
            before = lists.get(listed["name"], "") if "+=(" in line else ""
            lists[listed["name"]] = f"{before} {listed['words']}"
        elif assigned := ASSIGNMENT.fullmatch(line):
            variables[assigned["name"]] = "".join(shlex.split(_expanded(assigned["value"], variables)))
        elif not has_program or PROGRAM.search(line):
            line = LIST_USED.sub(lambda used: lists.get(used["name"], used[0]), line)
            commands += _commands(_expanded(REDIRECTION.sub("", ARGUMENTS.sub("", line)), variables))
    trainers = [command for command in commands if _program_at(command) is not None]
    if len(trainers) > 1:
        trainers = [command for command in trainers if any(trainer in program for program in _programs(command))]
    if len(trainers) > 1:
        raise ConfigError([f"the text starts {len(trainers)} trainers; give one command at a time"])
    return trainers[0] if trainers else [word for command in commands for word in command]


def _text_of(given: str | Path) -> str:
    """The text of a script, or the command line itself; without comments, each command and each list on one line."""
    text = str(given)
    if text.endswith(".sh") and len(text.split()) == 1:
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as err:
            raise ConfigError([f"cannot read the script {given}: {err}"]) from None
    text = COMMENT.sub("", text.replace("\r\n", "\n"))
    text = LIST.sub(lambda found: found[0].replace("\\\n", " ").replace("\n", " "), text)
    return CONTINUED.sub(" ", text)


def flags_of(words: Sequence[str]) -> list[str]:
    """The words after the program and its launcher's arguments, from the first flag or YAML file on.

    Raises:
        ConfigError: words that only a shell could compute.
    """
    words = arguments_of(words)
    starts = (i for i, word in enumerate(words) if word.startswith("--") or word.endswith((".yaml", ".yml")))
    flags = words[next(starts, len(words)) :]
    if unknown := [known(word) for word in flags if UNKNOWN in word]:
        raise ConfigError([f"{word!r} has a value that only a shell knows; write it out" for word in unknown])
    return flags


def known(word: str) -> str:
    """The word as it was written, without marks of what was not computed."""
    return word.replace(UNKNOWN, "")


def arguments_of(words: Sequence[str]) -> list[str]:
    """The words after the program; without one, all of them."""
    program = _program_at(words)
    if program is not None and any(PurePath(word).name == JOINING for word in words[:program]):
        words = [part for word in words for part in ([word] if "{" in word else _split(_expanded(word, os.environ)))]
        program = _program_at(words)
    words = words[program + 1 :] if program is not None else words
    return list(words[: next((i for i, word in enumerate(words) if OPERATOR.fullmatch(word)), len(words))])


def _program_at(words: Sequence[str]) -> int | None:
    """Where the trainer's program stands: the first that starts no other."""
    return next((i for i, word in enumerate(words) if PROGRAM.fullmatch(word) and not _is_launcher(word)), None)


def _programs(words: Sequence[str]) -> list[str]:
    return [word for word in words if PROGRAM.fullmatch(word)]


def _is_launcher(word: str) -> bool:
    return PurePath(word).name in LAUNCHERS


def _commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, up to the operator behind each; a launcher's own, before its program, are part of its command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as err:
        raise ConfigError([f"the command line cannot be read: {err}; check its quotes"]) from None
    command: list[str] = []
    for word in words:
        if OPERATOR.fullmatch(word) and _program_at(command) is not None:
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
    parts = groupby(QUOTED.findall(text), key=lambda part: part.startswith("'"))
    return "".join("".join(part) if is_literal else _computed("".join(part), variables) for is_literal, part in parts)


def _computed(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"] or ""
        return variables.get(name, match[0] if match["default"] is None else match["default"])

    text = DATE.sub(lambda match: time.strftime(match["format"]), text)
    for _ in range(DEEPEST):  # from the inside out
        text = VARIABLE.sub(value, text)
    text = SUM.sub(lambda match: _sum(match, variables), text)
    return COMPUTED.sub(lambda match: UNKNOWN + match[0], text)


def _sum(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """The value of a sum of whole numbers and variables; the text where it is something else."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.Name(name):
                return int(variables[name])
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, operation, right):
                return OPERATIONS[type(operation)](value(left), value(right))
        raise ValueError

    try:
        return str(value(ast.parse(match["sum"].strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
        return match[0]

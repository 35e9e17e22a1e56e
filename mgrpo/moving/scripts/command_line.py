"""The words that a launch script gives to a trainer: from a command line or a script as text, or from its words.

`Shell` reads the text; here the trainer's command is distinguished from others, and from launchers, which take it behind `--`.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath

from mgrpo.config.errors import ConfigError
from mgrpo.moving.scripts.shell import Shell
from mgrpo.moving.scripts.shell_lexer import MARK, UNKNOWN, Lexer, Token, known, line_of, reasons
from mgrpo.moving.scripts.shell_values import Values

LAUNCHERS = ("mason.py", "torchrun.py", "launch.py")
"""Programs that start others."""
JOINING = "mason.py"
"""The one that joins the words behind `--` with blanks, for another shell."""
PROGRAM = re.compile(r"(?<![^\s\"'])(?:[^\s\"'=]*\.py|\w+(?:\.\w+)*\.main\w*)(?![^\s\"';&|)])")
"""A script, or a module whose name begins with main."""
COMMENT = re.compile(r"(?m)^[ \t]*#.*$")
OPERATOR = re.compile(r"[;&|<>()]+")
SCRIPTS, YAML = (".sh", ".bash"), (".yaml", ".yml")


def words_of(given: str | Path | Sequence[str]) -> list[str]:
    """The flags of Open Instruct in a command line, a script, or the words of a command; a YAML file is its path.

    Raises:
        ConfigError: no flag, several trainers, a script that cannot be read, or words that only a shell could compute.
    """
    file = file_of(given)
    if file is not None and file.suffix in YAML:
        return [str(file)]
    return _flags(arguments_in(given, trainer="grpo", is_flag=_begins_flags))


def file_of(given: object) -> Path | None:
    """The file that `given` names: a path always, a line of text if it ends like a file or is the name of one.

    A line with a program or flags is a command, even if its last word is a file.
    """
    if isinstance(given, Path) or not isinstance(given, str):
        return given if isinstance(given, Path) else None
    line = given.strip()
    is_command = PROGRAM.search(line) or any(word.startswith("--") or "=" in word for word in line.split())
    is_name = line.endswith(SCRIPTS + YAML) and "\n" not in line and not is_command
    return Path(line) if is_name or os.path.isfile(line) else None


def arguments_in(given: str | Path | Sequence[str], *, trainer: str, is_flag: Callable[[str], bool]) -> list[str]:
    """The words that a command line, a script, or the words of a command give to a trainer.

    Args:
        trainer: a part of the program's name, which distinguishes it from others that the text starts.
        is_flag: True for a word in the form of the trainer's flags.
    Returns:
        `Placed` words, with marks of parts that only a shell could compute.
    Raises:
        ConfigError: no flag, several trainers, or a script that cannot be read.
    """
    words = arguments_of(command_of(given, trainer=trainer))
    if not any(UNKNOWN in word or is_flag(word) for word in words):
        came = str(given) if isinstance(given, (str, Path)) else " ".join(given)
        raise ConfigError(
            [
                f"{reprlib.repr(came)} holds no flag of the trainer; give the command line, its words, or a script, "
                "as text or by its path"
            ]
        )
    return words


def command_of(given: str | Path | Sequence[str], *, trainer: str) -> list[str]:
    """The words of the command that starts a trainer; words are returned as they are.

    Raises:
        ConfigError: several trainers or none, or a script that cannot be read.
    """
    if not isinstance(given, (str, Path)):
        return list(given)
    text = _text_of(given)
    without_comments = COMMENT.sub("", text)
    programs = list(PROGRAM.finditer(without_comments))
    commands = list(Shell(os.environ).commands(text, joins_lines=not programs))
    if not programs:
        return [word for command in commands for word in command]
    trainers = [command for command in commands if _program_at(command) is not None]
    named = [command for command in trainers if any(trainer in program for program in _programs(command))]
    if not named and (len(trainers) != 1 or any(trainer in program[0] for program in programs)):
        program = next((found for found in programs if trainer in found[0]), programs[0])
        line = without_comments.count("\n", 0, program.start()) + 1
        raise ConfigError(
            [f"line {line}: {program[0]} is started in a way that is not read; give the command itself, from there on"]
        )
    if len(trainers) > 1 and len(named) != 1:
        raise ConfigError([f"the text starts {len(named)} trainers; give one command at a time"])
    return (named or trainers)[0]


def _text_of(given: str | Path) -> str:
    file, text = file_of(given), str(given)
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as err:
            why = getattr(err, "strerror", None) or err
            raise ConfigError(
                [f"cannot read the script {given}: {why}; give the path of a script, or its text"]
            ) from None
    return text.replace("\r\n", "\n")


def flags_of(words: Sequence[str]) -> list[str]:
    """The words after the program and its launcher's arguments, from the first flag or YAML file on.

    Raises:
        ConfigError: words that only a shell could compute.
    """
    return _flags(arguments_of(words))


def _flags(words: list[str]) -> list[str]:
    starts = (i for i, word in enumerate(words) if UNKNOWN in word or _begins_flags(word))
    flags = words[next(starts, len(words)) :]
    if unknown := [word for word in flags if UNKNOWN in word]:
        raise ConfigError([unknown_value(known(word), word) for word in unknown])
    return [str(word) for word in flags]


def _begins_flags(word: str) -> bool:
    return word.startswith("--") or word.endswith(YAML)


def unknown_value(shown: str, word: str) -> str:
    """The sentence for a word with a mark."""
    return f"{shown!r} has a value that only a shell knows ({reasons(word)}); write it out"


def arguments_of(words: Sequence[str]) -> list[str]:
    """The words after the program; without one, all of them."""
    program = _program_at(words)
    if program is not None and any(PurePath(word).name == JOINING for word in words[:program]):
        words = [part for word in words for part in _read_again(word)]
        program = _program_at(words)
    words = words[program + 1 :] if program is not None else words
    return list(words[: next((i for i, word in enumerate(words) if OPERATOR.fullmatch(word)), len(words))])


def _program_at(words: Sequence[str]) -> int | None:
    """Index of the trainer's program: the first that starts no other."""
    return next((i for i, word in enumerate(words) if _is_program(word) and not _is_launcher(word)), None)


def _programs(words: Sequence[str]) -> list[str]:
    return [word for word in words if _is_program(word)]


def _is_program(word: str) -> bool:
    return PROGRAM.fullmatch(MARK.sub("_", word)) is not None


def _is_launcher(word: str) -> bool:
    return PurePath(word).name in LAUNCHERS


def _read_again(word: str) -> list[str]:
    """The words that another shell makes of one; a JSON object stays whole, as its launcher quotes it."""
    if UNKNOWN in word or ("{" in word and "${" not in word):
        return [word]
    values = Values(os.environ)
    try:
        return [part for field in _fields(word) for part in values.expanded(Token(field, line_of(word), is_word=True))]
    except ConfigError:
        return [word]


def _fields(text: str) -> Iterator[str]:
    """The parts between blanks that are not quoted."""
    lexer, at = Lexer(text), 0
    while at < len(text):
        begin = at
        while at < len(text) and text[at] not in " \t\n":
            at = lexer.after(at)
        if at > begin:
            yield text[begin:at]
        at += 1

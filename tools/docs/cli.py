"""docs/cli.md, written from each command's --help: `python -m tools.docs.cli > docs/cli.md`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from unittest.mock import patch

from mgrpo.cli import COMMANDS, SHORT_COMMANDS, main
from mgrpo.config.help import FIRST

INTRODUCTION = """<!-- Written by `python -m tools.docs.cli > docs/cli.md`; do not edit. -->

# Commands

`mgrpo COMMAND --help` prints what stands here. `train`, `eval`, `rollout` and `plan` take every [setting](config.md) as a flag; their help
lists the settings that a run needs first, `--help all` every one, `--help SECTION` or `--help NAME` some; this page lists none. Dashes in the name of a flag are the same as underscores.
`mgrpo completion` makes the shell complete commands and settings, and `mgrpo --version` prints the version.
"""
SUBCOMMANDS = {"convert": ("hf-to-megatron", "megatron-to-hf"), "engines": ("list", "add", "remove")}
WIDTH = 100


def commands() -> Iterator[tuple[str, ...]]:
    """Every command and subcommand, each as its words."""
    for command in ("train", *COMMANDS, *SHORT_COMMANDS):
        yield (command,)
        for subcommand in SUBCOMMANDS.get(command, ()):
            yield command, subcommand


def help_of(*words: str) -> str:
    """The help that a command prints."""
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        patch.dict(os.environ, {"COLUMNS": str(WIDTH)}),
    ):
        try:
            code = main([*words, "--help"])
        except SystemExit as err:
            code = err.code
    assert code in (0, None), f"mgrpo {' '.join(words)} --help ends with {code}"
    return output.getvalue().rstrip()


def without_settings(text: str) -> str:
    """The help without the groups of settings, which are the same in each command that has them."""
    return text.partition(f"\n\n{next(iter(FIRST))}:\n")[0]


def to_markdown() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for words in commands():
        heading = "#" * (len(words) + 1)
        parts.append(f"{heading} `mgrpo {' '.join(words)}`\n\n```text\n{without_settings(help_of(*words))}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(to_markdown())

"""The error for a configuration that cannot run, and a command's parser that raises it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one sentence per line; `problems` holds the sentences."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(
            "\n".join([f"{count} in the configuration:", *(f"  - {problem}" for problem in self.problems)])
        )


class CommandParser(argparse.ArgumentParser):
    """The parser of a command `mgrpo NAME`: a wrong argument is a ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise ConfigError([f"{message}; see {' '.join(self.prog.split()[:2])} --help"])

"""The error for a configuration that cannot run."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one sentence per line; `problems` holds the sentences."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(
            "\n".join([f"{count} in the configuration:", *(f"  - {problem}" for problem in self.problems)])
        )

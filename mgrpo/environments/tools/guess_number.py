"""The environment guess_number: find a number from answers that say higher or lower."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Call, Observation, Tool
from mgrpo.environments.tools.game import Game

_GUESS = Tool(
    name="guess",
    description="Guess the number.",
    parameters={
        "type": "object",
        "properties": {"number": {"type": "integer", "description": "The guess."}},
        "required": ["number"],
    },
)


class GuessNumber(Game):
    name = "guess_number"

    def __init__(self, min_val: int = 1, max_val: int = 100) -> None:
        """Both are among the numbers. A row's `env_config` may give the `number`; else it is drawn for each prompt."""
        if min_val >= max_val:
            raise ValueError(f"min_val={min_val} must be less than max_val={max_val}")
        self._least, self._greatest = min_val, max_val
        self._number = min_val
        self._num_guesses = 0

    def tools(self) -> Sequence[Tool]:
        return (_GUESS,)

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation:
        drawn = random.Random(seed).randint(self._least, self._greatest)
        self._number = int(row.get("env_config", {}).get("number", drawn))
        self._num_guesses = 0
        text = f"The number is one from {self._least} to {self._greatest}."
        return Observation(text=text, metrics={"guesses": 0})

    def move(self, call: Call) -> Observation:
        self._num_guesses += 1
        guess, metrics = call.arguments["number"], {"guesses": self._num_guesses}
        if guess == self._number:
            text = f"{guess} is right, after {self._num_guesses} guesses."
            return Observation(text=text, reward=1.0, done=True, metrics=metrics)
        span = self._greatest - self._least
        closeness = 1.0 - min(abs(guess - self._number), span) / span
        text = f"{guess} is too {'low' if guess < self._number else 'high'}."
        return Observation(text=text, reward=closeness, metrics=metrics)

"""Two games of calls: `counter`, which shows whether a run learns to call in turns, and `guess_number`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Call, Environment, Observation, Tool

_NO_ARGUMENTS = {"type": "object", "properties": {}, "required": []}
_TOOLS = tuple(
    Tool(name=name, description=description, parameters=_NO_ARGUMENTS)
    for name, description in (
        ("increment", "Add one to the counter."),
        ("decrement", "Take one from the counter."),
        ("submit", "Hand in the counter as it is."),
    )
)
_STEP_REWARD, _RIGHT_REWARD, _WRONG_REWARD = -0.1, 1.0, -0.5
_GUESS = Tool(
    name="guess",
    description="Guess the number.",
    parameters={
        "type": "object",
        "properties": {"number": {"type": "integer", "description": "The guess."}},
        "required": ["number"],
    },
)


class Game(Environment):
    """One call after the other, and none once the game is over; a subclass implements `move`."""

    is_repeatable = True

    def move(self, call: Call) -> Observation:
        raise NotImplementedError

    def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        observations: list[Observation] = []
        for call in calls:
            if observations and observations[-1].done:
                observations.append(Observation(text="not called: the game is over", done=True))
            else:
                observations.append(self.move(call))
        return observations


class Counter(Game):
    """Reach a number in steps of one, then submit it."""

    name = "counter"

    def __init__(self, target: int = 5) -> None:
        """A row's `env_config` may give another target."""
        self._usual_target = self._target = target
        self._value = self._num_steps = 0

    def tools(self) -> Sequence[Tool]:
        return _TOOLS

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation:
        self._target = int(row.get("env_config", {}).get("target", self._usual_target))
        self._value = self._num_steps = 0
        return Observation(
            text=f"The counter is at 0. Bring it to {self._target} and submit it.", metrics=self._metrics()
        )

    def move(self, call: Call) -> Observation:
        self._num_steps += 1
        if call.name == "submit":
            is_right = self._value == self._target
            text = (
                f"{'Right' if is_right else 'Wrong'}: the counter is at {self._value}, the target was {self._target}."
            )
            reward = _RIGHT_REWARD if is_right else _WRONG_REWARD
            return Observation(text=text, reward=reward, done=True, metrics=self._metrics())
        self._value += 1 if call.name == "increment" else -1
        return Observation(text=f"The counter is at {self._value}.", reward=_STEP_REWARD, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {
            "step_count": self._num_steps,
            "final_value": self._value,
            "reached_target": float(self._value == self._target),
        }


class GuessNumber(Game):
    """Find a number from answers that say higher or lower."""

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

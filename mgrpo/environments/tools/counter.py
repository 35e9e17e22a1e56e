"""The environment counter: reach a number in steps of one, then submit it. It shows whether a run learns to call in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Call, Observation, Tool
from mgrpo.environments.tools.game import Game

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


class Counter(Game):
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

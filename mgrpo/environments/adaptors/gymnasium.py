"""Games that a model plays in text: Gymnasium's, GEM's, and others with the same `reset` and `step`.

A turn is an action. This module finds the action in a turn, and writes observations as text.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgrpo.environments.environment import Call, Environment, Observation

_SEEDS = 2**31
"""Numpy's older generators take no larger seeds."""
_HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)


class Gymnasium(Environment):
    """Settings: which game, and how its actions are read."""

    name = "gymnasium"

    def __init__(
        self,
        *,
        env_id: str = "",
        make: str = "gymnasium:make",
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        action_pattern: str = "",
        is_repeatable: bool = False,
    ) -> None:
        """
        Args:
            env_id: the game's name; "" where `make` is its class.
            make: module:function that makes a game, as gem:make, textarena:make or my_game:Game.
            options: keyword arguments of `make`; with render_mode "ansi" the picture is the observation.
            actions: names of the actions of a game that numbers them, in their order.
            action_pattern: a regular expression; its first group, where it matches last, is the action. Default: the last
                name or number of an action in the turn, and the whole turn for games that take text.
            is_repeatable: the game draws from its own generator, which its seed initializes.
        """
        if make == "gymnasium:make" and not env_id:
            raise ValueError('gymnasium: got no env_id, expected the name of a game, as "FrozenLake-v1"')
        self._make, self._env_id, self._options = make, env_id, dict(options or {})
        self._names = tuple(actions)
        try:
            self._pattern = re.compile(action_pattern, re.DOTALL) if action_pattern else None
        except re.error as err:
            raise ValueError(f"gymnasium: action_pattern={action_pattern!r} is no regular expression: {err}") from err
        if self._pattern is not None and self._pattern.groups < 1:
            raise ValueError(
                f"gymnasium: action_pattern={action_pattern!r} has no group, expected one around the action"
            )
        self.is_repeatable = is_repeatable
        self._made: Callable[..., Any] | None = None
        self._game: Any = None
        self._seen = ""
        self._is_done = True

    def setup(self) -> None:
        self._made = _found(self._make)
        self._game = self._new_game()
        space = getattr(self._game, "action_space", None)
        if not _takes_text(space) and not hasattr(space, "n"):
            raise ValueError(
                f"gymnasium: {self._env_id or self._make} takes actions of {space}, expected numbered ones or text; "
                "wrap the game so that its step takes text"
            )
        if self._names and len(self._names) != getattr(space, "n", None):
            raise ValueError(f"gymnasium: got {len(self._names)} names of actions, but the actions are {space}")

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Observation:
        self._is_done, self._seen = False, ""
        if _is_arena(self._game):
            self._game = self._new_game()  # its wrappers keep observations of earlier games
            self._game.reset(num_players=1, seed=seed % _SEEDS)
            return Observation(text=self._heard())
        observation, _ = self._game.reset(seed=seed % _SEEDS)
        return Observation(text=self._shown(observation))

    def step(self, calls: Sequence[Call]) -> Sequence[Observation]:
        return [self._answered(str(call.arguments.get("text", ""))) for call in calls]

    def close(self) -> None:
        game, self._game = self._game, None
        if hasattr(game, "close"):  # GEM's games have none
            game.close()

    def _answered(self, text: str) -> Observation:
        if self._is_done:
            return Observation(text="The game is over.", failed=True, done=True)
        space = getattr(self._game, "action_space", None)
        action = self._text_action(text) if _takes_text(space) else self._numbered_action(text, space)
        if action is None:
            return Observation(text=f"No action was found; {self._expected(space)}.", failed=True)
        return self._played_arena(action) if _is_arena(self._game) else self._played(action)

    def _played(self, action: object) -> Observation:
        observation, reward, terminated, truncated, _ = self._game.step(action)
        self._is_done = bool(terminated or truncated)
        metrics = {"truncated": float(bool(truncated and not terminated))} if self._is_done else {}
        return Observation(text=self._shown(observation), reward=reward, done=self._is_done, metrics=metrics)

    def _played_arena(self, action: object) -> Observation:
        self._is_done, _ = self._game.step(action)
        if not self._is_done:
            return Observation(text=self._heard())
        ended = self._game.close()
        # Without a reward of its one player the game has no result, which differs from 0.
        rewards = ended[0] if isinstance(ended, tuple) and ended else None
        reward: Any = rewards.get(0) if isinstance(rewards, Mapping) else None
        return Observation(reward=reward, done=True)

    def _text_action(self, text: str) -> str | None:
        if self._pattern is None:
            return text.strip() or None
        found = list(self._pattern.finditer(text))
        return found[-1][1] if found else None

    def _numbered_action(self, text: str, space: Any) -> int | None:
        first = int(getattr(space, "start", 0))
        names = self._names or [str(first + number) for number in range(int(space.n))]
        chosen = text if self._pattern is None else self._text_action(text)
        longest_first = sorted(names, key=len, reverse=True)
        pattern = rf"(?<![\w.-])({'|'.join(map(re.escape, longest_first))})(?!\w|\.\d)"
        found = re.findall(pattern, chosen or "", flags=re.IGNORECASE)
        return first + [name.lower() for name in names].index(found[-1].lower()) if found else None

    def _expected(self, space: Any) -> str:
        wanted = "a text" if _takes_text(space) else f"one of {', '.join(self._names)}" if self._names else ""
        if not wanted:
            first = int(getattr(space, "start", 0))
            wanted = f"a number from {first} to {first + int(space.n) - 1}"
        return f"expected {wanted}" + (f", written as {self._pattern.pattern}" if self._pattern is not None else "")

    def _new_game(self) -> Any:
        assert self._made is not None, "setup comes first"
        return self._made(self._env_id, **self._options) if self._env_id else self._made(**self._options)

    def _shown(self, observation: object) -> str:
        picture = self._game.render() if getattr(self._game, "render_mode", None) == "ansi" else None
        if isinstance(picture, str):
            # Colours mark where the player is.
            return _HIGHLIGHTED.sub(r"[\1]", picture).strip("\n")
        return observation if isinstance(observation, str) else json.dumps(_plain(observation), ensure_ascii=False)

    def _heard(self) -> str:
        """A TextArena game's new messages since the last turn; some of its wrappers repeat everything."""
        _, heard = self._game.get_observation()
        if not isinstance(heard, str):
            return "\n".join(message for sender, message, *kind in heard if sender != 0 and not _is_own(*kind))
        new, self._seen = heard.removeprefix(self._seen), heard
        return new.strip()


def _found(make: str) -> Callable[..., Any]:
    module, _, name = make.partition(":")
    if not module or not name:
        raise ValueError(f"gymnasium: make={make!r}, expected module:function")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as err:
        raise ValueError(f"gymnasium: make={make!r} cannot be imported ({err}); install its package") from err
    except AttributeError as err:
        raise ValueError(f"gymnasium: make={make!r}: the module has no {name}") from err


def _is_arena(game: Any) -> bool:
    """True for a TextArena game: it returns observations on request, and rewards when closed."""
    return hasattr(game, "get_observation")


def _is_own(kind: object = None) -> bool:
    """True if a message repeats the only player's action, which some games send under the game's name."""
    return getattr(kind, "name", "") == "PLAYER_ACTION"


def _takes_text(space: Any) -> bool:
    return space is None or type(space).__name__ == "Text"


def _plain(value: Any) -> Any:
    """A value for JSON: arrays become lists, other objects text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)

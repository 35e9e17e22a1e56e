"""Games that draw from `random` and `numpy.random` as if they were alone in their process."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.Lock()


class PrivateRandom:
    """The state of the process's generators for one game, which is not changed by what others draw meanwhile."""

    def __init__(self) -> None:
        self._own: Any = None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Around the seeding of the game. If that does not touch the generators of the process, later steps need no lock."""
        with _LOCK:
            others = _state()
            try:
                yield
            finally:
                state = _state()
                self._own = None if _equal(state, others) else state
                _restore(others)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around a step of the game."""
        if self._own is None:
            yield
            return
        with _LOCK:
            others = _state()
            _restore(self._own)
            try:
                yield
            finally:
                self._own = _state()
                _restore(others)


def _state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _restore(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def _equal(first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    # numpy's state holds an array, which has no truth value.
    return first[0] == second[0] and _comparable(first[1]) == _comparable(second[1])


def _comparable(state: Any) -> Any:
    return None if state is None else (state[0], state[1].tobytes(), *state[2:])

"""Pickles, read without executing anything of them.

A pickle is a program that imports functions and calls them. Here an import of a name in the caller's list gives a record
class, whose call keeps the arguments, or a constant; any other import ends the reading.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any


class Forbidden(ValueError):
    """A pickle imports something that is not in the list."""


class StoredStorage:
    """The call of a function or a class by a pickle: its arguments, and the state that is set afterwards."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> StoredStorage:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def record(name: str) -> type[StoredStorage]:
    """A class of records, to stand for a class or a function of that name."""
    return type(name, (StoredStorage,), {})


def unpickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], Any],
    where: str,
    *,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The object in a pickle, made of records.

    Args:
        allowed: what stands for each (module, name) that may be imported.
        where: file in messages.
        persistent: gives the objects that the pickle only refers to.
    Raises:
        ValueError: it is not a pickle, or imports anything else (`Forbidden`); nothing of it was executed.
    """
    try:
        return _Unpickler(data, allowed, where, persistent).load()
    except Forbidden:
        raise
    except Exception as err:  # a damaged pickle can raise anything
        raise ValueError(f"{where} is damaged: it is not a complete pickle ({type(err).__name__}: {err})") from None


class _Unpickler(pickle._Unpickler):  # the one written in Python: in C, one byte code can ask for any amount of memory
    def __init__(
        self,
        data: bytes,
        allowed: Mapping[tuple[str, str], Any],
        where: str,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._where, self._persistent = allowed, where, persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise Forbidden(
                f"{self._where} is refused: it imports {module}.{name}, which weights do not need; nothing of it was "
                "executed. Such a file may be an attack: ask whoever made it"
            )
        return self._allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to objects outside it")
        return self._persistent(pid)

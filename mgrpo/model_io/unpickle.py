"""Pickles, read without executing anything of them.

A pickle is a program that imports functions and calls them. Here an import of a name in the caller's list gives a record
class, whose call keeps the arguments, or a constant; any other import ends the reading. torch's own restricted loading
(`weights_only`) is for files of torch.save alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any


class Forbidden(ValueError):
    """A pickle imports a name that is not in the list."""

    def __init__(self, where: str, imported: str) -> None:
        super().__init__(
            f"{where} is refused: it imports {imported}, which weights do not need; nothing of it was executed. Such a file "
            "may be an attack: ask whoever made it"
        )


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


def unpickle(data: bytes, allowed: Mapping[tuple[str, str], Any], where: str) -> Any:
    """The object in a pickle, made of records.

    Args:
        allowed: replacement for each (module, name) that may be imported.
        where: file in messages.
    Raises:
        ValueError: it is not a pickle, or imports anything else (`Forbidden`); nothing of it was executed.
    """
    try:
        return _Unpickler(data, allowed, where).load()
    except Forbidden:
        raise
    except Exception as err:  # a damaged pickle can raise anything
        raise ValueError(f"{where} is damaged: it is not a complete pickle ({type(err).__name__}: {err})") from None


class _Unpickler(pickle._Unpickler):  # the one written in Python: in C, one byte code can request any amount of memory
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._where = allowed, where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise Forbidden(self._where, f"{module}.{name}")
        return self._allowed[module, name]

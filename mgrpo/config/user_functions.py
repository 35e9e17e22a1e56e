"""Functions that a setting names: `file.py` or `package.module`, and the name in it."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mgrpo.processes.user_code import user_module


def user_function(setting: str, word: str, module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module, whose code runs here, once per process.

    Args:
        setting, word: what to call the function in errors: the setting's name and its value.
        module: the path of a file that ends in `.py`, or a module's dotted name.
    Raises:
        ValueError: there is no such file, module or function, or its code raises.
    """
    subject = f"{setting}: {word}"
    missing = "there is no module {name}; put its folder on PYTHONPATH, or write path/to/file.py:function"
    found = user_module(subject, module, missing=missing)
    function = getattr(found, name, None)
    if callable(function) and not inspect.isclass(function):
        return function
    others = [key for key, value in vars(found).items() if inspect.isfunction(value) and not key.startswith("_")]
    near = ", ".join(difflib.get_close_matches(name, others, n=3, cutoff=0.0)) or "none"
    problem = "is not a function" if hasattr(found, name) else "does not exist"
    raise ValueError(f"{subject}: {name} {problem}; functions there: {near}")


def check_one_argument(function: object, subject: str, usage: str) -> None:
    """Refuse what cannot be called with one argument.

    Args:
        subject, usage: the begin and the end of the error: what it is, and how it will be called.
    Raises:
        ValueError: it is not a function, or takes another number of arguments.
    """
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"{subject} is not a function; {usage}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(object())
    except TypeError as err:
        raise ValueError(f"{subject} cannot be called with one argument: {err}; {usage}") from err


def short_name(function: object) -> str:
    """The name of a function in messages; what Python prints of an object without one."""
    return getattr(function, "__qualname__", repr(function))


def name_of(function: Callable[..., Any] | type) -> str:
    """`package.module:NAME` or `/path/file.py:NAME`, by which another process finds the function or class.

    Raises:
        ValueError: it has no such name, or its file is a script that would do its work again.
    """
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    if module is None or not name.isidentifier() or getattr(module, name, None) is not function:
        raise ValueError(
            f"{function!r:.80} must be a function or class at the top of a module: other processes import it by name"
        )
    path = getattr(module, "__file__", None)
    if path is None:
        raise ValueError(f"{name} is in no file, from which other processes could import it; put it in a module")
    if module.__name__ == "__main__" and not _is_guarded(Path(path)):
        raise ValueError(
            f"{name} is in the script {path}, which other processes would run again to import it; put what the script does "
            'under `if __name__ == "__main__":`, or the function in a module'
        )
    is_alone = module.__name__ == "__main__" or (not module.__package__ and Path(path).name != "__init__.py")
    return f"{Path(path).resolve()}:{name}" if is_alone else f"{module.__name__}:{name}"


def as_names(value: object) -> object:
    """Functions and classes, alone, in a list or by name, as their names; other values as they are."""
    if isinstance(value, Mapping):
        return [f"{name}={as_names(item)}" for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [as_names(item) for item in value]
    return name_of(value) if callable(value) else value


def _is_guarded(script: Path) -> bool:
    """Whether a script asks if it is the one that was started."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)

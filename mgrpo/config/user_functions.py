"""Functions that a setting names: `file.py` or `package.module`, and the name in it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def user_function(setting: str, word: str, module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module, whose code runs here, once per process.

    Args:
        setting, word: what to call the function in errors: the setting's name and its value.
        module: the path of a file that ends in `.py`, or a module's dotted name.
    Raises:
        ValueError: there is no such file, module or function, or its code raises.
    """
    subject = f"{setting}: {word}"
    if module.endswith(".py") and not Path(module).is_file():
        raise ValueError(f"{subject}: there is no file {Path(module).resolve()}")
    try:
        found = _file_module(Path(module).resolve()) if module.endswith(".py") else importlib.import_module(module)
    except ModuleNotFoundError as err:
        raise ValueError(
            f"{subject} cannot be imported: there is no module {err.name}; put its folder on PYTHONPATH, or "
            "write path/to/file.py:function"
        ) from err
    # The user's module runs here, and may raise anything.
    except (Exception, SystemExit) as err:
        raise ValueError(f"{subject} cannot be imported: {type(err).__name__}: {err}") from err
    function = getattr(found, name, None)
    if callable(function) and not inspect.isclass(function):
        return function
    others = [key for key, value in vars(found).items() if inspect.isfunction(value) and not key.startswith("_")]
    near = ", ".join(difflib.get_close_matches(name, others, n=3, cutoff=0.0)) or "none"
    problem = "is not a function" if hasattr(found, name) else "does not exist"
    raise ValueError(f"{subject}: {name} {problem}; functions there: {near}")


def _file_module(file: Path) -> ModuleType:
    """The module that is the file; run once however many of its functions are named."""
    name = f"user_functions_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

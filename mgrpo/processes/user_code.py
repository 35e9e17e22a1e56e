"""Modules of the user's own, by a dotted name or by the path of a file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType


def user_module(subject: str, home: str, *, missing: str, raised: str = "", takes_files: bool = True) -> ModuleType:
    """The module, whose code runs here, once per process.

    Args:
        subject: how an error's text begins.
        home: `package.module`, or the path of a file that ends in `.py`.
        missing: the sentence about a module that does not exist, with {name} for its name or {err} for Python's words.
        raised: what to add where its code raises.
        takes_files: `home` may be a path.
    Raises:
        ValueError: there is no such file or module, or its code raises.
    """
    is_file = takes_files and home.endswith(".py")
    if is_file and (absent := missing_file(home)):
        raise ValueError(f"{subject}: {absent}")
    try:
        return _file_module(Path(home).resolve()) if is_file else importlib.import_module(home)
    except ModuleNotFoundError as err:
        raise ValueError(f"{subject} cannot be imported: {missing.format(name=err.name, err=err)}") from err
    # The user's module may raise anything.
    except (Exception, SystemExit) as err:
        raise ValueError(f"{subject} cannot be imported: {type(err).__name__}: {err}{raised}") from err


def missing_file(path: str) -> str:
    """The sentence for a file that does not exist; empty where it does."""
    return "" if Path(path).is_file() else f"there is no file {Path(path).resolve()}"


def _file_module(file: Path) -> ModuleType:
    """The module that is the file; run once, however many names are taken from it."""
    name = f"user_code_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

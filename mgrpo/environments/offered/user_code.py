"""What an entry of the user names: `package.module:attribute`, or `path/to/file.py:attribute`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any


def loaded(entry: str) -> Any:
    """The attribute; its module's code runs here, once in a process.

    Raises:
        ValueError: there is no such module, file or attribute, or its code raises.
    """
    home, _, attribute = entry.rpartition(":")
    if home.endswith(".py") and not Path(home).is_file():
        raise ValueError(f"{entry}: there is no file {Path(home).resolve()}")
    try:
        module = _file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except ModuleNotFoundError as err:
        raise ValueError(
            f"{entry} cannot be imported: there is no module {err.name}; put its folder on PYTHONPATH, or write "
            "path/to/file.py:attribute"
        ) from err
    # The user's module may raise anything.
    except (Exception, SystemExit) as err:
        raise ValueError(f"{entry} cannot be imported: {type(err).__name__}: {err}") from err
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            names = [other for other in vars(found) if not other.startswith("_")]
            near = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4)) or "none with a similar name"
            raise ValueError(f"{entry}: {name} does not exist; there is {near}")
        found = getattr(found, name)
    return found


def _file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"environment_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

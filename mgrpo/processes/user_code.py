"""A user's code: modules, by a dotted name or by the path of a file, and the frames of its errors."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST_FRAMES = 8


def user_module(subject: str, home: str, *, missing: str, raised: str = "", takes_files: bool = True) -> ModuleType:
    """Import the module, whose code runs here, once per process.

    Args:
        subject: how an error's text begins.
        home: `package.module`, or the path of a file that ends in `.py`.
        missing: the sentence about a module that does not exist, with {name} for its name or {err} for Python's words.
        raised: text to add if its code raises.
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


class UserCodeError(RuntimeError):
    """A user's code has failed or done something forbidden. The message is one sentence; `where` is added as a note.

    Frames of this package and of installed ones would hide the line that its author needs.
    """

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.add_note(where)


def own_frames(stack: Sequence[traceback.FrameSummary]) -> str:
    """Innermost frames of the user's own code as Python prints them; without any, the innermost of all."""
    own = [frame for frame in stack if not _is_installed(frame.filename)]
    return "".join(traceback.format_list(own[-_MOST_FRAMES:] or stack[-1:])).rstrip()


def definition(function: Callable[..., Any]) -> str:
    """The place of a function, or of an object's `__call__`, in the form of a frame; empty for one of C."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' if code else ""


def _is_installed(file: str) -> bool:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = str(Path(__file__).resolve().parents[1])
    return file.startswith(("<frozen ", *(f"{folder}/" for folder in (*folders, own))))


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

"""Paths that a program may read: the interpreter's library, the installed packages, shared libraries.

Within the walls they keep their names, except below the folders that the walls themselves fill.
"""

from __future__ import annotations

import os
import sys
import sysconfig

_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_ELSEWHERE = "/outside"
_FILLED = ("/tmp", "/dev", "/proc", _ELSEWHERE)
_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")


def readable_paths() -> tuple[str, ...]:
    """Existing paths, resolved; system folders that are links are also listed as links."""
    links = [path for path in _SYSTEM if os.path.islink(path)]
    wanted = (*_SYSTEM, *_FILES, os.path.join(sys.base_prefix, "lib"), *search_path())
    real = [os.path.realpath(path) for path in wanted if os.path.exists(path)]
    return tuple(dict.fromkeys(links + real))


def search_path() -> tuple[str, ...]:
    """Existing folders of a program's `sys.path`: the standard library and installed packages, without `.pth` files and PYTHONPATH."""
    standard = os.path.realpath(os.path.dirname(os.__file__))
    packages = [os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    wanted = (standard, os.path.join(standard, "lib-dynload"), *packages)
    return tuple(path for path in dict.fromkeys(wanted) if os.path.isdir(path))


def inner_path(path: str) -> str:
    """Name within the walls of a readable path. Two paths never share a name, nor does one hide a folder of the walls."""
    is_filled = any((path + "/").startswith(folder + "/") for folder in _FILLED)
    return _ELSEWHERE + path if is_filled else path


def outer_path(name: str) -> str:
    """The path with this `inner_path`."""
    return name.removeprefix(_ELSEWHERE)

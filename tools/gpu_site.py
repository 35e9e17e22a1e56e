"""The parts of torch 2.13 that mgrpo needs where the machine has an older torch; `tools/gpu_whole_run.py join` copies it as sitecustomize.py.

Python imports that in every process. Nothing is imported here before the process itself imports it.
"""

import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

VARLEN = "torch.nn.attention.varlen"
GROUPED = ("varlen_attn", "_varlen_attn")
"""Its functions to which torch 2.13 added `enable_gqa`; the other arguments of mgrpo's calls are those of torch 2.11."""


def complete(module: ModuleType) -> None:
    """Add the argument `enable_gqa` to the functions of `VARLEN` that lack it."""
    for name in GROUPED:
        attend = getattr(module, name, None)
        if attend is not None and "enable_gqa" not in signature_of(attend).parameters:
            setattr(module, name, with_enable_gqa(attend))


def signature_of(attend: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, or of the function that a custom op was made of."""
    return inspect.signature(getattr(attend, "_init_fn", attend))


def with_enable_gqa(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend` with the argument `enable_gqa`, which is dropped.

    Torch before 2.13 does not compare the numbers of heads, and its kernels take fewer heads of key and value than of query,
    forwards and backwards, so that none is repeated.
    """

    def grouped(*args: Any, enable_gqa: bool = False, **settings: Any) -> Any:
        return attend(*args, **settings)

    own = signature_of(attend)
    added = inspect.Parameter("enable_gqa", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    grouped.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # type: ignore[attr-defined]
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

        def execute_and_complete(module: ModuleType) -> None:
            execute(module)
            complete(module)

        spec.loader.exec_module = execute_and_complete  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())

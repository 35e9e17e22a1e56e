"""The verifiers by name. Their modules are imported when they are first asked for."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Sequence

from mgrpo.rewards.verifier import RemoteVerifier, Verifier

VerifierClass = type[Verifier] | type[RemoteVerifier]

_MODULES: dict[str, tuple[str, ...]] = {
    "numbers": ("integer", "gsm8k"),
    "mathematics": ("math", "strict_math"),
    "strings": ("flan", "string_matcher", "string_f1", "puzzle", "re_search_f1", "re_search"),
    "lengths": ("max_length", "up_to_max_length", "passthrough"),
    "accuracy": ("trl_accuracy",),
    "ifeval": ("ifeval", "ifeval_old"),
    "code": ("code", "code_stdio"),
    "judge": (
        "general-quality",
        "general-quality_ref",
        "general-quality_rubric",
        "general-safety",
        "general-factuality",
        "general-creative_writing",
        "general-refusal",
        "general-web_instruct_general_verifier",
    ),
    "rubric": ("rubric",),
}
"""Modules of `mgrpo.rewards.verifiers` and the names that each defines."""
_HOME = {name: f"mgrpo.rewards.verifiers.{module}" for module, names in _MODULES.items() for name in names}
_added: dict[str, VerifierClass] = {}


def known_verifiers() -> tuple[str, ...]:
    """Names that a row's `dataset` may hold."""
    return tuple(sorted(_HOME.keys() | _added.keys()))


def find(name: str) -> VerifierClass:
    """The verifier called `name`, in any case; an unknown name is a ValueError that says which are near."""
    key = name.lower() if isinstance(name, str) else ""
    if key in _added:
        return _added[key]
    if key in _HOME:
        return _classes(_HOME[key])[key]
    near = difflib.get_close_matches(str(name).lower(), known_verifiers(), n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown verifier {name!r}; {meant}known verifiers: {', '.join(known_verifiers())}")


def add_modules(modules: Sequence[str]) -> None:
    """Make the verifiers of the user's own modules known by their names (`verifier_modules`)."""
    for module in modules:
        try:
            found = _classes(module)
        except ImportError as err:
            raise ValueError(f"verifier_modules: {module} cannot be imported ({err}); is it on PYTHONPATH?") from err
        if not found:
            raise ValueError(f"verifier_modules: {module} defines no subclass of mgrpo.rewards.verifier.Verifier")
        for name in sorted(found.keys() & _HOME.keys()):
            raise ValueError(f"verifier_modules: {module} defines {name}, which exists already; choose another name")
        _added.update(found)


def _classes(module: str) -> dict[str, VerifierClass]:
    members = vars(importlib.import_module(module)).values()
    return {
        member.name.lower(): member
        for member in members
        if isinstance(member, type)
        and issubclass(member, (Verifier, RemoteVerifier))
        and not inspect.isabstract(member)
        and member.__module__ == module
    }

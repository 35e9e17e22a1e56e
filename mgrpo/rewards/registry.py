"""The verifiers by name. Their modules are imported on first use."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import site
from collections.abc import Sequence

from mgrpo.processes.user_code import user_module
from mgrpo.rewards.verifier import RemoteVerifier, Verifier

VerifierClass = type[Verifier] | type[RemoteVerifier]

_MODULES: dict[str, tuple[str, ...]] = {
    "numbers": ("integer", "gsm8k"),
    "mathematics": ("math", "strict_math"),
    "open_instruct_math": ("math_open_instruct",),
    "strings": ("flan", "string_matcher", "string_f1", "puzzle", "re_search_f1", "re_search"),
    "length_rewards": ("max_length", "up_to_max_length", "passthrough"),
    "accuracy": ("trl_accuracy",),
    "ifeval": ("ifeval", "ifeval_old"),
    "code": ("code", "code_stdio"),
    "llm_judge": (
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
UNSCORED = "passthrough"
"""The verifier of rows that an environment rewards."""
_INTERNAL = frozenset({"trl_accuracy"})
"""Verifiers that reward functions use, not rows."""
_added: dict[str, VerifierClass] = {}


def known_verifiers() -> tuple[str, ...]:
    """Names that a row's `dataset` may hold."""
    return tuple(sorted((_HOME.keys() | _added.keys()) - _INTERNAL))


def find(name: str) -> VerifierClass:
    """The verifier called `name`, in any case; ValueError, with similar names, for an unknown one."""
    key = name.lower() if isinstance(name, str) else ""
    if key in _added:
        return _added[key]
    if key in _HOME:
        return _classes(_HOME[key])[key]
    near = difflib.get_close_matches(str(name).lower(), known_verifiers(), n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown verifier {name!r}; {meant}known verifiers: {', '.join(known_verifiers())}")


def add_modules(modules: Sequence[str]) -> None:
    """Add the verifiers of the user's own modules (`verifier_modules`); all of them, or none.

    Raises:
        ValueError: a module that cannot be imported, defines no verifier, or one whose name is missing or taken.
    """
    found: dict[str, VerifierClass] = {}
    for module in modules:
        for name, verifier in _own_verifiers(module).items():
            if name in _HOME:
                raise ValueError(
                    f"verifier_modules: {module} defines {name}, which exists already; choose another name"
                )
            other = found.get(name) or _added.get(name)
            if other is not None and other.__module__ != module:
                raise ValueError(
                    f"verifier_modules: {module} and {other.__module__} both define {name}; choose another name for one"
                )
            found[name] = verifier
    _added.update(found)


def module_folders(modules: Sequence[str]) -> list[str]:
    """Folders that must be on `sys.path` for these modules to be imported, besides those where packages are installed."""
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    folders: dict[str, None] = {}
    for module in modules:
        spec = importlib.import_module(module.partition(".")[0]).__spec__
        if spec is None:
            continue
        places = spec.submodule_search_locations
        if places is None:
            places = [spec.origin] if spec.has_location and spec.origin else []
        parents = (os.path.dirname(os.path.abspath(place)) for place in places)
        folders.update(
            dict.fromkeys(parent for parent in parents if os.path.exists(parent) and parent not in installed)
        )
    return list(folders)


def _own_verifiers(module: str) -> dict[str, VerifierClass]:
    """The verifiers that a user's module defines."""
    user_module(
        f"verifier_modules: {module}",
        module,
        missing="{err}; give names as in an import statement, of modules on PYTHONPATH",
        takes_files=False,
    )
    classes = _defined_in(module)
    if not classes:
        raise ValueError(f"verifier_modules: {module} defines no subclass of mgrpo.rewards.verifier.Verifier")
    found: dict[str, VerifierClass] = {}
    for verifier in classes:
        name = getattr(verifier, "name", None)
        if not isinstance(name, str) or not name.strip():
            came = f"the name {name!r:.80}" if hasattr(verifier, "name") else "no name"
            raise ValueError(
                f"verifier_modules: {module}: the verifier {verifier.__name__} has {came}; give the class a text that rows "
                'call it by, for example name = "mine"'
            )
        other = found.setdefault(name.lower(), verifier)
        if other is not verifier:
            raise ValueError(
                f"verifier_modules: {module}: {other.__name__} and {verifier.__name__} are both called {name.lower()}; "
                "choose another name for one"
            )
    return found


def _classes(module: str) -> dict[str, VerifierClass]:
    return {member.name.lower(): member for member in _defined_in(module)}


def _defined_in(module: str) -> list[VerifierClass]:
    """The verifiers that a module defines, without those that it only imports; a class under two names appears once."""
    members = {
        member: None
        for member in vars(importlib.import_module(module)).values()
        if isinstance(member, type)
        and issubclass(member, (Verifier, RemoteVerifier))
        and not inspect.isabstract(member)
        and member.__module__ == module
    }
    return list(members)

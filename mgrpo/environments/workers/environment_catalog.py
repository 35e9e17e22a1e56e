"""Tools and environments by the users' entries: names of this package, their own code, classes of TRL and Open Instruct."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgrpo.environments.adaptors.open_instruct_environments import OpenInstruct, is_open_instruct
from mgrpo.environments.adaptors.trl_environments import Trl
from mgrpo.environments.adaptors.trl_rollout import TrlRollout, is_trl_rollout
from mgrpo.environments.environment import Environment
from mgrpo.environments.offered.agent import Agent, FunctionAgent
from mgrpo.environments.offered.calling import TimedCalls
from mgrpo.environments.offered.functions import FunctionTool
from mgrpo.environments.offered.offered_environment import OfferedEnvironment
from mgrpo.environments.offered.program import Program
from mgrpo.environments.offered.toolbox import Toolbox
from mgrpo.processes.user_code import user_module
from mgrpo.processes.visible import TOOL_VARIABLES

_HOME = "mgrpo.environments"
NAMES = {
    "python": f"{_HOME}.tools.python:Python",
    "search": f"{_HOME}.tools.search:Search",
    "calculate": f"{_HOME}.tools.calculate:Calculate",
    "mcp": f"{_HOME}.adaptors.mcp:Mcp",
    "openenv": f"{_HOME}.adaptors.openenv:OpenEnv",
    "gymnasium": f"{_HOME}.adaptors.gymnasium:Gymnasium",
}
"""Names of this package, and the places of their code."""
NAMES |= {
    "code": NAMES["python"],
    "serper_search": NAMES["search"],
    "s2_search": NAMES["search"],
    "generic_mcp": NAMES["mcp"],
}
_EXAMPLES = {
    "counter": "examples/game/games.py:Counter",
    "guess_number": "examples/game/games.py:GuessNumber",
}
"""Environments that Open Instruct has under these names, and the repository as examples."""
_CALLED_SO = frozenset({"code", "serper_search", "s2_search"})
"""Second names of tools, by which models call them as well."""
TRL = "trl:"
"""Prefix of a class in TRL's form; with a call name it is for the rows that have this name in their column `environment`."""
PROGRAM = "rollout:"
"""Prefix of a user's program that drives the model; it is then the only entry."""
AGENTS = {
    "command": f"{_HOME}.launch.command:CommandAgent",
    "verifiers": f"{_HOME}.adaptors.verifiers:Verifiers",
}
AGENT = "agent:"
"""Prefix of an agent that is given an address of the model, a name of `AGENTS` or the user's; it is then the only entry."""
_MISSING = (
    "there is no module {name}; put its folder on PYTHONPATH (for another env_python, install it there), or write "
    "path/to/file.py:attribute"
)
_RAISED = (
    ". Tools are imported by processes that have the arguments of the run's command, but only those variables of its "
    f"environment that hold no secrets, and {TOOL_VARIABLES}*; if it reads another one, name it so, or put the tool in a "
    "module that does not read it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One tool or environment in a user's settings."""

    entry: str
    """A name of `NAMES`, or `module:attribute` or `path/to/file.py:attribute`, also after `TRL` or `PROGRAM`."""
    call_name: str = ""
    """Another name for its only tool."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments; a function has only `is_repeatable`."""

    def to_json(self) -> dict[str, Any]:
        return {"entry": self.entry, "call_name": self.call_name, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Spec:
        return cls(**values)


def built(specs: Sequence[Spec], calls: TimedCalls | None = None) -> Toolbox:
    """A toolbox of new environments; `setup` opens them.

    Args:
        calls: makes their steps, within their limits; default: the usual ones.
    Raises:
        ValueError: everything that cannot be built, with its entry.
    """
    environments, problems = [], []
    for spec in specs:
        try:
            environments.append(_offered(spec, calls))
        except ValueError as err:
            problems.append(str(err))
    if problems:
        raise ValueError("; ".join(problems))
    return Toolbox(environments)


def _offered(spec: Spec, calls: TimedCalls | None) -> OfferedEnvironment:
    is_trl = spec.entry.startswith(TRL)
    is_program = spec.entry.startswith(PROGRAM)
    is_agent = spec.entry.startswith(AGENT)
    entry = spec.entry.removeprefix(TRL).removeprefix(PROGRAM).removeprefix(AGENT)
    found = _found(entry, {} if is_program else AGENTS if is_agent else NAMES)
    make = _program if is_program else _agent if is_agent else _trl if is_trl else _environment
    try:
        environment = make(found, spec)
    # The user's own code runs here, and may raise anything.
    except (Exception, SystemExit) as err:
        problem = str(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {err}"
        # Their values may be secrets.
        settings = f" with the settings {', '.join(spec.settings)}" if spec.settings else ""
        if spec.entry in NAMES and not spec.settings:
            settings = " without settings in tool_configs"
        raise ValueError(f"{entry} cannot be made{settings}: {problem}") from err
    own_name = environment.name or type(environment).__name__
    name = spec.call_name or (spec.entry if spec.entry in NAMES else own_name)
    return OfferedEnvironment(
        environment,
        name=name,
        entry=entry,
        call_name=name if spec.entry in _CALLED_SO else "" if is_trl else spec.call_name,
        is_alternative=is_trl and bool(spec.call_name),
        calls=calls,
    )


def _found(entry: str, names: Mapping[str, str]) -> Any:
    if ":" in entry:
        return _named(entry)
    if entry in names:
        return _named(names[entry])
    near = difflib.get_close_matches(entry, names, n=2, cutoff=0.6)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    if names is NAMES and entry in _EXAMPLES:
        meant = f"the repository has it as {_EXAMPLES[entry]}; "
    choices = ", ".join([*names, "package.module:name"])
    raise ValueError(f"there is no tool {entry}; {meant}give one of {choices} or path/to/file.py:name")


def _named(entry: str) -> Any:
    """The attribute of a module that an entry names.

    Raises:
        ValueError: there is no such module, file or attribute, or its code raises.
    """
    home, _, attribute = entry.rpartition(":")
    found: Any = user_module(entry, home, missing=_MISSING, raised=_RAISED)
    for name in attribute.split("."):
        if not hasattr(found, name):
            names = [other for other in vars(found) if not other.startswith("_")]
            near = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4)) or "none with a similar name"
            raise ValueError(f"{entry}: {name} does not exist; there is {near}")
        found = getattr(found, name)
    return found


def _trl(found: Any, spec: Spec) -> Environment:
    return Trl(found, **spec.settings)


def _program(found: Any, spec: Spec) -> Environment:
    if inspect.isclass(found) and issubclass(found, Program):
        return found(**spec.settings)
    return TrlRollout(found, **spec.settings) if is_trl_rollout(found) else Program(found, **spec.settings)


def _agent(found: Any, spec: Spec) -> Environment:
    if inspect.isclass(found) and issubclass(found, Agent):
        return found(**spec.settings)
    return FunctionAgent(found, **spec.settings)


def _environment(found: Any, spec: Spec) -> Environment:
    if inspect.isclass(found) and issubclass(found, Environment):
        return found(**spec.settings)
    if is_open_instruct(found):
        return OpenInstruct(found, call_name=spec.call_name, **spec.settings)
    if callable(found) and not inspect.isclass(found):
        return FunctionTool(found, **spec.settings)
    raise ValueError(
        "it is neither a function, nor a subclass of mgrpo.environments.environment.Environment, nor an environment of Open "
        f"Instruct; write {TRL}{spec.entry} for a class in TRL's form, whose public methods are the tools"
    )

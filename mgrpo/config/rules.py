"""How rules read a configuration: by the names of their parameters.

A rule is a generator of sentences whose parameters are settings (`zero_stage`), properties of `Config` or of a section (`batch_size`,
`has_turns`), `layout`, `provenance`, `config`, or facts of the run that `validate` brings (`world_size`, `hf_config`). It is not judged
where one of them has, or follows from, a value that is unsound by itself, so that one mistake makes one sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any, cast

from mgrpo.config.annotations import Needs, Rule
from mgrpo.config.derived import layout_of
from mgrpo.config.fields import section_types, settings
from mgrpo.config.schema import Config


class UnsoundError(Exception):
    """A rule reads a setting whose value is unsound."""


@dataclass(frozen=True, slots=True)
class _Sound:
    """A `Config`, or one of its sections, of which unsound settings cannot be read, neither directly nor by a property or method."""

    own: object
    unsound: Collection[str]

    def __getattr__(self, name: str) -> Any:
        # The settings of a configuration are those of its sections, of which one has a setting of its own name.
        if name in self.unsound and not isinstance(self.own, Config):
            raise UnsoundError(name)
        kind = getattr(type(self.own), name, None)
        if isinstance(kind, (property, FunctionType)):
            return kind.__get__(self)
        value = getattr(self.own, name)
        return _Sound(value, self.unsound) if type(value) in section_types().values() else value


@dataclass(frozen=True, slots=True)
class Reading:
    """A configuration as rules read it."""

    config: Config
    unsound: Collection[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """The value of a rule's parameter; UnsoundError where it depends on an unsound setting."""
        if name in self.facts:
            return self.facts[name]
        if setting := settings().get(name):
            if name in self.unsound:
                raise UnsoundError(name)
            return getattr(getattr(self.config, setting.section), name)
        config = cast(Config, _Sound(self.config, self.unsound))
        if name == "config":
            return config
        if name == "layout":
            return layout_of(config, self["world_size"])
        return getattr(getattr(config, section) if (section := section_of(name)) else config, name)

    def find(self, *rules: Rule) -> list[str]:
        """The sentences of all rules that can be judged, in their order."""
        return [sentence for rule in rules for sentence in self._judge(rule)]

    def has(self, *names: str) -> bool:
        """Whether nothing of this depends on an unsound setting."""
        try:
            for name in names:
                self[name]
        except UnsoundError:
            return False
        return True

    def holds(self, need: Needs) -> bool:
        """Whether a setting that needs this has an effect."""
        return need.holds(**{name: self[name] for name in parameters(need.holds)})

    def _judge(self, rule: Rule) -> list[str]:
        try:
            return list(rule(**{name: self[name] for name in parameters(rule)}))
        except UnsoundError:
            return []


@cache
def parameters(rule: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a rule reads."""
    return tuple(inspect.signature(rule).parameters)


@cache
def section_of(name: str) -> str:
    """The section that has a property of this name; empty where none has."""
    return next((section for section, kind in section_types().items() if name in vars(kind)), "")

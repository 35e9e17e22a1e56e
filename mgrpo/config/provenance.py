"""Where the values of a configuration come from, and the notes and problems found while reading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mgrpo.models.hf_files.hub import HubSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The history of a `Config`, which comparisons ignore."""

    preset: str = "mgrpo"
    """The preset whose defaults apply."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The values of settings that it has in place of the schema's."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source of every setting that is not at its default: "flag", "file F", "preset P", "argument", "alias A (flag)", "derived"."""
    is_python: bool = False
    """Whether the values came from Python, where a sentence has no flags."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: each alias that was used, each name without effect."""
    problems: tuple[str, ...] = ()
    """Mistakes found while reading; `validate` lists them before its own."""
    unsound: frozenset[str] = frozenset()
    """Settings whose value could not be read; they hold defaults and are not checked."""
    due: Mapping[str, float | None] = field(default_factory=dict)
    """Settings in steps that `counted` works out: a share of the run, or, for None, a pass over the data; until then they hold 1."""
    has_prompt_limit: bool = True
    """Whether prompts have a limit beside the model's; where nobody has set one, `bounded` and `fitted` say how long they may be."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Values that were given although they follow from others; `validate` compares."""
    services: Mapping[str, str] = field(default_factory=dict)
    """Addresses of services by the aliases that gave them, for tools that the caller of a run brings."""
    snapshots: Mapping[str, HubSnapshot] = field(default_factory=dict)
    """The folder on this machine for each setting that holds a name on the Hub."""

    def not_given(self, **values: object) -> str:
        """A clause about those of `values` that nobody gave, and where they come from; empty where all were given."""
        origins = {name: self.sources.get(name, "by default").replace("preset", "of preset") for name in values}
        chosen = [
            f"{name}={values[name]} {origin}"
            for name, origin in origins.items()
            if origin.startswith(("by default", "of preset"))
        ]
        return f" ({' and '.join(chosen)} {'was' if len(chosen) == 1 else 'were'} not given)" if chosen else ""

    def folder(self, setting: str, value: str | None) -> str | None:
        """Where the model lies that `value` of a setting names."""
        found = self.snapshots.get(setting)
        return str(found.folder) if found else value

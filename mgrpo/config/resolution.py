"""The state in which values from several places become one configuration: who gave what, and what it means.

Flag > file > preset > default. An alias, a name that is no setting and means some, has the rank of the place that gave it; what
it means is put here by a room above.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mgrpo.config.fields import build, settings, shown
from mgrpo.config.provenance import Provenance
from mgrpo.config.schema import Config

PRESET, FILE, FLAG = 1, 2, 3
"""Ranks of the places that values come from; a default has rank 0."""


@dataclass(slots=True, kw_only=True)
class Layer:
    """The values of one file or one command line, with the right types."""

    rank: int
    origin: str
    values: dict[str, object] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)
    """Settings whose text could not be read, by their own name or by one that sets them."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user about how they were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One value, and where it comes from."""

    value: Any
    rank: int
    origin: str
    via: str = ""
    """The aliases that gave it."""
    is_weak: bool = False
    """Gives way to the same setting by its own name."""

    @property
    def source(self) -> str:
        """For the provenance of a setting."""
        return f"alias {self.via} ({self.origin})" if self.via else self.origin


class Resolution:
    """The value given under every name, and the notes and problems that come of them."""

    def __init__(
        self,
        *,
        world_size: int,
        preset: str = "mgrpo",
        defaults: Mapping[str, object] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        """
        Args:
            world_size: learner ranks that were started.
            defaults: the preset's values of settings.
            notes: where the preset differs from what its name promises.
        """
        self.preset, self.defaults, self.started_ranks = preset, dict(defaults or {}), world_size
        self.by_preset = Given(value=None, rank=PRESET, origin=f"preset {preset}")
        self.given = {name: replace(self.by_preset, value=value) for name, value in self.defaults.items()}
        """Settings by name, those of the preset included."""
        self.peers: dict[str, Given] = {}
        """Names that are no settings."""
        self.problems: list[str] = []
        self.notes: list[str] = [*notes]
        self.used: dict[str, list[str]] = {}
        self.unsound: set[str] = set()
        self.expected: dict[str, Any] = {}
        self.due: dict[str, float | None] = {}
        self.services: dict[str, str] = {}
        self.has_prompt_limit = True

    def add(self, layer: Layer) -> None:
        """Add a layer of higher rank than those before."""
        self.notes.extend(layer.notes)
        for name, value in layer.values.items():
            target = self.given if name in settings() else self.peers
            target[name] = Given(value=value, rank=layer.rank, origin=layer.origin)
        self.unsound |= layer.unsound

    def value(self, name: str) -> Any:
        """Present value of a setting."""
        return self.given[name].value if name in self.given else settings()[name].default

    def peer(self, name: str, default: Any = None) -> Any:
        """Value given under a name that is no setting; `default` when none was."""
        given = self.peers.get(name)
        return default if given is None or given.value is None else given.value

    def peer_object(self, name: str) -> dict[str, Any]:
        """The JSON object given under a name that is no setting; empty where none was given, or something else, which is a problem."""
        text = self.peer(name, "{}")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        self.problems.append(f"{name}={text} must be a JSON object; a file of that name is not read")
        return {}

    def rank(self, *names: str) -> int:
        """Highest rank at which one of `names` was given; 0 where none was."""
        found = (self.given.get(name) or self.peers.get(name) for name in names)
        return max((given.rank for given in found if given), default=0)

    @property
    def world_size(self) -> int:
        """Learner ranks: those given, else those started."""
        return self.peer("world_size") or sum(self.value("num_learners_per_node")) or self.started_ranks

    @property
    def data_parallel(self) -> int | None:
        """Data-parallel ranks; None for a layout that does not divide."""
        axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        model = 1
        for axis in axes:
            model *= self.value(axis)
        divides = model > 0 and self.world_size >= model and self.world_size % model == 0
        return self.world_size // model if divides else None

    @property
    def sharing_ranks(self) -> int | None:
        """Data x context ranks, among which ZeRO shares; None for a layout that does not divide."""
        return self.data_parallel and self.data_parallel * self.value("context_parallel_size")

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps per training step."""
        return max(self.value("num_epochs") * self.value("num_mini_batches"), 1)

    def put(self, target: str, value: object, *names: str, weak: bool = False) -> None:
        """Set `target` to `value`, which the aliases `names` mean; the preset where none of them was given."""
        aliases = {name: self.peers[name] for name in names if name in self.peers}
        by = max(aliases.values(), key=lambda given: given.rank, default=self.by_preset)
        via = ", ".join(aliases)
        new = Given(value=value, rank=by.rank, origin=by.origin, via=via, is_weak=weak)
        old = self.given.get(target)
        if weak and self.value(target) == value:
            return
        if old is not None and old.rank == new.rank and not old.is_weak and old.value != value:
            if weak:
                return
            if old.via or old.rank > PRESET:
                other = f"{old.via} means {shown(old.value)}" if old.via else f"{target}={shown(old.value)} is given"
                self.problems.append(
                    f"{via or new.origin} means {target}={shown(value)}, but {other} ({old.origin}); keep one of them"
                )
                self.unsound.add(target)
                return
        if old is not None and old.rank > new.rank:
            if old.value != value:
                self.used.setdefault(via, []).append(f"{target} ({shown(old.value)}, {old.source} wins)")
            return
        self.given[target] = new
        if via:
            self.used.setdefault(via, []).append(f"{target} ({shown(value)})")

    def put_when_counted(self, target: str, alias: str, *, share: float | None = None) -> None:
        """Let `target` be due after each share of the run, or without one after each pass over the data."""
        self.put(target, 1, alias)
        if self.given[target].via == alias:
            self.due[target] = share
            unit = "a pass over the data" if share is None else f"{shown(share)} of the run"
            self.used[alias] = [f"{target} (the steps of {unit})"]

    def derive(self, target: str, value: object, note: str) -> None:
        """Set a setting that was not given."""
        self.given[target] = Given(value=value, rank=PRESET, origin="derived")
        self.notes.append(note)

    def config(self, *, explained: Mapping[str, str] | None = None) -> Config:
        """The result; `explained` are sentences for the notes of some aliases."""
        for via, targets in self.used.items():
            note = f"; {explained[via]}" if explained and via in explained else ""
            self.notes.append(f"{via} -> {', '.join(targets)}{note}")
        provenance = Provenance(
            preset=self.preset,
            defaults=self.defaults,
            sources={name: given.source for name, given in self.given.items()},
            notes=tuple(dict.fromkeys(self.notes)),
            problems=tuple(dict.fromkeys(self.problems)),
            unsound=frozenset(self.unsound),
            due=self.due,
            services=self.services,
            has_prompt_limit=self.has_prompt_limit,
            expected=self.expected,
        )
        values = {name: given.value for name, given in self.given.items() if name not in self.unsound}
        return build(values, provenance)

"""From what was said, and by whom, to the value of every setting: precedence, presets, aliases, conflicts.

Flag > file > preset > default. An alias has the rank of whoever used it. Whether the values make sense together is
`validate`'s question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgrpo.config.fields import build, settings
from mgrpo.config.peers import translate
from mgrpo.config.peers.names import TRL, table
from mgrpo.config.peers.presets import PRESET_NOTES, PRESETS
from mgrpo.config.provenance import Provenance
from mgrpo.config.schema import Config

PRESET, FILE, FLAG = 1, 2, 3
"""Ranks of those who can say something; a default has rank 0."""
LOUD = (
    "sequence_parallel_size",
    "max_prompt_length",
    "rho_mask_sequence_level",
    "activation_memory_budget",
    "cp_strategy",
    "deepspeed_zpg",
)
"""Aliases whose note is worth a line in every run: the same word means something else elsewhere."""


@dataclass(slots=True, kw_only=True)
class Layer:
    """What one file or one command line says, as values of the right types."""

    rank: int
    origin: str
    values: dict[str, object] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)
    """Names whose text could not be understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One value, and who gave it."""

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


def resolve(layers: Iterable[Layer], *, preset: str | None, world_size: int, problems: Sequence[str] = ()) -> Config:
    """The config that `layers` and `preset` come to, its provenance with every note and problem."""
    layers = list(layers)
    preset = preset or "mgrpo"
    found = Resolution(preset=preset if preset in PRESETS else "mgrpo", world_size=world_size)
    found.problems.extend(problems)
    if preset not in PRESETS:
        found.problems.append(f"preset={preset} does not exist; choose from {', '.join(PRESETS)}")
    for layer in layers:
        found.hear(layer)
    found.judge_names()
    translate.apply(found)
    return found.config()


class Resolution:
    """The state of `resolve`, and what the translations of `translate` may ask and say."""

    def __init__(self, *, preset: str, world_size: int) -> None:
        self.preset, self.started_ranks = preset, world_size
        self.preset_said = Said(value=None, rank=PRESET, origin=f"preset {preset}")
        self.own = {
            name: Said(value=value, rank=PRESET, origin=f"preset {preset}") for name, value in PRESETS[preset].items()
        }
        self.peers: dict[str, Said] = {}
        self.problems: list[str] = []
        self.notes: list[str] = [*PRESET_NOTES.get(preset, ())]
        self.used: dict[str, list[str]] = {}
        self.unsound: set[str] = set()
        self.expected: dict[str, object] = {}

    def hear(self, layer: Layer) -> None:
        """Take in a layer of higher rank than those before."""
        for name, value in layer.values.items():
            target = self.own if name in settings() else self.peers
            target[name] = Said(value=value, rank=layer.rank, origin=layer.origin)
        for name in layer.unsound:
            self.unsound.update((name,) if name in settings() else table()[name].to)

    def value(self, name: str) -> Any:
        """Present value of a setting."""
        return self.own[name].value if name in self.own else settings()[name].default

    def peer(self, name: str, default: Any = None) -> Any:
        """Value given under a name of the table; `default` when none was."""
        said = self.peers.get(name)
        return default if said is None or said.value is None else said.value

    def rank(self, *names: str) -> int:
        """Highest rank of those who said one of `names`; 0 when nobody did."""
        return max((said.rank for name in names for said in (self.own.get(name) or self.peers.get(name),) if said), default=0)  # fmt: skip

    @property
    def has_trl_defaults(self) -> bool:
        """Whether what is not given is to be as in TRL."""
        return self.preset.startswith("trl")

    @property
    def speaks_trl(self) -> bool:
        """Whether a word that means one thing in Open Instruct and another in TRL is TRL's."""
        return self.has_trl_defaults or any(table()[name].source == TRL for name in self.peers)

    @property
    def world_size(self) -> int:
        """Learner ranks, by what was given, else by what was started."""
        return self.peer("world_size") or sum(self.value("num_learners_per_node")) or self.started_ranks

    @property
    def data_parallel(self) -> int | None:
        """Data-parallel ranks; None for a layout that does not divide."""
        axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        model = 1
        for axis in axes:
            model *= self.value(axis)
        return self.world_size // model if model > 0 and self.world_size >= model and not self.world_size % model else None  # fmt: skip

    @property
    def sharing(self) -> int | None:
        """Data x context ranks, among which ZeRO shares; None for a layout that does not divide."""
        return self.data_parallel and self.data_parallel * self.value("context_parallel_size")

    @property
    def optimizer_steps_a_step(self) -> int:
        """Optimizer steps of a training step."""
        return max(self.value("num_epochs") * self.value("num_mini_batches"), 1)

    def put(self, target: str, value: object, *names: str, weak: bool = False) -> None:
        """Say that the aliases `names` (or the preset, without any given) mean `target` = `value`."""
        given = [self.peers[name] for name in names if name in self.peers]
        by = max(given, key=lambda said: said.rank) if given else self.preset_said
        via = ", ".join(name for name in names if name in self.peers)
        new = Said(value=value, rank=by.rank, origin=by.origin, via=via, is_weak=weak)
        old = self.own.get(target)
        if weak and self.value(target) == value:
            return
        if old is not None and old.rank == new.rank and not old.is_weak and old.value != value:
            if weak:
                return
            if old.via or old.rank > PRESET:
                other = f"{old.via} means {shown(old.value)}" if old.via else f"{target}={shown(old.value)} is given"
                self.problems.append(
                    f"{via or new.origin} means {target}={shown(value)}, but {other}, too ({old.origin}); keep one of them"
                )
                self.unsound.add(target)
                return
        if old is not None and old.rank > new.rank:
            if old.value != value:
                self.used.setdefault(via, []).append(f"{target} ({shown(old.value)}, {old.source} wins)")
            return
        self.own[target] = new
        if via:
            self.used.setdefault(via, []).append(f"{target} ({shown(value)})")

    def derive(self, target: str, value: object, note: str) -> None:
        """Set what nobody has given."""
        self.own[target] = Said(value=value, rank=PRESET, origin="derived")
        self.notes.append(note)

    def judge_names(self) -> None:
        """What the table says of each name without looking at the others."""
        for name, said in self.peers.items():
            entry = table()[name]
            if said.value in entry.plain:
                continue
            if entry.status == "refused" and not translate.is_excused(self, name):
                plain = f"leave it out or give {shown(entry.plain[0])}" if entry.plain else "leave it out"
                self.problems.append(f"{name}={shown(said.value)} is refused: {entry.note}; {plain}")
            elif entry.status == "no effect":
                self.notes.append(f"{name} has no effect: {entry.note}")
            elif name == "run_name":
                self.notes.append(f"{name}={said.value} has no effect: {entry.note}")
            elif entry.status == "derived":
                self.expected[name] = said.value

    def config(self) -> Config:
        """The result."""
        for via, targets in self.used.items():
            note = f"; {table()[via].note}" if via in LOUD else ""
            self.notes.append(f"{via} -> {', '.join(targets)}{note}")
        provenance = Provenance(
            preset=self.preset,
            sources={name: said.source for name, said in self.own.items()},
            notes=tuple(dict.fromkeys(self.notes)),
            problems=tuple(dict.fromkeys(self.problems)),
            unsound=frozenset(self.unsound),
            expected=self.expected,
        )
        values = {name: said.value for name, said in self.own.items() if name not in self.unsound}
        return build(values, provenance)


def shown(value: object) -> str:
    """A value as a user would write it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "nothing"
    return f"{value:g}" if isinstance(value, float) else str(value)

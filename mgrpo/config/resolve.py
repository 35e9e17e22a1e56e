"""From the values of files, flags and presets to the value of every setting: precedence, aliases, conflicts.

Flag > file > preset > default. An alias has the rank of the place that gave it. Whether the values make sense together is
`validate`'s question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mgrpo.config.fields import shown
from mgrpo.config.peers import translate
from mgrpo.config.peers.names import table
from mgrpo.config.peers.presets import PRESETS
from mgrpo.config.resolution import Layer, Resolution
from mgrpo.config.schema import Config


def resolve(layers: Iterable[Layer], *, preset: str | None, world_size: int, problems: Sequence[str] = ()) -> Config:
    """The config that `layers` and `preset` come to, its provenance with every note and problem."""
    preset = preset or "mgrpo"
    found = Resolution(preset=preset if preset in PRESETS else "mgrpo", world_size=world_size)
    found.problems.extend(problems)
    if preset not in PRESETS:
        found.problems.append(f"preset={preset} does not exist; choose from {', '.join(PRESETS)}")
    for layer in layers:
        found.add(layer)
    _check_names(found)
    translate.apply(found)
    return found.config()


def _check_names(found: Resolution) -> None:
    """What the table says of each name, whatever the others are."""
    for name, given in found.peers.items():
        entry = table()[name]
        if given.value in entry.neutral:
            continue
        if entry.status == "refused" and not translate.is_excused(found, name):
            advice = (
                f"leave it out or give {shown(entry.neutral[0])}"
                if entry.neutral and entry.neutral[0] != ()
                else "leave it out"
            )
            found.problems.append(f"{name}={shown(given.value)} is refused: {entry.sentence}; {advice}")
        elif entry.status == "no effect":
            found.notes.append(f"{name} has no effect: {entry.sentence}")
        elif entry.status == "derived":
            found.expected[name] = given.value

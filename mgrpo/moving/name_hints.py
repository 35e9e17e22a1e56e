"""The advice for a name that no setting has: other trainers' words for it, else a near spelling.

The words are data: those of verl.csv and slime.csv, whose commands only Python takes as they are, and the usual first guesses,
in name_hints.csv.
"""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mgrpo.config.load import PYTHON
from mgrpo.moving.command_words import TRAINERS, words
from mgrpo.moving.foreign_names import accepted

NEAR = 0.8
"""Similarity from which a name counts as misspelt: one or two letters of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """One word of another trainer."""

    trainer: str
    targets: tuple[str, ...]
    """The settings with that effect here; empty without any."""
    sentence: str

    def advice(self, dashes: str = "") -> str:
        """The advice in words; `dashes` stand before the name of each setting."""
        use = "use " + " and ".join(dashes + target for target in self.targets) if self.targets else ""
        if self.trainer != "verl":
            return "; ".join(part for part in (use, self.sentence) if part)
        rest = f"{use} ({self.sentence})" if use and self.sentence else use or self.sentence
        return f"it is a name of verl, whose commands docs/moving/verl.md translates: {rest}"


@cache
def hints() -> dict[str, Hint]:
    """Every such word: those of name_hints.csv, then verl's and slime's."""
    found = dict(tried())
    for trainer in TRAINERS:
        own = {
            name: Hint(trainer=trainer, targets=word.targets, sentence=word.sentence)
            for name, word in words(trainer).items()
            if not name.endswith("*") and (word.targets or word.sentence) and name not in accepted()
        }
        found = own | found
    return found


@cache
def tried() -> dict[str, Hint]:
    """Hints of name_hints.csv, in its order."""
    with Path(__file__).with_name("name_hints.csv").open(encoding="utf-8", newline="") as file:
        return {
            row["name"]: Hint(trainer=row["trainer"], targets=tuple(row["targets"].split()), sentence=row["sentence"])
            for row in csv.DictReader(file)
        }


def unknown(name: str, where: str) -> str:
    """The sentence for a name that is not accepted; a flag is given with its dashes, of which the advice then has some too."""
    word = name.lstrip("-").replace("-", "_")
    dashes = name[: len(name) - len(name.lstrip("-"))]
    everything = "docs/config.md lists every setting" if where == PYTHON else "--help all lists every setting"
    return f"unknown setting {name} ({where}); {_advice(word, dashes) or everything}"


def _advice(word: str, dashes: str) -> str:
    hint = hints().get(word) or hints().get(word.lower())
    if hint is not None:
        return hint.advice(dashes)
    useful = [name for name, entry in accepted().items() if entry.status not in ("no effect", "refused")]
    near = difflib.get_close_matches(word.lower(), [*useful, *tried()], n=1, cutoff=NEAR)
    if not near:
        return ""
    return tried()[near[0]].advice(dashes) if near[0] in tried() else f"did you mean {dashes}{near[0]}?"

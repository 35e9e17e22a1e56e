"""Every name that a run accepts in addition to its own settings: Open Instruct's, TRL's, and flags of old scripts.

The names are data, in foreign_names.csv; an alias that does more than rename is translated in `translate`. The columns:

    status    derived, alias, translated, no effect or refused; see the table in docs/config.md
    type      alternatives between bars: bool, int, float, text, words, json, none, or choices as in a/b/c; empty:
              the type of the first target
    neutral   values without effect, since they are the behaviour anyway, between blanks; [a,b] is a list, '' the empty text
    targets   the settings that an alias sets, between blanks
"""

from __future__ import annotations

import csv
import functools
import operator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from mgrpo.config.fields import Setting, read, section_types, settings

Status = Literal["used", "derived", "alias", "translated", "no effect", "refused"]
OURS = "mgrpo"
TYPES = {
    "bool": bool,
    "int": int,
    "float": float,
    "text": str,
    "words": tuple[str, ...],
    "json": dict[str, object],
    "none": type(None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One accepted name. A setting of the schema has status "used" and is not repeated in the table."""

    name: str
    section: str
    trainer: str
    status: Status
    type: Any
    """Annotation that its text is read as; None for an alias that is read as its target is."""
    neutral: tuple[object, ...] = ()
    """Values that are accepted without a note."""
    targets: tuple[str, ...] = ()
    """Settings that an alias sets."""
    sentence: str = ""

    @property
    def setting(self) -> Setting:
        """A setting that reads its text."""
        expected = settings()[self.targets[0]].type if self.type is None else self.type
        return Setting(name=self.name, section=self.section, type=expected, default=None)


SECRETS = ("hub_token",)
"""Refused names whose values must not be repeated, not even in the error."""
SPELLINGS: dict[str, dict[object, str]] = {
    "max_grad_norm": {None: "0"},
    "chat_template_name": {None: "auto"},
    "chat_template_kwargs": {None: "{}"},
    "vllm_extra_args": {None: "{}"},
    "vllm_server_base_url": {None: ""},
    "output_dir": {None: "trainer_output"},
    "reward_weights": {None: ""},
    "remap_verifier": {None: ""},
    "stop_strings": {None: ""},
    "hub_private_repo": {None: "true"},
    "lora_target_modules": {None: "all-linear"},
    "init_lora_weights": {"True": "true"},
    "tools": {None: ""},
    "tool_call_names": {None: ""},
    "tool_configs": {None: ""},
    "environment_factory": {None: ""},
    "eval_top_p": {None: "1.0"},
    "metric_for_best_model": {None: "eval/scores"},
    "report_to": {None: "none"},
    "wandb_project": {"open_instruct_internal": "none"},
    "moe_token_dispatcher_type": {"flex": "deepep"},
    "top_k": {None: "0", "none": "0", "-1": "0"},
    "min_p": {None: "0", "none": "0"},
    "kl_estimator": {"kl": "0", "kl1": "0", "kl2": "1", "kl3": "2", "kl4": "3"},
}
"""The spelling here of a value that other trainers write differently, by setting and their spelling."""


@cache
def table() -> dict[str, Name]:
    """Every name that is not a setting of the schema, in the order of foreign_names.csv."""
    found: dict[str, Name] = {}
    with Path(__file__).with_name("foreign_names.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert row["name"] not in found and row["name"] not in settings(), f"{row['name']} has two entries"
            found[row["name"]] = _name(row)
    return found


def _name(row: dict[str, str]) -> Name:
    expected = _type(row["type"]) if row["type"] else None
    return Name(
        name=row["name"],
        section=row["section"],
        trainer=row["trainer"],
        status=cast(Status, row["status"]),
        type=expected,
        neutral=tuple(_value(word, expected) for word in row["neutral"].split()),
        targets=tuple(row["targets"].split()),
        sentence=row["sentence"],
    )


def _type(text: str) -> Any:
    return functools.reduce(operator.or_, map(_alternative, text.split("|")))


def _alternative(word: str) -> Any:
    if word in TYPES:
        return TYPES[word]
    return Literal[tuple(int(choice) if choice.isdecimal() else choice for choice in word.split("/"))]


def _value(word: str, expected: Any) -> object:
    if word.startswith("["):
        return tuple(filter(None, word.strip("[]").split(",")))
    return read("" if word == "''" else word, expected)


@cache
def sections() -> tuple[str, ...]:
    """Sections of the table, in its order, then those of settings that no other trainer has a name for."""
    return tuple(dict.fromkeys([*(entry.section for entry in table().values()), *section_types()]))


@cache
def accepted() -> dict[str, Name]:
    """Every name that a command line or a file may hold: the settings, then the table."""
    own = {
        name: Name(name=name, section=setting.section, trainer=trainers_of(setting), status="used", type=setting.type)
        for name, setting in settings().items()
    }
    return own | table()


def trainers_of(setting: Setting) -> str:
    """The other trainers that have a setting of this name; mgrpo where none has."""
    return ", ".join(peer.value for peer in setting.peers) or OURS

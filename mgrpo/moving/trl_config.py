"""TRL's `GRPOConfig` and `AsyncGRPOConfig` as dataclasses: the same fields, types and defaults, for scripts and their parsers.

They are data, in trl_config.json, which tools/peers/record_trl.py makes of the release that requirements/bench_trl.txt pins:
TRL itself is never imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from dataclasses import InitVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from mgrpo.config.load import started_ranks
from mgrpo.moving.config_doors import from_values
from mgrpo.moving.foreign_names import accepted

OUTPUT_DIR = "trainer_output"
"""TRL's output_dir where none is given."""
KINDS: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "text": str,
    "words": list[str],
    "numbers": list[float],
    "json": dict[str, Any],
    "none": type(None),
}


@cache
def recorded() -> dict[str, Any]:
    """The release, and the fields of both classes: types between bars, default, choices, and the value of a flag without one."""
    return json.loads(Path(__file__).with_name("trl_config.json").read_text(encoding="utf-8"))


@cache
def recorded_fields(preset: str) -> dict[str, Any]:
    """Fields of the class whose defaults `preset` has."""
    fields = recorded()["fields"]
    if preset == "trl_async":
        fields = {name: entry for name, entry in (fields | recorded()["async_fields"]).items() if entry is not None}
    return fields


def recorded_defaults(preset: str) -> dict[str, object]:
    """Defaults of `recorded_fields`."""
    return {name: entry["default"] for name, entry in recorded_fields(preset).items()}


def with_recorded_fields(made: Any) -> Any:
    """`made` as a dataclass with TRL's fields."""
    for name, entry in recorded_fields(made.trl_preset).items():
        kinds = [_kind(word, entry.get("choices")) for word in entry["type"].split("|")]
        made.__annotations__[name] = functools.reduce(operator.or_, kinds)
        metadata = {"nargs": "?", "const": entry["bare"]} if "bare" in entry else {}
        setattr(made, name, dataclasses.field(metadata=metadata, **_default(entry["default"])))
    # Read by `dataclasses.replace` from the object and passed to the new one with the fields.
    made.__annotations__["_beside"] = InitVar[object]
    made._beside = dataclasses.field(default=cast(Any, property(made._history)), kw_only=True)
    return dataclasses.dataclass(init=False)(made)


def _kind(word: str, choices: list[str] | None) -> Any:
    return Literal[tuple(choices)] if word == "text" and choices else KINDS[word]


def _default(value: Any) -> dict[str, Any]:
    return {"default_factory": functools.partial(list, value)} if isinstance(value, list) else {"default": value}


class TrlConfig:
    """TRL's fields with TRL's defaults; settings of this project may be given among them.

    Its classes are ordinary dataclasses: parsers such as transformers' HfArgumentParser take them, and a script may derive its own.
    """

    trl_preset = ""
    """The preset with the defaults of the class."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: object, **values: object) -> TrlConfig:
        new = super().__new__(cls)
        # A parser and dataclasses.replace give every field; then those are the script's that differ from their defaults.
        is_whole = recorded_fields(cls.trl_preset).keys() <= values.keys()
        vars(new).update(_explicit=frozenset() if is_whole else frozenset(values), _derived={})
        return new

    def __init__(self, output_dir: str | None = None, *, _beside: object = None, **values: object) -> None:
        """
        Raises:
            ConfigError: everything among the values that cannot be done here.
        """
        vars(self).update(self._trl_defaults(), output_dir=output_dir)
        vars(self).update(values)
        self.__post_init__(_beside)

    def __post_init__(self, _beside: object = None) -> None:
        own = vars(self)
        given, derived = _beside if isinstance(_beside, tuple) else ({}, {})
        own.update({name: value for name, value in given.items() if name not in own})
        own["_explicit"] |= given.keys()
        own.update({name: None for name, value in derived.items() if own[name] == value})
        for name, entry in recorded_fields(self.trl_preset).items():
            if "json" in entry["type"] and isinstance(own[name], str) and own[name].startswith("{"):
                own[name] = json.loads(own[name])
        own["output_dir"] = own["output_dir"] or OUTPUT_DIR
        own["_derived"].update(self._follows())
        own.update(own["_derived"])
        from_values(self.given(), preset=self.trl_preset)

    def given(self) -> dict[str, object]:
        """Values given by the script: settings of this project, and fields, also with TRL's default unless a parser set them."""
        trl = self._trl_defaults() | self._derived
        # A class derived from TRL's may have fields of its own, of which those are settings that have a name here.
        own = defaults_of(self).keys() - trl.keys()
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_") and not (name in own and name not in accepted())
            if name in self._explicit or (value is not None if name in own else name not in trl or value != trl[name])
        }

    @classmethod
    def _trl_defaults(cls) -> dict[str, Any]:
        return defaults_of(next(kind for kind in cls.__mro__ if "trl_preset" in vars(kind)))

    def _follows(self) -> dict[str, object]:
        """Fields without a value, as TRL fills them in."""
        found: dict[str, object] = {"bf16": not self.fp16}
        if "steps_per_generation" in recorded_fields(self.trl_preset):
            step = self.per_device_train_batch_size * started_ranks()
            whole, steps = self.generation_batch_size, self.steps_per_generation
            steps = steps or (whole // step if whole else self.gradient_accumulation_steps)
            found |= {"generation_batch_size": step * steps, "steps_per_generation": steps}
        found["activation_checkpointing"] = self.gradient_checkpointing
        if self.metric_for_best_model is not None:
            found["greater_is_better"] = not (
                self.metric_for_best_model.startswith("-") or self.metric_for_best_model.endswith("loss")
            )
        return {name: value for name, value in found.items() if getattr(self, name) is None}

    def _history(self) -> tuple[dict[str, object], dict[str, object]]:
        """Provenance of the fields: given explicitly, or filled in."""
        names = defaults_of(self).keys()
        given = {name: value for name, value in self.given().items() if name not in names or name in self._explicit}
        return given, self._derived


@with_recorded_fields
class GRPOConfig(TrlConfig):
    """TRL's `GRPOConfig`."""

    trl_preset = "trl_main"


@with_recorded_fields
class AsyncGRPOConfig(TrlConfig):
    """TRL's `AsyncGRPOConfig`, of trl.experimental.async_grpo."""

    trl_preset = "trl_async"


def defaults_of(kind: Any) -> dict[str, Any]:
    """Default of each field of a dataclass."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
        if field.init
    }

"""Names, types and defaults of the installed TRL's GRPOConfig and AsyncGRPOConfig, which `mgrpo.trl` has as well.

    .venv-trl/bin/python tools/peers/record_trl.py > mgrpo/moving/trl_config.json

Run it with an interpreter that has what requirements/bench_trl.txt pins, after a change of the pin.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from importlib.metadata import version
from typing import Any

from trl import GRPOConfig
from trl.experimental.async_grpo import AsyncGRPOConfig

WORDS = {bool: "bool", int: "int", float: "float", str: "text", list: "words", dict: "json", type(None): "none"}


def main() -> None:
    """Print a field a line; of the asynchronous class those that GRPOConfig does not have alike, null for those it lacks."""
    fields, others = _fields(GRPOConfig), _fields(AsyncGRPOConfig)
    differing = {name: entry for name, entry in others.items() if fields.get(name) != entry}
    differing |= dict.fromkeys(name for name in fields if name not in others)
    release = {name: version(name) for name in ("trl", "transformers")}
    parts = [f'  "release": {json.dumps(release)}', _lines("fields", fields), _lines("async_fields", differing)]
    sys.stdout.write("{\n" + ",\n".join(parts) + "\n}\n")


def _fields(kind: type) -> dict[str, object]:
    kinds = typing.get_type_hints(kind)
    return {field.name: _entry(field, kinds[field.name]) for field in dataclasses.fields(kind) if field.init}


def _lines(name: str, entries: dict[str, object]) -> str:
    lines = [f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items()]
    return f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }"


def _entry(field: dataclasses.Field, kind: Any) -> dict[str, object]:
    """Types between bars; the default; the words it may be; the value of a flag without one."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    choices = [*field.metadata.get("choices", ()), *_members(kinds)]
    entry: dict[str, object] = {"type": _words(kinds), "default": _plain(default)}
    if choices:
        entry["choices"] = choices
    if "const" in field.metadata:
        entry["bare"] = field.metadata["const"]
    return entry


def _members(kinds: tuple[Any, ...]) -> list[str]:
    return [member.value for kind in kinds if isinstance(kind, enum.EnumMeta) for member in kind]


def _words(kinds: tuple[Any, ...]) -> str:
    """What a parser reads, and whether it may be nothing: text where several types could be meant."""
    words = set(filter(None, map(_word, kinds)))
    none = ["none"] if "none" in words else []
    if "json" in words:
        return "|".join(["json", "text", *none])
    return "|".join([*(["text"] if "text" in words else sorted(words - {"none"})), *none])


def _word(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin is list and typing.get_args(kind) == (float,):
        return "numbers"
    if isinstance(origin, enum.EnumMeta):
        return "text"
    if dataclasses.is_dataclass(origin):
        return "json"
    return WORDS.get(origin, "")


def _plain(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


if __name__ == "__main__":
    main()

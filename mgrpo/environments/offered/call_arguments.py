"""Arguments as a model wrote them, read against the tool's schema: converted where the meaning is plain, else refused.

Any arguments give a value or a text for the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mgrpo.environments.environment import Tool

Schema = Mapping[str, Any]

_INTEGER = re.compile(r"[+-]?[0-9]{1,300}(\.0+)?")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SHOWN = 100
"""Most characters shown of a wrong value."""
_MAX_STEPS = 20_000
"""Most parts of schemas that are read for one call: references may multiply a short schema without end."""
_MAX_NESTED_KINDS = 8
"""Alternatives within each other that an error names."""


class ArgumentError(Exception):
    """Arguments that do not fit the schema; the text, for the model, names the expected values."""


class _Root(dict[str, Any]):
    """A tool's schema, where references begin, with the number of parts that may still be read."""

    steps = _MAX_STEPS

    def count(self, steps: int = 1) -> None:
        """Raise ArgumentError where too many parts were read."""
        self.steps -= steps
        if self.steps < 0:
            raise ArgumentError(f"the tool's schema has more than {_MAX_STEPS} parts for these arguments; give fewer")


class _Unfit(Exception):
    """A value that does not fit: its place, as in `.names[0]`, and the problem there."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path.removeprefix('.')}: {self.problem}" if self.path else self.problem


def coerced(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the types of the tool's schema: "3" becomes 3 where an integer is expected, for example.

    Ranges, lengths and patterns are left to the tool.
    """
    parameters = _Root(tool.parameters)
    if not isinstance(arguments, Mapping):
        raise ArgumentError(
            f"{tool.name}: expected arguments by name, got {_shown(arguments)}; {_expected(parameters)}"
        )
    try:
        return _object(parameters, arguments, parameters)
    except _Unfit as err:
        raise ArgumentError(f"{tool.name}: {err}; {_expected(parameters)}") from err
    except RecursionError as err:
        raise ArgumentError(f"{tool.name}: the arguments are nested too deeply; {_expected(parameters)}") from err


def read_value(tool: Tool, name: str, text: str) -> Any:
    """The value of an argument that a model wrote as plain text; the text itself where it has none of the argument's types.

    Where a string is allowed too, another type is written as in JSON, an integer without a point: "3" is an integer, but
    "03", "3.0" and "True" are strings.
    """
    root = _Root(tool.parameters)
    try:
        parts = _parts((_properties(root) or {}).get(name), root)
        others = [part for part in parts if not _takes_text(part)]
        if len(others) < len(parts) and not isinstance(json.loads(text), int):
            others = [part for part in others if _type(part) != "integer"]
        for part in others:
            root.count(1 + len(text) // _SHOWN)
            with suppress(_Unfit):
                return _read_part(part, text, root)
    except (ArgumentError, ValueError, RecursionError):
        pass
    return text


def _parts(schema: Any, root: _Root) -> list[Schema]:
    """The schemas, without further alternatives, of which one must fit."""
    root.count()
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return [{}]
    alternatives = _alternatives(schema)
    return [part for each in alternatives for part in _parts(each, root)] if alternatives else [schema]


def _takes_text(schema: Schema) -> bool:
    kind = _type(schema)
    return kind == "string" or (kind is None and not _choices(schema))


def _read_part(schema: Schema, text: str, root: _Root) -> Any:
    kind = _type(schema)
    if kind == "null" and text.strip().lower() == "null":
        return None
    if kind in ("array", "object"):
        value = _parsed(text, list if kind == "array" else dict)
        with suppress(_Unfit):
            return _KINDS[kind](schema, value, root)
        if value is not None:
            return value  # `coerced` says which part of it does not fit
    elif kind is not None:
        return _KINDS[kind](schema, text.strip(), root)
    for choice in _choices(schema):
        if text == choice or text.strip() == _text(choice):
            return choice
    raise _unfit(kind or "one of its choices", text)


def _expected(parameters: _Root) -> str:
    """All arguments with their types, for the model."""
    parameters.steps = _MAX_STEPS
    required = _listed(parameters, "required")
    listed = [
        f"{name} ({_kind(schema, parameters)}{'' if name in required else ', optional'})"
        for name, schema in (_properties(parameters) or {}).items()
    ]
    return f"expected: {', '.join(listed)}" if listed else "expected no arguments"


def _listed(schema: Schema, name: str) -> Sequence[Any]:
    """A list in a schema; empty where the schema, which a server may have written, holds none under the name."""
    found = schema.get(name)
    return found if isinstance(found, list | tuple) else ()


def _properties(schema: Schema) -> Mapping[str, Any] | None:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else None


def _fitted(schema: Any, value: Any, root: _Root) -> Any:
    root.count(1 + len(value) // _SHOWN if isinstance(value, str) else 1)
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return value
    if alternatives := _alternatives(schema):
        return _one_of(alternatives, value, root)
    kind = _type(schema)
    fitted = value if kind is None else _KINDS[kind](schema, value, root)
    choices = _choices(schema)
    return _chosen(choices, fitted) if choices else fitted


def _type(schema: Schema) -> str | None:
    """The declared type, if it is one of JSON schemas' own."""
    kind = schema.get("type")
    return kind if isinstance(kind, str) and kind in _KINDS else None


def _choices(schema: Schema) -> Sequence[Any]:
    return [schema["const"]] if "const" in schema else _listed(schema, "enum")


def _alternatives(schema: Schema) -> list[Schema]:
    """The schemas of which one must fit; none: the schema itself must fit."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else []
    nested: list[Schema] = [*_listed(schema, "anyOf"), *_listed(schema, "oneOf")]
    found: list[Schema] = [dict(schema, type=name, nullable=False) for name in kinds] or nested
    if schema.get("nullable"):
        # Its `enum`, if there is one, need not hold null.
        found = [*(found or [dict(schema, nullable=False)]), {"type": "null"}]
    return found


def _one_of(alternatives: Sequence[Any], value: Any, root: _Root) -> Any:
    """The value, unchanged if one of the alternatives takes it so; else converted for the first that can."""
    fitting = []
    for schema in alternatives:
        try:
            fitted = _fitted(schema, value, root)
        except _Unfit:
            continue
        if type(fitted) is type(value) and fitted == value:
            return fitted
        fitting.append(fitted)
    if fitting:
        return fitting[0]
    raise _unfit(" or ".join(dict.fromkeys(_kind(each, root) for each in alternatives)), value)


def _chosen(choices: Sequence[Any], value: Any) -> Any:
    for choice in choices:
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return choice
    raise _unfit(f"one of {_text(list(choices))}", value)


def _integer(schema: Schema, value: Any, root: _Root) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0])
    raise _unfit("integer", value)


def _number(schema: Schema, value: Any, root: _Root) -> int | float:
    if isinstance(value, str):
        text = value.strip()
        if _INTEGER.fullmatch(text) and "." not in text:
            return int(text)
        value = float(text) if _NUMBER.fullmatch(text) else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _unfit("number", value)


def _boolean(schema: Schema, value: Any, root: _Root) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if isinstance(value, bool):
        return value
    raise _unfit("boolean", value)


def _string(schema: Schema, value: Any, root: _Root) -> str:
    if value is None:
        raise _unfit("string", value)
    return value if isinstance(value, str) else _text(value)


def _null(schema: Schema, value: Any, root: _Root) -> None:
    if value is not None and value not in ("null", "None"):
        raise _unfit("null", value)


def _array(schema: Schema, value: Any, root: _Root) -> list[Any]:
    items = _parsed(value, list)
    if items is None:
        raise _unfit("array", value)
    first = _listed(schema, "prefixItems")
    if first and len(items) != len(first):
        raise _unfit(f"array of {len(first)} items", value)
    schemas = [*first, *[schema.get("items")] * (len(items) - len(first))]
    return [_inside(f"[{i}]", each, item, root) for i, (each, item) in enumerate(zip(schemas, items, strict=True))]


def _object(schema: Schema, value: Any, root: _Root) -> dict[str, Any]:
    fields = _parsed(value, dict)
    if fields is None:
        raise _unfit("object", value)
    properties = _properties(schema)
    others = schema.get("additionalProperties", properties is None)
    known = properties or {}
    if unknown := [name for name in fields if name not in known and others is False]:
        raise _Unfit("", f"there is no argument {', '.join(map(str, unknown))}")
    if missing := [name for name in map(str, _listed(schema, "required")) if name not in fields]:
        raise _Unfit("", f"the argument {', '.join(missing)} is missing")
    return {name: _inside(f".{name}", known.get(name, others), field, root) for name, field in fields.items()}


_KINDS: dict[Any, Callable[[Schema, Any, _Root], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "string": _string,
    "null": _null,
    "array": _array,
    "object": _object,
}


def _inside(step: str, schema: Any, value: Any, root: _Root) -> Any:
    """A part of a value, fitted; `step` leads to the part."""
    try:
        return _fitted(schema, value, root)
    except _Unfit as err:
        raise _Unfit(step + err.path, err.problem) from err


def _parsed(value: Any, kind: type) -> Any:
    """The value, or that of its JSON text, if it is of this type; else None."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, kind) else None


def _resolved(schema: Any, root: _Root) -> Any:
    """The target of a reference within the tool's schema; None, which anything fits, if it has no target."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(path := schema.get("$ref"), str):
        if path in seen or not path.startswith("#/"):
            return None
        seen.add(path)
        root.count(1 + path.count("/"))
        schema = root
        for name in path[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _kind(schema: Any, root: _Root, depth: int = 0) -> str:
    """The type that is expected, in the words of JSON schemas."""
    try:
        root.count()
        schema = _resolved(schema, root)
    except ArgumentError:
        return "any"
    if not isinstance(schema, Mapping) or depth > _MAX_NESTED_KINDS:
        return "any"
    if "enum" in schema or "const" in schema:
        return f"one of {_text(schema.get('enum', [schema.get('const')]))}"
    if alternatives := _alternatives(schema):
        return " or ".join(dict.fromkeys(_kind(each, root, depth + 1) for each in alternatives))
    return str(schema.get("type", "any"))


def _unfit(expected: str, value: Any) -> _Unfit:
    return _Unfit("", f"expected {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

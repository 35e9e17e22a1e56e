"""Type hints as JSON schemas, equal to those of `transformers.utils.get_json_schema`, which takes seconds to import."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

_PLAIN: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
}

Schema = dict[str, Any]


def schema_of(hint: Any) -> Schema:
    """The JSON schema of values of this type.

    Raises:
        ValueError: the type has no JSON form; the text names those that have one.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is None:
        # Other classes stand for their fields.
        return {"type": _PLAIN.get(hint, "object")}
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _choices(arguments)
    if origin is list:
        return {"type": "array"} | ({"items": schema_of(arguments[0])} if arguments else {})
    if origin is tuple:
        return _tuple(arguments)
    if origin is dict:
        return {"type": "object"} | ({"additionalProperties": schema_of(arguments[1])} if arguments else {})
    raise ValueError(
        f"{hint} has no JSON form; use int, float, str, bool, list, tuple, dict, Literal or a union of them"
    )


def _union(members: tuple[Any, ...]) -> Schema:
    schemas = [schema_of(member) for member in members if member is not type(None)]
    if len(schemas) == 1:
        joined = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        joined = {"type": names[0] if len(names) == 1 else names}
    else:
        joined = {"anyOf": schemas}
    return joined | {"nullable": True} if type(None) in members else joined


def _choices(values: tuple[Any, ...]) -> Schema:
    if unfit := [value for value in values if type(value) not in _PLAIN]:
        raise ValueError(
            f"Literal with {unfit[0]!r} has no JSON form; its values may be texts, numbers, booleans and None"
        )
    names = list(dict.fromkeys(_PLAIN[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _tuple(members: tuple[Any, ...]) -> Schema:
    if not members:
        return {"type": "array"}
    if len(members) == 1 or ... in members:
        raise ValueError("a tuple needs the types of all its items, at least two; use list for any number of items")
    return {"type": "array", "prefixItems": [schema_of(member) for member in members]}

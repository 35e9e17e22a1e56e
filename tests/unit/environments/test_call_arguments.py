"""What a model wrote as arguments, against the schema: made to fit, or refused with a text for the model."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from mgrpo.environments.environment import Tool
from mgrpo.environments.offered.call_arguments import ArgumentError, coerced, read_value

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
        },
        "Endless": {"$ref": "#/$defs/Endless"},
    },
}


def tool(**properties):
    """A tool with these arguments, all of them required."""
    return Tool(
        name="t", description="", parameters={"type": "object", "properties": properties, "required": list(properties)}
    )


def read(schema, value):
    return coerced(tool(x=schema), {"x": value})["x"]


def refusal(schema, value):
    with pytest.raises(ArgumentError) as raised:
        read(schema, value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, 3, 3),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, " -3 ", -3),
        ({"type": "integer"}, 3.0, 3),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "number"}, 3, 3),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "2.5e-1", 0.25),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string"}, 3, "3"),
        ({"type": "string"}, True, "true"),
        ({"type": "string"}, {"a": "ü"}, '{"a": "ü"}'),
        ({"type": "null"}, "None", None),
        ({"type": "array", "items": {"type": "integer"}}, ["1", 2], [1, 2]),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, ["1", 2], [1, "2"]),
        ({"type": "object", "additionalProperties": {"type": "number"}}, '{"a": "1"}', {"a": 1}),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}}, {"a": "true"}, {"a": True}),
        ({"type": "object"}, {"a": [1]}, {"a": [1]}),
        ({"type": "integer", "nullable": True}, None, None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "7", 7),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"type": ["integer", "string"]}, "3", "3"),
        ({"type": ["integer", "string"]}, 3, 3),
        ({"type": ["boolean", "number"]}, "2", 2),
        ({"type": ["integer", "boolean"]}, True, True),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}, ["1"], [1]),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}, "[1]", "[1]"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, None, None),
        ({"type": "integer", "enum": [1, 2]}, "2", 2),
        ({"type": ["string", "null"], "enum": ["a", None]}, None, None),
        ({"const": "a"}, "a", "a"),
        ({}, [1, {"a": None}], [1, {"a": None}]),
    ],
)
def test_values_are_made_to_fit_where_their_meaning_is_plain(schema, value, expected):
    """Formats such as XML hold text only; a model that wrote "3" for 3 has called the tool well."""
    found = read(schema, value)
    assert found == expected and type(found) is type(expected)


SHARED = {"$defs": {"Count": {"type": ["integer", "null"]}}}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("1_000", {"type": "integer"}, "1_000"),
        ("٣", {"type": "integer"}, "٣"),
        ("2.", {"type": "number"}, 2.0),
        ("12345678901234567890", {"type": "number"}, 12345678901234567890),
        ("1e999", {"type": "number"}, "1e999"),
        ("True", {"type": "boolean"}, True),
        ("0", {"type": "boolean"}, "0"),
        ("yes", {"type": "boolean"}, "yes"),
        (" [1, 2] ", {"type": "array"}, [1, 2]),
        ("[1, 2] and", {"type": "array"}, "[1, 2] and"),
        ("[1, 2]", {"type": "object"}, "[1, 2]"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ('["1", 2]', {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ('["a", 2]', {"type": "array", "items": {"type": "integer"}}, ["a", 2]),
        ('{"a": "1"}', {"type": "object", "properties": {"a": {"type": "number"}}}, {"a": 1}),
        ('{"b": 1}', {"type": "object", "required": ["a"]}, {"b": 1}),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, "None"),
        ("None", {"type": ["integer", "null"]}, None),
        ("NULL", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "string", "nullable": True}, None),
        ("7", {"type": "integer", "nullable": True}, 7),
        ("3", {"type": "string"}, "3"),
        ("3", {"type": ["string", "integer"]}, 3),
        ("03", {"type": ["string", "integer"]}, "03"),
        ("-3", {"type": ["string", "integer"]}, -3),
        ("+3", {"type": ["string", "integer"]}, "+3"),
        ("0", {"type": ["integer", "string"]}, 0),
        ("3.0", {"type": ["integer", "string"]}, "3.0"),
        ("2.0", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "2.0"),
        ("-0.00", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "-0.00"),
        ("1e2", {"type": ["integer", "string"]}, "1e2"),
        ("3.0", {"type": ["integer", "null", "string"]}, "3.0"),
        ("3.0", {"type": ["integer", "null"]}, 3),
        ("3.0", {"type": ["number", "string"]}, 3.0),
        ("3", {"type": ["number", "string"]}, 3),
        ("True", {"type": ["string", "boolean"]}, "True"),
        ("true", {"type": ["string", "boolean"]}, True),
        ("[1]", {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ["1"]),
        ("x", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ("2", {"anyOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "integer"}]}, 2),
        ("3", {"$ref": "#/$defs/Count"}, 3),
        ("null", {"$ref": "#/$defs/Count"}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["2", "3"]}, "2"),
        ("3", {"enum": [1, 2]}, "3"),
        ("true", {"const": True}, True),
        ("all", {"anyOf": [{"type": "integer"}, {"enum": ["all"]}]}, "all"),
        ("3", {"anyOf": [{"enum": ["all"]}, {"type": "integer"}]}, 3),
        ("3", {"type": {}}, "3"),
        ("3", {"anyOf": [{"$ref": "#/properties/x"}]}, "3"),
        ("3", {}, "3"),
        ("3", None, "3"),
    ],
)
def test_the_schema_says_what_plain_text_means(text, schema, value):
    """What does not fit stays text, or the value that it is: the tool's answer then says what was expected."""
    own = tool(x=schema)
    assert repr(read_value(replace(own, parameters={**own.parameters, **SHARED}), "x", text)) == repr(value)
    assert read_value(own, "unknown", text) == text


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("1_000", {"type": "integer"}, 'expected integer, got "1_000"'),
        ("0", {"type": "boolean"}, 'expected boolean, got "0"'),
        ('["a", 2]', {"type": "array", "items": {"type": "integer"}}, 'x[0]: expected integer, got "a"'),
        ('{"b": 1}', {"type": "object", "required": ["a"]}, "x: the argument a is missing"),
        ("3", {"enum": [1, 2]}, 'expected one of [1, 2], got "3"'),
    ],
)
def test_plain_text_that_does_not_fit_is_refused_with_what_was_expected(text, schema, expected):
    assert expected in refusal(schema, read_value(tool(x=schema), "x", text))


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, "three", 'expected integer, got "three"'),
        ({"type": "integer"}, 2.5, "expected integer, got 2.5"),
        ({"type": "integer"}, True, "expected integer, got true"),
        ({"type": "integer"}, "9" * 5000, "expected integer, got "),
        ({"type": "integer"}, "٣", "expected integer"),
        ({"type": "number"}, "nan", "expected number"),
        ({"type": "number"}, float("inf"), "expected number"),
        ({"type": "number"}, "1e999", "expected number"),
        ({"type": "number"}, "1_0", "expected number"),
        ({"type": "boolean"}, 1, "expected boolean, got 1"),
        ({"type": "string"}, None, "expected string, got null"),
        ({"type": "array"}, "1, 2", "expected array"),
        ({"type": "array"}, "[" * 100_000, "expected array"),
        ({"type": "object"}, "[1]", "expected object"),
        ({"type": "array", "prefixItems": [{}, {}]}, [1], "expected array of 2 items"),
        ({"type": "array", "items": {"type": "integer"}}, [1, "b"], 'x[1]: expected integer, got "b"'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": {}}, "x.a: expected integer, got {}"),
        ({"type": "object", "properties": {}, "required": ["a"]}, {}, "x: the argument a is missing"),
        ({"type": ["integer", "null"]}, "b", "expected integer or null"),
        ({"type": "integer", "nullable": True}, "b", "expected integer or null"),
        ({"type": "string", "enum": ["a", "b"]}, "c", 'expected one of ["a", "b"], got "c"'),
        ({"enum": [1]}, True, "expected one of [1], got true"),
        ({"anyOf": [{"type": "integer"}, {"enum": ["all"]}]}, "b", 'expected integer or one of ["all"]'),
    ],
)
def test_values_that_do_not_fit_are_refused_with_what_was_expected(schema, value, expected):
    """The model reads this text: it has to be able to do better, and never sees a traceback."""
    assert expected in refusal(schema, value)
    assert len(refusal(schema, value)) < 300


def test_the_text_lists_all_arguments():
    both = Tool(
        name="add",
        description="",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "string"]}, "c": {"enum": ["x"]}},
            "required": ["a"],
        },
    )
    with pytest.raises(ArgumentError) as raised:
        coerced(both, {"b": 1})
    arguments = 'a (integer), b (integer or string, optional), c (one of ["x"], optional)'
    assert str(raised.value) == f"add: the argument a is missing; expected: {arguments}"
    with pytest.raises(ArgumentError, match=r"add: there is no argument d, e; expected: a \(integer\)"):
        coerced(both, {"a": 1, "d": 2, "e": 3})
    with pytest.raises(ArgumentError, match=r'add: expected arguments by name, got \["1"\]'):
        coerced(both, ["1"])
    with pytest.raises(ArgumentError, match="t: there is no argument a; expected no arguments"):
        coerced(tool(), {"a": 1})


def test_a_schema_without_properties_takes_any_argument():
    """Servers describe some tools so."""
    anything = Tool(name="t", description="", parameters={"type": "object"})
    assert coerced(anything, {"a": "1"}) == {"a": "1"}
    with_rest = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "integer"},
    }
    assert coerced(Tool(name="t", description="", parameters=with_rest), {"a": "1", "b": "2"}) == {"a": 1, "b": 2}


def test_references_are_followed():
    """Schemas that pydantic makes, as MCP servers have them, name their classes by reference."""
    nested = Tool(name="t", description="", parameters=TREE)
    value = {"root": {"value": "1", "children": [{"value": "2", "children": []}]}}
    assert coerced(nested, value) == {"root": {"value": 1, "children": [{"value": 2, "children": []}]}}
    with pytest.raises(ArgumentError, match=r"root\.children\[0\]\.value: expected integer"):
        coerced(nested, {"root": {"children": [{"value": "x"}]}})


def test_neither_endless_references_nor_endless_values_raise():
    """What a model writes must not end a worker."""
    endless = {**TREE, "properties": {"root": {"$ref": "#/$defs/Endless"}, "other": {"$ref": "elsewhere"}}}
    assert coerced(Tool(name="t", description="", parameters=endless), {"root": 1, "other": 2}) == {
        "root": 1,
        "other": 2,
    }
    value: dict = {}
    for _ in range(900):
        value = {"children": [value]}
    with pytest.raises(ArgumentError, match="nested too deeply"):
        coerced(Tool(name="t", description="", parameters=TREE), {"root": value})


WORDS = ["", "3", "-1.5", "true", "null", "[1, 2]", '{"a": "1"}', "x", "nan", "\ud800"]
KINDS = [
    "integer",
    "number",
    "boolean",
    "string",
    "null",
    "array",
    "object",
    "unheard-of",
    ["integer", "null"],
    None,
    {},
]


def some_value(draw, depth=3):
    kind = draw.randrange(8 if depth else 6)
    if kind < 6:
        return [None, True, draw.randint(-9, 9), draw.random(), draw.choice(WORDS), float("nan")][kind]
    if kind == 6:
        return [some_value(draw, depth - 1) for _ in range(draw.randrange(3))]
    return {draw.choice("abc"): some_value(draw, depth - 1) for _ in range(draw.randrange(3))}


def some_schema(draw, depth=3):
    schema = {"type": draw.choice(KINDS)}
    if draw.random() < 0.2:
        schema["nullable"] = True
    if draw.random() < 0.2:
        schema["enum"] = [some_value(draw, 1) for _ in range(2)]
    if depth:
        parts = [some_schema(draw, depth - 1) for _ in range(2)]
        nested = {
            "items": parts[0], "prefixItems": parts, "anyOf": parts, "additionalProperties": draw.choice([parts[0], False]),
            "properties": {"a": parts[0], "b": parts[1]}, "required": draw.choice([["a"], None]),
        }  # fmt: skip
        for name in draw.sample(sorted(nested), 2):
            schema[name] = nested[name]
    return schema


def test_whatever_comes_is_read_or_refused_and_what_was_read_is_read_again():
    """Models write anything and servers describe their tools in any way: neither may end a worker."""
    draw, num_read = random.Random(0), 0
    for _ in range(4000):
        schema, value = some_schema(draw), some_value(draw)
        try:
            found = read(schema, value)
        except ArgumentError as err:
            assert str(err)
            continue
        num_read += 1
        assert repr(read(schema, found)) == repr(found)
    assert num_read > 1000


def test_arguments_stay_as_they_came():
    """The transcript shows what the model wrote."""
    arguments = {"x": ["1"]}
    coerced(tool(x={"type": "array", "items": {"type": "integer"}}), arguments)
    assert json.dumps(arguments) == '{"x": ["1"]}'


def test_references_that_multiply_a_schema_are_given_up():
    """Two references to the next of forty definitions each: a server's schema of 3 kB would hold up all others for years."""
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {
        "d40": {"type": "null"}
    }
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    with pytest.raises(ArgumentError, match="the tool's schema has more than 20000 parts for these arguments"):
        coerced(Tool(name="go", description="", parameters=schema), {"x": "a"})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": ["x"]},
        {"properties": {"x": 5}},
        {"properties": {"x": {"enum": 5}}},
        {"properties": {"x": {"anyOf": 5, "oneOf": {}}}},
        {"properties": {"x": {"type": [["a"]]}}},
        {"properties": {"x": {"type": "array", "prefixItems": 7}}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"properties": {"x": {}}, "required": 5},
    ],
)
def test_parts_of_a_schema_that_are_none_take_anything(schema):
    """Servers write schemas: one that is broken must not fail every call with a traceback."""
    assert coerced(Tool(name="go", description="", parameters={"type": "object", **schema}), {"x": [1]}) == {"x": [1]}


def test_a_schema_that_refers_to_itself_is_a_failed_call_that_names_its_arguments():
    loop = {"$ref": "#/properties/x"}
    schema = {"type": "object", "properties": {"x": {"anyOf": [loop, loop]}}}
    with pytest.raises(ArgumentError, match=r"nested too deeply; expected: x \(any, optional\)"):
        coerced(Tool(name="go", description="", parameters=schema), {"x": "a"})

"""The flat view of `Config`: every setting by name, with its section and type, and how text becomes its value.

Files, flags and the Python door all hand over text, so that one set of rules decides what `2e-5` or `yes` means.

pydantic's `TypeAdapter` reads neither `1e5` and `.inf` nor `none`, `8,16` and a numeral that is a choice, and takes `t` for
true: each of these rules would be a validator of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from mgrpo.config.annotations import FINITE_TOO, Form, JSONObject, Needs, Peer, Range, Reason
from mgrpo.config.annotations import shown as shown
from mgrpo.config.provenance import Provenance
from mgrpo.config.schema import Config

Text = str | tuple[str, ...] | None
"""A value in a file or a flag: one word, a list of words, or nothing (YAML's null)."""

BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
LISTED = {str: "words", int: "whole numbers", float: "numbers", JSONObject: "JSON objects"}
YAML_FLOATS = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of one section."""

    name: str
    section: str
    type: Any
    """The field's annotation, resolved and without its metadata."""
    default: object
    range: Range | None = None
    """The numbers it may hold."""
    form: Form | None = None
    """The texts it may hold."""
    reason: str = ""
    """Why its values are limited, where the limit alone does not say it."""
    needs: tuple[Needs, ...] = ()
    """Conditions without which it has no effect."""
    peers: tuple[Peer, ...] = ()
    """Other trainers that have a setting of this name."""

    @property
    def is_list(self) -> bool:
        """Whether several words make the value."""
        return any(typing.get_origin(kind) is tuple for kind in alternatives(self.type))

    @property
    def is_list_of_mappings(self) -> bool:
        """Whether it is a list of JSON objects."""
        return JSONObject in (item for kind in alternatives(self.type) for item in typing.get_args(kind))

    @property
    def is_choice(self) -> bool:
        """Whether the value is one of a few words."""
        return typing.get_origin(self.type) is Literal

    @property
    def is_mapping(self) -> bool:
        """Whether a file may hold a mapping for it."""
        is_one = any(kind is JSONObject or typing.get_origin(kind) is dict for kind in alternatives(self.type))
        return is_one or self.is_list_of_mappings

    @property
    def is_switch(self) -> bool:
        """Whether a flag without a value means true."""
        return bool in alternatives(self.type)


@cache
def section_types() -> dict[str, Any]:
    """The sections of the schema, in its order."""
    return {name: kind for name, kind in typing.get_type_hints(Config).items() if kind is not Provenance}


@cache
def settings() -> dict[str, Setting]:
    """Every setting by name, in the order of the schema."""
    found: dict[str, Setting] = {}
    for section, section_type in section_types().items():
        annotations = typing.get_type_hints(section_type, include_extras=True)
        for field in dataclasses.fields(section_type):
            assert field.name not in found, f"{field.name} is in two sections of the schema"
            kind, *marks = _without_metadata(annotations[field.name])
            found[field.name] = Setting(
                name=field.name,
                section=section,
                type=kind,
                default=field.default,
                range=next((mark for mark in marks if isinstance(mark, Range)), None),
                form=next((mark for mark in marks if isinstance(mark, Form)), None),
                reason=next((mark.text for mark in marks if isinstance(mark, Reason)), ""),
                needs=tuple(mark for mark in marks if isinstance(mark, Needs)),
                peers=tuple(mark for mark in marks if isinstance(mark, Peer)),
            )
    return found


def _without_metadata(annotation: Any) -> tuple[Any, ...]:
    """The type, followed by its metadata."""
    return typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)


def flat(config: Config) -> dict[str, object]:
    """Value of every setting by name."""
    return {name: getattr(getattr(config, setting.section), name) for name, setting in settings().items()}


def build(values: Mapping[str, object], provenance: Provenance | None = None) -> Config:
    """Config with `values`, which must carry known names and the right types; the rest are defaults."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        sections.setdefault(settings()[name].section, {})[name] = value
    parts = {section: section_types()[section](**own) for section, own in sections.items()}
    return Config(**parts, provenance=provenance or Provenance())


def mismatch(setting: Setting, came: object, where: str) -> str:
    """The sentence for a value of the wrong type."""
    shown = "nothing" if came is None else repr(list(came) if isinstance(came, tuple) else came)
    return f"{setting.name} must be {describe(setting.type)}, got {shown} ({where}){_near(setting, came)}"


def _near(setting: Setting, came: object) -> str:
    """The choice that a misspelt word is near to."""
    choices = [
        str(word)
        for kind in alternatives(setting.type)
        if typing.get_origin(kind) is Literal
        for word in typing.get_args(kind)
    ]
    near = difflib.get_close_matches(str(came).lower(), choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def read(text: Text, expected: Any) -> object:
    """The value of type `expected` that `text` stands for; ValueError when there is none."""
    if _is_union(expected):
        return _read_first(text, typing.get_args(expected))
    if expected is type(None):
        if text is None or (isinstance(text, str) and text.lower() in ("none", "null")):
            return None
    elif typing.get_origin(expected) is tuple:
        item = typing.get_args(expected)[0]
        if isinstance(text, str):
            text = _objects(text) if item is JSONObject else tuple(filter(None, map(str.strip, text.split(","))))
        if isinstance(text, tuple):
            return tuple(read(piece, item) for piece in text)
    elif typing.get_origin(expected) is dict:
        if isinstance(text, str):
            return text
    elif isinstance(text, str):
        return text if expected in (str, JSONObject) else _read_word(text.strip(), expected)
    raise ValueError(text)


def _objects(text: str) -> tuple[str, ...]:
    """The texts of JSON objects with a comma or blanks between them; what cannot be read is one piece with all that follows."""
    found, rest = [], text.strip()
    while rest:
        try:
            end = json.JSONDecoder().raw_decode(rest)[1]
        except ValueError:
            end = len(rest)
        found.append(rest[:end])
        rest = rest[end:].lstrip(", \n\t")
    return tuple(found)


def _read_first(text: Text, alternatives: tuple[Any, ...]) -> object:
    for alternative in sorted(alternatives, key=lambda kind: kind is not type(None)):
        try:
            return read(text, alternative)
        except ValueError:
            continue
    raise ValueError(text)


def _read_word(word: str, expected: Any) -> object:
    if typing.get_origin(expected) is Literal:
        return _pick(word, {str(choice): choice for choice in typing.get_args(expected)})
    if expected is bool:
        return _pick(word.lower(), BOOLEANS)
    if expected is int:
        return _whole(word)
    assert expected is float, f"fields of type {expected} cannot be read"
    return YAML_FLOATS[word.lower()] if word.lower() in YAML_FLOATS else float(word)


def _pick(word: str, choices: Mapping[str, object]) -> object:
    if word not in choices:
        raise ValueError(word)
    return choices[word]


def _whole(word: str) -> int:
    """`100_000` and `1e5` are whole numbers, `2.5` is not."""
    try:
        return int(word)
    except ValueError:
        number = float(word)
    if not number.is_integer() or abs(number) > 2**53:  # is_integer is false for inf and nan
        raise ValueError(word)
    return int(number)


def in_python(sentence: str) -> str:
    """A sentence with its flags as keywords: `--top_k 8` is `top_k=8`, and of a list `["a", "b"]`."""

    def keyword(found: re.Match[str]) -> str:
        name, words = found[1], found[2].split()
        is_list = name in settings() and settings()[name].is_list
        return f"{name}={json.dumps(words) if is_list else ' '.join(words)}"

    return re.sub(r"--(?!help\b)([a-z]\w*)((?: [^\s,;:()`]+)+)", keyword, sentence)


def problem_of(setting: Setting, value: object) -> str:
    """The sentence for a value that no configuration may hold, whatever its others are; empty for a sound one."""
    reason = f"; {setting.reason}" if setting.reason else ""
    if not fits(value, setting.type):
        return f"{setting.name}={value!r} must be {describe(setting.type)}{_near(setting, value)}{reason}"
    if setting.range and isinstance(value, (int, float)) and not setting.range.holds(value):
        limits = str(setting.range).removesuffix("" if float in alternatives(setting.type) else FINITE_TOO)
        return f"{setting.name}={value} must be {limits}{reason}"
    if setting.form and value is not None and not setting.form.holds(str(value)):
        return f"{setting.name}={value!r} must be {setting.form.words}"
    return ""


def fits(value: object, expected: Any) -> bool:
    """Whether a Python value has type `expected`; a whole number serves as a float, a bool never as a number."""
    if _is_union(expected):
        return any(fits(value, alternative) for alternative in typing.get_args(expected))
    if expected is type(None):
        return value is None
    if typing.get_origin(expected) is tuple:
        item = typing.get_args(expected)[0]
        return isinstance(value, tuple) and all(fits(entry, item) for entry in value)
    if typing.get_origin(expected) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(expected))
    if expected is JSONObject:
        return isinstance(value, str)
    if expected in (int, float):
        return isinstance(value, (int, float) if expected is float else int) and not isinstance(value, bool)
    return isinstance(value, expected)


def describe(expected: Any) -> str:
    """A type in words."""
    if _is_union(expected):
        return " or ".join(describe(alternative) for alternative in typing.get_args(expected))
    if typing.get_origin(expected) is Literal:
        choices = [str(choice) for choice in typing.get_args(expected)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if typing.get_origin(expected) is dict:
        return "a JSON object"
    if typing.get_origin(expected) is tuple:
        return f"a list of {LISTED[typing.get_args(expected)[0]]}"
    words = {
        JSONObject: "a JSON object",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "none",
    }
    return words[expected]


def alternatives(expected: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    return typing.get_args(expected) if _is_union(expected) else (expected,)


def _is_union(expected: Any) -> bool:
    return typing.get_origin(expected) in (typing.Union, types.UnionType)

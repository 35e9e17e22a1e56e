"""mgrpo/moving/keywords.pyi, written from the schema: `python -m tools.docs.keywords > mgrpo/moving/keywords.pyi`.

Editors complete and explain the settings from it, and type checkers check calls of `mgrpo.GRPOConfig`.
"""

from __future__ import annotations

import sys
import typing
from typing import Any, Literal

from mgrpo.config.annotations import JSONObject
from mgrpo.config.fields import Setting, alternatives, section_types, settings
from mgrpo.config.help import field_docs, shown_default
from mgrpo.config.tools import SOURCES
from mgrpo.moving.presets import PRESETS

HEAD = '''"""The settings as keywords. Written by `python -m tools.docs.keywords > mgrpo/moving/keywords.pyi`; do not edit."""

# fmt: off
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

class Keywords(TypedDict, total=False):
    """Arguments of `mgrpo.GRPOConfig`."""

'''


def to_stub() -> str:
    """The whole file."""
    presets = ", ".join(f'"{name}"' for name in PRESETS)
    lines = [f"    preset: Literal[{presets}]", '    """Whose defaults to use. (default: mgrpo)"""']
    documents = {name: text for record in section_types().values() for name, text in field_docs(record).items()}
    for setting in settings().values():
        text = f"{documents[setting.name]} (default: {shown_default(setting.default)})".replace("\\", "\\\\")
        lines += [f"    {setting.name}: {_type(setting)}", f'    """{text}"""']
    return HEAD + "\n".join(lines) + "\n"


def _type(setting: Setting) -> str:
    """The types that a caller may give; text is read as in a file, where a list may be one word."""
    if setting.name in SOURCES:
        return "object"
    return " | ".join(dict.fromkeys(_alternative(kind) for kind in alternatives(setting.type)))


def _alternative(kind: Any) -> str:
    if kind is type(None):
        return "None"
    if kind is JSONObject:
        return "Mapping[str, object] | str"
    if typing.get_origin(kind) is Literal:
        return f"Literal[{', '.join(repr(choice).replace(chr(39), chr(34)) for choice in typing.get_args(kind))}]"
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return f"Sequence[{_alternative(item)}]" + (" | str" if item is str else "")
    return str(kind.__name__)


if __name__ == "__main__":
    sys.stdout.write(to_stub())

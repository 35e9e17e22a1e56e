"""The --help text: every setting by section, explained by the docstring beneath its field in the schema."""

from __future__ import annotations

import argparse
import ast
import inspect
import typing
from itertools import pairwise
from typing import Literal

from mgrpo.config import schema
from mgrpo.config.fields import Setting, settings


def help_text(prog: str | None = None) -> str:
    """All settings, grouped by section, with type, meaning and default."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE.yaml | FILE.yaml] [--name value | --name=value ...]",
        description="A flag wins over the file, the file over the default. Lists take several words or a comma between them.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8, width=100),
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file of `name: value` lines.")
    general.add_argument("-h", "--help", action="store_true", help="Show this text.")
    groups: dict[str, argparse._ArgumentGroup] = {}
    documents = field_docs()
    for name, setting in settings().items():
        group = groups.get(setting.section)
        if group is None:
            group = groups[setting.section] = parser.add_argument_group(setting.section)
        text = f"{documents.get(name, '')} (default: {_shown(setting.default)})".strip().replace("%", "%%")
        group.add_argument(f"--{name}", metavar=metavar(setting), help=text)
    return parser.format_help()


def field_docs() -> dict[str, str]:
    """Docstring beneath each field of the schema's sections; empty when Python runs without sources."""
    try:
        tree = ast.parse(inspect.getsource(schema))
    except OSError:
        return {}
    sections = {kind.__name__ for kind in typing.get_type_hints(schema.Config).values()}
    found: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in sections:
            continue
        for field, below in pairwise(node.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def metavar(setting: Setting) -> str:
    """A setting's type as the word after its flag."""
    if typing.get_origin(setting.type) is Literal:
        return "{" + ",".join(str(choice) for choice in typing.get_args(setting.type)) + "}"
    if setting.is_list:
        return "TEXT ..."
    if setting.is_switch:
        return "BOOL" if setting.type is bool else "BOOL|auto"
    return {int: "INT", float: "FLOAT"}.get(setting.type, "TEXT")


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(default) or "empty"
    if default is None or isinstance(default, bool):
        return str(default).lower()
    return str(default)

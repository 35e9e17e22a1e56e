"""The --help text: every setting by section, explained by the docstring beneath its field in the schema."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import typing
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from mgrpo.config.fields import Setting, alternatives, section_types, settings

COMMANDS = {
    "mgrpo train": "Trains a model.",
    "mgrpo eval": "Evaluates a model on the held-out prompts, without a learner; one process.",
    "mgrpo rollout": "Prints some completions, with their turns and tools; one process, no training.",
}
"""The commands that take settings, and what they do."""
OWN_FLAGS = {
    "mgrpo train": (
        ("--nproc-per-node", "N", "Start N ranks on this machine; without it the command is one rank, or torchrun's."),
    ),
    "mgrpo rollout": (("--num", "N", "How many prompts. (default: 4)"),),
}
"""Flags of a command that are no settings: name, value and meaning."""


def help_text(prog: str | None = None, *, presets: Iterable[str] = ("mgrpo",), other_names: str = "") -> str:
    """All settings, grouped by section, with type, meaning and default; first what the command itself does and takes.

    Args:
        presets: the names that --preset takes.
        other_names: the sentence that says which names are accepted beside the settings'.
    """
    command = prog or ""
    does = f"{COMMANDS[command]} " if command in COMMANDS else ""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE.yaml | FILE.yaml] [--preset NAME] [--name value | --name=value ...]",
        description=does
        + "A flag wins over the file, the file over the preset, the preset over the default. Lists take several "
        f"words or a comma between them. {other_names}".rstrip(),
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8, width=100),
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file of `name: value` lines.")
    general.add_argument(
        "--preset",
        metavar="{" + ",".join(presets) + "}",
        help="Whose defaults to use; `preset: NAME` in a file does the same. (default: mgrpo)",
    )
    for name, value, meaning in OWN_FLAGS.get(command, ()):
        general.add_argument(name, metavar=value, help=meaning)
    if command not in ("mgrpo eval", "mgrpo rollout"):
        general.add_argument("--show_config", action="store_true", help="Print every value with its source and exit.")
        general.add_argument(
            "--dry_run",
            action="store_true",
            help="Check configuration, data and layout, start everything, train one step and keep nothing.",
        )
    general.add_argument("-h", "--help", action="store_true", help="Show this text.")
    for section, record in section_types().items():
        group = parser.add_argument_group(section)
        documents = field_docs(record)
        for setting in settings().values():
            if setting.section == section:
                text = f"{documents.get(setting.name, '')} (default: {shown_default(setting.default)})".strip()
                group.add_argument(f"--{setting.name}", metavar=metavar(setting), help=text.replace("%", "%%"))
    return parser.format_help()


def field_docs(record: type) -> dict[str, str]:
    """Docstring beneath each field of a dataclass, on one line; empty when Python runs without sources."""
    try:
        tree = _syntax_tree(record.__module__)
    except OSError:
        return {}
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == record.__name__)
    return {
        field.target.id: " ".join(str(below.value.value).split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


@cache
def _syntax_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def metavar(setting: Setting) -> str:
    """A setting's type as the word after its flag."""
    return "|".join(_word(kind) for kind in alternatives(setting.type) if kind is not type(None))


def _word(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        return choices[0] if len(choices) == 1 else "{" + ",".join(choices) + "}"
    if typing.get_origin(kind) is tuple:
        return f"{_word(typing.get_args(kind)[0])} ..."
    return {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT"}.get(kind, "JSON")


def shown_default(default: object) -> str:
    """A default as a user would write it."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "empty"
    if default is None or isinstance(default, bool):
        return str(default).lower()
    return str(default)

"""Names and defaults of the flags of Open Instruct's GRPO trainer, which the preset open_instruct_main has as well.

    python tools/peers/record_open_instruct.py CHECKOUT > tests/unit/moving/open_instruct_defaults.json

CHECKOUT is a folder with Open Instruct's sources, of which nothing is imported or run: the dataclasses that the trainer's parser
takes are read with their base classes, and what the parser sets itself.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

TRAINER = "grpo_fast.py"


def main() -> None:
    """Print a flag a line."""
    package = Path(sys.argv[1]) / "open_instruct"
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    classes = {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in node.decorator_list)
    }
    parser, own = _parser(trees[package / TRAINER])
    found = {name: value for kind in parser for name, value in _fields(kind, classes)} | own
    constants = _constants(*trees.values())
    found = {name: constants.get(value, value) if isinstance(value, str) else value for name, value in found.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


def _constants(*trees: ast.Module) -> dict[str, object]:
    """Texts that have a name, by the name as `_value` shows it."""
    return {
        f"({target.id})": node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _parser(tree: ast.Module) -> tuple[list[str], dict[str, object]]:
    """Names of the dataclasses that the parser takes, and the defaults that it sets itself."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = next(call for call in calls if ast.unparse(call.func) == "ArgumentParserPlus")
    kinds = [
        ast.unparse(kind).rpartition(".")[2]
        for kind in ast.iter_child_nodes(made.args[0])
        if not isinstance(kind, ast.Load)
    ]
    own = next(call for call in calls if ast.unparse(call.func) == "parser.set_defaults")
    return kinds, {str(word.arg): _value(word.value) for word in own.keywords}


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, object]]:
    """Field and default of a dataclass: of its bases first, so that its own and those of earlier bases replace them."""
    node = classes[name]
    for base in reversed(node.bases):
        yield from _fields(ast.unparse(base).rpartition(".")[2], classes)
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
            words = {word.arg: word.value for word in field.value.keywords} if isinstance(field.value, ast.Call) else {}
            if "init" not in words:
                yield field.target.id, _default(field.value, words)


def _default(value: ast.expr, words: dict[str | None, ast.expr]) -> object:
    if "default" in words:
        return _value(words["default"])
    factory = words.get("default_factory")
    if factory is None:
        return _value(value)
    return _value(factory.body) if isinstance(factory, ast.Lambda) else []


def _value(node: ast.expr) -> object:
    """A literal, or the name of an enum's member; an expression that has to run is shown as it is written."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node.attr if isinstance(node, ast.Attribute) else f"({ast.unparse(node)})"


if __name__ == "__main__":
    main()

"""Which statements only a CUDA device reaches: read from the source, for one simple shape of conditions.

An `if` whose condition asks for the device (`ASKS`) has a side for CUDA: its body, its `else`, or what follows it in the
block where its other side leaves the function. Methods that this side calls on `self` belong to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ASKS = (".is_cuda", "has_cuda()", ".device.type", "_is_on_device", "on_gpu")


@dataclass(frozen=True, slots=True)
class Branch:
    """A condition and the first lines of the statements that it leads to on CUDA."""

    file: Path
    function: str
    line: int
    statements: tuple[int, ...]


def branches(file: Path) -> list[Branch]:
    """Every place in the file that asks for the device."""
    tree = ast.parse(file.read_text())
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        methods = _siblings(tree, function)
        for block, place in _blocks(function):
            statement = block[place]
            if not _asks(statement):
                continue
            side = _cuda_side(block, place)
            lines = {line for part in side for line in _lines(part)}
            for name in {name for part in side for name in _called(part)} & methods.keys():
                lines |= {line for part in methods[name].body for line in _lines(part)}
            found.append(Branch(file, function.name, statement.lineno, tuple(sorted(lines | {statement.lineno}))))
    return found


def _siblings(tree: ast.AST, function: ast.FunctionDef) -> dict[str, ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and function in node.body:
            return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    return {}


def _blocks(function: ast.FunctionDef) -> Iterator[tuple[list[ast.stmt], int]]:
    """Every statement of a function, without those of functions in it, as its block and its place there."""
    todo = [function.body]
    while todo:
        block = todo.pop()
        for place, statement in enumerate(block):
            yield block, place
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                todo += [part for name in ("body", "orelse", "finalbody") if (part := getattr(statement, name, None))]


def _asks(statement: ast.stmt) -> bool:
    """Whether the statement itself, not one within it, asks for the device."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return False
    head = [
        value for name, value in ast.iter_fields(statement) if name not in ("body", "orelse", "finalbody", "handlers")
    ]
    nodes = [
        node for value in head for node in (value if isinstance(value, list) else [value]) if isinstance(node, ast.AST)
    ]
    return any(name in ast.unparse(node) for node in nodes for name in ASKS)


def _cuda_side(block: list[ast.stmt], place: int) -> list[ast.stmt]:
    statement = block[place]
    if not isinstance(statement, ast.If):
        return [statement]
    if _holds(statement.test):
        return statement.body
    leaves = isinstance(statement.body[-1], (ast.Return, ast.Raise))
    return statement.orelse or (block[place + 1 :] if leaves else [])


def _holds(test: ast.expr) -> bool:
    """Whether the condition can hold on CUDA; what it asks besides is taken to be so."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not _holds(test.operand) if any(name in ast.unparse(test) for name in ASKS) else True
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(_holds(value) for value in test.values)
    return not (isinstance(test, ast.Compare) and ast.unparse(test.comparators[0]) == "'cpu'")


def _lines(statement: ast.stmt) -> Iterator[int]:
    for node in ast.walk(statement):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            yield node.lineno


def _called(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr

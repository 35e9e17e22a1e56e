"""Which lines of some modules run: marks are put into their code when they are imported.

A trace function would say it too, and call by call make the whole process, torch's code included, twice as slow.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

MARK = "__ran__"


class Lines:
    """The first lines of the statements that have run in the functions of some files, in any thread.

    Raises:
        AssertionError: a file's module has been imported already, and would not be marked.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.run: dict[str, set[int]] = {file: set() for file in files}
        early = {getattr(module, "__file__", None) for module in [*sys.modules.values()]} & self.run.keys()
        assert not early, f"imported before their lines are watched: {early}"
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Where a module is; Python asks for each that is imported."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in self.run:
            return None
        spec.loader = _Marked(name, spec.origin, self.run[spec.origin])
        return spec


class _Marked(SourceFileLoader):
    def __init__(self, name: str, file: str, run: set[int]) -> None:
        super().__init__(name, file)
        self.run = run

    def get_code(self, fullname: str) -> CodeType:
        """With marks, and so neither from a cache nor into one."""
        tree = ast.parse(self.get_data(self.path))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef)):
                continue
            for name in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, name, None), list):
                    setattr(node, name, [part for statement in block for part in (_mark(statement), statement)])
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, MARK, self.run.add)
        super().exec_module(module)


def _mark(statement: ast.stmt) -> ast.stmt:
    call = ast.Call(func=ast.Name(MARK, ast.Load()), args=[ast.Constant(statement.lineno)], keywords=[])
    return ast.copy_location(ast.Expr(call), statement)

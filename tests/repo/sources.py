"""The source files of the package as the checks of its shape read them. Each text is parsed once."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mgrpo"

Graph = dict[str, set[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, with the names that are taken from it."""

    module: str
    members: tuple[str, ...] = ()
    is_lazy: bool
    """Inside a function, or read by type checkers alone."""

    def names(self) -> set[str]:
        """Every dotted name that may be a module."""
        return {self.module, *(f"{self.module}.{member}" for member in self.members)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The facts of one file."""

    lines: int
    imports: tuple[Import, ...]
    classes: tuple[str, ...]
    """Defined at the top of the file."""
    names: frozenset[str]
    """Defined or imported at the top of the file."""


def files(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def source(path: Path) -> Source:
    return _read(path.read_text(encoding="utf-8"))


@functools.cache
def _read(text: str) -> Source:
    tree = ast.parse(text)
    return Source(
        lines=len(text.splitlines()),
        imports=tuple(_imports(tree, is_lazy=False)),
        classes=tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        names=frozenset(_names(tree)),
    )


def _imports(node: ast.AST, *, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(module=alias.name, is_lazy=is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, "relative import"
            yield Import(module=child.module, members=tuple(alias.name for alias in child.names), is_lazy=is_lazy)
        elif not isinstance(child, ast.expr):
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(child, is_lazy=is_lazy or is_function or _is_type_checking(child))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _names(child)


def docstrings(package: Path = PACKAGE) -> list[tuple[str, list[str]]]:
    """The docstrings of each file: of modules, classes, functions and attributes."""
    found = []
    for path in files(package):
        nodes = [child for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for child in _statements(node)]
        texts = [
            child.value.value
            for child in nodes
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        ]
        found.append((path.relative_to(package).as_posix(), [text for text in texts if isinstance(text, str)]))
    return found


def _statements(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []


def written(package: Path, texts: dict[str, str]) -> Path:
    """A package with these files, for the checks to find something in."""
    for name, text in texts.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def modules(package: Path) -> dict[str, Path]:
    """Every module by its dotted name."""
    paths = {path.relative_to(package.parent).with_suffix(""): path for path in files(package)}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def imported(path: Path, known: dict[str, Path], *, lazy: bool) -> set[str]:
    """The modules of the package that a file names in its imports; with `lazy` also those inside functions."""
    found: set[str] = set()
    for each in source(path).imports:
        if each.is_lazy and not lazy:
            continue
        members = {f"{each.module}.{member}" for member in each.members}
        found |= members & known.keys()
        if not each.members or members - known.keys():
            found |= {each.module} & known.keys()
    return found


def rooms_imported(path: Path, package: Path = PACKAGE) -> set[str]:
    """The rooms that a file imports anything from, and the compiled library."""
    named = {name for each in source(path).imports for name in each.names()}
    rooms = {name.split(".")[1] for name in named if name.startswith(f"{package.name}.")}
    return {room for room in rooms if not room.startswith("__")}


def cycle(graph: Graph) -> str:
    """Some cycle, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as err:
        # It names each node's predecessor, which here is what imports it.
        return " -> ".join(reversed(err.args[1]))
    return ""

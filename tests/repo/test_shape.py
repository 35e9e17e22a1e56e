"""The shape of the package: no import cycles, no class and no file too long to read in one go."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mgrpo"
DOOR = "__init__"
"""`mgrpo.train` imports the application, which imports everything else, when it is called: not an import of a layer."""
MAX_CLASS_LINES = 250
MAX_FILE_LINES = 500

Graph = dict[str, set[str]]


def modules(package: Path) -> dict[str, Path]:
    """Every module by its dotted name."""
    paths = {path.relative_to(package.parent).with_suffix(""): path for path in sorted(package.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
    """The code that runs on import; with `lazy` also the bodies of functions and what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not lazy and (
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_type_checking(child)
        ):
            continue
        yield child
        yield from statements(child, lazy=lazy)


def imported(path: Path, known: dict[str, Path], *, lazy: bool) -> set[str]:
    """The modules of the package that a file names in its imports."""
    names = set()
    for node in statements(ast.parse(path.read_text()), lazy=lazy):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members & known.keys()
            if members - known.keys():
                names.add(node.module)
    return names & known.keys()


def module_graph(package: Path, *, lazy: bool) -> Graph:
    """Imports between modules, except the package door's lazy ones.

    Importing a module also imports the packages around it, which matters where they do not hold the importer.
    """
    known = modules(package)
    graph: Graph = {}
    for name, path in known.items():
        graph[name] = set()
        for target in imported(path, known, lazy=lazy and room_of(name) != DOOR) - {name}:
            parts = target.split(".")
            around = {".".join(parts[:length]) for length in range(1, len(parts))}
            graph[name] |= {target} | {outer for outer in around if not f"{name}.".startswith(f"{outer}.")}
    return graph


def room_graph(package: Path) -> Graph:
    """All imports between rooms, wherever they stand, except the package door."""
    known = modules(package)
    graph: Graph = {}
    for name, path in known.items():
        targets = {room_of(target) for target in imported(path, known, lazy=True)} - {room_of(name)}
        graph.setdefault(room_of(name), set()).update(targets if room_of(name) != DOOR else ())
    return graph


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else DOOR


def cycle(graph: Graph) -> str:
    """Some cycle, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as err:
        # It names each node's predecessor, which here is what imports it.
        return " -> ".join(reversed(err.args[1]))
    return ""


def long_classes(path: Path) -> dict[str, int]:
    """Classes above the limit, with their lines."""
    sizes = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    return {name: size for name, size in sizes.items() if size > MAX_CLASS_LINES}


def in_package(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


@pytest.mark.parametrize("lazy", [False, True], ids=["at import", "with imports in functions"])
def test_modules_do_not_import_each_other_in_a_cycle(lazy):
    """Whether such modules can be imported depends on which comes first, and none can be read without the others."""
    assert cycle(module_graph(PACKAGE, lazy=lazy)) == ""


def test_rooms_do_not_import_each_other_in_a_cycle():
    """Rooms that need each other, even inside a function, are one room: neither can be read or tested alone."""
    assert cycle(room_graph(PACKAGE)) == ""


@pytest.mark.parametrize("path", modules(PACKAGE).values(), ids=in_package)
def test_nothing_is_too_long_to_read_in_one_go(path):
    """A longer class or file holds more than one noun."""
    assert long_classes(path) == {}
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.fixture
def package(tmp_path):
    """A package of two rooms: `high` imports `low` at its top."""
    sources = {
        "__init__.py": "def train():\n    from p.run import go\n",
        "run.py": "import p\nfrom p.high import a\n",
        "low/__init__.py": "",
        "low/b.py": "",
        "low/c.py": "from p.low import b\n",
        "high/__init__.py": "from p.high.a import f\n",
        "high/a.py": "from p.low.c import g\n",
    }
    for name, source in sources.items():
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "p"


def test_layers_and_the_package_door_are_no_cycle(package):
    """Otherwise the checks above would fail on every tree."""
    for lazy in (False, True):
        assert cycle(module_graph(package, lazy=lazy)) == ""
    assert cycle(room_graph(package)) == ""


@pytest.mark.parametrize(
    ("source", "at_import", "between_rooms"),
    [
        ("from p.low.c import g\n", True, False),
        ("import p.low.c\n", True, False),
        ("class B:\n    from p.low import c\n", True, False),
        ("from p.high import f\n", True, True),
        ("def h():\n    from p.low.c import g\n", False, False),
        ("def h():\n    from p.high import a\n", False, True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.high.a import f\n", False, True),
    ],
)
def test_cycles_are_found(package, source, at_import, between_rooms):
    """`low.b` closes a cycle with what imports it: at once, or lazily."""
    (package / "low" / "b.py").write_text(source)
    assert bool(cycle(module_graph(package, lazy=False))) == at_import
    assert cycle(module_graph(package, lazy=True))
    assert bool(cycle(room_graph(package))) == between_rooms


def test_long_classes_are_found(tmp_path):
    """One line above the limit."""
    body = "    x = 1\n"
    (tmp_path / "a.py").write_text("class A:\n" + body * MAX_CLASS_LINES + "class B:\n" + body * (MAX_CLASS_LINES - 1))
    assert long_classes(tmp_path / "a.py") == {"A": MAX_CLASS_LINES + 1}

"""The shape of the package: no cycles, no folder with more in it than a reader holds, no file too long or too short to stand alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repo import allowed, walls
from tests.repo.sources import PACKAGE, Graph, cycle, files, imported, modules, source, written

WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\(|\b(datetime\.|utc)now\(|CLOCK_REALTIME|\btime\.(localtime|gmtime)\(\)")


def module_graph(package: Path, *, lazy: bool) -> Graph:
    """Imports between modules, except the package door's lazy ones.

    Importing a module also imports the packages around it, which matters where they do not hold the importer.
    """
    known = modules(package)
    graph: Graph = {}
    for name, path in known.items():
        graph[name] = set()
        for target in imported(path, known, lazy=lazy and name != package.name) - {name}:
            parts = target.split(".")
            around = {".".join(parts[:length]) for length in range(1, len(parts))}
            graph[name] |= {target} | {outer for outer in around if not f"{name}.".startswith(f"{outer}.")}
    return graph


def cycles(found: list[walls.Folder]) -> list[str]:
    """A cycle of each folder that has one."""
    return [f"{folder.name}: {met}" for folder in found if (met := cycle(folder.graph))]


def long_files(package: Path) -> list[str]:
    sizes = {str(path.relative_to(package)): source(path).lines for path in files(package)}
    return [f"{name} has {lines} lines" for name, lines in sizes.items() if lines > allowed.MAX_FILE_LINES]


def report(said: list[str], found: list[walls.Folder]) -> str:
    """The sentences, and what there is, from which `allowed.py` can be set right."""
    return "\n".join([*said, "", walls.table(found)])


@pytest.mark.parametrize("lazy", [False, True], ids=["at import", "with imports in functions"])
def test_modules_do_not_import_each_other_in_a_cycle(lazy):
    """Whether such modules can be imported depends on which comes first, and none can be read without the others."""
    assert cycle(module_graph(PACKAGE, lazy=lazy)) == ""


def test_units_of_a_folder_do_not_import_each_other_in_a_cycle():
    """Rooms that need each other, even inside a function, are one room: neither can be read or tested alone. So are folders."""
    found = walls.folders()
    said = cycles(found)
    assert not said, report(said, found)


def test_folders_have_no_more_units_than_a_reader_holds():
    """A list of twenty files says nothing about which to open first."""
    found = walls.folders()
    said = walls.above(allowed.MAX_UNITS, walls.crowds(found), allowed.LARGE)
    assert not said, report(said, found)


def test_folders_have_no_more_floors_than_a_reader_climbs():
    """To know what the top does, its reader goes down every floor."""
    found = walls.folders()
    said = walls.above(allowed.MAX_FLOORS, {folder.name: folder.floors for folder in found}, allowed.TALL)
    assert not said, report(said, found)


def test_files_are_long_enough_to_stand_alone():
    """A journey through the package is as long as the files that it crosses are many."""
    said = walls.unlisted(walls.small(allowed.MIN_FILE_LINES), allowed.SMALL)
    assert not said, "\n".join(said)


def test_no_wait_and_no_limit_is_measured_by_the_wall_clock():
    """It is set in mid run, by an administrator or a time server, and then a wait of seconds ends at once or after years."""
    readers = {
        str(path.relative_to(PACKAGE)) for path in files() if WALL_CLOCK.search(path.read_text(encoding="utf-8"))
    }
    assert readers == allowed.WALL_CLOCK.keys(), (
        "use time.monotonic(), or say in allowed.WALL_CLOCK what the date is for"
    )


def test_no_file_is_too_long_to_read_in_one_go():
    """A longer file holds more than one noun."""
    said = long_files(PACKAGE)
    assert not said, "\n".join(said)


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
    return written(tmp_path / "p", sources)


def test_layers_and_the_package_door_are_no_cycle(package):
    """Otherwise the checks above would fail on every tree."""
    for lazy in (False, True):
        assert cycle(module_graph(package, lazy=lazy)) == ""
    assert cycles(walls.folders(package)) == []


@pytest.mark.parametrize(
    ("text", "at_import", "between_folders"),
    [
        ("from p.low.c import g\n", True, ["low: "]),
        ("import p.low.c\n", True, ["low: "]),
        ("class B:\n    from p.low import c\n", True, ["low: "]),
        ("from p.high import f\n", True, ["p: "]),
        ("def h():\n    from p.low.c import g\n", False, ["low: "]),
        ("def h():\n    from p.high import a\n", False, ["p: "]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.high.a import f\n", False, ["p: "]),
    ],
)
def test_cycles_are_found(package, text, at_import, between_folders):
    """`low.b` closes a cycle with what imports it: at once, or lazily; inside its room, or between rooms."""
    (package / "low" / "b.py").write_text(text)
    assert bool(cycle(module_graph(package, lazy=False))) == at_import
    assert cycle(module_graph(package, lazy=True))
    found = walls.folders(package)
    assert [said[:3] if said[0] == "p" else said[:5] for said in cycles(found)] == between_folders
    assert "cycle" in walls.table(found)


def test_units_floors_and_arrows_are_counted(package):
    """A door is no unit, and a folder is one, whatever is in it."""
    (package / "low" / "inner").mkdir()
    (package / "low" / "inner" / "d.py").write_text("def f():\n    from p.low.c import g\n    from p.low.c import h\n")
    (package / "low" / "inner" / "e.py").write_text("from p.low.inner import d\n")
    found = {folder.name: folder for folder in walls.folders(package)}
    numbers = {name: (len(each.graph), each.floors, each.arrows) for name, each in found.items()}
    assert numbers == {"p": (3, 3, 2), "high": (1, 1, 0), "low": (3, 3, 2), "low.inner": (2, 2, 1)}
    assert found["low"].graph == {"b": set(), "c": {"b"}, "inner": {"c"}}
    assert walls.inner(found.values()) == {"low.inner": {"c"}}
    assert walls.crowds(found.values()) == {"p": 3, "low": 3, "low.inner": 2}, "high has no arrow: a catalogue"


def test_folders_above_a_limit_are_found():
    """Without a row, with a number that is out of date in either direction, and with a row that is needed no more."""
    rows = {"b": (14, ""), "c": (14, ""), "d": (14, ""), "e": (14, ""), "f": (14, "")}
    assert walls.above(12, {"a": 12, "b": 14}, {"b": (14, "")}) == []
    assert walls.above(12, {"a": 13, "b": 15, "c": 13, "d": 12, "e": 14}, rows) == [
        "a has 13, more than 12",
        "b has 15, more than 14",
        "c has 13: lower its row",
        "d needs no row",
        "f needs no row",
    ]


def test_small_and_long_files_are_found(package):
    """One line beside the limits. Doors may be short."""
    (package / "run.py").write_text("\n" * allowed.MIN_FILE_LINES)
    (package / "low" / "b.py").write_text("\n" * (allowed.MIN_FILE_LINES - 1))
    (package / "low" / "c.py").write_text("\n" * (allowed.MAX_FILE_LINES + 1))
    (package / "high" / "a.py").write_text("\n" * allowed.MAX_FILE_LINES)
    found = walls.small(allowed.MIN_FILE_LINES, package)
    assert found == {"low/b.py": allowed.MIN_FILE_LINES - 1}
    assert walls.unlisted(found, {"run.py": "gone or grown"}) == ["low/b.py has no row", "run.py needs no row"]
    assert long_files(package) == [f"low/c.py has {allowed.MAX_FILE_LINES + 1} lines"]

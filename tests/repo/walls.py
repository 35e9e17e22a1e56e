"""The walls inside the package: the units of each folder (its files and folders), and the arrows of imports between them.

`python -m tests.repo.walls` prints a row for each folder, and the rows of `allowed.ROOMS` and `allowed.INNER` as they are now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.repo.allowed import APPLICATION, UNTIL_MERGED
from tests.repo.sources import PACKAGE, Graph, cycle, files, imported, modules, rooms_imported, source

DOOR = "__init__"
"""Not a unit: it stands before all of them. `mgrpo.train` imports the application when it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder and what its units import of each other, also inside functions."""

    name: str
    """Below the package, like "run.produce"; the package itself has its own name."""
    graph: Graph

    @property
    def arrows(self) -> int:
        return sum(map(len, self.graph.values()))

    @property
    def floors(self) -> int:
        """Units on the longest path of arrows; 0 where they form a cycle."""
        return 0 if cycle(self.graph) else max(map(self._floor, self.graph), default=0)

    def _floor(self, unit: str) -> int:
        return 1 + max(map(self._floor, self.graph[unit]), default=0)


def folders(package: Path = PACKAGE, *, going: Mapping[str, set[tuple[str, str]]] = UNTIL_MERGED) -> list[Folder]:
    """The package and every folder in it that has a file, without the arrows that are about to go."""
    known = modules(package)
    graphs: dict[str, Graph] = {}
    for name, path in known.items():
        parts = (*name.split("."), *([DOOR] if path.stem == DOOR else []))
        targets = [target.split(".") for target in imported(path, known, lazy=True)]
        for depth in range(1, len(parts)):
            graph = graphs.setdefault(".".join(parts[:depth]), {})
            if (unit := parts[depth]) == DOOR:
                continue
            inside = {target[depth] for target in targets if target[:depth] == list(parts[:depth]) and target[depth:]}
            graph.setdefault(unit, set()).update(inside - {unit})
    for name, arrows in going.items():
        for unit, target in arrows:
            graphs.get(f"{package.name}.{name}", {}).get(unit, set()).discard(target)
    return [Folder(name=short(name, package), graph=graph) for name, graph in sorted(graphs.items())]


def short(name: str, package: Path) -> str:
    return name.removeprefix(f"{package.name}.")


def crowds(found: Iterable[Folder]) -> dict[str, int]:
    """Units of the folders whose units import each other; a flat catalogue may be as long as it likes."""
    return {each.name: len(each.graph) for each in found if each.arrows}


def table(found: Iterable[Folder]) -> str:
    """One row a folder."""
    rows = [f"{each.name:28}{len(each.graph):6}{each.floors or 'cycle':>8}{each.arrows:8}" for each in found]
    return "\n".join([f"{'folder':28}{'units':>6}{'floors':>8}{'arrows':>8}", *rows])


def place(path: Path, package: Path = PACKAGE) -> str:
    """A file's room, or its unit of `run`: the key of its row in `allowed.ROOMS`."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:2]) if parts[0] == "run" and len(parts) > 1 and parts[1] != DOOR else parts[0]


def outer(package: Path = PACKAGE) -> dict[str, set[str]]:
    """The rooms that each room and each unit of `run` imports."""
    found: dict[str, set[str]] = {}
    for path in files(package):
        row = place(path, package)
        found.setdefault(row, set()).update(rooms_imported(path, package) - {row.split(".")[0]})
    return found


def inner(found: Iterable[Folder]) -> dict[str, set[str]]:
    """What each folder inside a room, and each unit of `run`, imports of its siblings."""
    found = list(found)
    names = {each.name for each in found}
    rows = {f"{each.name}.{unit}": (each, targets) for each in found for unit, targets in each.graph.items()}
    return {name: targets for name, (each, targets) in rows.items() if name in names or each.name == "run"}


def above(limit: int, sizes: Mapping[str, int], listed: Mapping[str, tuple[int, str]]) -> list[str]:
    """Sentences about folders above a limit that are not listed with their number, and about rows that are out of date."""
    said = []
    for name in sorted(sizes.keys() | listed.keys()):
        size, number = sizes.get(name, 0), listed[name][0] if name in listed else limit
        if size > limit and size != number:
            said.append(
                f"{name} has {size}, more than {number}" if size > number else f"{name} has {size}: lower its row"
            )
        elif size <= limit and name in listed:
            said.append(f"{name} needs no row")
    return said


def small(limit: int, package: Path = PACKAGE) -> dict[str, int]:
    """Files with fewer lines than the limit, doors excepted."""
    sizes = {str(path.relative_to(package)): source(path).lines for path in files(package) if path.stem != DOOR}
    return {name: lines for name, lines in sizes.items() if lines < limit}


def unlisted(found: Iterable[str], listed: Iterable[str]) -> list[str]:
    """Sentences about names without a row and rows without a name."""
    found, listed = set(found), set(listed)
    return [f"{name} has no row" for name in sorted(found - listed)] + [
        f"{name} needs no row" for name in sorted(listed - found)
    ]


def _rows(title: str, rows: Mapping[str, set[str]]) -> str:
    lines = [f'    "{name}": {{{", ".join(map(_quoted, sorted(rows[name])))}}},' for name in sorted(rows)]
    return "\n".join([title, *lines]).replace("{}", "set()")


def _quoted(name: str) -> str:
    return f'"{name}"'


if __name__ == "__main__":
    everything = folders()
    rooms = {name: used for name, used in outer().items() if name not in APPLICATION}
    print(table(everything), _rows("ROOMS", rooms), _rows("INNER", inner(everything)), sep="\n\n")

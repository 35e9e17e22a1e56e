"""The tests of what has changed: those of changed rooms and of the rooms that import them.

`python -m tests.repo.changed [REVISION]` prints their folders for `make test-changed`: of changes since the revision, which
is the last commit unless given, and of files that git does not know yet.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tests.repo import walls

ROOT = Path(__file__).parents[2]
ALWAYS = "tests/repo"
OUTSIDE = {"csrc": "ops", "tools": "tools"}
"""Folders beside the package, and the unit tests that cover them."""


def changed_files(revision: str) -> list[str]:
    """Paths of the repository that differ from a revision or are new; a file that was deleted counts."""

    def lines(*command: str) -> list[str]:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    return lines("git", "diff", "--name-only", revision) + lines("git", "ls-files", "--others", "--exclude-standard")


def affected_tests(paths: Iterable[str], importers: Mapping[str, set[str]], unit: Path) -> list[str]:
    """Test files and folders to run, below the repository's root.

    Args:
        importers: for each room and each unit of `run` those that import it.
        unit: the folder of unit tests.
    """
    found = {ALWAYS}
    for parts in (PurePosixPath(path).parts for path in paths):
        if parts[0] == "mgrpo" and len(parts) > 1:
            room = walls.place(Path(*parts), Path("mgrpo"))
            for name in {room, *importers.get(room, ())}:
                found |= _unit_tests(name, unit)
        elif parts[0] in OUTSIDE:
            found |= _unit_tests(OUTSIDE[parts[0]], unit)
        elif parts[0] == "tests" and parts[-1].startswith("test_") and (unit.parents[1] / Path(*parts)).exists():
            found.add("/".join(parts))
        elif parts[:2] == ("tests", "unit"):
            found.add("/".join(parts[:3]) if len(parts) > 3 else "tests/unit")
    folders = {name for name in found if not name.endswith(".py")}
    return sorted(name for name in found if not any(name.startswith(f"{folder}/") for folder in folders))


def _unit_tests(room: str, unit: Path) -> set[str]:
    path = room.replace(".", "/")
    names = [name for name in (path, f"test_{path}.py") if (unit / name).exists()]
    # Units of `run` share a folder, but for some that have their own.
    names = names or ([room.split(".")[0]] if "." in room else [])
    return {f"tests/unit/{name}" for name in names}


def importers() -> dict[str, set[str]]:
    """For each room and each unit of `run`, those that import it; units of `run` as imported by one another."""
    found: dict[str, set[str]] = {}
    inside = {name: {f"run.{unit}" for unit in used} for name, used in walls.inner(walls.folders()).items()}
    for importer, rooms in walls.outer().items():
        own = inside.get(importer, set()) if importer.startswith("run.") else set()
        for room in rooms - {"run"} | own:
            found.setdefault(room, set()).add(importer)
    return found


if __name__ == "__main__":
    print(*affected_tests(changed_files(*(sys.argv[1:] or ["HEAD"])), importers(), ROOT / "tests/unit"))

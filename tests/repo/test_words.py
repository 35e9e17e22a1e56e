"""A name means one thing: what is called as something else is, has a reason."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.repo import allowed, walls
from tests.repo.sources import PACKAGE, modules, source, written


def doubled(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def file_names(package: Path) -> dict[str, list[str]]:
    """Where each name of a file or folder occurs."""
    found = defaultdict(list)
    for module in modules(package):
        found[module.rpartition(".")[2]].append(walls.short(module, package))
    return dict(found)


def class_names(package: Path) -> dict[str, list[str]]:
    """Where each public class is defined."""
    found = defaultdict(list)
    for module, path in modules(package).items():
        for name in source(path).classes:
            if not name.startswith("_"):
                found[name].append(walls.short(module, package))
    return dict(found)


def test_names_of_files_that_occur_twice_have_a_reason():
    """Who greps for a name finds one thing, or knows why there are two."""
    found = doubled(file_names(PACKAGE))
    said = walls.unlisted(found, allowed.DOUBLED_FILES)
    assert not said, "\n".join([*said, *map(str, found.items())])


def test_names_of_classes_that_occur_twice_have_a_reason():
    """The same for what is defined in a file."""
    found = doubled(class_names(PACKAGE))
    said = walls.unlisted(found, allowed.DOUBLED_CLASSES)
    assert not said, "\n".join([*said, *map(str, found.items())])


def test_doubled_names_are_found(tmp_path):
    """A folder's name counts, a private class does not."""
    sources = {
        "__init__.py": "",
        "fleet.py": "class Fleet: ...\nclass _Own: ...\nclass Other: ...\n",
        "low/__init__.py": "class _Own: ...\n",
        "low/fleet/__init__.py": "class Fleet: ...\ndef f():\n    class Other: ...\n",
    }
    package = written(tmp_path / "p", sources)
    assert doubled(file_names(package)) == {"fleet": ["fleet", "low.fleet"]}
    assert doubled(class_names(package)) == {"Fleet": ["fleet", "low.fleet"]}

"""Programs that tests and tools keep in strings: no linter sees that what they import has got another name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.repo.sources import PACKAGE, modules, source

FOLDERS = ("tests", "tools", "examples", "benchmarks")
IMPORT = re.compile(r"(?:\b|(?<=\\n))from (mgrpo[\w.]*) import (\([^)]*\)|[\w, ]+)")


def gone(text: str, known: dict[str, Path]) -> Iterator[str]:
    """Imports from the package, in a program or in its strings, of what is not there."""
    for module, members in IMPORT.findall(text):
        if module not in known:
            yield module
            continue
        there = source(known[module]).names | {"_C"}
        for name in (re.split(r"\s+as\s+", member.strip())[0] for member in members.strip("()").split(",")):
            if name and f"{module}.{name}" not in known and name not in there:
                yield f"{module}.{name}"


def test_programs_in_strings_import_what_is_there():
    """Many of them run in slow tests alone, which would end before they begin."""
    known, root = modules(PACKAGE), PACKAGE.parent
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")) if path != Path(__file__)]
    said = [f"{path.relative_to(root)}: {name}" for path in paths for name in gone(path.read_text(), known)]
    assert not said, "\n".join(said)


def test_what_is_gone_is_found():
    """A module, a name of one, and one of several in brackets."""
    program = (
        "A = 'from mgrpo.layout import Layout as L, Gone\\nfrom mgrpo.gone import x'\n"
        "B = f'''from mgrpo.run.start import (\n    launch,\n    gone,\n)'''\n"
    )
    assert list(gone(program, modules(PACKAGE))) == ["mgrpo.layout.Gone", "mgrpo.gone", "mgrpo.run.start.gone"]

"""pytest passes over folders of some names without a word, `dist` and `build` among them."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_folder_of_tests_is_collected(request):
    patterns = request.config.getini("norecursedirs")
    assert any(fnmatch("dist", pattern) for pattern in patterns)
    folders = {folder for path in TESTS.rglob("test_*.py") for folder in path.relative_to(TESTS).parts[:-1]}
    assert [name for name in sorted(folders) if any(fnmatch(name, pattern) for pattern in patterns)] == []

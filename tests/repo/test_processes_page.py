"""The page of processes and threads: it names every thread that the code names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.repo.test_links import ROOT

PAGE = (ROOT / "docs/processes.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "mgrpo"
KINDS = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix", "Background": ""}
"""What makes threads, and the keyword that names them; the empty one is the first argument."""


def names(source: str) -> Iterator[tuple[str, bool]]:
    """The names of threads that a file starts, and whether each is whole; otherwise it is the constant part."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        keyword = KINDS.get(getattr(call.func, "attr", getattr(call.func, "id", "")))
        given = [each.value for each in call.keywords if each.arg == keyword] if keyword else call.args[:1]
        for name in given if keyword is not None else ():
            if isinstance(name, ast.JoinedStr):
                yield "".join(part.value for part in name.values if isinstance(part, ast.Constant)), False
            elif isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, True


def test_every_thread_is_on_the_page():
    """A thread that no page names has state that nobody knows the owner of."""
    words = set(re.findall(r"`([^`\n]+)`", PAGE))
    started = [
        (name, is_whole, path.relative_to(PACKAGE).as_posix())
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, is_whole in names(path.read_text(encoding="utf-8"))
    ]
    assert len(started) > 20, started
    assert [
        f"{where}: {name}"
        for name, is_whole, where in started
        if not (name in words if is_whole else any(name in word for word in words))
    ] == []


def test_names_of_threads_are_found():
    """A check that sees no threads would always pass."""
    source = (
        'Thread(target=f, name="a")\nThreadPoolExecutor(2, thread_name_prefix="b")\nBackground(f"c {d}")\nThread(f)'
    )
    assert list(names(source)) == [("a", True), ("b", True), ("c ", False)]

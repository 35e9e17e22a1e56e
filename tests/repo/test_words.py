"""A name means one thing: what is called as something else is, has a reason."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.repo import allowed, walls
from tests.repo.sources import PACKAGE, docstrings, modules, source, written


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


WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
NOT_A_NOUN = re.compile(r"\s*(What|Of|Whoever|Whose|Nobody|Whether|Who|Which|Where|How|That|Those|If)\b")
PARTICIPLE = re.compile(r"[a-z](ed|ing)$")
MOST_PARTICIPLES = 55
"""The number only falls."""


def test_docstrings_begin_with_a_noun_or_a_verb():
    """A relative clause has to be read twice. `config` is not rewritten yet."""
    found = dict(docstrings(PACKAGE))
    begun = {name: [text for text in texts if NOT_A_NOUN.match(text)] for name, texts in found.items()}
    assert {name: texts for name, texts in begun.items() if texts and not name.startswith("config/")} == {}
    clauses = {name: sum(len(WHAT.findall(text)) for text in texts) for name, texts in found.items()}
    assert sum(clauses.values()) < 100, {name: number for name, number in clauses.items() if number}


def test_classes_are_nouns():
    """Nobody greps for `Asked`."""
    names = {name for name in class_names(PACKAGE) if PARTICIPLE.search(name)}
    assert len(names) <= MOST_PARTICIPLES, sorted(names)


def test_clauses_and_participles_are_found(tmp_path):
    texts = {
        "a.py": '"""What it does."""\nclass Asked:\n    """A word: what was said, and what not."""\n    x: int\n    """Of x."""\n'
    }
    package = written(tmp_path / "p", texts)
    ((name, found),) = docstrings(package)
    assert name == "a.py" and len(found) == 3
    assert [bool(NOT_A_NOUN.match(text)) for text in found] == [True, False, True]
    assert sum(len(WHAT.findall(text)) for text in found) == 3
    assert [name for name in class_names(package) if PARTICIPLE.search(name)] == ["Asked"]

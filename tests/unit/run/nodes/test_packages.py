"""What a node says of its packages, and how those that differ are told."""

from __future__ import annotations

import sys
from importlib.metadata import distributions, version
from pathlib import Path

from mgrpo.run.nodes.packages import NUM_NAMED, installed, package_notes


def fake(folder: Path, name: str, number: str) -> None:
    """A package that is installed into `folder`, as importlib.metadata sees it."""
    info = folder / f"{name}-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def told(*packages: dict[str, str]) -> dict[int, dict]:
    return {rank: {"host": f"h{rank}", "packages": found} for rank, found in enumerate(packages)}


def test_every_installed_package_is_said_under_its_normal_name():
    """Two spellings of one name must not look like two packages."""
    found = installed()
    assert found["math-verify"] == version("math_verify") and found["pyyaml"] == version("PyYAML")
    assert len(found) == len({package.name.lower().replace("_", "-").replace(".", "-") for package in distributions()})


def test_the_package_that_is_imported_counts(tmp_path, monkeypatch):
    """An older copy may lie behind it on the path; a folder that a broken installation has left is not a package."""
    fake(tmp_path, "Rich", "0.1")
    (tmp_path / "left_over-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = installed()
    assert found["rich"] == "0.1" and not [name for name in found if "left" in name]


def test_equal_packages_are_not_worth_a_word():
    assert package_notes(told({"rich": "15"}, {"rich": "15"}, {"rich": "15"})) == []


def test_what_differs_is_told_once_for_all_nodes_that_differ_alike():
    """Sixteen nodes of an older image are one line."""
    old, new = {"pyzmq": "26", "rich": "15", "wandb": "1"}, {"protobuf": "7", "pyzmq": "27", "rich": "15"}
    assert package_notes(told(new, old, new, old, new | {"rich": "14"})) == [
        "packages on node 1 (h1), node 3 (h3) differ from node 0's: protobuf missing, pyzmq 26 instead of 27, "
        "wandb 1 in addition; the run goes on",
        "packages on node 4 (h4) differ from node 0's: rich 14 instead of 15; the run goes on",
    ]


def test_a_long_list_ends_with_a_number():
    """An environment of another Python may differ in two hundred packages."""
    many = {f"p{number:02}": "1" for number in range(NUM_NAMED + 3)}
    [note] = package_notes(told(many, {}))
    assert note.count("missing") == NUM_NAMED and f"p{NUM_NAMED - 1:02} missing and 3 more; the run goes on" in note

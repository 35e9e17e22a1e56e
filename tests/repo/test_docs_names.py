"""Files, folders, classes and methods that pages name in code type exist."""

from __future__ import annotations

import builtins
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from tests.repo import walls

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|cpp|cu|h)")
CLASS = re.compile(r"(?:[A-Z][a-z0-9]+){2,}")
HOUSE = {"docs/architecture.md", "docs/processes.md", "CONTRIBUTING.md"}
"""Pages on the code itself: they name folders, and classes of one word."""
FOLDER = re.compile(r"(?:[\w.-]+/)+")
SHORT_CLASS = re.compile(r"[A-Z][a-z]\w+")
FOREIGN = {
    "docs/agents.md": {"BadRequestError", "json.py"},
    "docs/checkpoints.md": {"KillWait"},
    "docs/code.md": {"IntEnum", "TextTestRunner"},
    "docs/conversion.md": {"HybridModel"},
    "docs/data.md": {"RandomState"},
    "docs/hyperparameters.md": {"data_loader.py", "grpo_utils.py"},
    "docs/ifeval.md": {"if_functions.py"},
    "docs/moving/open_instruct.md": {"mason.py"},
    "docs/moving/trl.md": {"HfArgumentParser", "TrlParser", "tests/test_grpo_trainer.py"},
    "benchmarks/README.md": {"ChunkedLogProbFunction", "LigerCrossEntropyLoss", "LigerFusedLinearCrossEntropyLoss"},
}
"""Names of other projects."""


@functools.cache
def tracked() -> frozenset[str]:
    """Files and folders of the repository, by every ending of their paths."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = {PurePosixPath(name) for name in listed if (ROOT / name).exists()}
    paths |= {folder for path in paths for folder in path.parents}
    return frozenset("/".join(path.parts[start:]) for path in paths for start in range(len(path.parts)))


@functools.cache
def classes() -> frozenset[str]:
    """Classes of the repository, and Python's own."""
    found = set(dir(builtins))
    for path in map(ROOT.joinpath, tracked()):
        if path.suffix in (".py", ".h", ".cpp") and path.is_file():
            found |= set(re.findall(r"^\s*(?:enum )?(?:class|struct) (\w+)", path.read_text("utf-8"), re.MULTILINE))
    return frozenset(found)


def missing(text: str, *, is_of_the_house: bool = False) -> Iterator[str]:
    """Names in code type that nothing in the repository has."""
    for code in CODE.findall(FENCE.sub("", text)):
        name = code.split("::")[0].split("(")[0]
        if FILE.fullmatch(name) or (is_of_the_house and FOLDER.fullmatch(name)):
            exists = name.rstrip("/") in tracked()
        elif CLASS.fullmatch(name) or (is_of_the_house and SHORT_CLASS.fullmatch(name)):
            exists = name in classes()
        else:
            continue
        if not exists:
            yield name


PAGES = [name for name in sorted(tracked()) if name.endswith(".md") and (ROOT / name).is_file()]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_files_folders_and_classes_exist(page: str) -> None:
    """A reader searches for what has moved, and trusts the rest of the page less."""
    found = set(missing((ROOT / page).read_text(encoding="utf-8"), is_of_the_house=page in HOUSE))
    assert found == FOREIGN.get(page, set())


def test_names_that_do_not_exist_are_found() -> None:
    text = "`mgrpo/gone.py`, `gone/`, `GoneClass(1)`, `Gone`, `mgrpo/cli.py`, `run/`, `EngineWeights`, `Loads`"
    assert [*missing(text)] == ["mgrpo/gone.py", "GoneClass"]
    assert [*missing(text, is_of_the_house=True)] == ["mgrpo/gone.py", "gone/", "GoneClass", "Gone"]


def test_the_step_on_the_page_is_the_trainers() -> None:
    """The page shows a step as text: a call that the trainer no longer makes would be learned by heart."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    trainer = (ROOT / "mgrpo/run/train/trainer.py").read_text(encoding="utf-8")
    calls = re.findall(r"self\.[\w.]+\([^()]*[^().]\)|self\.[\w.]+\(", snippet.replace(", ...)", ""))
    assert len(calls) == 5
    assert [call for call in calls if call not in trainer] == []


def test_the_floors_on_the_page_are_the_packages() -> None:
    """They say from where a room may be imported."""
    graph = next(folder.graph for folder in walls.folders() if folder.name == "mgrpo")

    def floor(room: str) -> int:
        return 1 + max(map(floor, graph[room]), default=0)

    rows = re.findall(r"^\| (\d) \| (.+) \|$", ARCHITECTURE, re.MULTILINE)
    shown = {
        room.rstrip("/").removesuffix(".py"): int(number) for number, names in rows for room in CODE.findall(names)
    }
    assert shown.pop("csrc") == 1
    assert shown.pop("mgrpo") == floor("cli")
    assert shown == {room: floor(room) for room in graph if room != "__main__"}

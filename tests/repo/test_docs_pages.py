"""The pages that teach name what exists: commands and YAML are read by the command line, Python compiles, metrics are logged."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mgrpo.config import ConfigError
from mgrpo.config.load import SWITCHES
from mgrpo.moving import load_file, parse
from mgrpo.moving.foreign_names import accepted
from mgrpo.planner.plan_command import _parser as plan_parser
from mgrpo.run.nodes.launch_command import parser as launch_parser
from mgrpo.run.ranks.local_ranks import FLAG as RANKS
from tools.docs import metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = """tutorial concepts learning hyperparameters troubleshooting comparison howto/7b_8gpus howto/32b_many_nodes
    howto/own_reward howto/own_verifier howto/own_loss howto/own_advantage howto/own_environment moving/trl
    moving/open_instruct moving/verl moving/slime"""
PAGES = [DOCS / f"{name}.md" for name in NAMES.split()]
FENCE = re.compile(r"^```(?P<language>\w+)(?P<title>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BEFORE = 'title="before'
"""Marks a block of another trainer."""
FILE = re.compile(r"^# (?P<name>[\w/]+\.(?:py|yaml))\b")
"""How a block says which file it is."""
COMMAND = re.compile(r"(?:^|\s)mgrpo (?P<name>train|eval|rollout|plan|launch) (?P<words>[^#]*)")
METRIC = re.compile(
    r"(?:async|batch|clip_ratio|completions|custom|debug|engines|env|eval|loss|lora|objective|optim|perf|policy|replay|"
    r"rewards|rollout|sync|time|tools|turns|val)/[\w{}/@]+"
)
CODE = re.compile(r"`([^`\n]+)`")
TABLE_OF_METRICS = re.compile(r"^\| ?metric ?\|.*?\n\n", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    title: str
    text: str

    @property
    def file(self) -> str:
        found = FILE.match(self.text)
        return found["name"] if found else ""


def blocks(page: Path, language: str) -> list[Block]:
    """This project's blocks in a language, without those of other trainers."""
    name = page.relative_to(ROOT).as_posix()
    every = [Block(name, *match.groups()) for match in FENCE.finditer(page.read_text(encoding="utf-8"))]
    return [block for block in every if block.language == language and not block.title.strip().startswith(BEFORE)]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and words of each `mgrpo` command of a script."""
    for line in text.replace("\\\n", " ").splitlines():
        found = COMMAND.search(line)
        if found:
            yield found["name"], shlex.split(found["words"].replace("$I", "1"))


def check(name: str, words: list[str]) -> None:
    """Read a command as the program would; raises what the user would see."""
    ranks = 1
    if name == "launch":
        split = words.index("--")
        launch_parser().parse_args(words[:split])
        name, words = "train", words[split + 1 :]
    if name == "plan":
        _, words = plan_parser("mgrpo plan").parse_known_args(words)
    if RANKS in words:
        at = words.index(RANKS)
        ranks, words = int(words[at + 1]), words[:at] + words[at + 2 :]
    if name == "rollout" and "--num" in words:
        at = words.index("--num")
        words = words[:at] + words[at + 2 :]
    parse([word for word in words if word not in SWITCHES], world_size=ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of all pages beside each other, and the repository's examples."""
    here = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        for block in [*blocks(page, "yaml"), *blocks(page, "python")]:
            if block.file:
                (here / block.file).write_text(block.text, encoding="utf-8")
    (here / "examples").symlink_to(ROOT / "examples")
    return here


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_read_by_the_command_line(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer copies them: a flag that is misspelt or refused would be their first impression."""
    monkeypatch.chdir(folder)
    for block in blocks(page, "sh"):
        for name, words in commands(block.text):
            check(name, words)
    for line in page.read_text(encoding="utf-8").splitlines():
        for code in CODE.findall(line) if line.startswith("|") else ():
            for name, words in commands(code):
                if name != "launch":
                    check(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_is_a_configuration(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block.text, encoding="utf-8")
        load_file(path, world_size=4)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_compiles_and_imports_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block.text, filename=block.page)):
            name = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and name.partition(".")[0] == "mgrpo":
                module = importlib.import_module(name)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{block.page}: {name} has no {alias.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_metrics_are_logged(page: Path) -> None:
    """A name that is looked for in vain is worse than none."""
    assert not unknown_metrics(page.read_text(encoding="utf-8"))


def test_metrics_in_pictures_are_logged() -> None:
    """Text in a picture is found by no search, so a renamed metric would stay there."""
    named = {
        name for path in (DOCS / "images").glob("*.svg") for name in METRIC.findall(path.read_text(encoding="utf-8"))
    }
    assert named and all(map(metrics.is_logged, named)), named


def unknown_metrics(text: str) -> list[str]:
    """Names like a metric's, and those of the first column of a table of metrics, that no run logs."""
    prose = FENCE.sub("", text)
    names = [code for code in CODE.findall(prose) if METRIC.fullmatch(code)]
    for table in TABLE_OF_METRICS.findall(prose + "\n\n"):
        for row in table.strip().splitlines()[2:]:
            names += [code for code in CODE.findall(row.split("|")[1]) if " " not in code]
    return [name for name in names if not metrics.is_logged(name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_the_last_column_of_a_table_of_names_are_settings(page: Path) -> None:
    """Tables that translate a word of another trainer, or say what a setting does, must name settings."""
    text = page.read_text(encoding="utf-8")
    for name in named_settings(text):
        assert name in accepted(), f"{page.stem} names {name}, which is no setting"


def named_settings(text: str) -> Iterator[str]:
    """The first words of code in the column `here` or `setting` of tables."""
    for table in re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text), re.MULTILINE):
        head, _, *rows = [cells(row) for row in table.splitlines()]
        columns = [at for at, title in enumerate(head) if title in ("here", "setting")]
        for row in rows:
            for at in columns:
                for code in CODE.findall(row[at]):
                    word = code.partition(" ")[0].partition(":")[0]
                    if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", word) and word not in VALUES:
                        yield word


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


VALUES = {"ppo_clip", "seq_mean", "low_var_kl", "constant_with_warmup", "trl_main", "open_instruct_main"}
"""Words with an underscore that are values."""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", ["--learning_rte", "1e-6"]),
        ("train", ["--clip_higher", "much"]),
        ("rollout", ["--num", "3", "--samples", "8"]),
        ("launch", ["--nodes", "2", "--learners", "1", "--", "--seed", "1"]),
    ],
)
def test_a_wrong_command_is_found(name: str, words: list[str]) -> None:
    with pytest.raises((ConfigError, SystemExit)):
        check(name, words)


def test_a_wrong_name_is_found() -> None:
    assert unknown_metrics("look at `optim/gradient` and `eval/scores`") == ["optim/gradient"]
    assert unknown_metrics("| metric | what |\n|---|---|\n| `rewards` | |\n\n") == ["rewards"]
    table = "| TRL | here |\n|---|---|\n| `a_b` | `num_samples`, `beta`, `seq_mean` |\n"
    assert list(named_settings(table)) == ["num_samples"]

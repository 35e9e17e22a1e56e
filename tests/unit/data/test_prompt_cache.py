"""When an earlier run's prompts may be used, and when they are made anew."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgrpo.config.schema import Data
from mgrpo.data import mixture
from mgrpo.data.mixture import open_data
from mgrpo.data.tokenizer import load_tokenizer
from tests.unit.data.conftest import CHARS, TEMPLATE, everything, make_tokenizer, make_tools, sums, texts, user


class Builds:
    """Counts how often prompts are made and not found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        build = mixture.build

        def counted(*args: Any, **options: Any) -> None:
            self.count += 1
            build(*args, **options)

        monkeypatch.setattr(mixture, "build", counted)

    def by(self, action: Callable[[], Any]) -> int:
        """How many builds an action takes."""
        before = self.count
        action()
        return self.count - before


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    return Builds(monkeypatch)


def test_every_ingredient_has_its_part_in_the_key(settings, write, folder, tmp_path: Path, builds: Builds) -> None:
    """A cache that misses one of them trains on prompts of another run; one that has too many is never found."""
    for name, text in (("a.jinja", TEMPLATE), ("b.jinja", TEMPLATE + " "), ("a.txt", "1"), ("b.txt", "2")):
        (tmp_path / name).write_text(text)
    a, b = (
        write("a.jsonl", [{**row, "prompt": [user(row["prompt"])], "truth": 1} for row in sums(6)]),
        write("b.jsonl", sums(2)),
    )
    base = {
        "chat_template_name": str(tmp_path / "a.jinja"),
        "system_prompt_override_file": str(tmp_path / "a.txt"),
        "overlong_prompt_policy": "truncate_left",
    }

    def run(*mix: str, tokenizer: Path = folder, need_verifiers: bool = True, tools: Any = None, **fields: Any) -> None:
        data = settings(*(mix or (a, "1.0")), **(base | fields))
        open_data(data, need_verifiers=need_verifiers)[0].encode(load_tokenizer(tokenizer), tools=tools)

    assert builds.by(run) == 1 and builds.by(run) == 0
    changes: list[Callable[[], None]] = [
        lambda: run(a, "5"),
        lambda: run(a, "2.0"),
        lambda: run(a, "1.0", a, "1.0"),
        lambda: run(ground_truths_key="truth"),
        lambda: run(need_verifiers=False),
        lambda: run(max_prompt_token_length=99),
        lambda: run(overlong_prompt_policy="filter"),
        lambda: run(chat_template_name=str(tmp_path / "b.jinja")),
        lambda: run(chat_template_name="none"),
        lambda: run(chat_template_kwargs='{"x": 1}'),
        lambda: run(system_prompt_override_file=str(tmp_path / "b.txt")),
        lambda: run(system_prompt_override_file=None),
        lambda: run(add_bos=True),
        lambda: run(tools=make_tools("a")),
        lambda: run(tools=make_tools("a", description="other")),
        lambda: run(tokenizer=make_tokenizer(tmp_path / "other", chars=CHARS[::-1])),
    ]
    for number, change in enumerate(changes):
        assert builds.by(change) == 1, f"change {number} was not noticed"
        assert builds.by(change) == 0, f"change {number} was not found again"
    (tmp_path / "a.txt").write_text("3")
    assert builds.by(run) == 1, "the system prompt's file has other words"
    (tmp_path / "a.jinja").write_text(TEMPLATE + "\t")
    assert builds.by(run) == 1, "the template's file has other words"
    Path(a).write_text(Path(a).read_text().replace("5+0=", "6+0="))
    assert builds.by(run) == 1, "the data were edited"
    shutil.copy(a, tmp_path / "copy.jsonl")
    shutil.copytree(folder, tmp_path / "model")
    assert builds.by(lambda: run(str(tmp_path / "copy.jsonl"), "6", tokenizer=tmp_path / "model")) == 0, "same content"
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (own / "chat_template.jinja").write_text(TEMPLATE + "!")
    automatic = {"chat_template_name": "auto"}
    assert builds.by(lambda: run(**automatic)) == 1 and builds.by(lambda: run(tokenizer=own, **automatic)) == 1
    assert builds.by(lambda: run(b, "1.0", system_prompt_override_file=None)) == 1


def test_versions_are_part_of_the_keys(settings, write, tokenizer, builds: Builds, monkeypatch, all_are_large) -> None:
    """A new release may make other prompts of the same data."""
    a = write("a.jsonl", sums(3))

    def run() -> None:
        open_data(settings(a, "1.0"))[0].encode(tokenizer)

    run()
    for name in ("mgrpo.data.mixture._TRANSFORM_VERSION", "mgrpo.data.sources._ROWS_VERSION"):
        assert builds.by(run) == 0
        monkeypatch.setattr(name, 999)
        assert builds.by(run) == 1


@pytest.mark.parametrize("name", ["prompts.arrow", "order.npy", "statistics.json", "manifest.json"])
def test_damaged_prompts_are_made_anew(settings, write, tokenizer, builds: Builds, name: str, caplog) -> None:
    """Wrong bytes are wrong tokens, and nothing else would notice."""
    data = settings(write("a.jsonl", sums(50)), "1.0")

    def run() -> list[str]:
        return texts(open_data(data)[0].encode(tokenizer))

    expected = run()
    [path] = Path(data.dataset_local_cache_dir).glob(f"prompts-*/{name}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert builds.by(lambda: run() == expected or pytest.fail()) == 1 and "damaged" in caplog.text
    path.write_bytes(content[: len(content) // 2])
    assert builds.by(lambda: run() == expected or pytest.fail()) == 1
    assert builds.by(run) == 0


def test_damaged_labels_are_made_anew(settings, write, tokenizer, all_are_large) -> None:
    """Labels stand beside the tokens."""
    data = settings(write("a.jsonl", sums(50)), "1.0")
    expected = everything(open_data(data)[0].encode(tokenizer))[7]
    [path] = Path(data.dataset_local_cache_dir).glob("prompts-*/prompts.arrow")
    path.write_bytes(path.read_bytes().replace(b'"ground_truth": 7', b'"ground_truth": 8'))
    found = everything(open_data(data)[0].encode(tokenizer))[7]
    assert found.ground_truths == expected.ground_truths == (7,)


def test_a_damaged_check_is_made_anew(settings, write, all_are_large) -> None:
    """It says which verifiers the run needs."""
    data = settings(write("a.jsonl", sums(50)), "1.0")
    open_data(data)
    [path] = Path(data.dataset_local_cache_dir).glob("checked-*/summary.json")
    path.write_text(path.read_text().replace("integer", "another"))
    train, _ = open_data(data)
    assert list(train.verifiers) == ["integer"]


def test_skipping_the_cache_makes_prompts_that_are_not_found_again(
    settings, write, tokenizer, builds: Builds, all_are_large
) -> None:
    """And they work although their files are gone."""
    data = settings(write("a.jsonl", sums(5)), "1.0", dataset_skip_cache=True)
    for _ in range(2):
        train, held_out = open_data(data)
        prompts = train.encode(tokenizer)
        del train, held_out
        assert texts(prompts) == [row["prompt"] for row in sums(5)]
    assert builds.count == 2 and not list(Path(data.dataset_local_cache_dir).iterdir())


TWO_AT_ONCE = """
import sys
from mgrpo.config.schema import Data
from mgrpo.data.mixture import open_data
from mgrpo.data import sources
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
sources._KEPT_BYTES = 0
data = Data(dataset_mixer_list=(sys.argv[2], "1.0"), dataset_local_cache_dir=sys.argv[3])
train, _ = open_data(data)
prompts = train.encode(tokenizer)
print(sum(prompts.prompt((0, index)).ground_truths[0] for index in range(len(prompts))))
"""


def test_two_runs_at_once_share_a_cache(folder, write, tmp_path: Path) -> None:
    """Neither may find what the other has half built, and what remains is one folder of each kind."""
    path = write("a.jsonl", sums(3000))
    command = [sys.executable, "-c", TWO_AT_ONCE, str(folder), path, str(tmp_path / "cache")]
    runs = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.stdout.readline() for run in runs] == ["ready\n"] * 2
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    assert [run.communicate(timeout=60)[0] for run in runs] == [f"{sum(range(3000))}\n"] * 2
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()) == ["checked", "prompts"]


def test_the_defaults_need_nothing_but_data(tmp_path: Path, monkeypatch, tokenizer) -> None:
    """Without any setting the cache is the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompts = open_data(Data(), dataset=sums(2))[0].encode(tokenizer)
    assert prompts.folder.parent == tmp_path / "mgrpo" / "datasets"

"""A mix as a run sees it before anything is started: its rows, and what is wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo.data.mixture import open_data
from tests.unit.data.conftest import sums, user


def test_a_mix_knows_its_sources_and_verifiers(settings, write) -> None:
    """A launcher that checks names and numbers must not need a tokenizer for it."""
    a = write("a.jsonl", sums(7))
    b = write("b.jsonl", [*sums(2, "math"), {**sums(1)[0], "dataset": ["integer", "gsm8k"], "ground_truth": [1, 2]}])
    c = write("c.jsonl", sums(3, "string_f1"))
    train, held_out = open_data(settings(a, "0.5", b, "4", c, "0", dataset_mixer_eval_list=(a, "1.0")))
    assert len(train) == 3 + 4 and len(held_out) == 7
    assert train.verifiers == {"integer": f"{a}:1", "math": f"{b}:1", "gsm8k": f"{b}:3"}
    assert [(part["source"], part["rows"], part["taken"]) for part in train.counts] == [(a, 7, 3), (b, 3, 4), (c, 3, 0)]
    assert held_out.counts == [{"source": a, "split": "test", "amount": "1.0", "rows": 7, "taken": 7}]


def test_a_mix_knows_the_columns_of_its_rows(settings) -> None:
    """A reward function that asks for a column that no row has is found before anything starts."""
    rows = [{"prompt": "a", "level": 1}, {"messages": [user("b")], "prompt": None, "answer": 2}]
    train, _ = open_data(settings(), dataset=rows, need_verifiers=False)
    assert train.columns == ["level", "answer"]


def test_without_data_mixes_are_empty(settings) -> None:
    """Whether data are needed is for others to say."""
    train, held_out = open_data(settings())
    assert len(train) == len(held_out) == 0 and train.verifiers == {}
    with pytest.raises(ValueError, match="there are no data; name them in dataset_mixer_list"):
        train.encode(None)


def test_rows_of_the_caller_take_the_place_of_the_mix(settings, write) -> None:
    """`train(config, dataset=rows)`; held-out data are the configuration's."""
    held = write("held.jsonl", sums(2))
    train, held_out = open_data(settings("unread.jsonl", "1.0", dataset_mixer_eval_list=(held, "1.0")), dataset=sums(5))
    assert len(train) == 5 and len(held_out) == 2
    assert train.verifiers == {"integer": "dataset:1"}
    with pytest.raises(ValueError, match="dataset has no rows"):
        open_data(settings(), dataset=[])


def test_held_out_rows_may_be_several_sets(settings) -> None:
    """Each is a source of its own, by which an evaluation tells them apart."""
    _, held_out = open_data(settings(), dataset=sums(1), eval_dataset={"easy": sums(2), "hard": sums(3)})
    assert [(part["source"], part["taken"]) for part in held_out.counts] == [
        ("eval_dataset/easy", 2),
        ("eval_dataset/hard", 3),
    ]


def test_bad_rows_of_all_sources_are_reported_together(settings, write) -> None:
    """One error a start is one start too many: training and held-out data, files and folders, in one message."""
    # a.jsonl is also held out, under another split: its rows are reported once.
    a, b, c = (
        write(name, [*sums(1), *["oops"] * bad]) for name, bad in (("a.jsonl", 3), ("b.jsonl", 11), ("c.jsonl", 9))
    )
    with pytest.raises(ValueError) as raised:
        open_data(settings(a, "1.0", b, "1.0", a, "2.0", dataset_mixer_eval_list=(a, "1.0", c, "1.0")))
    text = str(raised.value)
    assert text.startswith("23 malformed rows:\n")
    lines = text.splitlines()[1:]
    shown = [f"{a}:{line}" for line in (2, 3, 4)] + [f"{b}:{line}" for line in range(2, 13)]
    shown += [f"{c}:{line}" for line in range(2, 8)]
    assert [line.strip().split(": ")[0] for line in lines[:-1]] == shown and len(shown) == 20
    assert lines[-1].strip() == "... and 3 more"


def test_one_source_is_named_in_the_first_line(settings, write) -> None:
    """The message begins with what is wrong where."""
    path = write("rows.jsonl", [*sums(1), {}])
    with pytest.raises(ValueError, match=r"^1 malformed row in .*rows\.jsonl:\n  .*rows\.jsonl:2: found prompt None"):
        open_data(settings(path, "1.0"))


def test_sources_that_cannot_be_read_are_reported_with_the_bad_rows(settings, write, tmp_path: Path) -> None:
    """A file that is missing and a line that is wrong are mended in one go."""
    bad, empty = write("bad.jsonl", ["oops"]), write("empty.jsonl", [])
    with pytest.raises(ValueError) as raised:
        open_data(
            settings(
                "nowhere.jsonl", "1.0", bad, "1.0", empty, "1.0", "x", dataset_mixer_eval_list=("gone.jsonl", "1.0")
            )
        )
    assert "expected pairs" in str(raised.value) and "gone.jsonl does not exist" in str(raised.value)
    with pytest.raises(ValueError) as raised:
        open_data(settings("nowhere.jsonl", "1.0", bad, "1.0", empty, "1.0", str(tmp_path), "1.0"))
    text = str(raised.value)
    assert text.startswith("1 malformed row and 3 more problems:\n")
    for words in ("nowhere.jsonl does not exist", f"{empty} has no rows", f"{bad}:1: found 'oops'", str(tmp_path)):
        assert words in text
    with pytest.raises(ValueError, match=r"^data file nowhere\.jsonl does not exist"):
        open_data(settings("nowhere.jsonl", "1.0"))


def test_a_mix_of_no_rows_is_an_error(settings, write) -> None:
    """An empty data set would be found by the sampler, minutes later."""
    path = write("a.jsonl", sums(5))
    with pytest.raises(ValueError, match=r"the data mix .*a\.jsonl 0\.1 selects no rows; ask for more"):
        open_data(settings(path, "0.1"))
    with pytest.raises(ValueError, match=r"the held-out mix .*a\.jsonl 0 selects no rows"):
        open_data(settings(path, "1.0", dataset_mixer_eval_list=(path, "0")))


def test_settings_of_the_template_are_checked_with_the_rows(settings, write, tmp_path: Path) -> None:
    """They are used minutes later, while the engines start."""
    text, chat = write("a.jsonl", sums(2)), write("b.jsonl", [{**sums(1)[0], "prompt": [user("1")]}])
    (tmp_path / "system.txt").write_text("be brief\n")
    (tmp_path / "empty.txt").write_text(" \n")
    system = str(tmp_path / "system.txt")
    open_data(settings(chat, "1.0", system_prompt_override_file=system))
    for source, fields, words in (
        (
            text,
            {"system_prompt_override_file": system},
            r"needs rows with messages, and .*a\.jsonl:1 has a text prompt",
        ),
        (chat, {"system_prompt_override_file": "gone.txt"}, r"system_prompt_override_file=gone\.txt cannot be read"),
        (chat, {"system_prompt_override_file": str(tmp_path / "empty.txt")}, "is empty; expected the system prompt"),
        (chat, {"chat_template_kwargs": "{enable"}, "chat_template_kwargs={enable is not JSON"),
        (chat, {"chat_template_kwargs": "[1]"}, r"chat_template_kwargs=\[1\]; expected a JSON object"),
        (chat, {"chat_template_kwargs": '{"tokenize": true}'}, "chat_template_kwargs has tokenize"),
    ):
        with pytest.raises(ValueError, match=words):
            open_data(settings(source, "1.0", **fields))


def test_a_small_mix_is_read_without_heavy_packages(write, tmp_path: Path) -> None:
    """Most runs are small: checking their data must not cost them the import of arrow, datasets or torch."""
    path = write("a.jsonl", sums(900))
    code = f"""
import sys
from mgrpo.config.schema import Data
from mgrpo.data.mixture import open_data
train, _ = open_data(Data(dataset_mixer_list=({path!r}, "1.0"), dataset_local_cache_dir={str(tmp_path / "c")!r}))
print(len(train), sorted({{"pyarrow", "datasets", "torch", "transformers", "rich", "pandas"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "900 []"
    assert not (tmp_path / "c").exists()


def test_any_row_can_be_named_also_in_large_sources(settings, write, all_are_large) -> None:
    """The cache knows lines, not paths: a file that was moved is named as it is called now."""
    rows = [*sums(4), {**sums(1)[0], "dataset": "gsm8k"}]
    for name in ("a.jsonl", "moved.jsonl"):
        path = write(name, rows)
        train, _ = open_data(settings(path, "1.0"))
        assert train.verifiers == {"integer": f"{path}:1", "gsm8k": f"{path}:5"}
    broken = write("broken.jsonl", [*rows, {"prompt": 1}])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"broken\.jsonl:6: found prompt 1"):
            open_data(settings(broken, "1.0"))
    assert json.loads(Path(path).read_text().splitlines()[4])["dataset"] == "gsm8k"

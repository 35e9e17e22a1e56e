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
    assert [line.strip().split(": ")[0] for line in lines] == [f"{a}:2", f"{b}:2", f"{c}:2"]
    assert [line.rpartition(" (")[2] for line in lines] == [
        "2 more such rows: 3, 4)",
        "10 more such rows: 3, 4, 5, ...)",
        "8 more such rows: 3, 4, 5, ...)",
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"question": "2+3=", "answer": "so #### 5"},
            ["'question', 'answer'", "sft_messages_key", "ground_truths_key"],
        ),
        ({"conversations": [{"from": "human", "value": "2+3="}]}, ["'conversations'", "sft_messages_key"]),
        ({"messages": [{"from": "human", "value": "2+3="}]}, ["ShareGPT's names"]),
        ({"messages": [{"role": "human", "content": "2+3="}]}, ["role 'human'", "name for it, 'user'"]),
        ({"prompt": "2+3=", "ground_truth": "5"}, ["found dataset None", "reward_funcs"]),
        ({"prompt": "2+3=", "dataset": "integer", "answer": 5}, ["found no ground_truth", "ground_truths_key"]),
        (
            {"messages": "2+3=", "dataset": "integer", "ground_truth": 5},
            ["found messages '2+3='", "rename its column to prompt"],
        ),
    ],
)
def test_rows_of_another_form_are_one_sentence_with_its_cure(row, said, settings, write) -> None:
    """People come with GSM8K, ShareGPT and tables; the same sentence for every row hides what helps."""
    path = write("rows.jsonl", [row] * 252)
    with pytest.raises(ValueError) as raised:
        open_data(settings(path, "1.0"))
    first, second = str(raised.value).splitlines()
    assert first.startswith("252 malformed rows in ") and second.endswith("(251 more such rows: 2, 3, 4, ...)")
    for words in (f"{path}:1: ", *said):
        assert words in second


ASKED = [{"role": "user", "content": "2+3="}]
SCHEMAS = '[{"name": "add", "description": "adds", "parameters": {"a": {"type": "int"}}}]'


@pytest.mark.parametrize(
    ("row", "changes", "fields", "cures"),
    [
        (
            {"question": "2+3=", "answer": "so #### 5"},
            {"messages": ASKED, "dataset": "gsm8k"},
            {"ground_truths_key": "answer"},
            ["make messages of a text", "ground_truths_key"],
        ),
        (
            {"problem": "2+3=", "answer": "5", "source": "aime", "correctness_llama": None, "generations": ["5"]},
            {"prompt": "2+3=", "dataset": "math"},
            {"ground_truths_key": "answer"},
            ["rename its column to prompt", "ground_truths_key"],
        ),
        (
            {"prompt": ASKED, "data_source": "math_dapo", "reward_model": {"ground_truth": "34", "style": "rule"}},
            {"dataset": "math"},
            {"ground_truths_key": "reward_model.ground_truth"},
            ["add the column"],
        ),
        (
            {"prompt": "2+3=", "messages": [*ASKED, {"role": "assistant", "content": "5"}], "score_chosen": 8.0},
            {"dataset": "general-quality"},
            {"ground_truths_key": "score_chosen"},
            ["add the column"],
        ),
        (
            {"id": 0, "query": "2+3=", "answers": '[{"name": "add"}]', "tools": SCHEMAS},
            {"messages": ASKED, "dataset": "string_f1"},
            {"ground_truths_key": "answers"},
            ["make messages of a text"],
        ),
    ],
)
def test_the_cure_that_a_row_of_a_public_shape_is_told_works(row, changes, fields, cures, settings, write) -> None:
    """Advice that leads to another refusal costs a second start."""
    with pytest.raises(ValueError) as raised:
        open_data(settings(write("before.jsonl", [row]), "1.0"))
    assert all(cure in str(raised.value) for cure in cures)
    train, _ = open_data(settings(write("after.jsonl", [{**row, **changes}]), "1.0", **fields))
    assert len(train) == 1 and list(train.verifiers) == [changes["dataset"]]


def test_twenty_mistakes_are_said_and_the_rest_counted(settings, write) -> None:
    """Each row is wrong in its own way; an error of thousands of lines hides the others."""
    files = [write(f"{number}.jsonl", ["oops", "oops"]) for number in range(23)]
    with pytest.raises(ValueError) as raised:
        open_data(settings(*[word for file in files for word in (file, "1.0")]))
    lines = str(raised.value).splitlines()
    assert lines[0] == "46 malformed rows:" and len(lines) == 22 and lines[-1] == "  ... and 6 more"


def test_a_json_list_under_the_name_of_lines_is_said_to_be_one(settings, write, tmp_path) -> None:
    """Line by line it is 252 malformed rows."""
    for indent in (None, 1):
        path = tmp_path / f"list{indent}.jsonl"
        path.write_text(json.dumps([{"prompt": "1+1=", "ground_truth": 2, "dataset": "integer"}] * 20, indent=indent))
        with pytest.raises(ValueError, match=rf"^{path} holds one JSON list, .* rename it to list{indent}.json$"):
            open_data(settings(str(path), "1.0"))


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

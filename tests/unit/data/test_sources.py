"""The same rows, whatever they are stored in and however many they are."""

from __future__ import annotations

import datetime
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgrpo.data.cache import Cache
from mgrpo.data.checking import Summary
from mgrpo.data.rows import Contract
from mgrpo.data.sources import DataSource, SourceReader
from tests.unit.data.conftest import sums, user

RECORDS = [
    {"messages": [user(f"{index}?")], "ground_truth": str(index), "dataset": "math", "level": index}
    for index in range(5)
]
MIXED = [
    {"prompt": "a", "ground_truth": "text", "dataset": "math"},
    {"prompt": "b", "ground_truth": [1, "two", None], "dataset": "math"},
    {"prompt": "c", "ground_truth": {"key": {"deep": [True]}}, "dataset": "math"},
    {"prompt": "d", "ground_truth": 2**70, "dataset": "math"},
    {"prompt": "e", "ground_truth": ["x", {"y": 1}], "dataset": ["math", "integer"]},
]


def read(name: object, split: str = "train", *, cache: Path, need_verifiers: bool = True) -> DataSource:
    contract = Contract(need_verifiers=need_verifiers)
    return SourceReader(contract=contract, cache=Cache(cache)).named(str(name), split)


def given(dataset: object, *, cache: Path) -> DataSource:
    return SourceReader(contract=Contract(), cache=Cache(cache)).given("dataset", dataset)


def records(source: DataSource) -> list[dict]:
    return [json.loads(row.text) for row in source.rows()]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    module.disable_progress_bars()
    return module


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_kinds_of_files_and_folders_give_the_same_rows(datasets, tmp_path: Path, cache: Path, size: str) -> None:
    """The same data must train the same, whatever it is stored in."""
    table = datasets.Dataset.from_list(RECORDS)
    write_lines(tmp_path / "a.jsonl", RECORDS)
    write_lines(tmp_path / "b.json", RECORDS)
    (tmp_path / "c.json").write_text(json.dumps(RECORDS, indent=1))
    table.to_parquet(tmp_path / "d.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder" / "train-00000.parquet")
    for name in ("a.jsonl", "b.json", "c.json", "d.parquet", "saved", "splits", "folder"):
        source = read(tmp_path / name, cache=cache)
        assert records(source) == RECORDS, name
        assert source.summary.verifiers == {"math": 1} and source.summary.first_conversation == 1
    assert cache.exists() == (size == "large")
    for name in ("a.jsonl", "b.json", "d.parquet"):
        assert records(read(tmp_path / name, "any split", cache=cache)) == RECORDS
    with pytest.raises(
        ValueError, match=r"splits cannot be read at split 'test': .* there is no such split, only train"
    ):
        read(tmp_path / "splits", "test", cache=cache)
    with pytest.raises(ValueError, match="folder cannot be read at split 'test'"):
        read(tmp_path / "folder", "test", cache=cache)


def test_compressed_and_comma_separated_files_are_left_to_datasets(datasets, tmp_path: Path, cache: Path) -> None:
    """What `datasets` opens is data."""
    import gzip

    rows = [
        {"prompt": "a,b", "ground_truth": "1", "dataset": "math"},
        {"prompt": "c", "ground_truth": "2", "dataset": "m"},
    ]
    (tmp_path / "a.csv").write_text('prompt,ground_truth,dataset\n"a,b",x1,math\nc,x2,m\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["prompt"] for row in records(read(tmp_path / "a.csv", "test", cache=cache))] == ["a,b", "c"]
    assert [row["ground_truth"] for row in records(read(tmp_path / "b.jsonl.gz", "test", cache=cache))] == ["1", "2"]


CELLS = """prompt,ground_truth,dataset,level,price,is_hard,answer,note
4+18=,022,math,1,0.5,True,True,x
"a,b",None,math,-22,1e-05,False,False,
3,NA,math,,2.25,,None,nan
4,nan,math,12345678901234567890123,,True,True,1.50
"""


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "folder"])
def test_cells_that_are_text_stay_text(datasets, tmp_path: Path, cache: Path, name: str) -> None:
    """The label 022 that became 22 makes each right answer wrong, and None that became null is no label."""
    import gzip

    (tmp_path / "folder").mkdir()
    path = tmp_path / ("folder/train.csv" if name == "folder" else name)
    path.write_bytes(gzip.compress(CELLS.encode()) if name.endswith("gz") else CELLS.encode())
    found = records(read(tmp_path / name, cache=cache))
    columns = {key: [row[key] for row in found] for key in found[0]}
    assert columns == {
        "prompt": ["4+18=", "a,b", "3", "4"],
        "ground_truth": ["022", "None", "NA", "nan"],
        "dataset": ["math"] * 4,
        "level": [1, -22, None, 12345678901234567890123],
        "price": [0.5, 1e-05, 2.25, None],
        "is_hard": [True, False, None, True],
        "answer": ["True", "False", "None", "True"],
        "note": ["x", None, "nan", "1.50"],
    }
    assert [type(value) for value in columns["level"][:2]] == [int, int]


def test_labels_of_a_csv_are_numbers_only_where_all_are(datasets, tmp_path: Path, cache: Path) -> None:
    """The `integer` of clean columns stays one; words stay words; an empty cell is a missing label."""
    (tmp_path / "a.csv").write_text("prompt,ground_truth,dataset\n1,22,m\n2,-7,m\n")
    (tmp_path / "b.csv").write_text("prompt,ground_truth,dataset\n1,True,m\n2,False,m\n")
    (tmp_path / "c.csv").write_text("prompt,ground_truth,dataset\n1,22,m\n2,,m\n")
    (tmp_path / "d.tsv").write_text("prompt\tground_truth\tdataset\n1\t007\tm\n2\t8\tm\n")
    labels = {
        name: [row["ground_truth"] for row in records(read(tmp_path / name, cache=cache))]
        for name in ("a.csv", "b.csv", "d.tsv")
    }
    assert labels == {"a.csv": [22, -7], "b.csv": ["True", "False"], "d.tsv": ["007", "8"]}
    (mistake,) = read(tmp_path / "c.csv", cache=cache).summary.mistakes.values()
    assert mistake.lines == [2] and "no ground_truth" in mistake.problem


def test_messages_in_a_csv_are_messages(datasets, tmp_path: Path, cache: Path) -> None:
    """A list is JSON text there."""
    cell = json.dumps([user("1+1=")]).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'messages,ground_truth,dataset\n"{cell}",2,integer\n')
    source = read(tmp_path / "a.csv", cache=cache)
    assert source.summary.first_conversation == 1
    assert Contract().prompt(records(source)[0]) == [user("1+1=")]


def test_frames_and_tables_are_rows(datasets, cache: Path) -> None:
    """What a notebook has at hand; a missing value is a missing label, and a number that is not missing stays one."""
    import pandas
    import pyarrow

    frame = pandas.DataFrame(
        {**{key: [row[key] for row in RECORDS] for key in RECORDS[0]}, "score": [0.5, None, 1, 2, 3]}
    )
    expected = [{**row, "score": score} for row, score in zip(RECORDS, (0.5, None, 1.0, 2.0, 3.0), strict=True)]
    shuffled = frame.iloc[::-1]
    assert records(given(frame, cache=cache)) == expected
    assert records(given(shuffled, cache=cache)) == expected[::-1]
    assert records(given(pyarrow.Table.from_pylist(expected), cache=cache)) == expected
    mixed = pandas.DataFrame(
        {"prompt": ["a", "b"], "ground_truth": [{"x": [1]}, float("nan")], "dataset": ["math"] * 2}
    )
    summary = given(mixed, cache=cache).summary
    (mistake,) = summary.mistakes.values()
    assert summary.num_rows == 1 and mistake.lines == [2] and "no ground_truth" in mistake.problem


def test_labels_may_have_another_type_in_every_row(datasets, tmp_path: Path, cache: Path, size: str) -> None:
    """Arrow wants one type a column: a label that became text, or lost a key, makes every answer wrong."""
    write_lines(tmp_path / "a.jsonl", MIXED)
    (tmp_path / "b.json").write_text(json.dumps(MIXED))
    for source in (
        read(tmp_path / "a.jsonl", cache=cache),
        read(tmp_path / "b.json", cache=cache),
        given(MIXED, cache=cache),
        given(iter(MIXED), cache=cache),
    ):
        assert records(source) == MIXED
    small = [row for row in MIXED if row["ground_truth"] != 2**70]
    if "on_mixed_types" not in datasets.Dataset.from_list.__code__.co_varnames:
        pytest.skip("this version of datasets has no JSON columns")
    table = datasets.Dataset.from_list(small, on_mixed_types="use_json")
    table.to_parquet(tmp_path / "c.parquet")
    table.save_to_disk(tmp_path / "saved")
    for source in (
        read(tmp_path / "c.parquet", cache=cache),
        read(tmp_path / "saved", cache=cache),
        given(table, cache=cache),
    ):
        assert records(source) == small


def test_the_check_of_a_large_file_is_kept(tmp_path: Path, cache: Path, all_are_large) -> None:
    """A second start knows of the rows what the first one found."""
    path = write_lines(tmp_path / "a.jsonl", sums(300))
    expected = read(path, cache=cache)
    for _ in range(2):
        source = read(path, cache=cache)
        assert source.summary == expected.summary and records(source) == sums(300)
        assert [row.line for row in source.rows()] == list(range(1, 301))
    assert len(list(cache.iterdir())) == 1


def test_the_folder_itself_is_a_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` has no name, which `datasets` looks for in vain."""
    write_lines(tmp_path / "a.jsonl", sums(3))
    monkeypatch.chdir(tmp_path)
    assert records(read(Path("."), cache=cache)) == sums(3)


def test_rows_are_taken_by_their_number_among_the_rows(tmp_path: Path, cache: Path) -> None:
    """Blank lines are not rows: a row that is taken by its line has the label of another."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in sums(9)))
    source = read(path, cache=cache)
    assert [(row.line, json.loads(row.text)) for row in source.taken(np.array([2, 7]))] == [
        (5, sums(9)[2]),
        (15, sums(9)[7]),
    ]
    assert list(source.taken(np.array([], dtype=np.int64))) == []


def test_bad_rows_of_parquet_files_are_named_by_their_number(tmp_path: Path, cache: Path, all_are_large) -> None:
    """Also behind the first row group."""
    import pyarrow
    import pyarrow.parquet

    rows = [{**row, "ground_truth": str(row["ground_truth"])} for row in sums(40)]
    rows[33]["prompt"] = ""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    source = read(tmp_path / "a.parquet", cache=cache)
    (mistake,) = source.summary.mistakes.values()
    assert mistake.lines == [34] and mistake.problem == (
        "found prompt '' among 'prompt', 'ground_truth', 'dataset', expected "
        "messages (a list of role and content) or prompt (text)"
    )
    assert source.summary.num_rows == 39
    assert not cache.exists() or not list(cache.iterdir()), "rows with problems must not be found by the next start"
    rows[33]["prompt"] = "x"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    source = read(tmp_path / "a.parquet", cache=cache)
    assert records(source) == rows and [row.line for row in source.rows()] == list(range(1, 41))


def test_an_edited_file_is_read_again_and_a_copy_is_not(
    tmp_path: Path, cache: Path, monkeypatch, all_are_large
) -> None:
    """A stale cache trains on data that are no longer there; same size and same time are no proof of the same content."""
    path = write_lines(tmp_path / "a.jsonl", sums(9))
    first = read(path, cache=cache)
    before = path.stat()
    path.write_text(path.read_text().replace('"8+0="', '"7+0="'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = read(path, cache=cache)
    assert records(second)[-1]["prompt"] == "7+0=" and second.key != first.key
    copy = write_lines(tmp_path / "b.jsonl", sums(9))
    monkeypatch.setattr(Summary, "good", None)
    found = read(copy, cache=cache)
    assert found.key == first.key and records(found) == sums(9)
    assert found.origin(3) == f"{copy}:3"


def test_a_file_that_is_written_while_it_is_in_use_is_refused(
    tmp_path: Path, cache: Path, monkeypatch, all_are_large
) -> None:
    """Its new rows would be kept under the hash of the old ones, and found there from then on."""
    from mgrpo.data import sources

    first, second = (write_lines(tmp_path / name, sums(num)) for name, num in (("a.jsonl", 9), ("b.jsonl", 8)))
    source = read(first, cache=cache)
    kept = list(cache.iterdir())
    digest = sources._digest

    def digest_and_write(path: Path) -> str:
        found = digest(path)
        with path.open("a") as file:
            file.write("\n")
        return found

    monkeypatch.setattr(sources, "_digest", digest_and_write)
    with pytest.raises(ValueError, match=r"b\.jsonl changed while it was in use"):
        read(second, cache=cache)
    assert list(cache.iterdir()) == kept
    first.write_text("")
    with pytest.raises(ValueError, match=r"a\.jsonl changed while it was in use"):
        list(source.taken(np.array([0])))


def test_other_columns_or_rules_are_other_rows(tmp_path: Path, cache: Path, all_are_large) -> None:
    """Rows that were checked for a run without verifiers may lack what another needs."""
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}] * 3)
    assert read(path, cache=cache, need_verifiers=False).summary.num_rows == 3
    source = read(path, cache=cache)
    assert source.summary.num_problems == 3


def test_rows_from_python_are_known_by_their_content(datasets, cache: Path, size: str) -> None:
    """A list has no name; two of the same rows must share what was prepared, two of different rows must not."""

    def key(dataset: object) -> dict:
        return given(dataset, cache=cache).key

    assert key(sums(5)) == key(sums(5)) == key(row for row in sums(5)) != key(sums(6))
    table = datasets.Dataset.from_list(sums(5))
    assert key(table) == key(table) != key(table.select(range(4)))


def test_rows_that_a_function_makes_are_those_that_are_used(datasets, cache: Path) -> None:
    """TRL trains on what a data set gives, not on what it holds."""
    table = datasets.Dataset.from_list(sums(2))
    table.set_transform(lambda batch: {**batch, "prompt": [prompt.replace("0", "7") for prompt in batch["prompt"]]})
    source = given(table, cache=cache)
    assert [row["prompt"] for row in records(source)] == ["7+7=", "1+7="]


def test_what_is_not_a_list_of_rows_is_refused(datasets, cache: Path) -> None:
    """A DatasetDict iterates over the names of its splits, a DataFrame over its columns."""
    table = datasets.Dataset.from_list(sums(3))
    for dataset, words in (
        (
            datasets.DatasetDict({"train": table, "test": table}),
            "a mapping of train, test, expected rows; pass one split",
        ),
        ({"prompt": ["a"]}, "a mapping of prompt"),
        ("data.jsonl", "dataset is str, expected a list of dicts"),
        (7, "dataset is int"),
    ):
        with pytest.raises(ValueError, match=words):
            given(dataset, cache=cache)


def test_pictures_are_neither_decoded_nor_kept(datasets, tmp_path: Path, cache: Path) -> None:
    """Decoding a million pictures that are never used takes hours, and needs packages that are not here."""
    rows = [{**row, "picture": {"bytes": b"no picture", "path": None}} for row in sums(3)]
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "ground_truth": datasets.Value("int64"),
            "dataset": datasets.Value("string"),
            "picture": datasets.Image(),
        }
    )
    table = datasets.Dataset.from_list(rows, features=features)
    source = given(table, cache=cache)
    assert records(source) == sums(3) and source.summary.lost_columns == ["picture"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere.jsonl", None, r"data file .*nowhere\.jsonl does not exist \(looked for /"),
        ("/no/such/folder", None, "data file /no/such/folder does not exist"),
        ("broken.parquet", "no parquet", r"broken\.parquet cannot be read: "),
        ("broken.json", "[1, 2", r"broken\.json cannot be read as JSON"),
        ("broken.xyz", "what", r"broken\.xyz cannot be read: "),
    ],
)
def test_a_source_that_cannot_be_read_says_why(
    datasets, tmp_path: Path, cache: Path, name: str, content: str | None, message: str
) -> None:
    """Found before anything heavy starts."""
    if content is not None:
        (tmp_path / name).write_text(content)
        name = str(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        read(name, cache=cache)


def test_an_unknown_name_says_where_it_was_looked_for(datasets, cache: Path) -> None:
    """A typing error in a path looks like the name of a data set."""
    with pytest.raises(
        ValueError, match="data/trian is neither a file nor a folder, and could not be loaded as the name of a dataset"
    ):
        read("data/trian", cache=cache)


def test_a_damaged_parquet_file_is_reported(tmp_path: Path, cache: Path) -> None:
    """A damaged page shows only when it is read."""
    import pyarrow
    import pyarrow.parquet

    rows = [{**row, "ground_truth": str(row["ground_truth"])} for row in sums(400)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", compression="gzip")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[20:400] = b"\xff" * 380
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: "):
        read(tmp_path / "a.parquet", cache=cache)


def test_no_damage_of_a_parquet_file_is_another_error_or_another_number_of_rows(
    datasets, tmp_path: Path, cache: Path
) -> None:
    """A flipped bit of a value cannot be seen, all else is one sentence before anything starts."""
    import pyarrow
    import pyarrow.parquet

    path, rng, refused = tmp_path / "a.parquet", random.Random(1), 0
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "ground_truth": "1"} for row in sums(50)]), path)
    content = path.read_bytes()
    for number in range(16):
        place = rng.randrange(len(content))
        flipped = content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        path.write_bytes(flipped if number % 4 else content[:place])
        try:
            assert read(path, cache=cache).summary.num_rows == 50
        except ValueError as err:
            assert f"{path} cannot be read" in str(err)
            refused += 1
    assert refused > 6


def test_types_that_no_row_can_have_are_refused(datasets, tmp_path: Path, cache: Path) -> None:
    """Whoever writes tables from other programs' tables meets them."""
    import pyarrow as pa
    import pyarrow.parquet

    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    half = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    for name, values, is_unreadable in [
        ("prompt", pa.array([b"\xff"]), False),
        ("prompt", pa.array([1]), False),
        ("prompt", pa.array([None]), False),
        ("prompt", pa.array([{"a": 1}]), False),
        ("prompt", half, True),
        ("ground_truth", pa.array([b"\0"]), False),
        ("ground_truth", pa.array([datetime.timedelta(1)]), False),
        ("ground_truth", pa.array([deep]), True),
        ("ground_truth", pa.array([2**31 - 1], pa.date32()), True),
        ("level", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), True),
    ]:
        row = {"prompt": ["a"], "ground_truth": ["1"], "dataset": ["math"]} | {name: values}
        pa.parquet.write_table(pa.table(row), tmp_path / "a.parquet")
        try:
            assert read(tmp_path / "a.parquet", cache=cache).summary.num_problems == 1 and not is_unreadable, values
        except ValueError as err:
            assert is_unreadable and "a.parquet cannot be read" in str(err), values


def test_columns_that_cannot_be_kept_are_named(caplog: pytest.LogCaptureFixture, settings) -> None:
    """A reward function that gets None for a picture must have been told."""
    from mgrpo.data.mixture import open_data

    with caplog.at_level(logging.WARNING):
        open_data(settings(), need_verifiers=False, dataset=[{"prompt": "a", "picture": b"x"}])
    assert "reward functions get None for picture of dataset" in caplog.text

"""A model's files that are not what was written: each is found before anything is trained, by the checksums of an export or without."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from mgrpo.checkpoint.folder import LocalFolder
from mgrpo.model_io.hf_folder import HfFolder, carry, write_hf
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.checksums import SUMS, sum_problems, write_sums
from mgrpo.models.hf_files.weight_files import INDEX, SINGLE, files_beside, read_header, tensor_files, weight_problems
from tests.tiny_models import save_tiny

FLIPS = 100


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A model in several files, as exports and conversions write it."""
    folder = tmp_path_factory.mktemp("export")
    source, out = save_tiny(folder, "llama"), folder / "out"
    shape = shape_of(read_hf_config(source))
    (source / "tokenizer.json").write_text('{"model": {}}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("what it is")
    out.mkdir()
    carry(source, out)
    stored = HfFolder(source, shape)
    write_hf(stored.read, shape, stored.dtypes, out, file_bytes=100_000)
    return out


@pytest.fixture
def export(written, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(written, tmp_path / "export"))


def test_the_checksums_are_those_of_the_systems_own_program(export):
    """Whoever copies a model can compare it without this program."""
    sums = (export / SUMS).read_text()
    assert len([line for line in sums.splitlines() if ".safetensors" in line and INDEX not in line]) > 1
    assert sums.splitlines()[-1].endswith(".safetensors")
    write_sums(export)
    assert (export / SUMS).read_text() == sums
    assert list(sum_problems(export)) == []
    if program := shutil.which("sha256sum"):
        assert os.waitstatus_to_exitcode(os.system(f"cd '{export}' && {program} --quiet -c {SUMS}")) == 0


NAMES = ("my file.json", "config (1).json", "a@b.txt", "\u00e9.json", "b\\c.json", "d\ne.txt", "\udcff.json", ".json")


def test_names_of_any_form_are_compared(export):
    """An export would declare itself damaged because of the user's own file beside the model."""
    for name in NAMES:
        (export / name).write_text("{}")
    (export / "folder.json").mkdir()
    write_sums(export)
    assert list(sum_problems(export)) == []
    if program := shutil.which("sha256sum"):
        assert os.waitstatus_to_exitcode(os.system(f"cd '{export}' && {program} --quiet -c {SUMS}")) == 0
    for name in NAMES:
        (export / name).write_text("[]")
    found = list(sum_problems(export))
    assert len(found) == len(NAMES) - 2 and any("my file.json has changed" in line for line in found)


FOREIGN = (
    "{} *config.json",
    "{}  ./config.json",
    "{}  a/b/c.json",
    "{}  missing.bin",
    "{}  ../x",
    "# by hand {}",
    "{}  config.json",
)


@pytest.mark.parametrize("line", FOREIGN)
def test_somebody_elses_list_is_not_judged(export, line):
    """Publishers list files that were not downloaded, or have changed since, in forms of their own."""
    (export / SUMS).unlink()
    (export / "SHA256SUMS").write_text(line.format("0" * 64) + "\n")
    assert list(sum_problems(export)) == []
    assert "SHA256SUMS" not in [path.name for path in files_beside(export)]


def test_a_long_comparison_says_what_it_reads(export, monkeypatch, capsys):
    """Minutes without a word look like a run that hangs; each rank's own line would be eight."""
    assert not list(sum_problems(export)) and not capsys.readouterr().err
    monkeypatch.setattr("mgrpo.models.hf_files.checksums._TOLD_BYTES", 1)
    assert not [*sum_problems(export, rank=1, world_size=2)] and not capsys.readouterr().err
    assert not list(sum_problems(export, of_weights=True))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mgrpo: comparing 0.0 GB in ") and "with their checksums" in line


def test_every_flipped_bit_of_an_export_is_found(export):
    """In a weight it is another weight, in config.json another base of the rotations: the run would go on, a little worse."""
    rng, files = random.Random(4), [path for path in export.rglob("*") if path.is_file() and path.name != "README.md"]
    assert len(files) > 7
    for number in range(FLIPS):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        found = list(sum_problems(export))
        assert found and "copy the folder again" in found[0], (path, place, bit)
        path.write_bytes(content)
    assert list(sum_problems(export)) == []


def test_ranks_compare_every_file_once(export):
    """What none of them reads is not compared."""
    weights = sorted(export.glob("*.safetensors"))
    for path in (*weights, export / "config.json"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"x")
        found = [[*sum_problems(export, of_weights=True, rank=rank, world_size=3)] for rank in range(3)]
        assert sorted(map(len, found)) == ([0, 0, 1] if path in weights else [0, 0, 0])
        assert len([*sum_problems(export, of_weights=False)]) == (path not in weights)
        path.write_bytes(content)


def swap(folder: Path) -> None:
    """Two files of one size, as of two steps."""
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def cut(folder: Path, name: str, lines: int) -> None:
    kept = (folder / name).read_text().splitlines(keepends=True)[:lines]
    (folder / name).write_text("".join(kept))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "files that changed places": (swap, "has changed since it was written"),
    "a file is missing": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is in mgrpo.sha256 and cannot be read"),
    "an empty list": (lambda folder: (folder / SUMS).write_text(""), "mgrpo.sha256 is damaged"),
    "a list that was cut off": (lambda folder: cut(folder, SUMS, -1), "is not in mgrpo.sha256"),
    "a list that was cut in a line": (
        lambda folder: (folder / SUMS).write_bytes((folder / SUMS).read_bytes()[:-3]),
        "mgrpo.sha256 is damaged",
    ),
    "a path upwards": (lambda folder: (folder / SUMS).write_text(f"{'0' * 64}  ../x.jinja\n"), "mgrpo.sha256 is damaged"),
    "an absolute path": (lambda folder: (folder / SUMS).write_text(f"{'0' * 64}  /etc/passwd\n"), "mgrpo.sha256 is damaged"),
    "a path in depth": (lambda folder: (folder / SUMS).write_text(f"{'0' * 64}  a/b/c\n"), "mgrpo.sha256 is damaged"),
    "a file that nothing reads": (lambda folder: (folder / SUMS).write_text(f"{'0' * 64}  model.gguf\n"), "mgrpo.sha256 is damaged"),
    "no text": (lambda folder: (folder / SUMS).write_bytes(b"\xff\xfe"), "mgrpo.sha256 is damaged"),
    "a folder": (lambda folder: ((folder / SUMS).unlink(), (folder / SUMS).mkdir()), "mgrpo.sha256 cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_copy_that_is_not_whole_is_named(export, what):
    """Each is what copies that broke off, clean-up jobs and other people's folders look like."""
    damage, words = DAMAGES[what]
    damage(export)
    found = " ".join(sum_problems(export))
    assert any(word in found for word in words.split("|")), found


def test_folders_without_checksums_are_read_as_before(export):
    """Nobody else writes them; and what people edit is theirs."""
    (export / "README.md").write_text("something else")
    assert list(sum_problems(export)) == []
    (export / "config.json").write_text("{}")
    (export / SUMS).unlink()
    assert list(sum_problems(export)) == []


def test_checksums_do_not_travel_with_a_copy(export):
    """They would be those of other weights."""
    assert SUMS not in [path.name for path in files_beside(export)]


# Without checksums: headers of safetensors, and their index.


def safetensors(header: object, data: bytes = b"\0" * 16, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int = 0, end: int = 16, *, dtype: object = "F32", shape: object = (2, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "no header": b"\0" * 8,
    "a length beyond the file": safetensors({"a": tensor()}, length=10**9),
    "the greatest length": safetensors({"a": tensor()}, length=2**64 - 1),
    "no JSON": safetensors(b"{" * 50),
    "a hundred thousand brackets": safetensors(b"[" * 100_000),
    "a list": safetensors([1]),
    "a text": safetensors("a"),
    "no UTF-8": safetensors(b'{"\xff": 1}'),
    "a tensor that is a number": safetensors({"a": 1}),
    "a tensor without a place": safetensors({"a": {"dtype": "F32", "shape": [4]}}),
    "a place with one end": safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16]}}),
    "a place before the data": safetensors({"a": tensor(-16, 0)}),
    "a place backwards": safetensors({"a": tensor(16, 0)}),
    "a place in words": safetensors({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": ["0", "16"]}}),
    "a place in fractions": safetensors({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0.0, 16.0]}}),
    "a place that is true": safetensors({"a": tensor(False, 16)}),
    "a place beyond the file": safetensors({"a": tensor(0, 32, shape=[4, 2])}),
    "places that overlap": safetensors({"a": tensor(), "b": tensor()}),
    "places that overlap in part": safetensors({"a": tensor(0, 8, shape=[2]), "b": tensor(4, 16, shape=[3])}),
    "places with a gap": safetensors({"a": tensor(0, 4, shape=[1]), "b": tensor(8, 16, shape=[2])}),
    "data that is nobody's": safetensors({"a": tensor(0, 8, shape=[2])}),
    "fewer values than the shape": safetensors({"a": tensor(shape=[4, 2])}),
    "more values than the shape": safetensors({"a": tensor(shape=[3])}),
    "values of another width": safetensors({"a": tensor(dtype="BF16")}),
    "a negative shape": safetensors({"a": tensor(shape=[-2, -2])}),
    "a shape beyond all memory": safetensors({"a": tensor(shape=[2**62, 2**62])}),
    "a shape in words": safetensors({"a": tensor(shape="22")}),
    "a type that is none": safetensors({"a": tensor(dtype=["F32"])}),
    "a name twice": safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(tensor()).encode(),) * 2)),
    "an entry twice": safetensors(b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}'),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_nobody_wrote_is_refused_at_the_start(tmp_path, what):
    """Two tensors in one place are one tensor; the library's own error comes on some rank, when engines have started."""
    path = tmp_path / SINGLE
    path.write_bytes(HEADERS[what])
    with pytest.raises(ValueError, match=rf"{SINGLE} is not a complete safetensors file: ") as caught:
        read_header(path)
    assert len(str(caught.value)) < 600


def test_a_length_is_not_believed(tmp_path):
    """As much memory as the file is long would be taken for a header of that length."""
    path = tmp_path / SINGLE
    path.write_bytes(struct.pack("<Q", 10**11))
    os.truncate(path, 10**11 + 8)
    with pytest.raises(ValueError, match="its header has 100,000,000,000 bytes, at most 100,000,000 are read"):
        read_header(path)


def test_what_is_accepted_the_library_reads_alike(written, tmp_path):
    """Whatever a byte of a header becomes: refused, or the same names, types and shapes as for whoever reads the values."""
    original = min(written.glob("*.safetensors")).read_bytes()
    length, rng, refused = struct.unpack_from("<Q", original)[0], random.Random(5), 0
    path = tmp_path / SINGLE
    for _ in range(300):
        data = bytearray(original)
        data[rng.randrange(8 + length)] = rng.choice(b'0123456789"[]{},:abF\\ -\x00\xff')
        path.write_bytes(bytes(data))
        try:
            ours = read_header(path)
        except ValueError:
            refused += 1
            continue
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            theirs = {name: (own.get_dtype(), tuple(own.get_shape())) for name, own in slices.items()}
        assert theirs == {name: (own.dtype, own.shape) for name, own in ours.items()}
    assert refused > 150


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "dangling link", "link to a text"])
def test_a_place_that_is_no_file_of_weights_is_not_waited_for(export, tmp_path, kind):
    """A pipe without a writer would hold the start for ever."""
    path = min(export.glob("*.safetensors"))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "text").write_text("secret")
        path.symlink_to({"device": "/dev/zero", "dangling link": "/nowhere", "link to a text": tmp_path / "text"}[kind])
    (problem,) = weight_problems(export, None)
    assert path.name in problem and "secret" not in problem


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "b/../../model.safetensors"}},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": None}},
        {"weight_map": {"a": ""}},
        {"weight_map": {"a": "."}},
        {"weight_map": {"a": "a\0b"}},
        {"weight_map": {"a": "x" * 5000}},
        {"weight_map": [1, 2]},
        {"weight_map": "text"},
        {"weight_map": {}},
        {},
        [],
        "text",
    ],
    ids=lambda index: json.dumps(index)[:40],
)
def test_an_index_that_nobody_wrote_is_refused(tmp_path, index):
    """It names the files that are opened."""
    LocalFolder(tmp_path).replace(INDEX, json.dumps(index).encode())
    (problem,) = list(weight_problems(tmp_path, None)) or ["nothing"]
    assert str(tmp_path) in problem, problem


@pytest.mark.parametrize("text", [b"", b"\xff", b"[" * 100_000, b'{"weight_map": {"a": "b"}'])
def test_an_index_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(ValueError, match=rf"{INDEX} is damaged"):
        tensor_files(tmp_path)


def test_the_library_agrees_that_these_headers_are_wrong(tmp_path):
    """Otherwise the table above refuses what others write."""
    path, accepted = tmp_path / SINGLE, []
    for what, content in HEADERS.items():
        path.write_bytes(content)
        try:
            with safe_open(path, "pt"):
                accepted.append(what)
        except (SafetensorError, OSError):
            pass
    assert accepted == ["a name twice"]  # of which it reads the last

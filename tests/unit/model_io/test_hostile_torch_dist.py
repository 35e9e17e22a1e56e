"""Of a hostile or damaged checkpoint in Megatron-core's format nothing is executed or believed."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_cases import assert_same, refused, tensors_of
from torch.distributed.checkpoint.metadata import Metadata
from torch_dist_folder import FC2, LAYERS, edit, export, place_of

from mgrpo.model_io.convert import megatron_to_hf
from mgrpo.model_io.unpickle import Forbidden, record, unpickle


class Attack:
    """An object whose pickle makes a folder when it is loaded as usual."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_hostile_index_is_refused_and_not_executed(written, tmp_path):
    """A pickle can call any function; whoever downloads a checkpoint has not asked for that."""
    folder, mark = written("llama"), tmp_path / "mark"
    edit(folder, lambda index: setattr(index, "planner_data", Attack(mark)))
    refused(tmp_path / "out", export(folder, tmp_path / "out"), f"{folder}/.metadata", "posix.mkdir", "refused")
    assert not mark.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert mark.exists()  # the attack is one


def test_hostile_chunk_is_refused_and_not_executed(written, tmp_path):
    """Each chunk has a pickle of its own."""
    folder, mark = written("llama"), tmp_path / "mark"

    def replace_chunk(index: Metadata) -> None:
        place = place_of(index, FC2)
        place.relative_path, place.offset = "__9_0.distcp", 0
        torch.save([Attack(mark), torch.zeros(1 << 20)], folder / "__9_0.distcp")
        place.length = (folder / "__9_0.distcp").stat().st_size

    edit(folder, replace_chunk)
    refused(tmp_path / "out", export(folder, tmp_path / "out"), "__9_0.distcp", "posix.mkdir", "refused")
    assert not mark.exists()
    torch.load(folder / "__9_0.distcp", weights_only=False)
    assert mark.exists()


def _repacked(data: bytes, change: Callable[[zipfile.ZipInfo, bytes], bytes]) -> bytes:
    """An archive whose entries are changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            copy = zipfile.ZipInfo(entry.filename)
            content = change(copy, old.read(entry))
            new.writestr(copy, content)
    return out.getvalue()


def _compressed(entry: zipfile.ZipInfo, content: bytes) -> bytes:
    entry.compress_type = zipfile.ZIP_DEFLATED
    return content


def _with_an_entry_twice(data: bytes, ending: str) -> bytes:
    """An archive of torch.save with another entry of the same name and content at its end."""
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as archive, warnings.catch_warnings(action="ignore"):
        name = next(name for name in archive.namelist() if name.endswith(ending))
        archive.writestr(name, archive.read(name))
    return out.getvalue()


ARCHIVES: dict[str, Callable[[torch.Tensor, bytes], bytes]] = {
    "compressed": lambda tensor, data: _repacked(data, _compressed),
    "of another byte order": lambda tensor, data: _repacked(
        data, lambda entry, content: b"big" if entry.filename.endswith("byteorder") else content
    ),
    "of few values": lambda tensor, data: _repacked(
        data, lambda entry, content: content[:-4] if "/data/" in entry.filename else content
    ),
    "with a large pickle": lambda tensor, data: _repacked(
        data, lambda entry, content: content + bytes(2 << 20) if entry.filename.endswith("pkl") else content
    ),
    "with a damaged pickle": lambda tensor, data: _repacked(
        data, lambda entry, content: b"\x80\x02h\x07." if entry.filename.endswith("pkl") else content
    ),
    "with a pickle twice": lambda tensor, data: _with_an_entry_twice(data, "data.pkl"),
    "with its values twice": lambda tensor, data: _with_an_entry_twice(data, "data/0"),
    "after another archive": lambda tensor, data: _saved(2 * tensor) + data,
    "after other bytes": lambda tensor, data: b"0123456789abcdef" + data,
    "transposed": lambda tensor, data: _saved(tensor.mT.contiguous().mT),
    "a part of its storage": lambda tensor, data: _saved(torch.stack([tensor, tensor])[1]),
    "two tensors": lambda tensor, data: _saved([tensor, tensor]),
    "as before torch 1.6": lambda tensor, data: _saved(tensor, _use_new_zipfile_serialization=False),
}
"""Bytes in place of a chunk's archive."""


def _saved(value: object, **options: bool) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_that_megatron_does_not_write_is_refused(written, tmp_path, name):
    """Its values would be read from the wrong place, or in the wrong order."""
    folder = written("llama")

    def replace_chunk(index: Metadata) -> None:
        place, (chunk, *_) = place_of(index, FC2), index.state_dict_metadata[FC2].chunks
        tensor = torch.randint(256, (*chunk.sizes, 4), dtype=torch.uint8).view(torch.float32).view(chunk.sizes)
        data = ARCHIVES[name](tensor, _saved(tensor))
        place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(data)
        (folder / "__9_0.distcp").write_bytes(data)

    edit(folder, replace_chunk)
    refused(tmp_path / "out", export(folder, tmp_path / "out"), "__9_0.distcp", FC2)


def test_common_pt_and_objects_are_not_opened(model, written, tmp_path):
    """Weights need neither, so that what is in them does not matter."""
    folder, mark = written("llama"), tmp_path / "mark"
    torch.save({"args": Attack(mark)}, folder / "common.pt")
    torch.save([Attack(mark)], folder / "__9_0.distcp")

    def replace_objects(index: Metadata) -> None:
        for key, place in index.storage_data.items():
            if "_extra_state" in key.fqn:
                index.storage_data[key] = replace(place, relative_path="__9_0.distcp", offset=0, length=1000)

    edit(folder, replace_objects)
    megatron_to_hf(folder, tmp_path / "hf")
    assert_same(tmp_path / "hf", model("llama"))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/file", "", 3])
def test_chunk_in_a_file_outside_the_folder_is_refused(written, tmp_path, name):
    """A checkpoint must not make an export of another file of this machine."""
    folder = written("llama")
    edit(folder, lambda index: setattr(place_of(index, FC2), "relative_path", name))
    refused(tmp_path / "out", export(folder, tmp_path / "out"), FC2, repr(name))


def _without_a_chunk(index: Metadata) -> None:
    del index.state_dict_metadata[FC2].chunks[0]


def _with_a_chunk_twice(index: Metadata) -> None:
    index.state_dict_metadata[FC2].chunks.append(index.state_dict_metadata[FC2].chunks[0])


def _with_an_enormous_tensor(index: Metadata) -> None:
    own = index.state_dict_metadata[FC2]
    own.size = own.chunks[0].sizes = torch.Size((1 << 40, 1 << 20, 1 << 20))


def _with_a_chunk_beyond_its_file(index: Metadata) -> None:
    place_of(index, FC2).offset = 1 << 50


def _with_a_negative_offset(index: Metadata) -> None:
    place_of(index, FC2).offset = -1


def _without_a_place(index: Metadata) -> None:
    del index.storage_data[next(key for key in index.storage_data if key.fqn == FC2)]


def _with_another_type(index: Metadata) -> None:
    index.state_dict_metadata[FC2].properties.dtype = torch.int32


def _with_other_values(index: Metadata) -> None:
    for key, place in index.storage_data.items():
        if key.fqn == FC2:
            index.storage_data[key] = place_of(index, f"{LAYERS}mlp.linear_fc1.weight")
            assert place is not None
            return


DAMAGES = {
    _without_a_chunk: "elements are present",
    _with_a_chunk_twice: "overlap",
    _with_an_enormous_tensor: "bytes",
    _with_a_chunk_beyond_its_file: "ends after",
    _with_a_negative_offset: "from -1 on",
    _without_a_place: "is in no file",
    _with_another_type: "torch.int32",
    _with_other_values: "does not hold",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_index_that_does_not_fit_its_tensors_is_refused(written, tmp_path, damage):
    """A hole would be exported as whatever the memory held."""
    folder = written("llama")
    edit(folder, damage)
    refused(tmp_path / "out", export(folder, tmp_path / "out"), FC2, DAMAGES[damage])


@pytest.mark.parametrize("left", [0, 1, 1000])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_truncated_file_is_refused(written, tmp_path, file, left):
    """A download that broke off."""
    folder = written("llama")
    (folder / file).write_bytes((folder / file).read_bytes()[:left])
    refused(tmp_path / "out", export(folder, tmp_path / "out"), str(folder), file)


def test_missing_file_is_refused(written, tmp_path):
    folder = written("llama")
    (folder / "__0_0.distcp").unlink()
    refused(tmp_path / "out", export(folder, tmp_path / "out"), "__0_0.distcp is missing")


def test_changed_value_is_refused(written, model, tmp_path):
    """One flipped bit on a disk: the archives have checksums."""
    folder = written("llama")
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(tensors_of(model("llama"))["model.norm.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    refused(tmp_path / "out", export(folder, tmp_path / "out"), "decoder.final_layernorm.weight", "has changed")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [Attack(Path("mark")), print, [{"a": (len,)}]], ids=["call", "function", "nested"])
def test_only_listed_names_are_imported(tmp_path, monkeypatch, protocol, value):
    """Whichever byte codes name it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Forbidden, match="file is refused: it imports"):
        unpickle(pickle.dumps(value, protocol), {("collections", "OrderedDict"): record("OrderedDict")}, "file")
    assert not any(tmp_path.iterdir())


def test_listed_names_become_records_and_are_not_called(tmp_path):
    """Also a function in the list is only written down."""
    found = unpickle(pickle.dumps(Attack(tmp_path / "mark")), {("posix", "mkdir"): record("mkdir")}, "file")
    assert type(found).__name__ == "mkdir" and found.args == (str(tmp_path / "mark"),)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"garbage", b"\x80\x04r\xff\xff\xff\xff.", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f"]
)
def test_damaged_pickle_is_refused(data):
    """Also one that asks for more memory than there is."""
    with pytest.raises(ValueError, match="file is damaged"):
        unpickle(data, {}, "file")

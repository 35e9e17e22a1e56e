"""Checkpoints in Megatron-core's format: exact both ways, and nothing of a hostile or damaged one is executed or believed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_cases import assert_same, change, layout_of, refused, run_tool, tensors_of
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mgrpo.model_io import convert as conversion
from mgrpo.model_io import megatron_checkpoint
from mgrpo.model_io.convert import hf_to_megatron, hf_to_megatron_command, megatron_to_hf
from mgrpo.model_io.hf_folder import same_bits, write_hf
from mgrpo.model_io.megatron_checkpoint import write_checkpoint
from mgrpo.model_io.megatron_view import MegatronView
from mgrpo.model_io.model_reader import model_reader
from mgrpo.model_io.unpickle import Forbidden, record, unpickle
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import hf_tensors
from tests.tiny_models import FAMILIES

LAYERS = "decoder.layers."
FC2 = f"{LAYERS}mlp.linear_fc2.weight"


class Attack:
    """An object whose pickle makes a folder when it is loaded as usual."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def written(model, tmp_path):
    """`written(family)`: the folder of a new checkpoint, whose parent has the files beside the weights."""

    def write(family: str) -> Path:
        hf_to_megatron(model(family), tmp_path / "megatron", None)
        return tmp_path / "megatron" / "release"

    return write


def edit(folder: Path, how: Callable[[Metadata], object]) -> None:
    """Change the index of a checkpoint."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    how(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def rename(folder: Path, new: Callable[[str], str]) -> None:
    """Give tensors other names."""

    def change_names(index: Metadata) -> None:
        index.state_dict_metadata = {new(name): own for name, own in index.state_dict_metadata.items()}
        index.storage_data = {
            MetadataIndex(new(key.fqn), key.offset): place for key, place in index.storage_data.items()
        }

    edit(folder, change_names)


def place_of(index: Metadata, name: str) -> _StorageInfo:
    """Where the first chunk of a tensor is."""
    return next(place for key, place in index.storage_data.items() if key.fqn == name)


def export(checkpoint: Path, out: Path) -> Callable[[], None]:
    return lambda: megatron_to_hf(checkpoint, out)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_comes_back(model, tmp_path, family):
    """A row lost or swapped in a conversion is another model, which nobody notices before it is trained."""
    hf_to_megatron(model(family), tmp_path / "megatron", None)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert_same(tmp_path / "hf", model(family))


def test_files_are_of_bounded_size(model, tmp_path, monkeypatch):
    """With chunks smaller than a tensor, and files smaller than the model."""
    monkeypatch.setattr(megatron_checkpoint, "CHUNK_BYTES", 4096)
    hf_to_megatron(model("qwen3_moe"), tmp_path / "megatron", None, file_bytes=1 << 16)
    sizes = [path.stat().st_size for path in tmp_path.glob("megatron/release/*.distcp")]
    assert len(sizes) > 4 and max(sizes) < 2 << 16  # archives are larger than the values in them
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert_same(tmp_path / "hf", model("qwen3_moe"))


@pytest.mark.parametrize("chunk_mb", [8, 1024], ids=["ours", "one chunk for each matrix"])
def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch, chunk_mb):
    """A 70B model is converted on a machine that cannot hold it, also where Megatron's ranks wrote large chunks."""
    hf = {"model_type": "llama", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 32_768}
    hf |= {"num_hidden_layers": 1, "num_attention_heads": 8, "tie_word_embeddings": False}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf))
    shape, noise = shape_of(hf), torch.randn(64 << 20).bfloat16()
    dtypes = dict.fromkeys(hf_tensors(shape), torch.bfloat16)

    def read(box: Box) -> torch.Tensor:
        return noise[: box.size].view(box.shape)

    write_hf(read, shape, dtypes, tmp_path / "hf")
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert size > 320e6
    commands = {
        "convert_hf_to_megatron": ["--hf", "hf", "--out", "megatron", "--format", "torch_dist"],
        "convert_megatron_to_hf": ["--checkpoint", "megatron", "--out", "back"],
    }
    if chunk_mb > 8:
        del commands["convert_hf_to_megatron"]
        monkeypatch.setattr(megatron_checkpoint, "CHUNK_BYTES", chunk_mb << 20)
        write_checkpoint(read, shape, dtypes, tmp_path / "megatron")
        shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "megatron")
    for tool, arguments in commands.items():
        said = run_tool(tool, *arguments, cwd=tmp_path)
        used = float(said.split(" MB for the conversion")[0].split()[-1].replace(",", "")) * 1e6
        assert used < size / 2, said
    with (
        safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as before,
        safe_open(tmp_path / "back" / "model.safetensors", framework="pt") as after,
    ):
        for name in before.keys():  # noqa: SIM118
            expected = before.get_tensor(name)
            if chunk_mb == 8:
                assert same_bits(after.get_tensor(name), expected)
            assert after.get_tensor(name).shape == expected.shape


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_next"])
def test_a_run_starts_from_a_checkpoint(model, tmp_path, family):
    """`model_name_or_path` takes the folder: a rank reads the boxes it holds, which begin and end anywhere."""
    hf_to_megatron(model(family), tmp_path / "megatron", None)
    shape = shape_of(read_hf_config(tmp_path / "megatron"))
    read = model_reader(tmp_path / "megatron", shape)
    for name, tensor in tensors_of(model(family)).items():
        start = tuple(length // 3 for length in tensor.shape)
        box = Box(name, start, tuple(length - length // 2 for length in tensor.shape))
        assert same_bits(read(box), tensor[box.within(Box(name, (0,) * tensor.dim(), tensor.shape))].contiguous()), name


def test_nothing_is_written_when_a_tensor_does_not_come_back(model, tmp_path, monkeypatch):
    """`--verify` also of this format: here one bit of what was written is not what was read."""

    def write(*args, folder, **options):
        write_checkpoint(*args, folder=folder, **options)
        index = pickle.loads((folder / "release" / ".metadata").read_bytes())
        place = place_of(index, "decoder.final_layernorm.weight")
        data = bytearray((folder / "release" / place.relative_path).read_bytes())
        at = data.index(tensors_of(model("llama"))["model.norm.weight"].numpy().tobytes())
        data[at] ^= 1
        (folder / "release" / place.relative_path).write_bytes(data)

    monkeypatch.setattr(conversion, "write_checkpoint", write)
    refused(
        tmp_path / "out",
        lambda: hf_to_megatron(model("llama"), tmp_path / "out", None, verify=True),
        "model.norm.weight",
        "does not come back",
    )


# Names that a Megatron gives


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "qwen3_next"])
@pytest.mark.parametrize("kept", [0, 1])
def test_each_name_of_a_norm_alone_is_understood(model, written, tmp_path, family, kept):
    """Transformer Engine's layers and Megatron-core's own name norms differently; a checkpoint has the names of one."""
    folder = written(family)
    pairs = {"mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"}
    pairs |= {"mlp_bda.norm.weight": "mlp.linear_fc2.post_layernorm.weight"} if family == "gemma2" else {}
    dropped = {pair[1 - kept] for pair in pairs.items()}

    def drop(index: Metadata) -> None:
        before = len(index.state_dict_metadata)
        gone = {name for name in index.state_dict_metadata if name.endswith(tuple(dropped))}
        index.state_dict_metadata = {n: own for n, own in index.state_dict_metadata.items() if n not in gone}
        assert len(index.state_dict_metadata) < before

    edit(folder, drop)
    megatron_to_hf(folder, tmp_path / "hf")
    assert_same(tmp_path / "hf", model(family))


def test_norm_under_two_names_with_different_values_is_refused(written, tmp_path):
    """Which of them the model trains with, nobody knows."""
    folder = written("llama")

    def point_elsewhere(index: Metadata) -> None:
        for key in [key for key in index.storage_data if key.fqn == f"{LAYERS}input_layernorm.weight"]:
            other = MetadataIndex(f"{LAYERS}pre_mlp_layernorm.weight", key.offset)
            index.storage_data[key] = index.storage_data[other]

    edit(folder, point_elsewhere)
    refused(tmp_path / "out", export(folder, tmp_path / "out"), "input_layernorm.weight", "twice")


def test_prefix_before_all_names_is_understood(model, written, tmp_path):
    """NeMo's checkpoints have one."""
    folder = written("qwen2")
    rename(folder, lambda name: f"module.{name}")
    megatron_to_hf(folder, tmp_path / "hf")
    assert_same(tmp_path / "hf", model("qwen2"))


def test_state_of_an_optimizer_is_skipped_and_other_tensors_are_refused(model, written, tmp_path):
    """A tensor that belongs to the model would be missing from it afterwards."""
    folder = written("llama")

    def add(name: str) -> None:
        edit(folder, lambda index: index.state_dict_metadata.update({name: index.state_dict_metadata[FC2]}))

    add(f"optimizer.state.exp_avg.{FC2}")
    add(f"chained_0.optimizer.state.exp_avg.{FC2}")
    megatron_to_hf(folder, tmp_path / "hf")
    assert_same(tmp_path / "hf", model("llama"))
    add(f"{LAYERS}mlp.linear_fc2.bias")
    refused(tmp_path / "out", export(folder, tmp_path / "out"), f"{LAYERS}mlp.linear_fc2.bias", "would lose")


def test_checkpoint_of_another_model_is_refused(model, written, tmp_path):
    """`--hf` of another model, or a tensor that was left out."""
    folder = written("llama")
    refused(tmp_path / "out", lambda: megatron_to_hf(folder, tmp_path / "out", hf=model("qwen2")), "linear_qkv.bias")
    rename(folder, lambda name: name.replace("output_layer", "optimizer.output_layer"))
    refused(tmp_path / "out", export(folder, tmp_path / "out"), "lacks output_layer.weight")


def test_folder_without_a_configuration_asks_for_it(model, written, tmp_path):
    """As Megatron's own have none."""
    folder = written("llama")
    own = shutil.move(folder, tmp_path / "iter_0000010")
    refused(tmp_path / "out", export(own, tmp_path / "out"), "has no config.json", "--hf DIR")
    megatron_to_hf(own, tmp_path / "hf", hf=model("llama"))
    assert_same(tmp_path / "hf", model("llama"))


@pytest.mark.parametrize("newest", ["20", "release", "../elsewhere", ""])
def test_tracker_that_names_nothing_is_refused(written, tmp_path, newest):
    """A run whose last checkpoint was not finished, or not copied."""
    run = shutil.move(written("llama"), tmp_path / "run" / "iter_0000010").parent
    (run / "latest_checkpointed_iteration.txt").write_text(newest)
    refused(tmp_path / "out", export(run, tmp_path / "out"), "latest_checkpointed_iteration.txt", repr(newest))


# The norm of a delta net, which Megatron multiplies with 1 more than it keeps


DELTA_NORM = "model.layers.0.linear_attn.norm.weight"
OUT_NORM = "decoder.layers.0.self_attention.out_norm.weight"


@pytest.mark.parametrize("norm", [torch.bfloat16, torch.float32], ids=str)
def test_norm_of_a_delta_net_comes_back_in_its_type(own_model, tmp_path, norm):
    """Checkpoints have it in bfloat16 or, beside weights in bfloat16, in float32; here with values far from 1."""
    source = own_model("qwen3_5_text")
    values = torch.tensor([1.0, 1.375, 0.1, 0.03, 17.0, 0.75]).repeat(4).to(norm)

    def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: values.clone() if name.endswith("linear_attn.norm.weight") else tensor.bfloat16()
            for name, tensor in tensors.items()
        }

    change(source, rounded)
    hf_to_megatron(source, tmp_path / "megatron", None, verify=False)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert_same(tmp_path / "hf", source)


def test_norm_of_a_delta_net_that_would_be_rounded_is_refused(own_model, tmp_path):
    """1e-9 less 1 is -1 in float32."""
    source = own_model("qwen3_5_text")

    def with_a_small_value(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        tensors[DELTA_NORM][3] = 1e-9
        return tensors

    change(source, with_a_small_value)
    refused(
        tmp_path / "out", lambda: hf_to_megatron(source, tmp_path / "out", None), DELTA_NORM, "--format safetensors"
    )


def test_trained_norm_of_a_delta_net_is_not_rounded_to_the_other_weights_type(model):
    """A run in bfloat16 keeps 0.001, with which Megatron multiplies by 1.001: bfloat16 has nothing between 1 and 1.0078."""
    shape = shape_of(read_hf_config(model("qwen3_5_text")))
    kept = torch.linspace(0.001, 0.9, 24).bfloat16()
    view = MegatronView(shape)
    dtypes = view.dtypes(dict.fromkeys(hf_tensors(view.kept), torch.bfloat16), lambda box: kept)
    read = view.reader(lambda box: kept, dtypes)
    assert dtypes[DELTA_NORM] is torch.float32 and dtypes["model.norm.weight"] is torch.bfloat16
    assert same_bits(read(Box(DELTA_NORM, (0,), (24,))), kept.float() + 1)


def test_layers_that_guess_further_tokens_are_left_out(model, written, tmp_path, capsys):
    """As of a Hugging Face folder: they are not trained."""
    folder = written("qwen3_next")

    def add(index: Metadata) -> None:
        index.state_dict_metadata["mtp.layers.0.eh_proj.weight"] = index.state_dict_metadata[OUT_NORM]

    edit(folder, add)
    megatron_to_hf(folder, tmp_path / "hf")
    assert_same(tmp_path / "hf", model("qwen3_next"))
    assert "left out: mtp.layers.0.eh_proj.weight" in capsys.readouterr().out


# What is refused


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


@pytest.mark.parametrize("text", ["{", "[]", '{"sharded_backend": "zarr", "sharded_backend_version": 1}'])
def test_other_format_is_refused(written, tmp_path, text):
    """Megatron-core has had another one."""
    folder = written("llama")
    (folder / "metadata.json").write_text(text)
    refused(tmp_path / "out", export(folder, tmp_path / "out"), "metadata.json")


def test_layers_of_different_types_are_refused(own_model, tmp_path):
    """Megatron has all layers of a dense model in one tensor."""
    source, name = own_model("llama"), "model.layers.1.input_layernorm.weight"
    change(source, lambda tensors: tensors | {name: tensors[name].bfloat16()})
    hf_to_megatron(source, tmp_path / "fits", layout_of())
    refused(tmp_path / "out", lambda: hf_to_megatron(source, tmp_path / "out", None), "layer_norm_weight", "one type")


def test_layout_is_refused_by_the_name_of_its_flag(model, tmp_path, capsys):
    """The format has no layout; whoever names one expects something else."""
    arguments = ["--hf", str(model("llama")), "--out", str(tmp_path / "out"), "--format", "torch_dist"]
    arguments += ["--tensor_model_parallel_size", "2"]
    assert hf_to_megatron_command(arguments, prog="convert") == 2
    assert "--tensor_model_parallel_size does not apply to --format torch_dist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# The reader of pickles


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

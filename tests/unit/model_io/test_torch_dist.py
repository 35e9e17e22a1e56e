"""Checkpoints in Megatron-core's format: exact both ways, and what cannot be is refused."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
from megatron_cases import assert_same, change, layout_of, refused, run_tool, tensors_of
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch_dist_folder import FC2, LAYERS, edit, export, place_of, rename

from mgrpo.layout import Layout
from mgrpo.model_io import convert as conversion
from mgrpo.model_io import megatron_checkpoint
from mgrpo.model_io.convert import hf_to_megatron, hf_to_megatron_command, megatron_to_hf
from mgrpo.model_io.hf_folder import same_bits, write_hf
from mgrpo.model_io.megatron_checkpoint import write_checkpoint
from mgrpo.model_io.megatron_view import MegatronView
from mgrpo.model_io.model_reader import model_reader
from mgrpo.model_io.torch_dist import TorchDistFolder, _Window, write_torch_dist
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import hf_tensors
from tests.tiny_models import FAMILIES, save_tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_comes_back(model, tmp_path, family):
    """A row lost or swapped in a conversion is another model, which nobody notices before it is trained."""
    hf_to_megatron(model(family), tmp_path / "megatron", None)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert_same(tmp_path / "hf", model(family))


def test_a_bias_that_megatron_core_does_not_have_is_refused(tmp_path):
    """It loads what its own model has, and passes over the rest without a word."""
    hf = save_tiny(tmp_path, "seed_oss", layers=2, attention_out_bias=True)
    with pytest.raises(ValueError, match=r"attention_out_bias=true: Megatron-core's attention .* --format safetensors"):
        hf_to_megatron(hf, tmp_path / "megatron", None)
    hf_to_megatron(hf, tmp_path / "own", Layout(world_size=1))
    megatron_to_hf(tmp_path / "own", tmp_path / "hf")
    found, expected = tensors_of(tmp_path / "hf"), tensors_of(hf)
    assert found.keys() == expected.keys() and "model.layers.1.self_attn.o_proj.bias" in found
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())


def test_files_are_of_bounded_size(model, tmp_path, monkeypatch):
    """With chunks smaller than a tensor, and files smaller than the model."""
    monkeypatch.setattr(megatron_checkpoint, "CHUNK_BYTES", 4096)
    hf_to_megatron(model("qwen3_moe"), tmp_path / "megatron", None, file_bytes=1 << 16)
    sizes = [path.stat().st_size for path in tmp_path.glob("megatron/release/*.distcp")]
    assert len(sizes) > 4 and max(sizes) < 2 << 16  # archives are larger than the values in them
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert_same(tmp_path / "hf", model("qwen3_moe"))


def test_regions_are_longer_than_one_read(model, tmp_path, monkeypatch):
    """Linux reads at most 2 GiB at once, network file systems less; here 100 bytes."""
    hf_to_megatron(model("llama"), tmp_path / "megatron", None)

    def readinto(window: _Window, buffer: memoryview) -> int:
        return read(window, memoryview(buffer)[:100])

    read = _Window.readinto
    monkeypatch.setattr(_Window, "readinto", readinto)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert_same(tmp_path / "hf", model("llama"))


@pytest.mark.slow
def test_region_of_more_than_2_gib_is_read(tmp_path):
    """The first column of two long rows; the file has a hole in place of the values."""
    whole = Box("weight", (0, 0), (2, (1 << 30) + 1))
    headers = {"weight": (torch.bfloat16, whole.shape)}

    def values() -> torch.Tensor:
        return torch.empty(whole.shape, dtype=torch.bfloat16)

    with torch.serialization.skip_data():
        write_torch_dist(tmp_path, headers, [(whole, values)], copies={}, objects=[], common={}, file_bytes=1 << 40)
    found = TorchDistFolder(tmp_path).read(Box("weight", (0, 0), (2, 1)))
    assert found.tolist() == [[0], [0]]


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

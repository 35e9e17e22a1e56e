"""Hugging Face -> Megatron -> Hugging Face: every bit comes back, from any layout, and damage is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_cases import change, flip, layout_of, refused, shape, tensors_of, there_and_back
from safetensors import safe_open

from mgrpo.layout import Layout
from mgrpo.model_io.convert import hf_to_megatron, megatron_to_hf
from mgrpo.model_io.megatron_folder import stored_parameters
from mgrpo.model_io.model_reader import model_reader
from mgrpo.models.placement.boxes import Box
from tests.tiny_models import FAMILIES

LAYOUTS = [(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)]
SPECIAL = {
    "uneven": Layout(world_size=6, tensor=2, pipeline=3, first_stage_layers=1, last_stage_layers=2),
    "interleaved": Layout(world_size=2, pipeline=2, virtual_pipeline=2),
}
EXPERT = {
    "ep2": Layout(world_size=2, expert=2),
    "tp2 ep2": Layout(world_size=2, tensor=2, expert=2),
    "tp4 ep2": Layout(world_size=4, tensor=4, expert=2),
    "tp2 pp2 ep4": Layout(world_size=8, tensor=2, pipeline=2, expert=4),
}


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_comes_back(model, tmp_path, family, tensor, pipeline):
    """A row lost or swapped in a conversion is another model, which nobody notices before it is trained."""
    there_and_back(model(family), layout_of(tensor, pipeline), tmp_path)


@pytest.mark.parametrize("name", SPECIAL)
def test_every_bit_comes_back_from_uneven_and_interleaved_stages(model, tmp_path, name):
    """Layers are numbered over the whole model, wherever they are."""
    there_and_back(model("qwen2"), SPECIAL[name], tmp_path)


@pytest.mark.parametrize("name", EXPERT)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_bit_comes_back_from_experts_that_are_shared_out(model, tmp_path, family, name):
    """Each parameter is stored for one expert rank only, so each must be found where the rule puts it."""
    there_and_back(model(family), EXPERT[name], tmp_path)


@pytest.mark.parametrize("name", EXPERT)
def test_nothing_large_is_stored_twice(model, name):
    """Dense weights once an expert rank would multiply a large model by ep."""
    layout = EXPERT[name]
    stored = stored_parameters(shape(model("qwen3_moe")), layout).values()
    names = [name for parameters in stored for name in parameters if ".experts." not in name]
    assert all(names.count(name) in (1, layout.tensor) for name in names)
    experts = [
        piece.box
        for parameters in stored
        for name, parameter in parameters.items()
        if ".experts." in name
        for piece in parameter.pieces
    ]
    assert len(set(experts)) == len(experts) > 0


def test_files_hold_what_megatron_calls_them(model, tmp_path):
    """By hand, for two tensor ranks: gate above up, groups of query rows with their key and value, a padded vocabulary."""
    source = model("llama")
    hf_to_megatron(source, tmp_path / "megatron", layout_of(tensor=2))
    hf = tensors_of(source)
    with safe_open(tmp_path / "megatron" / "tp_01_pp_000_ep_00-0.safetensors", framework="pt") as file:
        own = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    at = "model.layers.3."
    gate, up = hf[at + "mlp.gate_proj.weight"], hf[at + "mlp.up_proj.weight"]
    assert torch.equal(own["decoder.layers.3.mlp.linear_fc1.weight"], torch.cat((gate[48:], up[48:])))
    q, k, v = (hf[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")  # 4 heads and 2 groups of 16 rows each
    assert torch.equal(own["decoder.layers.3.self_attention.linear_qkv.weight"], torch.cat((q[32:], k[16:], v[16:])))
    assert torch.equal(own["decoder.layers.3.mlp.linear_fc2.weight"], hf[at + "mlp.down_proj.weight"][:, 48:])
    embedding = torch.cat((hf["model.embed_tokens.weight"][64:], torch.zeros(3, 64)))
    assert torch.equal(own["embedding.word_embeddings.weight"], embedding)


@pytest.mark.parametrize("box", [((0, 0), (1, 1)), ((20, 3), (70, 50)), ((0, 0), (64, 64))])
def test_reader_gives_any_box(model, tmp_path, box):
    """Another layout's ranks ask for boxes that lie across those of the folder."""
    source, name = model("qwen2"), "model.layers.2.self_attn.q_proj.weight"
    hf_to_megatron(source, tmp_path / "megatron", layout_of(tensor=4, pipeline=2))
    start, extent = box
    extent = tuple(min(n, 64 - a) for a, n in zip(start, extent, strict=True))
    expected = tensors_of(source)[name][start[0] : start[0] + extent[0], start[1] : start[1] + extent[1]]
    for folder in (source, tmp_path / "megatron"):
        assert torch.equal(model_reader(folder, shape(source))(Box(name, start, extent)), expected)


def test_types_are_kept_tensor_by_tensor(own_model, tmp_path):
    """A norm or a router in float32 beside bfloat16 matrices must not be rounded."""
    source = own_model("llama")
    change(source, lambda tensors: {n: t if "norm" in n else t.bfloat16() for n, t in tensors.items()})
    there_and_back(source, layout_of(2, 2), tmp_path)


def test_bits_that_are_no_numbers_come_back(own_model, tmp_path):
    """Minus zero and the payload of a NaN are bits, too."""
    source = own_model("llama")

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for tensor in tensors.values():
            tensor.view(torch.int32).reshape(-1)[:3] = torch.tensor([-(2**31), 0x7FC12345, 0x7F800000])
        return tensors

    change(source, spoil)
    there_and_back(source, layout_of(2, 1), tmp_path)


def test_rows_that_no_rank_would_hold_are_noticed(model):
    """Whatever was asked beforehand: what the ranks hold must add up to the model."""
    with pytest.raises(ValueError, match="elements are present"):
        stored_parameters(shape(model("llama")), layout_of(3))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("file", "how", "words"),
    [
        ("tp_01_pp_000_ep_00-0.safetensors", cut, "bytes instead of"),
        ("tp_01_pp_000_ep_00-0.safetensors", flip, "has changed"),
        ("tp_00_pp_000_ep_00-0.safetensors", Path.unlink, "is missing"),
        ("megatron.json", cut, "megatron.json cannot be read"),
    ],
)
def test_damaged_folder_is_refused(model, tmp_path, file, how, words):
    """A model with a flipped bit loads everywhere and is another model."""
    hf_to_megatron(model("llama"), tmp_path / "megatron", layout_of(2))
    how(tmp_path / "megatron" / file)
    refused(tmp_path / "out", lambda: megatron_to_hf(tmp_path / "megatron", tmp_path / "out"), file, words)

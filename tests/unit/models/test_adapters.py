"""Where adapters lie: every element of every A and B is on the ranks that need it."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape, adapter_places, adapter_tensors
from mgrpo.models.family import shape_of
from mgrpo.models.table import hf_tensors, local_parameters
from tests.unit.models.test_table import LAYOUTS, MODELS

LORA = LoraShape(rank=3, alpha=6)


def region(box):
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))


def filled(place, tensors):
    """What a parameter at `place` holds of `tensors`."""
    values = np.zeros(place.shape)
    for piece in place.pieces:
        values[piece.region] = tensors[piece.box.name][region(piece.box)]
    return values


def merged(name, place, lora, adapters):
    """B A of the layer at `place`, from its own a and b alone."""
    a, b = adapter_places(name, place, lora)
    delta = np.zeros(place.shape)
    rows_of_a = {piece.box.name.replace("lora_A", "lora_B"): piece.local[0] for piece in a.pieces}
    own_a, own_b = filled(a, adapters), filled(b, adapters)
    for piece in b.pieces:
        first = rows_of_a[piece.box.name]
        rows = slice(piece.local[0], piece.local[0] + piece.box.shape[0])
        delta[rows] = own_b[rows] @ own_a[first : first + lora.rank]
    return delta


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "up_proj", "w3"), ("k_proj", "down_proj", "w2")])
def test_every_rank_can_merge_its_own_weights(name, layout, targets):
    """A row of B beside another matrix's A, or a missing one, adapts a weight on some layouts only."""
    model = shape_of(MODELS[name])
    if (model.experts is None and layout.expert > 1) or layout.tensor > model.kv_heads * 4:
        pytest.skip("not a layout of this model")
    lora = LoraShape(rank=3, alpha=6, targets=targets)
    random = np.random.default_rng(0)
    adapters = {name: random.normal(size=shape) for name, shape in adapter_tensors(model, lora).items()}
    deltas = {}
    for matrix, shape in hf_tensors(model).items():
        stem = matrix.removesuffix("weight")
        a, b = adapters.get(stem + "lora_A.weight"), adapters.get(stem + "lora_B.weight")
        deltas[matrix] = np.zeros(shape) if a is None else b @ a
    seen = {name: np.zeros(shape, dtype=bool) for name, shape in adapter_tensors(model, lora).items()}
    for rank in range(layout.world_size):
        for parameter, place in local_parameters(model, layout, rank).items():
            if (own := adapter_places(parameter, place, lora)) is None:
                assert not any(lora.adapts(piece.box.name) for piece in place.pieces)
                continue
            np.testing.assert_allclose(merged(parameter, place, lora, adapters), filled(place, deltas), atol=1e-12)
            assert own[0].shape[1] == place.shape[1] and own[1].shape == (place.shape[0], lora.rank)
            for piece in own[0].pieces + own[1].pieces:
                seen[piece.box.name][region(piece.box)] = True
    assert all(held.all() for held in seen.values())


def test_a_is_whole_on_ranks_without_a_row_of_its_matrix():
    """Two key-value ranks share one head: the gradient of key's A is summed over ranks that must all hold it."""
    model, layout = shape_of(MODELS["llama-1kv"]), Layout(world_size=4, tensor=4)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    held = [local_parameters(model, layout, rank)[name] for rank in range(4)]
    assert {piece.box.name.split(".")[-2] for piece in held[0].pieces} == {"q_proj"}
    for place in held:
        a, _ = adapter_places(name, place, LORA)
        assert [piece.box.name.split(".")[-3] for piece in a.pieces] == ["q_proj", "k_proj", "v_proj"]


def test_names_and_shapes_are_those_of_peft():
    """Another name or a transposed shape is a folder that nothing loads."""
    tensors = adapter_tensors(shape_of(MODELS["mixtral"]), LORA)
    at = "model.layers.1."
    assert tensors[at + "self_attn.k_proj.lora_A.weight"] == (3, 64)
    assert tensors[at + "self_attn.k_proj.lora_B.weight"] == (32, 3)
    assert tensors[at + "block_sparse_moe.experts.2.w2.lora_A.weight"] == (3, 96)
    assert tensors[at + "block_sparse_moe.experts.2.w2.lora_B.weight"] == (64, 3)
    # Four of attention, three of each of four experts.
    assert len(tensors) == 4 * 2 * (4 + 4 * 3)


def test_only_linear_layers_are_adapted():
    """Engines cannot take an adapter of an embedding, a head or a router; norms and biases have no rank."""
    model = shape_of(MODELS["qwen3_moe"])
    adapted = {name.split(".")[-2] for name in hf_tensors(model) if LORA.adapts(name)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not LoraShape(rank=3, alpha=6, targets=("lm_head", "gate")).adapts("lm_head.weight")
    assert not LORA.adapts("model.layers.0.self_attn.q_proj.bias")


def test_scale():
    """A scale that is off by a factor trains at another learning rate than the one that was tuned."""
    assert LoraShape(rank=16, alpha=32).scale == 2
    assert LoraShape(rank=16, alpha=32, use_rslora=True).scale == 8

"""The rule table: every element of every HF tensor is on the ranks that should hold it."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import engine_boxes, hf_tensors, local_parameters, training_boxes

HF = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 125,
}
HYBRID = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 8,
}
MODELS = {
    "qwen3": HF,
    "qwen2-tied": HF | {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama-1kv": HF | {"model_type": "llama", "num_key_value_heads": 1},
    "olmo3": HF | {"model_type": "olmo3", "num_key_value_heads": 8},
    "gemma2-tied": HF | {"model_type": "gemma2"},
    "mixtral": HF | {"model_type": "mixtral", "num_local_experts": 4},
    "gpt_oss": HF | {"model_type": "gpt_oss", "num_local_experts": 4},
    "qwen3_moe": HF
    | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_next": HF | HYBRID | {"model_type": "qwen3_next", "num_experts": 8, "mlp_only_layers": [1]},
    "qwen3_5_text": HF | HYBRID | {"model_type": "qwen3_5_text", "full_attention_interval": 2},
    "glm4_moe": HF | {"model_type": "glm4_moe", "n_routed_experts": 8, "moe_intermediate_size": 24, "head_dim": 16},
    "deepseek_v3": HF
    | {"model_type": "deepseek_v3", "num_key_value_heads": 8, "n_routed_experts": 16, "first_k_dense_replace": 1},
    "moonlight": HF
    | {"model_type": "deepseek_v3", "num_key_value_heads": 8, "q_lora_rank": None, "first_k_dense_replace": 4},
}
LAYOUTS = [
    Layout(world_size=1),
    Layout(world_size=4, tensor=4),
    Layout(world_size=8, tensor=2, pipeline=2),
    Layout(world_size=4, pipeline=4),
    Layout(world_size=2, pipeline=2, virtual_pipeline=2),
    Layout(world_size=2, pipeline=2, first_stage_layers=1),
    Layout(world_size=8, tensor=2, expert=4, sequence_parallel=True),
    Layout(world_size=8, pipeline=2, context=2, expert=2),
]


def counts(model, boxes: list[Box]) -> dict[str, np.ndarray]:
    held = {name: np.zeros(shape, dtype=int) for name, shape in hf_tensors(model).items()}
    for box in boxes:
        held[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] += 1
    return held


def is_whole(model, tensor: str) -> bool:
    """Whether every tensor rank holds all of it: norms, routers and latents, but not a norm of whole projections."""
    is_split_norm = model.qk_norm == "whole" and ("q_norm" in tensor or "k_norm" in tensor)
    parts = (".gate.", ".router.", "o_proj.bias", ".q_a_proj.", ".kv_a_proj_with_mqa.", ".shared_expert_gate.")
    return ("norm" in tensor and not is_split_norm) or any(part in tensor for part in parts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_ranks_hold_everything_once_a_replica(name, layout):
    """An element held by nobody is never trained; one held twice in a replica is averaged with itself."""
    model = shape_of(MODELS[name])
    held = counts(model, [box for boxes in training_boxes(model, layout) for box in boxes])
    for tensor, number in held.items():
        expected = layout.data * layout.context
        if ".experts." in tensor:
            # A bias that is added to a sum over tensor ranks is whole on each.
            expected = layout.expert_data * (layout.expert_tensor if tensor.endswith("down_proj_bias") else 1)
        elif is_whole(model, tensor):
            expected *= layout.tensor
        if tensor == "model.embed_tokens.weight" and model.tied and layout.pipeline > 1:
            expected *= 2
        assert (number == expected).all(), tensor


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_engine_workers_hold_everything(name, workers, expert_parallel):
    """Key-value heads are copied when there are fewer than workers; all else is cut, or experts are shared out."""
    model, layout = shape_of(MODELS[name]), InferLayout(tensor=workers, expert_parallel=expert_parallel)
    held = counts(model, [box for boxes in engine_boxes(model, layout) for box in boxes])
    for tensor, number in held.items():
        copies = 1
        if is_whole(model, tensor) or "norm" in tensor:
            copies = workers
        elif "k_proj" in tensor or "v_proj" in tensor:
            copies = max(workers // model.kv_heads, 1)
        assert (number == copies).all(), tensor


def test_workers_that_share_out_experts_hold_them_whole():
    """Worked by hand: of 8 experts among 3 workers the first two have 3. Routers, attention and dense layers are cut as ever."""
    model = shape_of(MODELS["qwen3_moe"] | {"num_attention_heads": 12, "num_key_value_heads": 3})
    cut, shared_out = (engine_boxes(model, InferLayout(tensor=3, expert_parallel=each)) for each in (False, True))
    tensors = hf_tensors(model)
    for own, boxes, others in zip((range(3), range(3, 6), range(6, 8)), shared_out, cut, strict=True):
        experts = [box for box in boxes if ".experts." in box.name]
        assert all(box.shape == tensors[box.name] for box in experts)
        names = {(layer, expert) for layer in (0, 2, 3) for expert in own}
        assert {(int(box.name.split(".")[2]), int(box.name.split(".")[5])) for box in experts} == names
        assert len(experts) == 3 * len(names)
        assert [box for box in boxes if box not in experts] == [box for box in others if ".experts." not in box.name]


def test_copies_of_attention_share_out_the_experts_and_nothing_else():
    """Worked by hand: 8 experts among 2 copies of 2 workers. All else of worker 2 and 3 is what 0 and 1 have."""
    model = shape_of(MODELS["qwen3_moe"])
    alone = engine_boxes(model, InferLayout(tensor=2, expert_parallel=True))
    boxes = engine_boxes(model, InferLayout(tensor=2, data=2, expert_parallel=True))
    for worker, held in enumerate(boxes):
        experts = [box for box in held if ".experts." in box.name]
        assert {int(box.name.split(".")[5]) for box in experts} == {2 * worker, 2 * worker + 1}
        rest = [box for box in held if box not in experts]
        assert rest == [box for box in alone[worker % 2] if ".experts." not in box.name]


def test_pieces_of_a_parameter_do_not_overlap():
    """Two tensors written to one place would overwrite each other while loading."""
    for model in map(shape_of, MODELS.values()):
        for layout in LAYOUTS:
            for rank in range(layout.world_size):
                for name, place in local_parameters(model, layout, rank).items():
                    seen = np.zeros(place.shape, dtype=int)
                    for piece in place.pieces:
                        seen[piece.region] += 1
                    assert seen.max(initial=0) <= 1
                    if "embed" not in name and "output_layer" not in name:
                        assert seen.min() == 1, f"{name} has a hole"


def test_padding_of_the_vocabulary_does_not_depend_on_the_layout():
    """Else a checkpoint of one layout has another shape than the next."""
    model = shape_of(HF)
    for tensor in (1, 2, 4):
        parameters = local_parameters(model, Layout(world_size=tensor, tensor=tensor), tensor - 1)
        assert parameters["output_layer.weight"].shape[0] * tensor == 128


def test_query_key_value_rows_are_interleaved_by_group():
    """Worked by hand: 4 heads, 2 groups, head_dim 1: q0 q1 k0 v0 | q2 q3 k1 v1, cut in two."""
    model = shape_of(HF | {"model_type": "llama", "num_attention_heads": 4, "head_dim": 1, "hidden_size": 4})
    parameter = local_parameters(model, Layout(world_size=2, tensor=2), 1)[
        "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    rows = [
        (piece.box.name.split(".")[-2], piece.box.start[0], piece.box.shape[0], piece.local[0])
        for piece in parameter.pieces
    ]
    assert rows == [("q_proj", 2, 2, 0), ("k_proj", 1, 1, 2), ("v_proj", 1, 1, 3)]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_rows_of_a_delta_net_are_those_of_whole_key_heads(family):
    """Worked by hand: two key heads of one dimension, two value heads to each, on the second of two ranks: q, k, v, z, b, a."""
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 1,
        "linear_value_head_dim": 1,
    }
    model = shape_of(HF | HYBRID | sizes | {"model_type": family, "num_experts": 8})
    places = local_parameters(model, Layout(world_size=2, tensor=2, sequence_parallel=True), 1)
    at = "decoder.layers.0.self_attention."
    rows = [
        (piece.box.name.split("_")[-1].removesuffix(".weight"), piece.box.start[0], piece.box.shape[0])
        for piece in places[at + "in_proj.weight"].pieces
    ]
    # Rows of the first head: q 0, k 1, v 2 and 3, z 4 and 5; b 0 and 1, a 2 and 3.
    by_head = [("qkvz", 6, 1), ("qkvz", 7, 1), ("qkvz", 8, 2), ("qkvz", 10, 2), ("ba", 4, 2), ("ba", 6, 2)]
    apart = [("qkv", 1, 1), ("qkv", 3, 1), ("qkv", 6, 2), ("z", 2, 2), ("b", 2, 2), ("a", 2, 2)]
    assert rows == (by_head if family == "qwen3_next" else apart)
    convolution = places[at + "conv1d.weight"]
    assert convolution.shape == (4, 4)
    assert [(piece.box.start, piece.box.shape, piece.local) for piece in convolution.pieces] == [
        ((1, 0, 0), (1, 1, 4), (0, 0)),
        ((3, 0, 0), (1, 1, 4), (1, 0)),
        ((6, 0, 0), (2, 1, 4), (2, 0)),
    ]


def test_gates_of_attention_lie_behind_the_queries_of_their_group():
    """Worked by hand: four heads of one dimension in two groups; the checkpoint has query, gate, query, gate."""
    model = shape_of(HF | HYBRID | {"model_type": "qwen3_5_text", "num_attention_heads": 4, "head_dim": 1})
    place = local_parameters(model, Layout(world_size=2, tensor=2), 1)[
        "decoder.layers.3.self_attention.linear_qkv.weight"
    ]
    rows = [(piece.box.name.split(".")[-2][0], piece.box.start[0]) for piece in place.pieces]
    assert rows == [("q", 4), ("q", 6), ("q", 5), ("q", 7), ("k", 1), ("v", 1)]

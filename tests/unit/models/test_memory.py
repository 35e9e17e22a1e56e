"""Memory of a learner rank against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape, adapter_places, adapter_tensors
from mgrpo.models.family import shape_of
from mgrpo.models.memory import (
    LOGITS_CHUNK,
    adapter_elements,
    choose_logits_chunk,
    logits_bytes,
    merged_bytes,
    num_parameters,
    stage_elements,
    state_bytes,
)
from mgrpo.models.shape import Experts
from mgrpo.models.table import local_parameters

GIB = 1 << 30
# Qwen2.5-7B. A layer: q 3584 x 3584 + 3584, k and v 3584 x 512 + 512 each, o 3584 x 3584, three 3584 x 18944 of the
# MLP, two norms of 3584: 233,057,792. Embedding and head: 152,064 x 3584 = 544,997,376 each, final norm 3584.
QWEN_7B = shape_of(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
)
LAYER, EMBEDDING, NORM = 233_057_792, 544_997_376, 3584
ONE = Layout(world_size=1)
EXPERTS = Experts(count=16, top_k=2, ffn=1280, normalised=True, dense_layers=(0, 3))


def choose(setting: int | str = "auto", **changes) -> int:
    """Qwen2.5-7B in bf16 over 8 data-parallel GPUs of 80 GiB, unless told otherwise."""
    arguments = {
        "shape": QWEN_7B,
        "layout": Layout(world_size=8),
        "dtype_bytes": 2,
        "pack_length": 16_384,
        "has_reference": False,
        "device_bytes": 80 * GIB,
    }
    return choose_logits_chunk(setting, **arguments | changes)


def test_parameters_of_a_stage_are_what_the_rank_holds() -> None:
    """Counted wrong here, a model that does not fit is only found out by running it."""
    assert num_parameters(QWEN_7B, ONE, stage=0) == 28 * LAYER + 2 * EMBEDDING + NORM == 7_615_616_512
    two_stages = Layout(world_size=8, pipeline=2)
    assert num_parameters(QWEN_7B, two_stages, stage=0) == 14 * LAYER + EMBEDDING
    assert num_parameters(QWEN_7B, two_stages, stage=1) == 14 * LAYER + EMBEDDING + NORM
    # Everything is cut in two but the norms: two a layer and the final one.
    norms = 57 * NORM
    assert num_parameters(QWEN_7B, Layout(world_size=2, tensor=2), stage=0) == (7_615_616_512 - norms) // 2 + norms


def test_padding_and_the_second_copy_of_a_tied_embedding_are_counted() -> None:
    """A tied model over several stages holds its embedding twice, and a padded vocabulary is padded in memory too."""
    tied = dataclasses.replace(QWEN_7B, tied=True, vocab=152_000)  # 1187.5 x 128
    assert num_parameters(tied, ONE, stage=0) == 28 * LAYER + EMBEDDING + NORM
    assert num_parameters(tied, Layout(world_size=2, pipeline=2), stage=1) == 14 * LAYER + EMBEDDING + NORM


def test_states_of_a_bf16_model_are_18_bytes_a_parameter_on_one_rank() -> None:
    """2 weight + 4 gradient + 4 master + 8 moments; ZeRO-1 divides the last two by the data-parallel size."""
    p = 7_615_616_512
    one = state_bytes(QWEN_7B, ONE, stage=0, dtype_bytes=2)
    assert (one.parameters, one.gradients, one.optimizer, one.reference) == (2 * p, 4 * p, 12 * p, 0)
    assert one.total == 18 * p  # 137 GB
    eight = state_bytes(QWEN_7B, Layout(world_size=8), stage=0, dtype_bytes=2, has_reference=True)
    assert (eight.optimizer, eight.reference) == (12 * p // 8, 2 * p)
    assert state_bytes(QWEN_7B, ONE, stage=0, dtype_bytes=4).total == 16 * p  # fp32 weights are their own master


def test_logits_are_one_buffer_of_the_padded_shard() -> None:
    """Their gradient overwrites them; counting it again would chunk where nothing is gained."""
    assert logits_bytes(16_384, shape=QWEN_7B, layout=ONE, dtype_bytes=2) == 16_384 * 152_064 * 2  # 4.98 GB
    odd = dataclasses.replace(QWEN_7B, vocab=125)
    assert logits_bytes(3, shape=odd, layout=Layout(world_size=2, tensor=2), dtype_bytes=4) == 3 * 64 * 4


@pytest.mark.parametrize("setting", [0, 1, 4096])
def test_a_number_is_taken_as_given(setting: int) -> None:
    """Who sets it has measured; also where the logits would fit, or nothing does."""
    assert choose(setting) == choose(setting, device_bytes=GIB) == setting


def test_auto_computes_all_at_once_where_the_logits_fit() -> None:
    """8 GPUs of 80 GiB: 85.9 GB less 57.1 GB of states leave 28.8 GB, half of it is 14.4 GB."""
    assert choose(pack_length=16_384) == 0  # 4.98 GB
    assert choose(pack_length=32_768) == 0  # 9.97 GB
    assert choose(pack_length=65_536) == LOGITS_CHUNK  # 19.9 GB


def test_auto_counts_logits_in_fp32() -> None:
    """9.97 GB of bf16 logits fit into half of what is left, 19.9 GB in fp32 do not."""
    assert choose(pack_length=16_384, fp32_logits=True) == 0
    assert choose(pack_length=32_768, fp32_logits=True) == LOGITS_CHUNK


def test_auto_counts_the_reference_model() -> None:
    """15.2 GB of reference weights leave 13.6 GB: 9.97 GB of logits would meet the activations there."""
    assert choose(pack_length=16_384, has_reference=True) == 0
    assert choose(pack_length=32_768, has_reference=True) == LOGITS_CHUNK


def test_auto_chunks_where_not_even_the_states_fit() -> None:
    """One 80 GiB GPU: 137 GB of states. Whatever saves them, there is nothing to spare for logits."""
    assert choose(layout=ONE, pack_length=512) == LOGITS_CHUNK


def test_auto_never_chunks_capped_logits() -> None:
    """The chunked head has no logits to cap, and refuses such a model."""
    capped = dataclasses.replace(QWEN_7B, logit_softcap=30.0)
    assert choose(shape=capped, layout=ONE, pack_length=512) == 0


def test_auto_changes_at_exactly_half_of_what_is_left() -> None:
    """The rule in the docstring is the rule."""
    states = state_bytes(QWEN_7B, ONE, stage=0, dtype_bytes=2).total
    logits = logits_bytes(1000, shape=QWEN_7B, layout=ONE, dtype_bytes=2)
    fits = {"layout": ONE, "pack_length": 1000}
    assert choose(**fits, device_bytes=states + 2 * logits) == 0
    assert choose(**fits, device_bytes=states + 2 * logits - 1) == LOGITS_CHUNK


def test_auto_looks_at_the_last_stage() -> None:
    """Logits exist there only, beside its own weights: the first stage has a norm less."""
    layout = Layout(world_size=2, pipeline=2)
    last = state_bytes(QWEN_7B, layout, stage=1, dtype_bytes=2).total
    assert last - state_bytes(QWEN_7B, layout, stage=0, dtype_bytes=2).total == 18 * NORM
    logits = logits_bytes(1000, shape=QWEN_7B, layout=layout, dtype_bytes=2)
    fits = {"layout": layout, "pack_length": 1000}
    assert choose(**fits, device_bytes=last + 2 * logits) == 0
    assert choose(**fits, device_bytes=last + 2 * logits - 1) == LOGITS_CHUNK


def test_each_zero_stage_shares_what_it_names() -> None:
    """Sharing counted where there is none, and a run that was promised to fit dies in its first step."""
    p, ranks = 7_615_616_512, Layout(world_size=8)
    held = {
        zero: state_bytes(QWEN_7B, dataclasses.replace(ranks, zero_stage=zero), stage=0, dtype_bytes=2)
        for zero in range(4)
    }
    assert [(s.parameters, s.gradients, s.optimizer) for s in held.values()] == [
        (2 * p, 4 * p, 12 * p),
        (2 * p, 4 * p, 12 * p // 8),
        (2 * p, 4 * p // 8, 12 * p // 8),
        (2 * p // 8, 4 * p // 8, 12 * p // 8),
    ]
    # Two layers and what is in none: with ZeRO-3 their weights are whole.
    whole = 2 * LAYER + p - QWEN_7B.num_layers * LAYER
    assert [s.unsharded for s in held.values()] == [0, 0, 0, 2 * whole]


def test_context_ranks_share_and_replicas_do_not() -> None:
    """ZeRO goes over data x context ranks; with a shard size, over so many of them."""
    p = 7_615_616_512
    context = state_bytes(QWEN_7B, Layout(world_size=8, context=4), stage=0, dtype_bytes=2)
    assert context.optimizer == 12 * p // 8
    replicas = Layout(world_size=8, zero_stage=3, shard_size=4)
    assert state_bytes(QWEN_7B, replicas, stage=0, dtype_bytes=2).parameters == 2 * p // 4


def test_offload_and_small_moments_shrink_the_optimizer() -> None:
    """12 bytes a weight on one rank: of half the weights the moments leave it, 16 bytes go to the host; 4 + 2 + 2 in bf16."""
    p = 7_615_616_512
    offloaded = state_bytes(QWEN_7B, ONE, stage=0, dtype_bytes=2, offload_fraction=0.5)
    assert (offloaded.optimizer, offloaded.host) == (8 * p, 8 * p)
    assert state_bytes(QWEN_7B, ONE, stage=0, dtype_bytes=2, moment_bytes=4).optimizer == 8 * p


def test_a_reference_that_moves_has_an_fp32_copy() -> None:
    """It is kept from the first update of the reference on, and would come as a surprise then."""
    moving = state_bytes(QWEN_7B, ONE, stage=0, dtype_bytes=2, has_reference=True, reference_moves=True)
    assert moving.reference == 6 * 7_615_616_512


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, {"world_size": 8, "tensor": 2, "pipeline": 4}),
        ({"tied": True, "vocab": 151_999}, {"world_size": 8, "tensor": 2, "pipeline": 2}),
        ({"tied": True}, {"world_size": 2, "tensor": 2}),
        ({}, {"world_size": 4, "pipeline": 2, "virtual_pipeline": 7}),
        ({}, {"world_size": 4, "pipeline": 4, "first_stage_layers": 5, "last_stage_layers": 7}),
        ({"experts": EXPERTS}, {"world_size": 8, "pipeline": 2, "expert": 4, "tensor": 2}),
        ({"experts": EXPERTS}, {"world_size": 4, "pipeline": 2, "tensor": 2}),
    ],
)
def test_every_stage_holds_what_the_rule_table_gives_it(changes: dict, layout: dict) -> None:
    """Uneven stages, interleaved chunks, experts, padding and a tied copy: the count by layers is the table's."""
    shape, layout = dataclasses.replace(QWEN_7B, **changes), Layout(**layout)
    for stage in range(layout.pipeline):
        rank = stage * layout.world_size // layout.pipeline
        table = sum(math.prod(place.shape) for place in local_parameters(shape, layout, rank).values())
        assert num_parameters(shape, layout, stage=stage) == table


def test_experts_are_shared_by_those_who_hold_the_same() -> None:
    """With all ranks of a stage holding different experts, nothing of these is shared: 12 bytes a weight, not 12/8."""
    shape = dataclasses.replace(QWEN_7B, experts=EXPERTS)
    layout = Layout(world_size=8, expert=8)
    held = stage_elements(shape, layout, stage=0)
    optimizer = state_bytes(shape, layout, stage=0, dtype_bytes=2).optimizer
    assert held.experts == 26 * 3 * 3584 * 1280 * 16 // 8 and layout.expert_data == 1
    assert optimizer == 12 * (-(-held.dense // 8) + held.experts)


LORA = LoraShape(rank=16, alpha=32)
# A layer at rank 16: inputs 3584 of q, k, v, o, gate and up, 18944 of down; outputs 3584, 512, 512, 3584, 18944, 18944, 3584.
ADAPTERS = 28 * 16 * (6 * 3584 + 18944 + 3 * 3584 + 2 * 512 + 2 * 18944)


def test_adapters_are_trained_in_float32_beside_frozen_weights() -> None:
    """2 bytes a weight, and 16 an adapter: parameter, gradient and two moments; no master, no reference."""
    p = 7_615_616_512
    assert ADAPTERS == 40_370_176
    assert adapter_elements(QWEN_7B, ONE, LORA, stage=0).total == ADAPTERS
    found = state_bytes(QWEN_7B, ONE, stage=0, dtype_bytes=2, has_reference=True, lora=LORA)
    assert found.parameters == 2 * p + 4 * ADAPTERS
    assert (found.gradients, found.optimizer, found.reference) == (4 * ADAPTERS, 8 * ADAPTERS, 0)
    shared = state_bytes(QWEN_7B, Layout(world_size=8), stage=0, dtype_bytes=2, lora=LORA)
    assert (shared.gradients, shared.optimizer) == (4 * ADAPTERS, ADAPTERS)
    # The MLP's gate and up are one weight, merged in float32 and rounded.
    assert merged_bytes(QWEN_7B, ONE, LORA, stage=0, dtype_bytes=2) == 2 * 18944 * 3584 * (4 + 2)
    attention = LoraShape(rank=16, alpha=32, targets=("q_proj", "o_proj"))
    assert merged_bytes(QWEN_7B, ONE, attention, stage=0, dtype_bytes=4) == (3584 + 2 * 512) * 3584 * 4
    assert merged_bytes(QWEN_7B, ONE, None, stage=0, dtype_bytes=2) == 0


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, {"world_size": 8, "tensor": 2, "pipeline": 4}),
        ({"kv_heads": 2}, {"world_size": 4, "tensor": 4}),
        ({}, {"world_size": 4, "pipeline": 4, "first_stage_layers": 5, "last_stage_layers": 7}),
        ({"experts": EXPERTS}, {"world_size": 8, "pipeline": 2, "expert": 4, "tensor": 2}),
    ],
)
def test_every_stage_holds_the_adapters_that_the_rule_table_gives_it(changes: dict, layout: dict) -> None:
    """The count by layers is the table's on every rank; on one rank it is that of the tensors."""
    shape, layout = dataclasses.replace(QWEN_7B, **changes), Layout(**layout)
    for rank in range(layout.world_size):
        places = [adapter_places(*held, LORA) for held in local_parameters(shape, layout, rank).items()]
        table = sum(math.prod(place.shape) for pair in places if pair for place in pair)
        stage = rank // (layout.world_size // layout.pipeline)
        assert adapter_elements(shape, layout, LORA, stage=stage).total == table
    whole = sum(map(math.prod, adapter_tensors(shape, LORA).values()))
    assert adapter_elements(shape, ONE, LORA, stage=0).total == whole


def test_what_frozen_weights_leave_free_goes_to_the_logits() -> None:
    """The chunk follows from what is left: without adapters' saving the head would run in chunks for nothing."""
    assert choose(device_bytes=70 * GIB, layout=ONE) == LOGITS_CHUNK
    assert choose(device_bytes=70 * GIB, layout=ONE, lora=LORA) == 0

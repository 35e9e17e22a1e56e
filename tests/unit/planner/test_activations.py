"""Activations against the paper's formula and against schedules worked out by hand; `test_real_bytes` measures them."""

from __future__ import annotations

import dataclasses

import pytest

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.family import shape_of
from mgrpo.planner.activations import (
    LayerActivations,
    chunks_in_flight,
    dropped_bytes,
    layer_activations,
    loss_bytes,
    stage_activations,
)
from mgrpo.planner.plan_command import shipped_config

# GPT-3 175B (arXiv:2205.05198, table 3) with SwiGLU: 3 matrices of 8/3 h are as many weights as 2 of 4 h.
GPT_175B = shape_of(
    {
        "model_type": "llama",
        "num_hidden_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "intermediate_size": 32768,
        "vocab_size": 51200,
        "tie_word_embeddings": False,
    }
)
TOKENS = 2048


def one_layer(layout: Layout, **settings) -> int:
    layer = layer_activations(
        GPT_175B, layout, has_experts=False, pack_length=TOKENS, dtype_bytes=2, settings=Parallel(**settings)
    )
    return layer.total


def stage(layout: Layout, number: int = 0, count: int = 64, logits_chunk: int = 0, **settings):
    return stage_activations(
        GPT_175B,
        layout,
        stage=number,
        pack_length=TOKENS,
        dtype_bytes=2,
        settings=Parallel(**settings),
        num_micro_batches=count,
        logits_chunk=logits_chunk,
    )


def test_a_layer_keeps_about_what_the_paper_says() -> None:
    """Without scores and dropout masks the paper has 34 - 2 = 32 bytes x tokens x hidden; SwiGLU and rotated keys keep an eighth more.

    By hand: 2 (2h + 2h) + 2 (6h) attention + 2 x 3 x 8/3 h = 36, and logs and norm factors.
    """
    unit = TOKENS * 12288
    assert one_layer(Layout(world_size=1)) == 36 * unit + TOKENS * (4 * 96 + 2 * 4)
    assert 1.1 < one_layer(Layout(world_size=1)) / (32 * unit) < 1.15


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    """Section 4.2: tensor ranks split all but 10 of 34 bytes; sequence parallelism also splits those."""
    whole = one_layer(Layout(world_size=1))
    tensor = one_layer(Layout(world_size=8, tensor=8))
    both = one_layer(Layout(world_size=8, tensor=8, sequence_parallel=True))
    assert tensor - both == 7 * 8 * TOKENS * 12288 // 8 + 7 * TOKENS  # norms' inputs and outputs, one fp32 factor a row
    assert both == whole // 8


def test_recomputation_keeps_less_in_the_order_of_its_price() -> None:
    """Full keeps each layer's input and one layer whole; selective drops the modules it names."""
    layout = Layout(world_size=1)
    none, full = stage(layout), stage(layout, recompute_granularity="full")
    selective = stage(layout, recompute_granularity="selective", recompute_modules=("mlp",))
    head = 2 * TOKENS * 12288 * 2 + 4 * TOKENS
    turns = TOKENS * 128 * 2  # cosines and sines, once for all layers
    assert full.kept == 96 * TOKENS * 12288 * 2 + head + turns
    assert full.layer - none.layer == one_layer(layout)
    assert none.kept - selective.kept == 96 * (selective.layer - none.layer) == 96 * TOKENS * 3 * 32768 * 2
    assert full.total < selective.total < none.total


def test_1f1b_keeps_one_micro_batch_for_each_stage_behind() -> None:
    """The first of p stages holds p, the last 1, and never more than there are."""
    layout = Layout(world_size=4, pipeline=4)
    assert [chunks_in_flight(layout, stage=n, num_micro_batches=9) for n in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(layout, stage=n, num_micro_batches=2) for n in range(4)] == [2, 2, 2, 1]


def test_interleaving_keeps_the_papers_factor_more() -> None:
    """arXiv:2205.05198, section 4.2.3: 1 + (p - 1) / (p m) times as much on the first stage, with m chunks a stage."""
    plain, chunks = Layout(world_size=8, pipeline=8), Layout(world_size=8, pipeline=8, virtual_pipeline=3)
    assert chunks_in_flight(chunks, stage=0, num_micro_batches=64) / 3 == pytest.approx(8 * (1 + 7 / 24))
    assert stage(chunks).in_flight / stage(plain).in_flight == pytest.approx(1 + 7 / 24)


def test_context_ranks_share_the_tokens_but_not_the_gathered_keys() -> None:
    """All-gathered keys and values are those of the whole pack, which is what limits long packs; exchanged heads are not."""
    grouped = dataclasses.replace(GPT_175B, kv_heads=8)
    keep = {
        comm: layer_activations(
            grouped,
            Layout(world_size=4, context=4),
            has_experts=False,
            pack_length=TOKENS,
            dtype_bytes=2,
            settings=Parallel(cp_comm_type=comm),
        ).attention
        for comm in ("all_gather", "a2a")
    }
    own, key = TOKENS // 4, 8 * 128
    # Of 8 stretches the first rank has the first and the last, which see 1 + 8 of them: 9/8 of the pack.
    assert keep["all_gather"] == own * 2 * 2 * 12288 + TOKENS * 2 * key * 2 * 9 // 8
    assert keep["a2a"] == own * 2 * (3 * 12288 + 2 * key)


def parts_of(name: str, **options) -> LayerActivations:
    """One layer of a published model without parallelism, 1000 tokens in bf16."""
    shape = shape_of(shipped_config(name))
    layout = Layout(world_size=1)
    return layer_activations(shape, layout, pack_length=1000, dtype_bytes=2, settings=Parallel(), **options)


def test_latent_attention_keeps_latents_and_whole_heads() -> None:
    """By hand: both latent vectors before and after their norms, with one fp32 factor a row; then per head, DeepSeek-V3: queries,
    keys and padded values of 192, a padded output and its part of 128. GLM-4.7-Flash, whose values are as wide as its
    keys, has 192 + 256 of the latent vector's second projection in place of padded values."""
    latents = 2 * 1000 * (2 * 1536 + 2 * 512 + 64) + 2 * 4 * 1000
    assert parts_of("deepseek-v3", has_experts=False).attention == latents + 2 * 1000 * 128 * (4 * 192 + 128)
    latents = 2 * 1000 * (2 * 768 + 2 * 512 + 64) + 2 * 4 * 1000
    flash = parts_of("glm-4.7-flash", has_experts=False)
    assert flash.attention == latents + 2 * 1000 * 20 * (2 * 256 + (192 + 256) + 256)
    assert flash.scores == 1000 * 20 * 4


def test_a_delta_net_keeps_less_when_its_core_is_recomputed() -> None:
    """Qwen3-Next, by hand: 2 x 2048 + 4096 + 4096 + 64 of the input projection, 2 x 4096 behind the rule, a factor for each of 32 norms;
    between them the convolution's 8192, a query and a key of 128 for each value head, 64 scores, a rate, and four fp32 numbers."""
    layer = parts_of("qwen3-next-80b-a3b", has_experts=True, has_attention=False)
    assert layer.attention == 1000 * (2 * (12_288 + 64 + 2 * 4096) + 4 * 32)
    assert layer.scores == 1000 * (2 * (8192 + 32 * (2 * 128 + 64 + 1)) + 4 * 4 * 32)
    core = Parallel(recompute_granularity="selective", recompute_modules=("core_attn",))
    assert dropped_bytes(layer, has_experts=True, settings=core) == layer.scores


def test_gates_and_shared_experts_keep_what_they_multiply() -> None:
    """Qwen3-Next's attention: 3q + 3k, its gate in the same projection, the gated output, a sigmoid in fp32, and the factors of the norms
    of 16 + 2 heads. GLM-4.5-Air's shared expert: gate, up and product of 1408."""
    gated = parts_of("qwen3-next-80b-a3b", has_experts=True)
    query, key = 16 * 256, 2 * 256
    norms = 2 * query + 4 * (16 + 2)
    assert gated.attention == 1000 * (2 * (3 * query + 3 * key) + (2 * 2 + 4) * query + norms)
    shape = shape_of(shipped_config("glm-4.5-air"))
    alone = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, shared_ffn=0))
    options = {"has_experts": True, "pack_length": 1000, "dtype_bytes": 2, "settings": Parallel()}
    one, other = (layer_activations(own, Layout(world_size=1), **options).mlp for own in (shape, alone))
    assert one - other == 1000 * 3 * 1408 * 2


def test_the_loss_has_logits_and_two_gradients() -> None:
    """With `logits_chunk` neither the forward nor the backward pass holds more columns; the input's gradient is in fp32.

    The gradient of the head's 6400 x 12288 weights is whole before it is added to the buffer.
    """
    layout = Layout(world_size=8, tensor=8)
    options = {"shape": GPT_175B, "layout": layout, "dtype_bytes": 2}
    weights = 6400 * 12288 * 2
    assert loss_bytes(100, logits_chunk=0, **options) == weights + 100 * (6400 * 2 + 12288 * 2)
    assert loss_bytes(100, logits_chunk=1600, **options) == weights + 100 * (1600 * 2 + 12288 * 8)
    # In fp32, beside the rounded gradient of all columns or of a chunk, and with both gradients of the input.
    wide = options | {"fp32_logits": True}
    assert loss_bytes(100, logits_chunk=0, **wide) == weights + 100 * (6400 * (4 + 2) + 12288 * 8)
    assert loss_bytes(100, logits_chunk=1600, **wide) == weights + 100 * (1600 * (4 + 2) + 12288 * 8)
    in_fp32 = options | {"dtype_bytes": 4}
    assert loss_bytes(100, logits_chunk=0, **in_fp32) == loss_bytes(100, logits_chunk=0, **in_fp32, fp32_logits=True)
    capped = options | {"shape": dataclasses.replace(GPT_175B, logit_softcap=30.0)}
    assert loss_bytes(100, logits_chunk=0, **capped) == weights + 100 * (3 * 6400 * 2 + 12288 * 2)


def test_the_loss_and_the_layers_follow_one_another() -> None:
    """A plan that adds up what they need was a tenth too large on one rank with few layers.

    By hand, f = 32768 x tokens in bf16: a layer's backward pass has its 7f at SwiGLU, 3f of which are kept, and two
    gradients of the residual stream.
    """
    many = 16384
    options = {"stage": 0, "dtype_bytes": 2, "settings": Parallel(), "num_micro_batches": 1}
    f, stream = many * 32768 * 2, many * 12288 * 2
    found = stage_activations(GPT_175B, Layout(world_size=1), pack_length=many, **options)
    assert found.layer == 4 * f + 2 * stream and found.buffers == 0
    assert found.total == found.kept + found.layer > found.kept + found.loss
    # Few tokens: the gradient of the first projection's weights is larger than all activations.
    f, stream = TOKENS * 32768 * 2, TOKENS * 12288 * 2
    few = stage_activations(GPT_175B, Layout(world_size=1), pack_length=TOKENS, **options)
    assert few.layer == 2 * 32768 * 12288 * 2 - f + 3 * stream
    assert few.loss == loss_bytes(TOKENS, shape=GPT_175B, layout=Layout(world_size=1), dtype_bytes=2, logits_chunk=0)
    assert few.total == few.kept + max(few.loss, few.layer)


def test_gathers_and_messages_have_buffers() -> None:
    """Megatron gathers all tensor ranks' tokens into a buffer that stays; a message between stages has a rank's share."""
    layout = Layout(world_size=8, tensor=4, pipeline=2, sequence_parallel=True)
    stream = TOKENS * 12288 * 2
    assert stage(layout).buffers == stream + stream // 4
    assert stage(layout).loss == 0 < stage(layout, number=1).loss
    assert stage(Layout(world_size=2, pipeline=2)).buffers == stream


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloading_leaves_the_last_layer_of_each_chunk_on_the_device(recompute: str) -> None:
    """By hand, GPT-3 on 8 stages of 2 chunks of 6 layers: of a micro-batch on stage 3 two layers and two inputs stay."""
    layout = Layout(world_size=8, pipeline=8, virtual_pipeline=2)
    settings = {"recompute_granularity": recompute}
    plain = stage(layout, 3, **settings)
    moved = stage(layout, 3, activation_offloading=True, **settings)
    a_layer, an_input = plain.kept_layer, TOKENS * 12288 * 2
    assert moved.offloaded == 10 * a_layer - 2 * an_input
    assert plain.kept - moved.kept == moved.on_host == int(moved.in_flight * moved.offloaded)
    assert moved.layer - plain.layer == a_layer
    first = stage(layout, 0, activation_offloading=True, **settings)
    assert first.offloaded == 10 * a_layer - an_input

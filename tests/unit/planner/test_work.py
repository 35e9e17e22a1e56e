"""Operations and bytes of a step against the papers' formulas and hand-worked cases."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mgrpo import packing
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.family import shape_of
from mgrpo.models.memory import num_parameters
from mgrpo.models.shape import ModelShape
from mgrpo.moving import from_values
from mgrpo.planner.hardware import Flops
from mgrpo.planner.plan_command import shipped_config
from mgrpo.planner.traffic import Passed, Traffic, backward_traffic, data_traffic, forward_traffic
from mgrpo.planner.work import (
    Workload,
    active_weights,
    forward_flops,
    layer_flops,
    packed_flops,
    passes_of,
    seen_pairs,
    stage_flops,
)
from mgrpo.types import TrainSample
from tests.unit.planner.test_activations import GPT_175B

MOE = shape_of(shipped_config("qwen3-30b-a3b"))
MOE_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
BATCH = Workload(
    prompts=64,
    sequences=64,
    prompt_tokens=0.0,
    response_tokens=2048.0,
    longest_response=2048,
    shares_prompts=False,
)


def test_operations_are_the_papers() -> None:
    """72 B L s h^2 (1 + s / 6h + V / 12 L h) per step (arXiv:2205.05198, appendix A), attention there not causal: half of it."""
    b, s, h, layers, vocab = 64, 2048, 12288, 96, 51200
    paper = 72 * b * layers * s * h**2 * (1 + s / (12 * h) + vocab / (12 * layers * h))
    assert 3 * forward_flops(GPT_175B, BATCH).total == pytest.approx(paper, rel=1e-3)


def test_a_token_meets_its_own_experts_only() -> None:
    """Qwen3-30B-A3B has its name from 3.3 billion active weights, embedding and head included."""
    ends = 2 * 151_936 * 2048
    assert num_parameters(MOE, Layout(world_size=1), stage=0) == 30_532_122_624
    assert sum(active_weights(MOE)) + ends == pytest.approx(3.35e9, rel=0.01)
    assert forward_flops(MOE, BATCH).experts == 64 * 2048 * 2 * 48 * 8 * 3 * 2048 * 768


def test_a_shared_expert_meets_every_token() -> None:
    """GLM-4.5-Air: 8 of 128 experts and the shared one, which is an ordinary matrix product, in all layers but the first."""
    glm = shape_of(shipped_config("glm-4.5-air"))
    tokens, expert = 64 * 2048, 2 * 3 * 4096 * 1408
    layers = layer_flops(glm, BATCH)
    assert layers[0].mlp == Flops(tokens * 2 * 3 * 4096 * 10944)
    assert layers[1].mlp == Flops(own=tokens * expert, experts=tokens * 8 * expert)
    shared = dataclasses.replace(glm, experts=dataclasses.replace(glm.experts, shared_ffn=0))
    assert layers[1].rest == layer_flops(shared, BATCH)[1].rest


def test_values_of_another_width_than_keys_cost_theirs() -> None:
    """DeepSeek-V3: queries and keys have 192 dimensions, values 128."""
    core = layer_flops(shape_of(shipped_config("deepseek-v3")), BATCH)[0].core
    assert core.total == 2 * 128 * (192 + 128) * 64 * 2048**2 / 2


def test_a_delta_net_costs_the_same_for_every_token() -> None:
    """Qwen3-Next, by hand for one value head and chunk of 64 tokens, per token: products of 64 x 64 with 3 x 128 and 2 x 128
    columns, the inverse of a triangle, and three products with a state of 128 x 128."""
    qwen = shape_of(shipped_config("qwen3-next-80b-a3b"))
    head = 2 * 64 * (3 * 128 + 2 * 128) + 2 * 64 * 64 // 3 + 3 * 2 * 128 * 128
    long = dataclasses.replace(BATCH, sequences=1, prompts=1, response_tokens=64 * 2048.0)
    for work in (BATCH, long):
        layers = layer_flops(qwen, work)
        assert layers[0].core.total == 64 * 2048 * 32 * head
        assert layers[3].core.total == 4 * 16 * 256 * work.sequences * work.length**2 / 2


def test_windows_and_shared_prompts_are_not_computed_twice() -> None:
    """4 queries see 1 + 2 + 3 + 4 keys, about 4^2 / 2; with a window of 2 about 2 each; a prompt only once."""
    assert seen_pairs(4, None) == seen_pairs(4, 9) == 8
    assert seen_pairs(4, 2) == 4 * 2 - 2
    groups = dataclasses.replace(BATCH, prompts=8, prompt_tokens=1000.0)
    shared = dataclasses.replace(groups, shares_prompts=True)
    assert groups.trained_tokens - shared.trained_tokens == 56 * 1000
    saved = forward_flops(GPT_175B, groups).total - forward_flops(GPT_175B, shared).total
    weights = 2 * sum(active_weights(GPT_175B))
    assert saved == pytest.approx(56 * (weights * 1000 + 4 * 12288 * 96 * 1000**2 / 2))


def test_operations_of_real_packs_are_those_of_their_documents() -> None:
    """Lengths vary and attention is quadratic: MFU from a mean length would be too low.

    By hand, for a prompt of 3 and completions of 3 and 2 tokens, each without its last: alone 5 tokens see 1 + ... + 5
    keys and 4 see 1 + ... + 4; behind one prompt 3 tokens see 1 + 2 + 3, and the branches 4 + 5 and 4. All 5 response
    tokens reach the head. Under a window of 2, every token except a first one sees 2.
    """
    samples = [
        TrainSample(
            prompt_tokens=np.ones(3, np.int32),
            tokens=np.ones(length, np.int32),
            loss_mask=np.ones(length, bool),
            rollout_logprobs=np.zeros(length, np.float32),
            advantage=1.0,
            group=0,
        )
        for length in (3, 2)
    ]
    a_token, a_pair, a_row = 2 * sum(active_weights(GPT_175B)), 96 * 4 * 12288, 2 * 12288 * 51200
    for groups, tokens, pairs in (([[0], [1]], 9, 15 + 10), ([[0, 1]], 6, 6 + 9 + 4)):
        lengths = packing.pack_lengths(samples, [groups], multiple_of=1, document_multiple_of=1)
        found = packed_flops(GPT_175B, lengths.runs, responses=lengths.responses)
        assert found.total == tokens * a_token + pairs * a_pair + 5 * a_row
    narrow = dataclasses.replace(GPT_175B, windows=(2,) * 95 + (None,))
    found = packed_flops(narrow, np.array([[0, 1], [1, 3], [0, 1]]), responses=0)
    assert found.total == 5 * a_token + 4 * 12288 * (95 * (1 + 2 + 2 + 2 + 1) + (1 + 2 + 3 + 4 + 1))
    found = packed_flops(MOE, np.array([[0, 2048]] * 64), responses=64 * 2048)
    assert found.total == pytest.approx(forward_flops(MOE, BATCH).total, rel=1e-3)


def test_recomputation_repeats_what_it_names() -> None:
    """Full is one more forward pass of the layers; the head is repeated only by its chunks."""
    layout = Layout(world_size=2, pipeline=2)

    def repeated(granularity: str, stage: int = 0, chunk: int = 0, modules: tuple[str, ...] = ("mlp",)) -> float:
        settings = Parallel(recompute_granularity=granularity, recompute_modules=modules)
        return stage_flops(GPT_175B, layout, BATCH, settings, stage=stage, logits_chunk=chunk).repeated.total

    tokens, forward = 64 * 2048, stage_flops(GPT_175B, layout, BATCH, Parallel(), stage=0, logits_chunk=0).forward.total
    assert repeated("none") == 0 and repeated("full") == forward
    assert repeated("selective") == 48 * 2 * 3 * 12288 * 32768 * tokens
    assert repeated("selective", modules=("core_attn",)) == 48 * 4 * 12288 * 64 * 2048**2 / 2
    assert repeated("none", stage=1, chunk=1600) == 2 * 12288 * 51200 * tokens


def test_passes_follow_the_algorithm() -> None:
    """A pass over the batch too many or too few is a quarter of the training time."""
    base = {"num_unique_prompts_rollout": 8, "beta": 0.0}
    assert dataclasses.astuple(passes_of(from_values(base))) == (1, 0, 0, 1, 2)
    several = from_values(base | {"beta": 0.1, "num_epochs": 2, "num_mini_batches": 4})
    assert dataclasses.astuple(passes_of(several)) == (2, 1, 1, 8, 2)
    assert passes_of(several).in_forward == 2 * 3 + 1 + 1
    engine = from_values(base | {"num_mini_batches": 4, "use_vllm_logprobs": True})
    assert passes_of(engine).old == 0


def sent(
    shape: ModelShape,
    layout: Layout,
    *,
    stage: int = 0,
    tokens: int = 0,
    responses: int = 0,
    chunk: int = 0,
    **settings,
) -> tuple[Traffic, Traffic]:
    """Of a forward and of a backward pass, in bf16."""
    passed = Passed(tokens=tokens, responses=responses, dtype_bytes=2)
    parallel = Parallel(**settings)
    return (
        forward_traffic(shape, layout, parallel, passed, stage=stage),
        backward_traffic(shape, layout, parallel, passed, stage=stage, logits_chunk=chunk),
    )


def test_tensor_ranks_send_the_stream_four_times_a_layer() -> None:
    """An all-gather and a reduce-scatter around attention and around the MLP; saved inputs are gathered once more.

    A stage in the middle; what its ends add: the sum of the embedding's shards, scattered, and its gradient; the LM
    head's input, gathered, and the sum of its gradient, twice as large where chunks add it up in fp32.
    """
    layout = Layout(world_size=24, tensor=8, pipeline=3, sequence_parallel=True)
    ring = 7 / 8 * 2048 * 12288 * 2

    def tensor(stage: int, layout: Layout = layout, **options: Any) -> list[float]:
        return [way.tensor / ring for way in sent(GPT_175B, layout, stage=stage, tokens=2048, **options)]

    assert tensor(1) == [32 * 4, 32 * 6]
    assert tensor(0) == [32 * 4 + 1, 32 * 6 + 1]
    assert tensor(2, responses=1024) == [32 * 4 + 1, 32 * 6 + 1]
    assert tensor(2, responses=1024, chunk=1600) == [32 * 4 + 1, 32 * 6 + 2]
    # All-reduces, none of them for the embedding's gradient or the head's input.
    whole = dataclasses.replace(layout, sequence_parallel=False)
    assert [tensor(stage, whole, responses=1024) for stage in range(3)] == [[130, 128], [128, 128], [128, 129]]


def test_latent_vectors_are_gathered_in_place_of_hidden_states() -> None:
    """DeepSeek-V3's first stage, all dense: 1536 + 512 + 64 elements are gathered where others have 7168, and again but for the
    last in a backward pass; the gradients of the projections that make them are summed once a step."""
    deepseek = shape_of(shipped_config("deepseek-v3"))
    layout = Layout(world_size=4, tensor=2, pipeline=2, sequence_parallel=True, first_stage_layers=3)
    ring = 1 / 2 * 1000 * 2
    forward, backward = sent(deepseek, layout, tokens=1000)
    assert forward.tensor == ring * (7168 + 3 * (2 * 7168 + 7168 + 1536 + 512 + 64))
    assert backward.tensor == ring * (7168 + 3 * (3 * 7168 + 7168 + 2 * (1536 + 512) + 64))
    step = data_traffic(deepseek, layout, stage=0, dtype_bytes=2, num_micro_batches=1)
    assert step.tensor == 3 * 2 * 1 / 2 * 4 * 7168 * (1536 + 512 + 64)
    alone = dataclasses.replace(layout, tensor=1, world_size=2, sequence_parallel=False)
    assert data_traffic(deepseek, alone, stage=0, dtype_bytes=2, num_micro_batches=1).tensor == 0


def test_a_shared_expert_is_cut_like_an_mlp() -> None:
    """GLM-4.5-Air: it gathers and scatters the stream beside the experts' exchange, and is recomputed with them."""
    glm = shape_of(shipped_config("glm-4.5-air"))
    layout = Layout(world_size=4, tensor=2, pipeline=2, expert=2, sequence_parallel=True)
    ring = 1 / 2 * 1000 * 4096 * 2
    forward, _ = sent(glm, layout, stage=1, tokens=1000)
    assert forward.tensor == ring * (23 * 4 + 1)  # and the LM head's input
    once, again = (sent(glm, layout, stage=1, tokens=1000, **options)[1].tensor for options in ({}, MOE_AGAIN))
    assert again - once == ring * 23 * 2


def test_delta_nets_exchange_tokens_for_heads() -> None:
    """Qwen3-Next: queries, keys and values of 2 x 2048 + 4096, 32 rates and decays, and 4096 back, in three of four layers,
    also where attention gathers keys and values."""
    qwen = shape_of(shipped_config("qwen3-next-80b-a3b"))
    forward, backward = sent(qwen, Layout(world_size=2, context=2), tokens=1000)
    delta, attention = 1 / 2 * (2 * 2048 + 4096 + 2 * 32 + 4096), 2 * 2 * 256
    assert forward.context == backward.context == 500 * 2 * (36 * delta + 12 * attention)


def test_recomputed_modules_send_again() -> None:
    """The plan of 32b_16x8, which recomputes its MLPs, lacked a sixth of its tensor traffic."""
    tensor = Layout(world_size=24, tensor=8, pipeline=3, sequence_parallel=True)
    ring = 7 / 8 * 2048 * 12288 * 2

    def backward(shape: ModelShape, layout: Layout, granularity: str, *modules: str) -> Traffic:
        recompute = {"recompute_granularity": granularity, "recompute_modules": modules}
        return sent(shape, layout, stage=layout.pipeline - 2, tokens=2048, **recompute)[1]

    assert backward(GPT_175B, tensor, "selective", "mlp").tensor == 32 * (6 + 2) * ring
    assert backward(GPT_175B, tensor, "selective", "core_attn", "layernorm").tensor == 32 * 6 * ring
    assert backward(GPT_175B, tensor, "full").tensor == 32 * (6 + 4) * ring
    context = Layout(world_size=6, context=2, pipeline=3)
    once = backward(GPT_175B, context, "none").context
    assert backward(GPT_175B, context, "selective", "core_attn").context == 2 * once
    assert backward(GPT_175B, context, "selective", "mlp").context == once
    experts = Layout(world_size=24, expert=8, pipeline=3)
    once = backward(MOE, experts, "none").expert
    assert backward(MOE, experts, "selective", "moe").expert == backward(MOE, experts, "full").expert == 2 * once


def test_experts_pipelines_and_contexts_send_what_the_formulas_say() -> None:
    """The three axes whose messages grow with the tokens beside tensor parallelism."""
    layout = Layout(world_size=8, expert=8)
    expert, _ = sent(MOE, layout, tokens=1000)
    assert expert == Traffic(expert=48 * 2 * 7 / 8 * 1000 * 8 * 2048 * 2)
    context = Layout(world_size=4, context=4)
    gathered, _ = sent(MOE, context, tokens=1000)
    assert gathered.context == 48 * 3 * 250 * 2 * (4 * 128) * 2
    exchanged, back = sent(MOE, context, tokens=1000, cp_comm_type="a2a")
    assert exchanged.context == back.context == 48 * 3 / 4 * 250 * (2 * 4096 + 2 * 512) * 2


def test_the_ends_of_a_pipeline_send_one_way_only() -> None:
    """The first stage has nothing to send back from its first chunk, the last nothing to pass on from its last."""
    message = 1000 * 2048 * 2

    def messages(layout: Layout) -> list[list[float]]:
        return [
            [way.pipeline / message for way in sent(MOE, layout, stage=stage, tokens=1000)]
            for stage in range(layout.pipeline)
        ]

    assert messages(Layout(world_size=3, pipeline=3)) == [[1, 0], [1, 1], [0, 1]]
    assert messages(Layout(world_size=3, pipeline=3, virtual_pipeline=2)) == [[2, 1], [2, 2], [1, 2]]
    assert messages(Layout(world_size=1)) == [[0, 0]]


def test_data_ranks_send_gradients_and_parameters() -> None:
    """fp32 gradients are scattered and bf16 parameters gathered: 6 bytes a weight; ZeRO-2 and 3 do so in every micro-batch."""
    weights = num_parameters(GPT_175B, Layout(world_size=1), stage=0) * 3 / 4
    outside = (2 * 51200 + 1) * 12288 * 3 / 4
    layer = (weights - outside) / 96

    def data(micro_batches: int = 5, **layout: Any) -> float:
        held = Layout(world_size=4, **layout)
        return data_traffic(GPT_175B, held, stage=0, dtype_bytes=2, num_micro_batches=micro_batches).data

    assert [data(zero_stage=zero) for zero in range(3)] == [8 * weights, 6 * weights, (5 * 4 + 2) * weights]
    # Layers forward and backward, one of them ahead; embedding, head and norm only once, as they stay whole.
    assert data(zero_stage=3) == 5 * (4 * weights + 2 * (2 * 96 + 1) * layer) + 2 * outside
    # Two shards and two replicas, which all-reduce their halves of the gradients in the end.
    pairs = data(zero_stage=3, shard_size=2)
    assert pairs == data(zero_stage=3) * (1 / 2) / (3 / 4) + 2 * 1 / 2 * 4 * weights / (3 / 4) / 2


def test_copies_of_a_tied_embedding_sum_their_gradients() -> None:
    """The first and the last stage each have one."""
    tied = dataclasses.replace(GPT_175B, tied=True)
    layout = Layout(world_size=6, pipeline=3, tensor=2)
    found = [data_traffic(tied, layout, stage=stage, dtype_bytes=2, num_micro_batches=1).pipeline for stage in range(3)]
    assert found == [4 * 51200 * 12288 / 2, 0, 4 * 51200 * 12288 / 2]

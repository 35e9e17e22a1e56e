"""Seconds of the learners: what links carry, what memory limits, what the host needs. Cases that can be worked by hand."""

from __future__ import annotations

import dataclasses
import itertools
from statistics import mean

import pytest

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.family import shape_of
from mgrpo.models.memory import stage_elements
from mgrpo.models.shape import Experts
from mgrpo.planner import plan_report
from mgrpo.planner.hardware import GPUS, Assumptions, Flops, Hardware
from mgrpo.planner.learners.links import beside, bytes_s, expert_seconds, link_seconds, nodes_reached, ring_bytes_s
from mgrpo.planner.learners.touched import stage_touched, unfused_weights
from mgrpo.planner.plan_command import shipped_config
from mgrpo.planner.suggest import CAUSES as SHORT_CAUSES
from mgrpo.planner.traffic import Passed, Traffic
from mgrpo.planner.work import Workload, fused_weights, layer_flops
from tests.unit.planner.test_plan import shipped_plan

H100S = Hardware(gpu=GPUS["H100"], nodes=4, assumed=Assumptions(link_efficiency=1.0))
"""NVLink 450 GB/s, a card of 50 GB/s for each of 8 GPUs."""
EXPERTS = Experts(count=128, top_k=8, ffn=768, normalised=True)


@pytest.mark.parametrize(
    ("ranks", "stride", "gb_s"),
    [(8, 1, 450), (2, 4, 450), (32, 1, 400), (16, 2, 200), (4, 8, 50), (2, 16, 50), (1, 64, 450)],
)
def test_a_ring_uses_the_cards_of_all_its_ranks_in_a_node(ranks: int, stride: int, gb_s: float) -> None:
    """32 ranks of FSDP on four nodes have eight cards in each, tensor groups' neighbours have one."""
    assert ring_bytes_s(H100S, ranks=ranks, stride=stride) == gb_s * 1e9


def test_only_copies_that_leave_the_node_go_over_the_network() -> None:
    """Of 16 copies over two nodes, one stays on the rank, seven go to its neighbours and eight leave; those take longest."""
    layout = Layout(world_size=16, expert=16)
    sent = 15e9
    assert expert_seconds(sent, layout, H100S, EXPERTS) == pytest.approx(8e9 / 50e9)
    assert bytes_s("expert", layout, Parallel(), H100S, EXPERTS) == pytest.approx(50e9 * 15 / 8)
    inside = Layout(world_size=16, expert=8)
    assert expert_seconds(sent, inside, H100S, EXPERTS) == pytest.approx(15e9 / 450e9)


def test_contexts_gather_in_a_ring_or_exchange() -> None:
    """16 context ranks, two of them in a node of two tensor groups of four: 14 of 15 parts of an exchange leave it."""
    layout = Layout(world_size=64, tensor=4, context=16)
    ring, exchange = (
        bytes_s("context", layout, Parallel(cp_comm_type=kind), H100S, None) for kind in ("all_gather", "a2a")
    )
    assert ring == 100e9 and exchange == pytest.approx(50e9 * 15 / 14)


def test_a_token_goes_to_a_node_once_where_dispatch_is_by_node() -> None:
    """Eight experts over two nodes: nearly always both, so one copy in place of four leaves."""
    layout = Layout(world_size=16, expert=16)
    flex = dataclasses.replace(H100S, dispatches_by_node=True)
    slow, fast = (expert_seconds(15e9, layout, hardware, EXPERTS) for hardware in (H100S, flex))
    leaving = 16e9 / 8 * (2 - 2 / 2**8) / 2
    assert fast == pytest.approx(max(leaving / (0.86 * 50e9), 15e9 / 450e9))
    assert 3 < slow / fast < 4
    asked = bytes_s("expert", layout, Parallel(moe_token_dispatcher_type="deepep"), H100S, EXPERTS)
    assert asked == pytest.approx(15e9 / fast)


def test_nodes_reached_are_those_of_all_choices() -> None:
    """Over all ways to choose, with repetition; groups keep a token's experts on fewer nodes."""
    few = dataclasses.replace(EXPERTS, top_k=3)
    assert nodes_reached(4, few) == pytest.approx(mean(len(set(way)) for way in itertools.product(range(4), repeat=3)))
    grouped = dataclasses.replace(EXPERTS, groups=8, top_groups=4)
    assert nodes_reached(8, grouped) == pytest.approx(4 * (1 - 0.75**8))
    assert nodes_reached(1, EXPERTS) == 1


def test_hidden_traffic_costs_what_it_takes_of_the_gpu() -> None:
    """10 s beside 6 s of computation, a tenth of which nothing can hide: 4 s are waited for."""
    assert beside(10.0, 6.0, H100S, exposed=0.1) == pytest.approx(4 + 6 * 0.15)
    assert beside(10.0, 60.0, H100S, exposed=0.1) == pytest.approx(1 + 9 * 0.15)
    half = dataclasses.replace(H100S, assumed=dataclasses.replace(H100S.assumed, tensor_exposed=0.5))
    layout = Layout(world_size=8, tensor=8)
    seconds = [link_seconds(Traffic(tensor=45e9), layout, Parallel(), hardware, None) for hardware in (H100S, half)]
    assert seconds == [{"tensor": pytest.approx(0.1)}, {"tensor": pytest.approx(0.05)}]


def test_elements_that_only_memory_limits_are_counted() -> None:
    """Llama 3.1 8B, a token and layer: 4 h of norms, 6 h of sums, 2 (q + k) rotated, 3 f of the MLP; and the logits."""
    shape = shape_of(shipped_config("llama-3.1-8b") or {})
    passed = Passed(tokens=1000, responses=0, dtype_bytes=2)
    a_layer = 1000 * 2 * (10 * 4096 + 2 * 5120 + 3 * 14336)
    whole = stage_touched(shape, Layout(world_size=1), Parallel(), passed, stage=0, logits_chunk=0, in_8_bits=())
    assert whole.forward == 32 * a_layer and whole.backward == 64 * a_layer and whole.repeated == 0
    split = stage_touched(
        shape,
        Layout(world_size=4, tensor=4, sequence_parallel=True),
        Parallel(recompute_granularity="full"),
        passed,
        stage=0,
        logits_chunk=0,
        in_8_bits=(),
    )
    assert split.forward == split.repeated == 8 * a_layer
    head = dataclasses.replace(passed, responses=10)
    more = stage_touched(shape, Layout(world_size=1), Parallel(), head, stage=0, logits_chunk=64, in_8_bits=())
    assert more.forward - whole.forward == more.repeated == 2 * 10 * 128_256 * 2
    casts = stage_touched(
        shape, Layout(world_size=1), Parallel(), passed, stage=0, logits_chunk=0, in_8_bits=("dense",)
    )
    assert casts.forward - whole.forward == 32 * 1000 * 4 * (4096 + 6144 + 4096 + 2 * 14336)


def test_experts_move_every_copy_six_times() -> None:
    """Qwen3-30B-A3B: eight copies a token, permuted, ordered and ordered back, summed; queries and keys have norms."""
    shape = shape_of(shipped_config("qwen3-30b-a3b") or {})
    passed = Passed(tokens=1000, responses=0, dtype_bytes=2)
    found = stage_touched(shape, Layout(world_size=1), Parallel(), passed, stage=0, logits_chunk=0, in_8_bits=())
    attention = 10 * 2048 + 4 * (4096 + 512)
    experts = 2048 * 50 + 3 * 8 * 768 + 128 * 4 * 2
    assert found.forward == 48 * 1000 * 2 * (attention + experts)


def test_the_gpu_waits_for_the_host_where_packs_are_short() -> None:
    """The kernels of a layer take the host as long for a pack of 512 tokens as for one of 16,384, which the GPU takes longer for."""
    plans = {}
    for length in (512, 16_384):
        plan, _ = shipped_plan("30b_a3b_4x8", pack_length=length)
        busy = sum(s for cause, s in plan.learners.training.items() if cause not in ("bubble", "data", "optimizer"))
        host = 48 * 10.5e-3 * plan.learners.num_micro_batches
        assert busy >= host * 0.999
        plans[length] = busy / host
    assert plans[512] == pytest.approx(1, rel=0.01) and plans[16_384] > 1.5


def test_products_are_as_fast_as_their_operands_allow() -> None:
    """An H100 computes 989e12 operations a second in bf16, twice that in fp8, and 67e12 in float32; heads and attention stay in bf16."""
    ideal = Assumptions(compute_efficiency=1, expert_efficiency=0.5, attention_efficiency=0.25)
    hardware = dataclasses.replace(H100S, assumed=ideal)
    work = Flops(dense=989e12, experts=989e12, attention=989e12, own=989e12, head=989e12)
    assert hardware.compute_seconds(work, gpus=1) == pytest.approx(1 + 2 + 4 + 1 + 1)
    assert hardware.compute_seconds(work, gpus=2, in_8_bits=("dense",)) == pytest.approx((0.5 + 2 + 4 + 1 + 1) / 2)
    assert hardware.compute_seconds(work, gpus=1, dtype_bytes=4) == pytest.approx(9 * 989 / 67)


def test_layers_that_megatron_keeps_stay_in_bf16() -> None:
    """DeepSeek-V3 in fp8: its experts are faster and the MLPs of its first layers, not latent attention, routers and shared experts."""
    shape = shape_of(shipped_config("deepseek-v3") or {})
    assert fused_weights(shape) == (3 * 7168 * 18432,) * 3 + (0,) * 58
    work = Workload(
        prompts=1, sequences=1, prompt_tokens=1, response_tokens=999, longest_response=999, shares_prompts=False
    )
    dense, mixed = layer_flops(shape, work)[0].total, layer_flops(shape, work)[-1].total
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert dense.dense == 2000 * 3 * 7168 * 18432 and mixed.dense == 0
    assert mixed.own == pytest.approx(2000 * (attention + 7168 * 256 + 3 * 7168 * 2048), rel=1e-4)
    llama = shape_of(shipped_config("llama-3.1-8b") or {})
    assert layer_flops(llama, work)[0].total.own == 0


def test_gradients_are_added_once_a_pack_however_short() -> None:
    """Experts' products do not add to the buffer; with Transformer Engine those of attention do, without it and under FSDP none do."""
    shape = shape_of(shipped_config("qwen3-30b-a3b") or {})
    layout = Layout(world_size=8, expert=8, zero_stage=1)
    held = stage_elements(shape, layout, stage=0)
    attention = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512)
    fused = held.total - unfused_weights(shape, layout, Parallel(), stage=0)
    assert fused == pytest.approx(attention, rel=1e-3)
    for settings, other in (
        (Parallel(transformer_impl="local"), layout),
        (Parallel(), dataclasses.replace(layout, zero_stage=3)),
    ):
        assert unfused_weights(shape, other, settings, stage=0) == held.total
    seconds = {}
    for length in (4096, 16_384):
        plan, _ = shipped_plan("30b_a3b_4x8", pack_length=length)
        packs = plan.learners.num_micro_batches
        unfused = unfused_weights(plan.shape, plan.layout, plan.config.parallel, stage=0)
        seconds[length] = plan.learners.training["gradients"]
        assert seconds[length] == pytest.approx(packs * unfused * 10 / (3350e9 * 0.7))
    assert seconds[4096] > 3.5 * seconds[16_384]


def test_copies_of_activations_cost_what_computing_does_not_cover() -> None:
    """64 GB/s each way: the inputs of layers hide behind their products, all that 7B keeps takes longer than both passes."""
    few, _ = shipped_plan("7b_8gpu", activation_offloading=True, recompute_granularity="full")
    assert "offload" not in few.learners.training
    many, _ = shipped_plan("7b_8gpu", activation_offloading=True, recompute_granularity="none")
    packs = many.work.trained_tokens / many.layout.data / many.config.parallel.pack_length
    one_way = packs * many.worst.activations.offloaded / 64e9
    passes = sum(many.learners.training[cause] for cause in ("compute", "memory", "gradients", "tensor"))
    assert many.learners.training["offload"] == pytest.approx(2 * one_way - passes, rel=0.01)


def test_every_cause_has_a_name_on_the_page() -> None:
    """A cause that the tables do not know would end the command."""
    plan, _ = shipped_plan("30b_a3b_4x8", activation_offloading=True, recompute_granularity="none", pack_length=16_384)
    assert {"gradients", "offload", "expert"} <= set(plan.learners.training)
    assert set(plan.learners.training) <= set(SHORT_CAUSES) == set(plan_report.CAUSES["train"])

"""A GPU that a learner and an engine share: what each phase of a step needs."""

from __future__ import annotations

import pytest

from mgrpo.models.family import shape_of
from mgrpo.moving import from_values
from mgrpo.planner.engines.transfers import held_share
from mgrpo.planner.hardware import GPUS, Assumptions, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import plan_command, shipped_config
from mgrpo.planner.plan_report import as_json

WEIGHTS = 7_615_616_512
LEARNERS = 8


def plan(**settings: object) -> RunPlan:
    """Qwen2.5 7B on 8 H100, with TP 2, ZeRO-1 and 8 engines."""
    values = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "tensor_model_parallel_size": 2,
        "num_learners_per_node": [LEARNERS],
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_num_engines": LEARNERS,
        "vllm_kv_cache_mb": 40 << 10,
        **settings,
    }
    config = from_values(values)
    shape = shape_of(shipped_config("Qwen/Qwen2.5-7B"))
    gpu = GPUS["H100"]
    hardware = Hardware(gpu=gpu, nodes=1, gpus_per_node=8, network_gbps=400, assumed=Assumptions())
    return plan_run(config, shape, hardware, num_learners=LEARNERS)


@pytest.mark.parametrize(("zero_stage", "read"), [(1, WEIGHTS * 2 / 2), (3, WEIGHTS * 4 / 2 / 4)])
def test_each_phase_holds_one_half_and_what_the_other_cannot_give_up(zero_stage, read):
    """A phase that is forgotten ends the run out of memory, hours after the plan said that it fits."""
    found = plan(zero_stage=zero_stage)
    generate, train, sync = found.sharing
    reserved, workspace, slots = found.worst.reserved, found.engine.workspace, LEARNERS * 2 * 16 << 20
    assert generate.learner == reserved
    assert generate.engine == pytest.approx(2 * WEIGHTS + (40 << 30) + workspace + slots, rel=1e-3)
    assert train.engine == workspace + slots
    assert train.learner == found.worst.total
    assert sync.engine == pytest.approx(2 * WEIGHTS + workspace + slots, rel=1e-3)
    # Parameters in bf16 on two tensor ranks, or float32 masters on four data ranks of them as well.
    assert sync.learner - reserved == pytest.approx(read, rel=0.01)
    assert found.fits and found.split.idle == 0
    assert [phase["phase"] for phase in as_json(found, [], [])["sharing"]] == ["generate", "train", "sync"]


def test_what_does_not_fit_is_named_by_phase():
    """The remedy depends on it."""
    too_much = list(plan(vllm_kv_cache_mb=70 << 10).shortages())
    assert (
        len(too_much) == 1 and too_much[0].startswith("generate: learner 4.0 + engine 88") and "kv_cache" in too_much[0]
    )
    (both,) = plan(vllm_enable_sleep_mode=False).shortages()
    assert both.startswith("train: learner") and "let them take turns: vllm_enable_sleep_mode true" in both
    (sentence,) = plan(vllm_num_engines=4).shortages()
    assert "8 learners and vllm_num_engines x vllm_tensor_parallel_size = 4 workers share GPUs" in sentence


def test_turns_cost_copies_in_both_directions():
    """12 bytes of states and 2 of parameters for each weight of a rank, once out and once back over PCIe."""
    found = plan(zero_stage=0, beta=0)
    assert found.phases["turns"] == pytest.approx(2 * 14 * WEIGHTS / 2 / 64e9, rel=0.01)
    assert plan(vllm_enable_sleep_mode=False).phases["turns"] == 0


def test_the_table_is_printed(capsys):
    """The command is where users look."""
    settings = "--model_name_or_path Qwen/Qwen2.5-7B --single_gpu_mode true --vllm_kv_cache_mb 8192 --suggest 0"
    assert (
        plan_command([*settings.split(), "--gpu", "B200", "--gpus_per_node", "1", "--apply_verifiable_reward", "true"])
        == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory of a shared GPU, GiB of 180" in printed
    assert "1 learner, 1 shared with 1 engine of 1, 0 idle" in printed


def over_nodes(tensor: int, **settings: object) -> RunPlan:
    """Qwen2.5 7B on 4 nodes of 8 H100 that learners and engines share."""
    values = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "tensor_model_parallel_size": 4,
        "num_learners_per_node": [8] * 4,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_num_engines": 32 // tensor,
        "vllm_tensor_parallel_size": tensor,
        "vllm_kv_cache_mb": 20 << 10,
        **settings,
    }
    hardware = Hardware(gpu=GPUS["H100"], nodes=4, gpus_per_node=8, network_gbps=400, assumed=Assumptions())
    return plan_run(from_values(values), shape_of(shipped_config("Qwen/Qwen2.5-7B")), hardware, num_learners=32)


def test_over_nodes_only_what_a_node_lacks_crosses_the_network():
    """A layout whose nodes hold a whole model each would be passed over for one that sends all of it."""
    whole, halves, shards = over_nodes(8), over_nodes(8, pipeline_model_parallel_size=2), over_nodes(8, zero_stage=3)
    parts = [held_share(each.shape, each.layout, ranks=range(8, 16)) for each in (whole, halves, shards)]
    assert parts == [1, 1 / 2, 1 / 4]
    assert whole.fits and whole.phases["sync"] < halves.phases["sync"] < shards.phases["sync"]


def test_an_engine_over_nodes_cannot_share_gpus():
    """Its workers on other nodes have no memory in common with the learners that send to it."""
    (sentence,) = over_nodes(16).shortages()
    assert "16 workers of an engine that shares the learners' GPUs are on one node of 8 GPUs" in sentence

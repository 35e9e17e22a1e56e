"""What each node contributes, and whether that is enough."""

from __future__ import annotations

import pytest

from mgrpo.moving import from_values
from mgrpo.run.nodes.job import NodeJob, Share, about, gpu_problems, share_of

EIGHT = tuple("01234567")


def share(rank: int, *, learner_nodes: int, ranks: int, gpus=EIGHT, num_cpus: int = 16) -> Share:
    return share_of(rank, nodes=4, learner_nodes=learner_nodes, ranks_a_node=ranks, gpus=gpus, num_cpus=num_cpus)


def test_a_node_offers_the_gpus_that_its_learners_leave():
    """LOCAL_RANK chooses a learner's GPU, so learners have the first ones."""
    assert share(3, learner_nodes=2, ranks=8) == Share(gpus=EIGHT, num_cpus=16)
    assert share(1, learner_nodes=2, ranks=6) == Share(gpus=("6", "7"), num_cpus=16)
    assert share(0, learner_nodes=2, ranks=8).is_empty
    assert share(3, learner_nodes=2, ranks=8, num_cpus=2).num_cpus == 8


def test_without_gpus_learners_share_their_nodes_only_where_there_are_no_others():
    assert share(0, learner_nodes=2, ranks=4, gpus=()).is_empty
    assert share(2, learner_nodes=2, ranks=4, gpus=()) == Share(gpus=(), num_cpus=16)
    assert share(0, learner_nodes=4, ranks=4, gpus=()) == Share(gpus=(), num_cpus=12)
    assert share(0, learner_nodes=4, ranks=4, gpus=(), num_cpus=2) == Share(gpus=(), num_cpus=1)


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "words"),
    [
        ([8, 8, 8, 8], 8, 16, None),
        ([8, 8, 8, 8], 7, 18, None),
        ([8, 8, 8, 4], 8, 16, "need 16 GPUs, but learners leave 12 (node 2 8, node 3 4)"),
        ([8, 4, 8, 8], 8, 1, "--nproc-per-node=8: node 1 (h1) has 4 GPUs"),
        ([8, 0, 8, 8], 8, 1, "--nproc-per-node=8: node 1 (h1) has 0 GPUs"),
        ([0, 0, 0, 0], 8, 4, None),
    ],
)
def test_missing_gpus_are_found_before_anything_starts(gpus, ranks, engines, words):
    """Ray would wait for a placement that never comes."""
    config = from_values({"vllm_num_engines": engines})
    job = NodeJob(nodes=4, learner_nodes=2, ranks_a_node=None, words=(), timeout_s=1)
    told = {rank: {"host": f"h{rank}", "gpus": num} for rank, num in enumerate(gpus)}
    found = gpu_problems(config, job, ranks, told)
    assert len(found) == (words is not None) and all(words in problem for problem in found)


SHARED = {"vllm_mode": "colocate", "vllm_num_engines": 8, "vllm_tensor_parallel_size": 4, "vllm_kv_cache_mb": 9}


def test_where_learners_share_their_gpus_ray_counts_none_and_has_room_for_their_engines():
    """Ray would put other engines on a GPU that it counts."""
    for num_cpus, room in ((16, 8), (2, 8), (192, 184)):
        found = share_of(1, nodes=4, learner_nodes=4, ranks_a_node=8, gpus=EIGHT, num_cpus=num_cpus, shares_gpus=True)
        assert found == Share(gpus=(), num_cpus=room)


@pytest.mark.parametrize(
    ("values", "learner_nodes", "ranks", "visible", "words"),
    [
        ({}, 4, 8, None, None),
        ({}, 3, 8, None, "--learner-nodes=3 of 4: with vllm_mode=colocate"),
        (
            {"vllm_num_engines": 7},
            4,
            8,
            None,
            "there are 32 learners, and vllm_num_engines=7 x vllm_tensor_parallel_size=4 = 28",
        ),
        ({"vllm_num_engines": 6}, 4, 6, None, "which has 6 learners; use a number that divides them"),
        ({}, 4, 8, "0,1", "CUDA_VISIBLE_DEVICES differs between nodes: 0,1, None"),
        (
            {"teacher_model_name_or_path": "t", "teacher_mode": "engine"},
            4,
            8,
            None,
            "vllm_mode=colocate on several nodes has no teachers with engines",
        ),
    ],
)
def test_engines_that_cannot_be_on_the_learners_gpus_are_refused(values, learner_nodes, ranks, visible, words):
    """A worker elsewhere would have no memory in common with a learner."""
    config = from_values(SHARED | values)
    job = NodeJob(nodes=4, learner_nodes=learner_nodes, ranks_a_node=ranks, words=(), timeout_s=1)
    told = {rank: {"host": f"h{rank}", "gpus": 8, "visible": None} for rank in range(4)}
    told[2]["visible"] = visible
    found = gpu_problems(config, job, ranks, told)
    assert len(found) == (words is not None) and all(words in problem for problem in found)


def test_a_node_says_its_versions_and_its_arguments(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    job = NodeJob(nodes=4, learner_nodes=2, ranks_a_node=None, words=("--seed", "1"), timeout_s=1)
    said = about("10.0.0.1", job=job, num_gpus=8)
    assert said["address"] == "10.0.0.7" and said["gpus"] == 8
    assert said["same"].keys() == {
        "mgrpo", "python", "torch", "ray", "vllm", "megatron-core", "--nodes", "--learner-nodes", "arguments of the training"
    }  # fmt: skip
    assert "none" not in said["same"].values() and said["same"]["arguments of the training"] == "--seed 1"

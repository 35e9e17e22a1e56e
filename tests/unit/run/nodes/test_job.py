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


def test_a_node_says_its_versions_and_its_arguments(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    job = NodeJob(nodes=4, learner_nodes=2, ranks_a_node=None, words=("--seed", "1"), timeout_s=1)
    said = about("10.0.0.1", job=job, num_gpus=8)
    assert said["address"] == "10.0.0.7" and said["gpus"] == 8
    assert said["same"].keys() == {
        "mgrpo", "python", "torch", "ray", "vllm", "megatron-core", "--nodes", "--learner-nodes", "arguments of the training"
    }  # fmt: skip
    assert "none" not in said["same"].values() and said["same"]["arguments of the training"] == "--seed 1"

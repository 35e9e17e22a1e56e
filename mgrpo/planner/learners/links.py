"""Seconds of the learners' traffic (traffic.py): by the ranks of a group in a node, and by the time that computation hides.

A ring that visits the ranks of a node one after another crosses to the next node once: of m ranks of a group in a node, all
m network cards carry a part of every collective, so that it goes at m times a card's rate, and at NVLink's at most. That is
the "bus bandwidth" of NCCL's tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). An all-to-all has no such
help: bytes that leave the node go through each rank's own card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.shape import Experts
from mgrpo.planner.hardware import Hardware
from mgrpo.planner.traffic import Traffic

FLEX_EFFICIENCY = 0.86
"""Share of the network's rate of DeepEP's dispatch and combine: 43 of 50 GB/s on two nodes of H800 (github.com/deepseek-ai/DeepEP)."""


def ring_bytes_s(hardware: Hardware, *, ranks: int, stride: int) -> float:
    """Assumed bytes per second of each of `ranks` ranks, `stride` ranks from one another."""
    within = min(ranks, max(hardware.gpus_per_node // stride, 1))
    gpu, network = hardware.gpu, hardware.network_gbps / 8
    rate = gpu.nvlink_gb_s if within == ranks else min(gpu.nvlink_gb_s, within * network)
    return rate * 1e9 * hardware.assumed.link_efficiency


def exchange_bytes_s(hardware: Hardware, *, ranks: int, stride: int) -> float:
    """The same of an all-to-all: bytes within the node and bytes that leave it are sent at the same time."""
    within = min(ranks, max(hardware.gpus_per_node // stride, 1))
    if within == ranks:
        return ring_bytes_s(hardware, ranks=ranks, stride=stride)
    leaving = (ranks - within) / (ranks - 1)
    over_network = hardware.network_gbps / 8 / leaving
    over_nvlink = hardware.gpu.nvlink_gb_s / (1 - leaving) if within > 1 else math.inf
    return min(over_network, over_nvlink) * 1e9 * hardware.assumed.link_efficiency


def bytes_s(axis: str, layout: Layout, settings: Parallel, hardware: Hardware, experts: Experts | None) -> float:
    """Assumed bytes per second of each rank in exchanges of this axis; "data" is for weights other than experts."""
    if axis == "expert" and experts is not None:
        if settings.moe_token_dispatcher_type != "alltoall":
            hardware = replace(hardware, dispatches_by_node=True)
        return 1 / expert_seconds(1.0, layout, hardware, experts)
    # A pipeline's neighbour is a whole stage away.
    ranks, stride = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "data": (layout.data * layout.context, layout.tensor),
        "pipeline": (2, layout.world_size // layout.pipeline),
    }[axis]
    if axis == "context" and settings.cp_comm_type == "a2a":
        return exchange_bytes_s(hardware, ranks=ranks, stride=stride)
    return ring_bytes_s(hardware, ranks=ranks, stride=stride)


def link_seconds(
    traffic: Traffic, layout: Layout, settings: Parallel, hardware: Hardware, experts: Experts | None
) -> dict[str, float]:
    """Seconds of a pass by axis; data-parallel traffic is `data_seconds`'."""
    axes = {axis: getattr(traffic, axis) for axis in ("tensor", "context", "expert", "pipeline")}
    seconds = {axis: sent / bytes_s(axis, layout, settings, hardware, experts) for axis, sent in axes.items() if sent}
    if "tensor" in seconds:
        seconds["tensor"] *= hardware.assumed.tensor_exposed
    return seconds


def expert_seconds(sent: float, layout: Layout, hardware: Hardware, experts: Experts) -> float:
    """Seconds in which a rank sends this many bytes of tokens' copies to the ranks of their experts, or gets them back.

    The "alltoall" dispatcher sends each copy on its own: those for ranks of the node go over NVLink, the others over the
    network, at the same time. The "flex" one (DeepEP, HybridEP) sends a token once to each node that has some of its experts,
    and there over NVLink.
    """
    ranks = layout.expert * layout.expert_tensor
    within = min(ranks, hardware.gpus_per_node)
    if within == ranks or not hardware.dispatches_by_node:
        return sent / exchange_bytes_s(hardware, ranks=ranks, stride=1)
    nodes, copies = ranks / within, sent * ranks / (ranks - 1)
    across = copies / experts.top_k * nodes_reached(nodes, experts) * (nodes - 1) / nodes
    in_node = ring_bytes_s(hardware, ranks=within, stride=1)
    return max(sent / in_node, across / (hardware.network_gbps / 8 * 1e9 * FLEX_EFFICIENCY))


def nodes_reached(nodes: float, experts: Experts) -> float:
    """Nodes that have an expert of a token, of those over which all experts are spread: the mean where all are chosen equally.

    Where experts are chosen in some groups only, those of a group are neighbours.
    """
    open_nodes = min(nodes, math.ceil(nodes * experts.top_groups / experts.groups))
    return open_nodes * (1 - (1 - 1 / open_nodes) ** experts.top_k)


def beside(seconds: float, window: float, hardware: Hardware, *, exposed: float) -> float:
    """Seconds of communication not hidden behind `window` seconds of compute.

    A share `exposed` is never hidden. Hidden traffic costs the multiprocessors that move it: `Assumptions.overlap_cost` of its time.
    """
    hidden = min(seconds * (1 - exposed), window)
    return seconds - hidden + hidden * hardware.assumed.overlap_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Computation that hides data-parallel traffic."""

    window: float
    """Seconds of computation that overlap with it."""
    edge: float
    """Share of it that nothing can hide: the first layer's gather, the last one's reduction."""


def data_seconds(
    sent: float, layout: Layout, settings: Parallel, hardware: Hardware, hidden: Hidden, *, expert_share: float
) -> float:
    """Seconds that data-parallel traffic adds to an update.

    Args:
        sent: bytes of one rank.
        expert_share: share of them that are of experts, which fewer ranks share.
    """
    dense = bytes_s("data", layout, settings, hardware, None)
    experts = ring_bytes_s(hardware, ranks=layout.expert_data, stride=layout.expert * layout.expert_tensor)
    seconds = sent * ((1 - expert_share) / dense + expert_share / experts)
    return beside(seconds, hidden.window, hardware, exposed=hidden.edge)

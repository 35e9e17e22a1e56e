"""Small collectives between GPUs: a latency by the number of ranks and nodes, and bytes over the slowest link.

Latencies are those with which NCCL chooses its algorithms (src/graph/tuning.cc, protocol LL): a base, and a term for each hop
over NVLink, PCIe or the network. An all-reduce goes up and down a tree, an all-gather or reduce-scatter around a ring.
"""

from __future__ import annotations

import math

from mgrpo.planner.hardware import Hardware

TREE_US, RING_US = 6.8, 6.6
NVLINK_HOP_US, PCIE_HOP_US = 0.6, 1.0
TREE_NETWORK_US, RING_NETWORK_US = 5.0, 2.7


def all_reduce_s(size: float, *, ranks: int, hardware: Hardware) -> float:
    """Seconds of the sum of `size` bytes over neighbouring ranks."""
    if ranks < 2:
        return 0.0
    nodes = -(-ranks // hardware.gpus_per_node)
    hops = (ranks / nodes - 1) * _hop_us(hardware) + math.floor(math.log2(nodes)) * TREE_NETWORK_US
    return (TREE_US + 2 * hops) * 1e-6 + 2 * _ring_s(size, ranks, hardware)


def all_gather_s(size: float, *, ranks: int, hardware: Hardware) -> float:
    """Seconds in which every rank receives the parts of all, `size` bytes together; as long as a reduce-scatter back."""
    if ranks < 2:
        return 0.0
    nodes = -(-ranks // hardware.gpus_per_node)
    between = nodes - 1
    hops = (ranks - 1 - between) * _hop_us(hardware) + between * RING_NETWORK_US
    return (RING_US + hops) * 1e-6 + _ring_s(size, ranks, hardware)


def _ring_s(size: float, ranks: int, hardware: Hardware) -> float:
    """Each rank passes on all parts but its own; over the network a node's GPUs share out what enters it."""
    per_node = hardware.gpus_per_node
    inside = size * (ranks - 1) / ranks / hardware.link_bytes_s(min(ranks, per_node))
    nodes = -(-ranks // per_node)
    between = size * (nodes - 1) / nodes / per_node / hardware.link_bytes_s(ranks) if nodes > 1 else 0.0
    return max(inside, between)


def _hop_us(hardware: Hardware) -> float:
    return NVLINK_HOP_US if hardware.gpu.nvlink_gb_s > hardware.gpu.pcie_gb_s else PCIE_HOP_US

"""Small collectives between an engine's GPUs, and weight syncs.

A collective takes a latency by the number of ranks and nodes, and its bytes over the slowest link. Within a node vLLM adds up with
its own kernel. Other collectives are NCCL's, with the latencies by which it chooses its algorithms (src/graph/tuning.cc,
protocol LL): a base, and a term for each hop over NVLink, PCIe or the network. An all-reduce goes up and down a tree, an
all-gather or reduce-scatter around a ring. Those of NVLink are as measured (16 and 13 us for 8 ranks); a hop over the network takes
three times NCCL's figure: its sums over two nodes of 8 H100 take 42 to 50 us for 8 to 128 KiB, and 89 us for 1 MiB
(github.com/microsoft/mscclpp, docs/dsl/results.md), those over two of 8 H20 46 us (github.com/NVIDIA/nccl/issues/1244).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mgrpo.layout import ALL_DIRECT, MOST_GROUPS, InferLayout, Layout
from mgrpo.models.shape import ModelShape
from mgrpo.planner.engines.engine_memory import worker_pieces
from mgrpo.planner.hardware import Hardware

TREE_US, RING_US = 6.8, 6.6
NVLINK_HOP_US, PCIE_HOP_US = 0.6, 1.0
TREE_NETWORK_US, RING_NETWORK_US = 15.0, 8.1
NETWORK_SUM_GB_S = 24.0
"""Rate of a small sum over nodes: (89 - 45) us for 1 MiB."""
OWN_SUM_US, OWN_SUM_STEP_US, OWN_SUM_EFFICIENCY = 3.4, 0.85, 0.3
"""vLLM's own sum on NVLink: a base, a term for each doubling of the ranks, and the share of NVLink's rate, fitted to 4 KiB to 16 MiB
on 2 to 8 H100 (kernels.py has the source; median error 9 %)."""


def all_reduce_s(size: float, *, ranks: int, hardware: Hardware) -> float:
    """Seconds of the sum of `size` bytes over neighbouring ranks."""
    if ranks < 2:
        return 0.0
    nodes, gpu = -(-ranks // hardware.gpus_per_node), hardware.gpu
    if nodes == 1 and gpu.nvlink_gb_s > gpu.pcie_gb_s:
        latency = OWN_SUM_US + OWN_SUM_STEP_US * math.log2(ranks)
        return latency * 1e-6 + 2 * size * (ranks - 1) / ranks / (gpu.nvlink_gb_s * 1e9 * OWN_SUM_EFFICIENCY)
    hops = (ranks / nodes - 1) * _hop_us(hardware) + math.ceil(math.log2(nodes)) * TREE_NETWORK_US
    sent = size / (NETWORK_SUM_GB_S * 1e9) if nodes > 1 else 2 * _ring_s(size, ranks, hardware)
    return (TREE_US + 2 * hops) * 1e-6 + sent


def all_gather_s(size: float, *, ranks: int, hardware: Hardware) -> float:
    """Seconds in which every rank receives the parts of all, `size` bytes together; as long as a reduce-scatter back."""
    if ranks < 2:
        return 0.0
    nodes = -(-ranks // hardware.gpus_per_node)
    between = nodes - 1
    hops = (ranks - 1 - between) * _hop_us(hardware) + between * RING_NETWORK_US
    return (RING_US + hops) * 1e-6 + _ring_s(size, ranks, hardware)


def _ring_s(size: float, ranks: int, hardware: Hardware) -> float:
    """Seconds of a ring: each rank passes on all parts but its own; over the network a node's GPUs share its incoming bytes."""
    per_node = hardware.gpus_per_node
    inside = size * (ranks - 1) / ranks / hardware.link_bytes_s(min(ranks, per_node))
    nodes = -(-ranks // per_node)
    between = size * (nodes - 1) / nodes / per_node / hardware.link_bytes_s(ranks) if nodes > 1 else 0.0
    return max(inside, between)


def _hop_us(hardware: Hardware) -> float:
    return NVLINK_HOP_US if hardware.gpu.nvlink_gb_s > hardware.gpu.pcie_gb_s else PCIE_HOP_US


def held_share(shape: ModelShape, layout: Layout, *, ranks: Sequence[int]) -> float:
    """Share of the weights that these learners hold together; for an MoE model, of its experts, which are nearly all of it."""
    is_spread = shape.experts is not None and layout.expert > 1
    shards = layout.num_shards if layout.sharding >= 2 else 1
    count = layout.pipeline * (layout.expert if is_spread else layout.tensor)
    held = {
        (
            place.pipeline,
            place.expert if is_spread else place.tensor,
            (place.data * layout.context + place.context) % shards,
        )
        for place in map(layout.coordinate, ranks)
    }
    return min(len(held) / (count * shards), 1.0)


def shared_sync_seconds(
    sent_bytes: float, shape: ModelShape, layout: Layout, infer: InferLayout, *, hardware: Hardware
) -> float:
    """Seconds of a weight sync where learners and engines share GPUs; see `sync_seconds` for the hosts' work.

    The weights that a node's learners lack come over the network once per node, over all of its cards, while its workers take
    those of the node.

    Args:
        sent_bytes: to the workers of one engine together.
    """
    a_node = min(hardware.gpus_per_node, layout.world_size)
    least = min(
        held_share(shape, layout, ranks=range(first, min(first + a_node, layout.world_size)))
        for first in range(0, layout.world_size, a_node)
    )
    missing = sent_bytes * (1 - least) / a_node / hardware.link_bytes_s(hardware.num_gpus)
    pieces = worker_pieces(shape, infer) * max(layout.tensor // infer.tensor, 1)
    handed = sent_bytes / infer.workers / hardware.link_bytes_s(a_node)
    return max(missing, handed) + pieces * hardware.assumed.piece_us * 1e-6


def direct_engines(layout: Layout, infer: InferLayout) -> int:
    """Engines that learners send to directly, see `mgrpo.sync.sending.senders.choose`."""
    if infer.engines <= ALL_DIRECT:
        return infer.engines
    return min(infer.engines, (MOST_GROUPS - 1) * layout.replicas)


def sync_seconds(
    sent_bytes: float,
    shape: ModelShape,
    infer: InferLayout,
    *,
    learners: int,
    cuts: int,
    hardware: Hardware,
    direct: int | None = None,
    bucket_bytes: int = 0,
) -> float:
    """Seconds of one weight sync: each worker receives its share once, each learner sends an even part of the total.

    A worker puts each piece into place, and its sender cuts it out: work of their hosts, which does not overlap with itself.
    Where engines send on, to two others at most, they do so while they receive: each level of the trees adds one bucket.

    Args:
        sent_bytes: to the workers of one engine together.
        cuts: pieces of a tensor on learners; a worker's part consists of several where it is cut less finely.
        direct: `direct_engines`; None: all.
        bucket_bytes: most bytes in flight to a worker.
    """
    direct = infer.engines if direct is None else direct
    below = min(-(-(infer.engines - direct) // direct), 2)
    floors = math.floor(math.log2(-(-infer.engines // direct)))
    rate = hardware.link_bytes_s(hardware.num_gpus)
    received, sent = sent_bytes / infer.workers, sent_bytes * direct / learners
    pieces = worker_pieces(shape, infer) * max(cuts // infer.tensor, 1)
    host = max(pieces * (1 + below), pieces * infer.workers * direct / learners) * hardware.assumed.piece_us * 1e-6
    first = floors * below * min(bucket_bytes, received) / rate
    return max(received * max(below, 1), sent) / rate + first + host

"""The time of a weight sync: bytes over the network, and the host time of each piece."""

from __future__ import annotations

from mgrpo.layout import InferLayout
from mgrpo.models.shape import ModelShape
from mgrpo.planner.engines.engine_memory import worker_pieces
from mgrpo.planner.hardware import Hardware


def sync_seconds(
    sent_bytes: float, shape: ModelShape, infer: InferLayout, *, learners: int, cuts: int, hardware: Hardware
) -> float:
    """Seconds of one weight sync: each worker receives its share once, each learner sends an even part of the total.

    A worker puts each piece into place, and a learner cuts it out: work of their hosts, which does not overlap with itself.

    Args:
        sent_bytes: to the workers of one engine together.
        cuts: pieces of a tensor on learners, of which a worker's part consists where it is not cut as finely itself.
    """
    rate = hardware.link_bytes_s(hardware.num_gpus)
    received, sent = sent_bytes / infer.workers, sent_bytes * infer.engines / learners
    pieces = worker_pieces(shape, infer) * max(cuts // infer.tensor, 1)
    host = max(pieces, pieces * infer.workers * infer.engines / learners) * hardware.assumed.piece_us * 1e-6
    return max(received, sent) / rate + host

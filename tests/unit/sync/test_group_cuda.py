"""A transfer group that sends to itself: on one GPU every line of NCCL's path, and the same on the CPU over gloo."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgrpo.models.placement.boxes import Box
from mgrpo.sync.group import ProcessGroup, join_group
from mgrpo.sync.live import LiveBoxes, WeightMessage

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
SIZE = 1 << 20
CYCLES = 30_000_000_000
"""Of a GPU's clock: some 15 s."""


class ToItself:
    """A group whose every message goes to itself: what is sent comes back into `received`, what is received is `sent`.

    NCCL does that in a group of one, if both are in one round; gloo needs a second member, which this holds as well.
    """

    def __init__(self, groups: Sequence[Any], received: torch.Tensor, sent: torch.Tensor) -> None:
        self.groups, self.received, self.sent = groups, received, sent
        self.supports_coalescing = groups[0].supports_coalescing
        if self.supports_coalescing:
            self._start_coalescing, self._end_coalescing = groups[0]._start_coalescing, groups[0]._end_coalescing
        self.abort = groups[0].abort
        self.other_ends: list[dist.Work] = []

    def send(self, buckets: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Torch's."""
        work = self.groups[0].send(buckets, len(self.groups) - 1, tag)
        self.other_ends.append(self.groups[-1].recv([self.received], 0, tag))
        return work

    def recv(self, buckets: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Torch's."""
        self.other_ends.append(self.groups[-1].send([self.sent], 0, tag))
        return self.groups[0].recv(buckets, len(self.groups) - 1, tag)


def lost(peers: Sequence[int], err: Exception) -> Exception:
    return RuntimeError(f"waited for {peers}: {err}")


def join(device: torch.device, timeout_s: float) -> tuple[ProcessGroup, list[Any]]:
    """A group of one, or of two on the CPU, and its backends."""
    store, size = dist.HashStore(), 1 if device.type == "cuda" else 2

    def member(rank: int) -> ProcessGroup:
        return join_group(
            store, rank=rank, size=size, dtype=torch.bfloat16, device=device, host="127.0.0.1", timeout_s=timeout_s
        )

    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(member, range(size)))
    return groups[0], [group.backend for group in groups]


def message(values: torch.Tensor) -> WeightMessage:
    box = Box("weight", (0,), (values.numel(),))
    return WeightMessage(LiveBoxes([(box, values)], values.dtype), [box])


@pytest.mark.parametrize("device_type", DEVICES)
def test_what_is_sent_arrives_with_two_rounds_under_way(device_type: str) -> None:
    """The first messages over NCCL that anybody sees; wrong order of streams, or a bucket freed too early, shows here."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    group, backends = join(device, 30)
    weights, target = torch.randn(SIZE, device=device), torch.zeros(SIZE, device=device, dtype=torch.bfloat16)
    received = torch.zeros(SIZE, device=device, dtype=torch.bfloat16)
    group.backend = ToItself(backends, received, sent=torch.randn(SIZE, device=device).bfloat16())
    for _ in range(3):
        # Long work on this stream: the messages must wait for it.
        weights.normal_()
        group.backend.sent.normal_()
        first = group.send({0: message(weights)}, lost=lost)
        second = group.recv({0: message(target)}, lost=lost)
        first.settle()
        second.settle()
        # Inside of a round NCCL has no work of its own for each message.
        for work in filter(None, group.backend.other_ends):
            work.wait()
        group.backend.other_ends.clear()
        assert torch.equal(received, weights.bfloat16())
        assert torch.equal(target, group.backend.sent)
    group.close()


def give_up(device_type: str) -> None:
    """A process of its own: it gives up a message that does not come, and goes on."""
    device, timeout_s = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu"), 1
    group, backends = join(device, timeout_s)
    into = torch.zeros(SIZE, device=device, dtype=torch.bfloat16)
    if device_type == "cuda":
        # NCCL refuses to receive from itself what it does not send; its stream waits for this one, so nothing begins.
        group.backend = ToItself(backends, into.clone(), sent=into.clone())
        # The first message makes NCCL's connections, which waits for all that the device has to do.
        group.recv({len(backends) - 1: message(into)}, lost=lost).settle()
        torch.cuda._sleep(CYCLES)
    round_ = group.recv({len(backends) - 1: message(into)}, lost=lost)
    try:
        round_.settle()
    except RuntimeError as err:
        assert "waited for" in str(err), err
        assert device_type == "cpu" or "no answer" in str(err), err
    else:
        raise AssertionError("it has arrived")
    group.close()
    del group, backends, round_
    # Beyond all limits after which a watchdog would end the process.
    time.sleep(4 * timeout_s)
    assert torch.ones(2, device=device).sum().item() == 2
    test_what_is_sent_arrives_with_two_rounds_under_way(device_type)


@pytest.mark.parametrize("device_type", DEVICES)
def test_a_message_that_does_not_come_is_given_up_and_the_process_lives(device_type: str) -> None:
    """An engine that hangs must not end its learners, and their GPUs must be usable afterwards."""
    child = multiprocessing.get_context("spawn").Process(target=give_up, args=(device_type,))
    child.start()
    child.join(120)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0

"""The weight sync between two processes: on one GPU, which NCCL refuses, and the same on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

import pytest
import torch
import torch.distributed as dist

from mgrpo.sync.channel import Sender
from mgrpo.sync.group import open_store
from mgrpo.sync.shared import SharedMemory
from tests.unit.sync import ends

DEVICES = [
    ("cpu", "cpu"),
    pytest.param(
        ("cuda:0", "cuda:0"),
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
    pytest.param(
        ("cuda:0", "cuda:1"),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
        ],
    ),
]
"""Of the learner and of the worker; colocated engines with several workers have learners that reach into other GPUs."""
VERSIONS = 4


@dataclass
class Pair:
    """A learner here and the only worker, in a process of its own."""

    sender: Sender
    worker: SpawnProcess
    tensors: dict[str, torch.Tensor]
    store: dist.Store


@pytest.fixture(params=DEVICES)
def connected(request: pytest.FixtureRequest) -> Iterator[Pair]:
    own, other = request.param
    store, port = open_store(ends.HOST, 60)
    model, train, infer = ends.small()
    tensors = {name: t.to(own) for name, t in ends.whole(model, torch.float32, seed=0).items()}
    settings = ends.settings(port, share_gpus=True, dtype=torch.bfloat16)
    sender = ends.make_senders(model, train, infer, tensors, **settings)[0]
    worker = multiprocessing.get_context("spawn").Process(
        target=ends.receive_from_learner, args=(port, VERSIONS, other)
    )
    worker.start()
    assert sender.join({0: 0}) == {}
    yield Pair(sender, worker, tensors, store)
    sender.close()
    store.set("done", "1")
    worker.join(30)
    if worker.is_alive():
        worker.kill()


def test_a_worker_that_shares_memory_holds_the_learners_weights_bit_for_bit(connected: Pair) -> None:
    """A slot that is read before the copy into it has ended gives the engine parts of older weights."""
    sender = connected.sender
    assert type(sender.channels[0].transport) is SharedMemory
    assert ends.sent_bytes(sender) == sum(tensor.numel() for tensor in connected.tensors.values()) * 2
    for version in range(VERSIONS):
        for tensor in connected.tensors.values():
            # Long work on this stream before the message: the copy must wait for it.
            tensor.normal_(std=version + 1)
        assert sender.send(version, [0]) == {}
        sender.compare(version, sender.digests(), {0: 0})
    with pytest.raises(RuntimeError, match="does not hold the trainer's weights"):
        sender.compare(VERSIONS, sender.digests() + 1, {0: 0})
    connected.store.set("done", "1")
    connected.worker.join(30)
    assert connected.worker.exitcode == 0


def test_a_worker_that_is_killed_is_named_and_the_learner_goes_on_without_it(connected: Pair) -> None:
    """The learner has mapped memory of a process that is gone: it must neither hang nor lose its own context."""
    sender, worker = connected.sender, connected.worker
    assert sender.send(0, [0]) == {}
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    failures = sender.send(1, [0])
    assert re.search(r"could not send bucket \d+ to worker 0 of engine 0 .* it has ended", failures[0])
    assert sender.send(2, [0]) == {}
    total = torch.stack([tensor.double().sum() for tensor in connected.tensors.values()]).sum()
    assert torch.isfinite(total)

"""The weight sync between two processes on one GPU, which NCCL refuses."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch

from mgrpo.sync.group import open_store
from mgrpo.sync.shared import SharedMemory
from tests.unit.sync import ends

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VERSIONS = 4


@pytest.fixture
def connected(monkeypatch):
    """A sender on the GPU whose worker is another process on it, and that process."""
    store, port = open_store(ends.HOST, 60)
    model, train, infer = ends.small()
    tensors = {name: t.cuda() for name, t in ends.whole(model, torch.float32, seed=0).items()}
    settings = ends.settings(port, share_gpus=True, dtype=torch.bfloat16)
    sender = ends.make_senders(model, train, infer, tensors, **settings)[0]
    worker = multiprocessing.get_context("spawn").Process(target=ends.receive_on_gpu, args=(port, VERSIONS))
    worker.start()
    sender.join()
    yield sender, worker, tensors, store
    sender.close()
    store.set("done", "1")
    worker.join(30)
    if worker.is_alive():
        worker.kill()


def test_a_worker_on_the_learners_gpu_holds_its_weights_bit_for_bit(connected):
    """A slot that is read before the copy into it has ended gives the engine parts of older weights."""
    sender, worker, tensors, store = connected
    assert type(sender.channels[0].transport) is SharedMemory
    num_bytes = sum(tensor.numel() for tensor in tensors.values()) * 2
    for version in range(VERSIONS):
        for tensor in tensors.values():
            # Long work on this stream before the message: the copy must wait for it.
            tensor.normal_(std=version + 1)
        assert sender.send(version) == num_bytes
        sender.compare(version, sender.digests())
    with pytest.raises(RuntimeError, match="does not hold the trainer's weights"):
        sender.compare(VERSIONS - 1, sender.digests() + 1)
    store.set("done", "1")
    worker.join(30)
    assert worker.exitcode == 0


def test_a_worker_that_is_killed_is_named_and_the_learner_goes_on_without_it(connected):
    """The learner has mapped memory of a process that is gone: it must neither hang nor lose its own context."""
    sender, worker, tensors, _ = connected
    sender.send(0)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    with pytest.raises(RuntimeError, match=r"could not send bucket \d+ to worker 0 of engine 0 .* it has ended"):
        sender.send(1)
    total = sum(tensor.double().sum() for tensor in tensors.values())
    assert torch.isfinite(total)

"""The sync of learners and engines that share the devices of several nodes, over sockets of one machine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.box_table import HeldBoxes
from mgrpo.models.table import training_boxes
from mgrpo.sync.group import ProcessGroup, connect_store, open_store
from mgrpo.sync.nodes.nodes_sender import NodesSender
from mgrpo.sync.shared import SharedMemory
from tests.unit.models.test_table import MODELS
from tests.unit.sync.ends import HOST, make_receiver, settings, sharded_holdings, view, whole

CASES = {
    "halves": ("qwen3", Layout(world_size=2, tensor=2), InferLayout(engines=2), 1, torch.bfloat16),
    "stages": ("gemma2-tied", Layout(world_size=4, pipeline=2), InferLayout(engines=2, tensor=2), 2, torch.float32),
    "experts": ("mixtral", Layout(world_size=4, expert=4), InferLayout(engines=4), 2, torch.bfloat16),
    "masters": ("qwen3", Layout(world_size=4, zero_stage=3), InferLayout(engines=4), 2, torch.bfloat16),
    "replicas": ("qwen2-tied", Layout(world_size=2), InferLayout(engines=2), 1, torch.float32),
    "float32 beside bfloat16": ("glm4_moe", Layout(world_size=2, expert=2), InferLayout(engines=2), 1, torch.bfloat16),
}


class Run:
    """Learners and workers, each in a thread."""

    def __init__(self, case: str) -> None:
        name, self.train, self.infer, self.a_node, self.dtype = CASES[case]
        self.model = shape_of(MODELS[name])
        is_sharded = self.train.zero_stage > 1
        self.tensors = whole(self.model, torch.float32 if is_sharded else self.dtype, seed=0)
        self.held = sharded_holdings(self.model, self.train) if is_sharded else training_boxes(self.model, self.train)
        self.store, self.port = open_store(HOST, 20)
        self.size = self.train.world_size
        self.meeting = threading.Barrier(2 * self.size)
        self.senders: list[NodesSender] = []

    def sender(self, rank: int) -> NodesSender:
        return NodesSender(
            [(box, view(self.tensors, box)) for box in self.held[rank]],
            nodes=[each // self.a_node for each in range(self.size)],
            holdings=HeldBoxes.of(self.held),
            model=self.model,
            train_layout=self.train,
            infer_layout=self.infer,
            rank=rank,
            store=connect_store(HOST, self.port, 20),
            host=HOST,
            **settings(self.port, dtype=self.dtype, timeout_s=20, share_gpus=True),
        )


@pytest.mark.parametrize("case", CASES)
def test_every_worker_holds_the_trainers_weights_and_none_meets_a_learner_of_another_node(case):
    """What a round brings and the next one overwrites must not be what an engine samples with."""
    run = Run(case)

    def learn(rank: int) -> torch.Tensor:
        sender = run.sender(rank)
        run.senders.append(sender)
        run.meeting.wait(20)
        assert sender.join(dict.fromkeys(range(run.infer.engines), 0)) == {}
        assert sender.send(1, range(run.infer.engines)) == {}
        run.meeting.wait(20)
        if rank == 0:
            for values in run.tensors.values():
                values.mul_(2)
        run.meeting.wait(20)
        assert sender.send(2, range(run.infer.engines)) == {}
        assert sender.relay.brought == {}
        run.meeting.wait(20)
        return sender.digests()

    def sample(worker: int) -> tuple[Any, Any]:
        run.meeting.wait(20)
        live, receiver = make_receiver(run.model, run.infer, worker, run.dtype, run.senders[0])
        receiver.receive(1)
        run.meeting.wait(20)
        run.meeting.wait(20)
        receiver.receive(2)
        receiver.report_digests(2)
        run.meeting.wait(20)
        assert isinstance(receiver.channel.transport, SharedMemory)
        return live, [name for name in receiver.channel.names if name.startswith("training rank")]

    with ThreadPoolExecutor(2 * run.size) as threads:
        learners = [threads.submit(learn, rank) for rank in range(run.size)]
        workers = [threads.submit(sample, worker) for worker in range(run.size)]
        truth = sum(learner.result(60) for learner in learners)
        for number, worker in enumerate(workers):
            live, names = worker.result(60)
            for box, values in live:
                assert torch.equal(values, view(run.tensors, box).to(values.dtype)), box
            node = number // run.a_node
            assert set(names) <= {f"training rank {node * run.a_node + place}" for place in range(run.a_node)}
    sender = run.senders[0]
    sender.compare(2, truth, dict.fromkeys(range(run.infer.engines), 0))
    assert isinstance(sender.relay._group, ProcessGroup)
    has_rounds = any(sender.routes.network_bytes(node) for node in sender.routes.ranks)
    assert has_rounds == (case != "replicas")
    assert all(sender.relay.num_rounds > 2 for sender in run.senders if sender.routes.received(sender.rank))


def test_an_engine_that_has_gone_keeps_no_other_from_its_weights():
    """Nor a node whose engines are all gone the other nodes: its learners still send what only they hold."""
    run = Run("halves")

    def learn(rank: int) -> dict[int, str]:
        sender = run.sender(rank)
        run.senders.append(sender)
        run.meeting.wait(20)
        assert sender.join({0: 0, 1: 0}) == {}
        run.meeting.wait(20)
        return sender.send(1, [0, 1])

    def sample(worker: int) -> Any:
        run.meeting.wait(20)
        live, receiver = make_receiver(run.model, run.infer, worker, run.dtype, run.senders[0])
        if worker == 0:
            receiver.close()
        run.meeting.wait(20)
        if worker == 1:
            receiver.receive(1)
        return live

    with ThreadPoolExecutor(4) as threads:
        learners = [threads.submit(learn, rank) for rank in range(2)]
        _, kept = [threads.submit(sample, worker) for worker in range(2)]
        lost, none = (learner.result(60) for learner in learners)
        assert list(lost) == [0] and "could not send bucket 0 to worker 0 of engine 0" in lost[0]
        assert none == {}
        for box, values in kept.result(60):
            assert torch.equal(values, view(run.tensors, box).to(values.dtype)), box

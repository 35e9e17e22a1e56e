"""Engines that fail during a sync over NCCL, with a stand-in for torch's group: no test has seen the real one fail."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.sync import channel
from mgrpo.sync.group import BLOCKING_WAIT, open_store
from tests.unit.models.test_table import MODELS
from tests.unit.sync.ends import HOST, make_receiver, make_senders, settings, view, whole
from tests.unit.sync.nccl import Nccl, State, meet_over

ENGINES, LEARNERS, LOST = 4, 2, 2
NAME = f"worker 0 of engine {LOST}"


class Fleet:
    """Two learners and four engines in threads, each with GPUs of its own as far as they can tell."""

    def __init__(self, patch: pytest.MonkeyPatch, state: State, *, timeout_s: float) -> None:
        self.groups: list[Nccl] = []
        self.begun: dict[str, list[tuple[str, int]]] = {}
        patch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
        patch.setattr(channel, "meet", meet_over(state, self.groups, self.begun))
        model, train, self.infer = (
            shape_of(MODELS["qwen3"]),
            Layout(world_size=LEARNERS, tensor=2),
            InferLayout(engines=ENGINES),
        )
        self.model, self.tensors = model, whole(model, torch.bfloat16, seed=0)
        self._store, port = open_store(HOST, 60)
        own = settings(port, dtype=torch.bfloat16, bucket_bytes=1 << 16, timeout_s=timeout_s)
        self.senders = make_senders(model, train, self.infer, self.tensors, **own)
        for sender in self.senders:
            sender.live.device = torch.device("cuda")  # no thread for each engine

    def sync(self, *, joins: bool, without: int | None = None) -> tuple[list[dict[int, str]], dict[int, Any]]:
        """The failures that each learner finds, and what each worker holds, or why it has failed; one takes no part."""
        seats = {engine: 0 for engine in range(ENGINES) if joins or engine != without}
        with ThreadPoolExecutor(ENGINES + LEARNERS) as threads:
            if joins:
                self.ends = dict(enumerate(threads.map(self._receiver, range(ENGINES))))
            workers = {engine: threads.submit(self._receive, engine) for engine in seats if engine != without}

            def send(sender: channel.Sender) -> dict[int, str]:
                return (sender.join(seats) if joins else {}) | sender.send(1, seats)

            failures = list(threads.map(send, self.senders))
            return failures, {engine: worker.result() for engine, worker in workers.items()}

    def _receiver(self, worker: int) -> Any:
        return make_receiver(self.model, self.infer, worker, torch.bfloat16, self.senders[0])

    def _receive(self, engine: int) -> Any:
        live, receiver = self.ends[engine]
        receiver.receive(1)
        return live

    def num_rounds(self, group: Nccl) -> int:
        """That this end of a transfer group sends in a sync."""
        return len(self.senders[group.rank].channels[int(group.name[-1])].rounds)

    def hold(self, held: dict[int, Any]) -> bool:
        """Whether these engines have the learners' weights."""
        return all(torch.equal(values, view(self.tensors, box)) for live in held.values() for box, values in live)


@pytest.mark.parametrize("at", [0, 2, -1], ids=["early", "between rounds", "late"])
def test_an_engine_that_fails_is_given_up_before_the_others_are_done(monkeypatch, at: int) -> None:
    """While a rank waits for one engine after the other, nobody sees that another one has died."""
    fleet: Fleet

    def state(group: Nccl, number: int) -> Literal["goes", "taken", "waits", "fails"]:
        begins = at % fleet.num_rounds(group)
        if group.name == NAME:
            return "fails" if number >= begins else "taken"
        (lost,) = (each for each in fleet.groups if (each.name, each.rank) == (NAME, group.rank))
        return "goes" if number < begins or lost.is_aborted else "waits"

    fleet = Fleet(monkeypatch, state, timeout_s=20)
    failures, held = fleet.sync(joins=True, without=LOST)
    for rank, found in enumerate(failures):
        assert found.keys() == {LOST}
        said = rf"weight sync 1: training rank {rank} could not send bucket \d+ to {NAME} within .*: NCCL error"
        assert re.match(said, found[LOST])
    assert fleet.hold(held)
    assert {group.name for group in fleet.groups if group.is_aborted} == {NAME}
    # The run goes on: the same groups take the next weights.
    for tensor in fleet.tensors.values():
        tensor.neg_()
    failures, held = fleet.sync(joins=False, without=LOST)
    assert failures == [{}, {}] and fleet.hold(held)


def test_an_engine_that_hangs_is_given_up_in_time_for_the_others(monkeypatch) -> None:
    """Their workers have waited nearly as long as the learners when the one that hangs is given up."""

    def state(group: Nccl, number: int) -> Literal["goes", "waits"]:
        return "waits" if group.name == NAME else "goes"

    fleet = Fleet(monkeypatch, state, timeout_s=6)
    failures, held = fleet.sync(joins=True, without=LOST)
    for rank, found in enumerate(failures):
        assert found.keys() == {LOST}
        said = rf"weight sync 1: training rank {rank} could not send bucket 0 to {NAME} within .*=6 s: no answer"
        assert re.match(said, found[LOST])
    assert fleet.hold(held)


def test_all_learners_begin_the_rounds_in_one_order(monkeypatch) -> None:
    """With two orders each of two learners would wait for an engine that waits for the other one."""
    chance = random.Random(0)

    def state(group: Nccl, number: int) -> Literal["goes", "waits"]:
        return "goes" if chance.random() < (0.1 if group.name[-1] == str(group.rank) else 0.9) else "waits"

    fleet = Fleet(monkeypatch, state, timeout_s=60)
    failures, held = fleet.sync(joins=True)
    assert failures == [{}, {}] and fleet.hold(held)
    for rank in range(LEARNERS):
        begun = fleet.begun[f"training rank {rank}"]
        assert begun == sorted(begun, key=lambda each: (each[1], each[0]))
        assert len(begun) == sum(fleet.num_rounds(group) for group in fleet.groups if group.rank == rank) > 4 * ENGINES
    assert all(group.environment[BLOCKING_WAIT] == "1" for group in fleet.groups)

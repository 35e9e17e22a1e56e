"""Workers and learners that meet while one of them fails: the wait ends with that one's own error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.sync import joining, shared
from mgrpo.sync.channel import announce_failure, announced_failure
from mgrpo.sync.group import open_store
from mgrpo.sync.joining import meet_unless_failed
from mgrpo.sync.vllm_plugin.receiver import failure_announced
from tests.unit.models.test_table import MODELS
from tests.unit.sync.ends import HOST, make_receiver, make_senders, settings, whole

LONG_S = 600
"""The time limit of the waits: longer than a test may take."""


def senders(train: Layout, infer: InferLayout, port: int) -> tuple[Any, list[Any]]:
    model = shape_of(MODELS["qwen3"])
    own = settings(port, timeout_s=LONG_S)
    return model, make_senders(model, train, infer, whole(model, torch.float32, seed=0), **own)


def test_a_worker_that_fails_ends_the_wait_of_learners_and_of_the_engines_other_worker() -> None:
    """vLLM answers for an engine when all its workers have: the other one would be waited for, which waits itself."""
    _store, port = open_store(HOST, LONG_S)
    infer = InferLayout(tensor=2)
    model, (first, second) = senders(Layout(world_size=2, tensor=2), infer, port)
    invitation = first.invitation(0)

    def fail() -> None:
        with failure_announced(invitation, 1):
            raise ValueError("the engine does not hold lm_head in one piece")

    own = "worker 1 of engine 0 could not join the weight-transfer group: the engine does not hold lm_head in one piece"
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(sender.join, {0: 0}) for sender in (first, second)]
        other = threads.submit(make_receiver, model, infer, 0, torch.float32, first)
        with pytest.raises(ValueError, match="in one piece"):
            fail()
        assert [each.result() for each in waiting] == [{0: own}, {0: own}]
        with pytest.raises(RuntimeError) as error:
            other.result()
    assert str(error.value) == own


def test_a_worker_that_fails_after_all_have_come_ends_the_wait(monkeypatch) -> None:
    """A network interface that its node lacks is found when gloo connects: learners then wait inside of gloo."""
    _store, port = open_store(HOST, LONG_S)
    infer = InferLayout()
    model, (sender,) = senders(Layout(world_size=1), infer, port)
    monkeypatch.setattr(shared, "connect", lambda *args, **more: None)
    join = joining.join_group

    def join_or_fail(*args: Any, rank: int, **more: Any) -> Any:
        if rank == 1:
            raise ValueError("no interface eth9")
        return join(*args, rank=rank, **more | {"timeout_s": 60})

    monkeypatch.setattr(joining, "join_group", join_or_fail)

    def fail() -> None:
        with failure_announced(sender.invitation(0), 0):
            make_receiver(model, infer, 0, torch.float32, sender)

    with ThreadPoolExecutor(1) as threads:
        worker = threads.submit(fail)
        found = sender.join({0: 0})
        with pytest.raises(ValueError, match="no interface eth9"):
            worker.result()
    assert found == {0: "worker 0 of engine 0 could not join the weight-transfer group: no interface eth9"}


def test_a_learner_that_fails_ends_the_wait_of_all_others(monkeypatch) -> None:
    """The engine is lost for all learners then, and its worker waits for one that will not come."""
    _store, port = open_store(HOST, LONG_S)
    infer = InferLayout()
    model, (first, second) = senders(Layout(world_size=2, tensor=2), infer, port)

    def fail(*args: Any) -> None:
        raise RuntimeError("too many open files")

    monkeypatch.setattr(second, "_meet", fail)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(first.join, {0: 0})
        worker = threads.submit(make_receiver, model, infer, 0, torch.float32, first)
        assert second.join({0: 0}) == waiting.result() == {0: "too many open files"}
        with pytest.raises(RuntimeError, match="too many open files"):
            worker.result()


def test_the_first_reason_counts_and_only_for_its_start_of_the_engine() -> None:
    """What follows from a failure is announced as well; an engine that was started again has not failed."""
    _store, port = open_store(HOST, LONG_S)
    _, (sender,) = senders(Layout(world_size=1), InferLayout(), port)
    for reason in ("its disk is full", "worker 1 has left"):
        announce_failure(sender.store, (0, 1), reason)
    released = threading.Event()

    def read(seats: list[tuple[int, int]]) -> Callable[[], str]:
        return lambda: announced_failure(sender.store, seats)

    assert read([(0, 0), (0, 2), (1, 1)])() == ""
    with pytest.raises(RuntimeError, match=r"^its disk is full$"):
        meet_unless_failed(released.wait, read([(1, 0), (0, 1)]))
    released.set()


def test_a_transport_that_comes_too_late_is_closed() -> None:
    """Its other end would take the silence for a member that hangs."""
    released, closed = threading.Event(), threading.Event()

    class Late:
        def close(self) -> None:
            closed.set()

    def meet() -> Any:
        released.wait()
        return Late()

    with pytest.raises(RuntimeError, match=r"^it has failed$"):
        meet_unless_failed(meet, lambda: "it has failed")
    assert not closed.is_set()
    released.set()
    assert closed.wait(60)

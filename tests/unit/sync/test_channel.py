"""Both ends of the weight sync, in threads of one process, on each transport; recorded groups for what only NCCL does."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import hf_tensors, training_boxes
from mgrpo.processes import local_socket
from mgrpo.sync import channel, shared
from mgrpo.sync.channel import Sender
from mgrpo.sync.group import ProcessGroup, open_store
from mgrpo.sync.joining import SyncMembers
from mgrpo.sync.live import LiveBoxes
from mgrpo.sync.plan import plan
from mgrpo.sync.shared import Listener, SharedMemory
from tests.unit.models.test_table import MODELS
from tests.unit.sync.ends import (
    HOST,
    SHIPPED,
    die_after_messages,
    make_receiver,
    make_senders,
    sent_bytes,
    settings,
    sharded_holdings,
    shipped,
    small,
    view,
    whole,
)

CASES = {
    "replicas": ("qwen2-tied", Layout(world_size=2), InferLayout(engines=2), torch.float32),
    "one engine, two workers": ("mixtral", Layout(world_size=2, expert=2), InferLayout(tensor=2), torch.bfloat16),
    "stages": ("gemma2-tied", Layout(world_size=2, pipeline=2), InferLayout(engines=2), torch.float32),
    "an idle learner": ("llama-1kv", Layout(world_size=3), InferLayout(), torch.float32),
    "half precision": ("qwen3", Layout(world_size=2, tensor=2), InferLayout(), torch.float16),
    "float32 beside bfloat16": ("glm4_moe", Layout(world_size=2, expert=2), InferLayout(tensor=2), torch.bfloat16),
    "float32 beside masters": ("glm4_moe", Layout(world_size=2, zero_stage=3), InferLayout(), torch.bfloat16),
    "masters": ("qwen3", Layout(world_size=2, zero_stage=3), InferLayout(tensor=2), torch.bfloat16),
}


TRANSPORTS = {"shared memory": {SharedMemory}, "gloo": {ProcessGroup}, "both": {SharedMemory, ProcessGroup}}


@pytest.fixture(params=TRANSPORTS)
def transport(request, monkeypatch) -> str:
    """With gloo every worker, with both it and its first training rank seem to be on different machines."""
    connect, thread = shared.connect, threading.local()  # each meeting has a thread of its own

    def connect_elsewhere(address: str, **settings: Any) -> Any:
        is_first = not hasattr(thread, "has_connected")
        thread.has_connected = True
        return None if request.param == "gloo" or is_first else connect(address, **settings)

    if request.param != "shared memory":
        monkeypatch.setattr(shared, "connect", connect_elsewhere)
    return request.param


def kinds(transport: Any) -> set[type]:
    """What moves the weights."""
    return {type(each) for each in getattr(transport, "by_peer", {0: transport}).values()}


@pytest.mark.parametrize("case", CASES)
def test_every_worker_holds_the_trainers_weights_bit_for_bit(case, transport):
    """A slice in the wrong place, or a bucket that is overwritten on its way, trains on samples of another model."""
    name, train, infer, dtype = CASES[case]
    model = shape_of(MODELS[name])
    is_sharded = train.zero_stage > 1
    tensors = whole(model, torch.float32 if is_sharded else dtype, seed=0)
    _store, port = open_store(HOST, 20)
    senders = make_senders(
        model,
        train,
        infer,
        tensors,
        holdings=sharded_holdings(model, train) if is_sharded else None,
        dtype=dtype,
        port=port,
        bucket_bytes=1 << 12,
        timeout_s=20,
    )
    num_workers = infer.engines * infer.workers
    found: list[set[type]] = []

    def receive(worker: int) -> Any:
        live, receiver = make_receiver(model, infer, worker, dtype, senders[0])
        for version in (1, 2):
            receiver.receive(version)
            receiver.report_digests(version)
        found.append(kinds(receiver.channel.transport))
        return live

    def send(sender: Sender) -> tuple[int, torch.Tensor]:
        assert sender.join(dict.fromkeys(range(infer.engines), 0)) == {}
        assert sender.send(1, range(infer.engines)) == sender.send(2, range(infer.engines)) == {}
        return sent_bytes(sender), sender.digests()

    with ThreadPoolExecutor(num_workers + train.world_size) as threads:
        workers = [threads.submit(receive, worker) for worker in range(num_workers)]
        learners = [threads.submit(send, sender) for sender in senders]
        sent, digests = zip(*(learner.result(60) for learner in learners), strict=True)
        for worker in workers:
            for box, values in worker.result(60):
                assert torch.equal(values, view(tensors, box).to(values.dtype)), box
    has_second = (
        max(count for engine in range(infer.engines) for count in senders[0].plan.num_sources(engine)) > 1
    )  # a training rank that is not a worker's first
    assert set.union(*found) == (TRANSPORTS[transport] if has_second or transport != "both" else {ProcessGroup})
    assert sum(sent) == senders[0].plan.lower_bound
    truth = torch.stack(digests).sum(0)
    senders[0].compare(2, truth, dict.fromkeys(range(infer.engines), 0))
    truth[0, 1] += 1
    with pytest.raises(RuntimeError, match="worker 0 of engine 0 does not hold the trainer's weights; 1 of"):
        senders[0].compare(1, truth, dict.fromkeys(range(infer.engines), 0))


@dataclasses.dataclass
class Made:
    """A slice of twice a tensor, made when it is read."""

    weight: Callable[[], torch.Tensor]
    region: tuple[slice, ...]

    def __getitem__(self, region: tuple[slice, ...]) -> Made:
        pairs = zip(self.region, region, strict=True)
        return Made(self.weight, tuple(slice(a.start + b.start, a.start + b.stop) for a, b in pairs))


def test_weights_that_are_made_when_they_are_sent(transport):
    """A merged weight that is kept sends yesterday's; all of them at once need the memory of a second model."""
    model, train, infer = shape_of(MODELS["qwen3"]), Layout(world_size=1), InferLayout(tensor=2)
    tensors, alive, most = whole(model, torch.float32, seed=0), weakref.WeakSet(), []

    def make(tensor: torch.Tensor) -> torch.Tensor:
        memory = np.empty(tensor.shape, dtype=np.float32).view(Memory)
        alive.add(memory)
        most.append(len(alive))
        return torch.from_numpy(memory).copy_(2 * tensor)

    class Memory(np.ndarray):
        """An array that can be in a set."""

        __hash__ = object.__hash__

    _store, port = open_store(HOST, 20)
    (sender,) = make_senders(model, train, infer, tensors, **settings(port, timeout_s=20, bucket_bytes=1 << 14))
    held = [(box, view(tensors, box)) for box in training_boxes(model, train)[0]]
    makers = {name: partial(make, tensor) for name, tensor in tensors.items() if "proj" in name}
    sender.live = LiveBoxes(
        (
            (box, Made(makers[box.name], box.within(Box(box.name, (0, 0), hf_tensors(model)[box.name]))))
            if box.name in makers
            else (box, values)
            for box, values in held
        ),
        torch.float32,
    )

    def receive(worker: int) -> Any:
        live, receiver = make_receiver(model, infer, worker, torch.float32, sender)
        for version in (1, 2):
            receiver.receive(version)
            receiver.report_digests(version)
        return live

    with ThreadPoolExecutor(2) as threads:
        workers = [threads.submit(receive, worker) for worker in range(2)]
        assert sender.join({0: 0}) | sender.send(1, [0]) == {}
        for tensor in tensors.values():
            tensor.neg_()
        assert sender.send(2, [0]) == {}
        for worker in workers:
            for box, values in worker.result(60):
                assert torch.equal(values, (2 if box.name in makers else 1) * view(tensors, box)), box
    sender.compare(2, sender.digests(), {0: 0})
    # Those whose slices are copied, and the next.
    assert len(most) > len(makers) and max(most) <= 2
    assert not alive, "a weight was kept"


def test_a_member_that_does_not_come_is_named():
    """NCCL would wait for it without an end."""
    model, train, infer = shape_of(MODELS["qwen3"]), Layout(world_size=2), InferLayout()
    _store, port = open_store(HOST, 20)
    settings = {"dtype": torch.float32, "port": port, "bucket_bytes": 1 << 12, "timeout_s": 0.5}
    senders = make_senders(model, train, infer, whole(model, torch.float32, seed=0), **settings)
    (failure,) = senders[1].join({0: 0}).values()
    assert failure.startswith("training rank 1 waited for training rank 0, worker 0 of engine 0 to join")


def test_a_peer_that_is_silent_is_named(transport):
    """The run ends with the name of the process to look at."""
    model, train, infer = shape_of(MODELS["qwen3"]), Layout(world_size=2), InferLayout()
    _store, port = open_store(HOST, 20)
    settings = {"dtype": torch.float32, "port": port, "bucket_bytes": 1 << 12, "timeout_s": 2}
    senders = make_senders(model, train, infer, whole(model, torch.float32, seed=0), **settings)
    with ThreadPoolExecutor(4) as threads:
        worker = threads.submit(lambda: make_receiver(model, infer, 0, torch.float32, senders[0])[1])
        for learner in [threads.submit(sender.join, {0: 0}) for sender in senders]:
            learner.result(20)
        receiving = threads.submit(worker.result(20).receive, 7)
        sending = threads.submit(senders[0].send, 7, [0])
        with pytest.raises(RuntimeError, match=r"sync 7: worker 0 of engine 0 waited for bucket 0 of training rank 1"):
            receiving.result(20)
        failure = sending.result(20)[0]
        assert re.match(r"weight sync 7: training rank 0 could not send bucket \d+ to worker 0 of engine 0", failure)


@pytest.mark.parametrize("dying", ["learner", "worker"])
def test_a_peer_that_is_killed_is_named_at_once_and_nothing_is_left(dying):
    """It will never answer; waiting for the time-out would cost minutes, and what lay in /dev/shm would stay there."""
    _store, port = open_store(HOST, 60)
    model, train, infer = small()
    sender = make_senders(model, train, infer, whole(model, torch.float32, seed=0), **settings(port))[0]
    peer = multiprocessing.get_context("spawn").Process(target=die_after_messages, args=(dying, port, 3))
    peer.start()
    if dying == "learner":
        _, receiver = make_receiver(model, infer, 0, torch.float32, sender)
        with pytest.raises(RuntimeError, match=r"worker 0 of engine 0 waited for bucket 3 of training rank 0 .* ended"):
            receiver.receive(1)
    else:
        sender.join({0: 0})
        failure = sender.send(1, [0])[0]
        assert re.search(r"rank 0 could not send bucket \d+ to worker 0 of engine 0 within .* ended", failure)
    peer.join(20)
    assert peer.exitcode == -signal.SIGKILL
    assert not [name for name in os.listdir("/dev/shm") if "mgrpo" in name]


def test_an_engine_that_leaves_does_not_end_the_others():
    """The rest of a fleet goes on with the new weights."""
    model, train, infer = shape_of(MODELS["qwen3"]), Layout(world_size=1), InferLayout(engines=2)
    tensors = whole(model, torch.float32, seed=0)
    _store, port = open_store(HOST, 60)
    sender = make_senders(model, train, infer, tensors, **settings(port))[0]

    def receive(worker: int) -> Any:
        live, receiver = make_receiver(model, infer, worker, torch.float32, sender)
        if worker == 0:
            receiver.close()
        else:
            receiver.receive(1)
            receiver.receive(2)
        return live

    with ThreadPoolExecutor(2) as threads:
        workers = [threads.submit(receive, worker) for worker in range(2)]
        sender.join({0: 0, 1: 0})
        failures = sender.send(1, [0, 1])
        assert failures.keys() == {0} and "to worker 0 of engine 0 " in failures[0]
        assert sender.send(2, [0, 1]) == {}
        for box, values in workers[1].result(60):
            assert torch.equal(values, view(tensors, box)), box


def no_memory(monkeypatch) -> str:
    def allocate(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    return "[Errno 12] Cannot allocate memory"


def another_user(monkeypatch) -> str:
    """An engine that somebody else has started may be theirs."""
    connect, own = shared.connect, os.geteuid()
    monkeypatch.setattr(
        shared, "connect", lambda address, **more: connect(address.replace(f"-{own}-", f"-{own + 1}-"), **more)
    )
    return f"they run as users {own + 1} and {own}"


@pytest.mark.parametrize("fault", [no_memory, another_user])
def test_without_memory_to_share_the_weights_go_over_gloo_and_a_line_says_so(monkeypatch, capsys, fault):
    """The run is slower then, and the user can know why."""
    reason = fault(monkeypatch)
    model, train, infer = small()
    tensors = whole(model, torch.float32, seed=0)
    _store, port = open_store(HOST, 60)
    sender = make_senders(model, train, infer, tensors, **settings(port))[0]
    with ThreadPoolExecutor(1) as threads:
        worker = threads.submit(make_receiver, model, infer, 0, torch.float32, sender)
        sender.join({0: 0})
        live, receiver = worker.result(60)
        receiving = threads.submit(receiver.receive, 1)
        sender.send(1, [0])
        receiving.result(60)
    assert all(torch.equal(values, view(tensors, box)) for box, values in live)
    line = f"mgrpo: worker 0 of engine 0 cannot share memory with training rank 0: {reason}; "
    assert capsys.readouterr().err.splitlines() == [line + "these weights take the slower way over gloo"]


def test_processes_of_other_users_are_not_let_in(monkeypatch):
    """Every user of the machine can see the name of the socket."""
    listener, cpu = Listener(1), torch.device("cpu")
    link = shared.connect(listener.address, member=1, slot_bytes=8, dtype=torch.float32, device=cpu, timeout_s=5)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RuntimeError, match="no answer"):
        listener.accept({1: 8}, dtype=torch.float32, device=cpu, timeout_s=0.2)
    with pytest.raises(RuntimeError):
        link.take([torch.zeros(1)])


def test_a_worker_that_connects_and_dies_is_an_engine_that_has_failed():
    """Learners give an engine up for a RuntimeError, and end themselves for any other."""
    listener, cpu = Listener(1), torch.device("cpu")
    local_socket.connect(listener.address, timeout_s=5).close()
    with pytest.raises(RuntimeError, match="it has ended"):
        listener.accept({1: 8}, dtype=torch.float32, device=cpu, timeout_s=5)


class Transfer:
    """A round of a recorded group, which is over as soon as somebody asks."""

    def __init__(self, log: list[tuple], group: str, number: int) -> None:
        self.log, self.group, self.number = log, group, number

    def is_completed(self) -> bool:
        self.log.append(("arrived", self.group, self.number))
        return True

    def wait(self) -> None:
        self.log.append(("wait", self.group, self.number))


class RecordedGroup:
    """One member's end of a group that behaves like torch's NCCL backend towards its caller, and only takes notes."""

    supports_coalescing = True

    def __init__(self, log: list[tuple], name: str, members: list[str]) -> None:
        self.log, self.name, self.members = log, name, members
        self.num_rounds = self.most_buckets = 0
        self.buckets: list[weakref.ref] = []

    def _start_coalescing(self) -> None:
        self.messages: list[tuple[str, str, int]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._message("send", tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._message("recv", tensors[0], peer)

    def _message(self, kind: str, bucket: torch.Tensor, peer: int) -> None:
        self.messages.append((kind, self.members[peer], bucket.numel()))
        self.buckets.append(weakref.ref(bucket))

    def _end_coalescing(self) -> Transfer:
        self.buckets = [bucket for bucket in self.buckets if bucket() is not None]
        self.most_buckets = max(self.most_buckets, len(self.buckets))
        self.log.append(("begin", self.name, self.num_rounds, self.messages))
        self.num_rounds += 1
        return Transfer(self.log, self.name, self.num_rounds - 1)


@pytest.fixture(scope="module", params=SHIPPED)
def recorded(request) -> tuple[dict[str, list[tuple]], list[RecordedGroup]]:
    """What each process of a shipped configuration does in a sync of four layers, on tensors without values."""
    model, train, infer = shipped(request.param)
    model = dataclasses.replace(model, num_layers=4)
    made = plan(model, train, infer)
    logs: dict[str, list[tuple]] = {}
    groups: list[RecordedGroup] = []
    _store, port = open_store(HOST, 60)

    def meet(store: Any, members: SyncMembers, *, dtype: Any, device: Any, timeout_s: float, host: str) -> ProcessGroup:
        log = logs.setdefault(members.names[members.rank], [])
        groups.append(RecordedGroup(log, members.names[-1], members.names))
        return ProcessGroup(groups[-1], dtype=dtype, device=device, timeout_s=timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "plan", lambda *args, **kwargs: made)  # once for all ranks
        patch.setattr(channel, "meet", meet)
        settings = {"dtype": torch.bfloat16, "port": port, "bucket_bytes": 64 << 20, "timeout_s": 60}
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in hf_tensors(model).items()
        }
        senders = make_senders(model, train, infer, tensors, **settings)
        for sender in senders:
            assert not sender.join(dict.fromkeys(range(infer.engines), 0)) | sender.send(1, range(infer.engines))
        for worker in range(infer.engines * infer.workers):
            make_receiver(model, infer, worker, torch.bfloat16, senders[0], "meta")[1].receive(1)
    return logs, groups


def test_both_ends_agree_and_wait_for_each_other_in_no_circle(recorded):
    """Rounds on the device take their turn, and one that has no partner yet holds up all that follow."""
    logs, _ = recorded
    todo = {
        me: [(group, messages) for kind, group, _, *rest in log if kind == "begin" for messages in rest]
        for me, log in logs.items()
    }
    done = dict.fromkeys(todo, 0)
    offers: dict[tuple[str, str, str, str], list[int]] = {}
    has_offered = dict.fromkeys(todo, -1)

    def ends(me: str, group: str, kind: str, peer: str) -> list[list[int]]:
        pair = (me, peer) if kind == "send" else (peer, me)
        return [offers.setdefault((group, *pair, end), []) for end in (kind, "recv" if kind == "send" else "send")]

    is_moving = True
    while is_moving:
        is_moving = False
        for me, rounds in todo.items():
            while done[me] < len(rounds):
                group, messages = rounds[done[me]]
                pairs = [ends(me, group, kind, peer) for kind, peer, _ in messages]
                if has_offered[me] < done[me]:
                    for (own, _), (_, _, size) in zip(pairs, messages, strict=True):
                        own.append(size)
                    has_offered[me] = done[me]
                    is_moving = True
                if any(len(other) < len(own) for own, other in pairs):
                    break
                assert all(other[len(own) - 1] == own[-1] for own, other in pairs), (me, group, messages)
                done[me] += 1
                is_moving = True
    assert all(done[me] == len(rounds) > 0 for me, rounds in todo.items()), "a circle"


def test_the_host_waits_for_the_round_before_the_last_and_at_most_two_are_held(recorded):
    """A `wait` for what has not arrived would block the host; rounds without a limit need memory for the whole model."""
    logs, groups = recorded
    for log in logs.values():
        steps = [entry[:3] for entry in log]
        for kind, group, number in steps:
            if kind == "begin":
                arrived, written = steps.index(("arrived", group, number)), steps.index(("wait", group, number))
                assert arrived < written
                if number > 1:
                    assert steps.index(("wait", group, number - 2)) < steps.index(("begin", group, number))
    for group in groups:
        widest = max(len(entry[3]) for entry in group.log if entry[:2] == ("begin", group.name))
        assert group.most_buckets <= 2 * widest

"""An engine worker's end of the weight sync: what it receives it writes into its live weights, and sends on to other engines.

It goes through the rounds of `mgrpo.sync.sending.rounds.rounds`, and writes the last one while one is under way. Other engines read
its live weights: what has arrived stays as it is until the next sync, so that none of them holds up what it receives. On CUDA its
answer to rank 0 waits for what it sends as well (`transfer_engine`): one that takes nothing delays that until it is given up.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mgrpo.models.adapters import sent_tensors
from mgrpo.models.placement.box_table import COLUMNS, Tensors, unpacked
from mgrpo.models.placement.boxes import Box
from mgrpo.models.placement.mlp_rows import is_frozen
from mgrpo.models.shape import ModelShape
from mgrpo.processes.background import Background
from mgrpo.sync.channel import (
    DIGEST,
    Channel,
    announce_failure,
    announced_failure,
    digest_key,
    group_name,
    invited_lora,
    member_names,
    proven_tensors,
    relay_name,
    unserved_key,
)
from mgrpo.sync.delivery import Delivery, deliver
from mgrpo.sync.group import another_connection, connect_store
from mgrpo.sync.live import Held, LiveBoxes
from mgrpo.sync.sending.digest import digests
from mgrpo.sync.sending.float32_units import shapes_in_units, views_in_units
from mgrpo.sync.sending.rounds import messages, rounds
from mgrpo.sync.sending.seating import Link
from mgrpo.sync.shared import BUCKET_BYTES
from mgrpo.sync.transport import Round

PATIENCE = 0.25
"""The part of `timeout_s` that engines wait for each other: rank 0 waits `timeout_s` for one to say that it has got nothing. (A
group receives for twice as long on CUDA.)"""
ANNOUNCE_S = 5.0
"""Seconds for the connection over which a worker announces that it cannot join."""


class Arrived:
    """How much has arrived, for the threads that send it on."""

    def __init__(self) -> None:
        self._count = 0
        self._has_failed = False
        self._changed = threading.Condition()

    def tell(self, count: int) -> None:
        """So many messages have arrived."""
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def fail(self) -> None:
        """No more will arrive."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until so many have arrived.

        Raises:
            RuntimeError: they never will.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed or self._count >= count)
            if self._count < count:
                raise RuntimeError("the weights have not arrived")


class OnwardLink:
    """A worker's transfer to the same worker of another engine, in a thread: what this one receives does not wait for it.

    Args:
        meet: returns the channel, once the other end is there.
    """

    def __init__(self, meet: Callable[[], Channel]) -> None:
        self._thread = Background("weights sent on")
        self._channel = self._thread.submit(meet)

    def forward(self, arrived: Arrived, stream: torch.Stream | None) -> None:
        """Begin to send on what arrives; an engine that fails is given up.

        Args:
            stream: in whose order the weights are written, on CUDA.
        """
        self._thread.submit(partial(self._forward, arrived, stream))

    def _forward(self, arrived: Arrived, stream: torch.Stream | None) -> None:
        channel = self._channel.result()
        if not channel.is_open:
            return
        if stream is not None:
            torch.accelerator.set_stream(stream)

        def begin(number: int) -> Round:
            arrived.wait(number + 1)
            return channel.transport.send(channel.rounds[number], lost=lambda _, err: RuntimeError(str(err)))

        deliver({0: Delivery(begin, len(channel.rounds))}, lambda *_: channel.close())

    def close(self) -> None:
        """Leave the transfer, after what is under way."""
        self._thread.submit(lambda: self._channel.result().close())
        self._thread.close()


def _close(source: Future[Channel]) -> None:
    if source.exception() is None:
        source.result().close()


@contextlib.contextmanager
def failure_announced(invitation: Mapping[str, Any], worker: int) -> Iterator[None]:
    """Announce a failure within the block: the learners and the engine's other workers wait for this one."""
    try:
        yield
    except Exception as err:
        reason = f"worker {worker} of engine {invitation['engine']} could not join the weight-transfer group: {err}"
        # Without a store the engine's answer is left to say it.
        with contextlib.suppress(RuntimeError):
            store = connect_store(invitation["host"], invitation["port"], ANNOUNCE_S)
            announce_failure(store, (invitation["engine"], invitation["generation"]), reason)
        raise


def joined(earlier: Receiver | None, invitation: Mapping[str, Any], make: Callable[[], Receiver]) -> Receiver:
    """The receiver that takes up an invitation: the earlier one if it has that seat already, or a new one after that has left."""
    if earlier is not None:
        if earlier.is_seat(invitation):
            earlier.follow(invitation["followers"])
            return earlier
        earlier.close()
    return make()


class Receiver:
    """An engine worker's end: every slice is written in place into the live weights.

    Args:
        targets: every box the worker holds with the live view to write to.
        loaded: those of what it has loaded by itself, which only digests read.
        worker: number of the worker in its engine.
        invitation: of `mgrpo.sync.channel.Sender.invitation`.
    """

    def __init__(self, targets: Held, *, loaded: Held = (), worker: int, invitation: dict[str, Any]) -> None:
        targets, loaded = list(targets), list(loaded)
        dtype = next(view.dtype for box, view in (*targets, *loaded) if not is_frozen(box.name))
        self.live, self.loaded = LiveBoxes(targets, dtype), list(views_in_units(loaded, dtype))
        self.model, self.lora = ModelShape.from_dict(invitation["model"]), invited_lora(invitation)
        self.engine, self.generation, self.worker = invitation["engine"], invitation["generation"], worker
        self.place = (invitation["host"], invitation["port"])
        """Host and port of the store, which is there as long as the run is."""
        self.timeout_s = invitation["timeout_s"]
        self.learners: list[int] = invitation["learners"]
        self.upstream: Link | None = invitation["upstream"] and tuple(invitation["upstream"])
        stages = self._incoming(invitation)
        self._check_targets(stages)
        self.store = connect_store(invitation["host"], invitation["port"], self.timeout_s)
        cut = partial(messages, itemsize=self.live.dtype.itemsize, bucket_bytes=invitation["bucket_bytes"])
        cuts = [{source: partial(cut, boxes, len(stage)) for source, boxes in stage.items()} for stage in stages]
        # What is sent on is cut alike in all engines, however it has come into the first.
        limit = BUCKET_BYTES if self.live.device.type == "cpu" else None
        queues = (rounds({source: each(limit=limit) for source, each in stage.items()}) for stage in cuts)
        self._sent_on = [each for queue in queues for round_ in queue for each in round_.items()]
        self._open = partial(
            Channel,
            self.live,
            dtype=self.live.dtype,
            host=invitation["host"],
            share_gpus=invitation["share_gpus"],
        )
        self._source: Future[Channel] = Future()
        """To where weights come from."""
        self.relays: dict[Link, OnwardLink] = {}
        """By the engines that get their weights from this one."""
        if self.upstream is not None:
            # The engine above may come late, or never: that is seen when weights are received.
            meeting = Background("weights from above")
            self._source = meeting.submit(partial(self._between, self.upstream, self._link, is_worker=True))
            meeting.close()
        else:
            channel = self._open(
                cuts,
                store=dist.PrefixStore(group_name(self.engine, self.generation), another_connection(self.store)),
                names=member_names(self.learners, len(invitation["slices"]), self.engine),
                rank=len(self.learners) + worker,
                is_worker=True,
                timeout_s=self.timeout_s,
                failure=partial(announced_failure, self.store, [self._link]),
            )
            self._source.set_result(channel)
        self.is_open = True
        """Whether the transfer goes on."""
        self.follow(invitation["followers"])

    @property
    def channel(self) -> Channel:
        """To where weights come from; RuntimeError if the engine above has not come."""
        return self._source.result()

    @property
    def _link(self) -> Link:
        return self.engine, self.generation

    def is_seat(self, invitation: Mapping[str, Any]) -> bool:
        """Whether this is what the invitation is to; only other engines may be below it."""
        place = (invitation["host"], invitation["port"])
        seat = invitation["engine"], invitation["generation"]
        return self.is_open and (self.place, self.engine, self.generation) == (place, *seat)

    def follow(self, followers: Iterable[Sequence[int]]) -> None:
        """From here on send to these engines, which are joining, or have joined.

        One that does not come is left out: it gets its weights otherwise.
        """
        links = [(engine, generation) for engine, generation in followers]
        for link in self.relays.keys() - links:
            self.relays.pop(link).close()
        for link in links:
            if link not in self.relays:
                self.relays[link] = OnwardLink(partial(self._between, self._link, link))

    def _between(self, above: Link, below: Link, *, is_worker: bool = False) -> Channel:
        """Form the transfer from an engine to another one, in a thread of its own; `is_worker`: of that one's end."""
        if self.live.device.type == "cuda":
            torch.accelerator.set_device_index(self.live.device)
        return self._open(
            [{int(not is_worker): lambda limit: [boxes for _, boxes in self._sent_on]}],
            store=dist.PrefixStore(relay_name(above, below, self.worker), another_connection(self.store)),
            names=[f"worker {self.worker} of engine {engine}" for engine, _ in (above, below)],
            rank=int(is_worker),
            is_worker=is_worker,
            timeout_s=self.timeout_s * PATIENCE,
            failure=partial(announced_failure, self.store, [above, below]),
        )

    def _incoming(self, invitation: Mapping[str, Any]) -> list[dict[int, list[Box]]]:
        """The slices for this worker in each stage, by their source's place among `learners`."""
        if self.worker >= (workers := len(invitation["slices"])):
            raise ValueError(
                f"the plan sends to {workers} workers of the engine, which has a worker number {self.worker}"
            )
        tensors = Tensors(shapes_in_units(sent_tensors(self.model, self.lora), self.live.dtype.itemsize))
        slices = unpacked(invitation["slices"][self.worker], COLUMNS)
        sources = unpacked(invitation["sources"][self.worker], 1)[:, 0]
        counts = invitation["stages"][self.worker] if "stages" in invitation else [len(slices)]
        ends = np.cumsum([0, *counts]).tolist()
        return [
            {
                source: tensors.boxes(slices[first:last][sources[first:last] == source])
                for source in np.unique(sources[first:last]).tolist()
            }
            for first, last in itertools.pairwise(ends)
        ]

    def _check_targets(self, stages: Iterable[Mapping[int, list[Box]]]) -> None:
        """The engine's live weights must be exactly the boxes that the plan sends to it."""
        live = {name: sum(box.size for box, _ in held) for name, held in self.live.by_name.items()}
        planned: dict[str, int] = {}
        for box in (box for incoming in stages for boxes in incoming.values() for box in boxes):
            planned[box.name] = planned.get(box.name, 0) + box.size
            if self.live.find(box) is None:
                raise ValueError(f"the engine does not hold {box} in one piece, which the plan sends to it")
        differing = sorted(name for name in live.keys() | planned.keys() if live.get(name) != planned.get(name))
        if differing:
            raise ValueError(f"engine and plan differ in {len(differing)} tensors, the first are {differing[:3]}")

    def receive(self, version: int) -> bool:
        """Receive all slices of one sync, and send them on. Whether they have come.

        They have not where the engine above has failed, which rank 0 is told: this one is well.

        Raises:
            RuntimeError: naming this worker, the training ranks and the bucket that were waited for, after `timeout_s`. The
                transfer is over then.
        """
        arrived = Arrived()
        stream = torch.accelerator.current_stream(self.live.device) if self.live.device.type == "cuda" else None
        for relay in self.relays.values():
            relay.forward(arrived, stream)
        try:
            self._receive(version, arrived)
        except Exception as err:
            arrived.fail()
            self.close()
            if self.upstream is None or not isinstance(err, RuntimeError):
                raise
            self.store.set(unserved_key(self.engine, self.generation, version), str(err))
            return False
        return True

    def _receive(self, version: int, arrived: Arrived) -> None:
        try:
            channel = self._source.result(self.timeout_s * PATIENCE)
        except TimeoutError:
            # Gloo tries several times to connect, each as long as it may take.
            raise RuntimeError(f"the engine above has not met worker {self.worker} of engine {self.engine}") from None
        ready = self._ready(channel)
        begun: list[Round] = []
        for number, round_ in enumerate(channel.rounds):
            begun.append(channel.transport.recv(round_, lost=partial(self._lost, version, number)))
            if number > 0:
                begun[number - 1].settle()
                arrived.tell(ready[number - 1])
        for each in begun[-1:]:
            each.settle()
            arrived.tell(len(self._sent_on))

    def _ready(self, channel: Channel) -> list[int]:
        """After each round the messages that can be sent on."""
        if self.upstream is not None:
            return [*range(1, len(self._sent_on) + 1)]
        ends: list[tuple[int, int]] = []
        wanted: dict[int, int] = {}
        for source, boxes in self._sent_on:
            wanted[source] = wanted.get(source, 0) + sum(box.size for box in boxes)
            ends.append((source, wanted[source]))
        found, here, count = [], dict.fromkeys(wanted, 0), 0
        for round_ in channel.rounds:
            for source, message in round_.items():
                here[source] += message.size
            while count < len(ends) and here[ends[count][0]] >= ends[count][1]:
                count += 1
            found.append(count)
        return found

    def _lost(self, version: int, number: int, peers: Sequence[int], err: Exception) -> RuntimeError:
        ranks = ", ".join(self.channel.names[peer] for peer in peers)
        part = "" if self.upstream is None else f"{PATIENCE:g} x "
        return RuntimeError(
            f"weight sync {version}: worker {self.worker} of engine {self.engine} waited for bucket {number} of {ranks} "
            f"for {part}weight_sync_timeout={self.timeout_s:g} s: {err}"
        )

    def close(self) -> None:
        """Leave the transfer."""
        self.is_open = False
        self._source.add_done_callback(_close)
        for relay in self.relays.values():
            relay.close()
        self.relays = {}

    def report_digests(self, version: int) -> None:
        """Tell rank 0 the digest of every tensor's part that this worker holds now.

        What vLLM keeps in a wider type counts as it was sent.
        """
        received = ((box, self.live.values(view)) for pairs in self.live.by_name.values() for box, view in pairs)
        held = ((box, values.to(self.live.dtype)) for box, values in itertools.chain(received, self.loaded))
        shapes = proven_tensors(self.model, self.lora, self.live.dtype.itemsize)
        sums = digests(held, shapes).numpy().astype(DIGEST)
        store: Any = self.store  # torch's stubs know text only
        store.set(digest_key(self.engine, self.generation, self.worker, version), sums.tobytes())

"""An engine worker's end of the weight sync: it writes received slices into its live weights and forwards them to other engines.

It follows the rounds of `mgrpo.sync.sending.rounds.rounds`, and writes the last one while the next is under way. Forwarding reads the
live weights, which do not change until the next sync, so that no child engine delays receiving. On CUDA the answer to rank 0 also
waits for forwarding (`transfer_engine`): a child engine that hangs delays it until it is dropped.
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
"""Share of `timeout_s` that engines wait for each other, so that each reports a failed upstream to rank 0 within `timeout_s`. (A
group receives for twice as long on CUDA.)"""
ANNOUNCE_S = 5.0
"""Time limit of the connection over which a worker announces that it cannot join, in seconds."""


class Arrived:
    """Number of messages that have arrived, for the threads that forward them."""

    def __init__(self) -> None:
        self._count = 0
        self._has_failed = False
        self._changed = threading.Condition()

    def tell(self, count: int) -> None:
        """Record that `count` messages have arrived."""
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def fail(self) -> None:
        """Record that no more messages will arrive."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until `count` messages have arrived.

        Raises:
            RuntimeError: receiving failed before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed or self._count >= count)
            if self._count < count:
                raise RuntimeError("the weights have not arrived")


class OnwardLink:
    """A worker's transfer to the same worker of a child engine, in a thread of its own, so that receiving does not wait for it.

    Args:
        meet: returns the channel once the other end has joined.
    """

    def __init__(self, meet: Callable[[], Channel]) -> None:
        self._thread = Background("weights sent on")
        self._channel = self._thread.submit(meet)

    def forward(self, arrived: Arrived, stream: torch.Stream | None) -> None:
        """Begin to forward messages as they arrive; a failed transfer is closed.

        Args:
            stream: the stream that writes the weights, on CUDA.
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
        """Leave the transfer after the messages under way."""
        self._thread.submit(lambda: self._channel.result().close())
        self._thread.close()


def _close(source: Future[Channel]) -> None:
    if source.exception() is None:
        source.result().close()


@contextlib.contextmanager
def failure_announced(invitation: Mapping[str, Any], worker: int) -> Iterator[None]:
    """Announce a failure within the block to the learners and the engine's other workers, which wait for this one."""
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
    """The receiver for an invitation: the earlier one if it has that seat already, else a new one after closing the earlier."""
    if earlier is not None:
        if earlier.is_seat(invitation):
            earlier.follow(invitation["followers"])
            return earlier
        earlier.close()
    return make()


class Receiver:
    """An engine worker's end: every slice is written in place into the live weights.

    Args:
        targets: every box of the worker that the sync writes, with its live view.
        loaded: boxes that the worker has loaded by itself; only digests read them.
        worker: number of the worker in its engine.
        invitation: from `mgrpo.sync.channel.Sender.invitation`.
    """

    def __init__(self, targets: Held, *, loaded: Held = (), worker: int, invitation: dict[str, Any]) -> None:
        targets, loaded = list(targets), list(loaded)
        dtype = next(view.dtype for box, view in (*targets, *loaded) if not is_frozen(box.name))
        self.live, self.loaded = LiveBoxes(targets, dtype), list(views_in_units(loaded, dtype))
        self.model, self.lora = ModelShape.from_dict(invitation["model"]), invited_lora(invitation)
        self.engine, self.generation, self.worker = invitation["engine"], invitation["generation"], worker
        self.place = (invitation["host"], invitation["port"])
        """Host and port of the store, which exists as long as the run."""
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
        """The channel to the learners or the parent engine."""
        self.relays: dict[Link, OnwardLink] = {}
        """Transfers to the child engines."""
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
        """False once the transfer has failed or been left."""
        self.follow(invitation["followers"])

    @property
    def channel(self) -> Channel:
        """The channel to the learners or the parent engine; RuntimeError if the parent did not join."""
        return self._source.result()

    @property
    def _link(self) -> Link:
        return self.engine, self.generation

    def is_seat(self, invitation: Mapping[str, Any]) -> bool:
        """True if the invitation is to this receiver's seat; its children may differ."""
        place = (invitation["host"], invitation["port"])
        seat = invitation["engine"], invitation["generation"]
        return self.is_open and (self.place, self.engine, self.generation) == (place, *seat)

    def follow(self, followers: Iterable[Sequence[int]]) -> None:
        """Replace the child engines by these, which are joining or have joined.

        One that does not join is left out; it gets its weights in another way.
        """
        links = [(engine, generation) for engine, generation in followers]
        for link in self.relays.keys() - links:
            self.relays.pop(link).close()
        for link in links:
            if link not in self.relays:
                self.relays[link] = OnwardLink(partial(self._between, self._link, link))

    def _between(self, above: Link, below: Link, *, is_worker: bool = False) -> Channel:
        """Join the transfer from an engine to its child; `is_worker`: at the child's end. Called in a thread of its own."""
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
        """Raise ValueError unless the engine's live weights are exactly the boxes that the plan sends to it."""
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
        """Receive all slices of one sync and forward them; returns True if they have arrived.

        False if the upstream engine has failed, which is reported to rank 0: this engine is sound.

        Raises:
            RuntimeError: after `timeout_s`, naming this worker, the senders and the bucket. The transfer is closed then.
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
        """Number of messages that can be forwarded after each round."""
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
        """Report to rank 0 the digest of each tensor's part that this worker holds.

        Weights that vLLM keeps in a wider type are cast to the type in which they were sent.
        """
        received = ((box, self.live.values(view)) for pairs in self.live.by_name.values() for box, view in pairs)
        held = ((box, values.to(self.live.dtype)) for box, values in itertools.chain(received, self.loaded))
        shapes = proven_tensors(self.model, self.lora, self.live.dtype.itemsize)
        sums = digests(held, shapes).numpy().astype(DIGEST)
        store: Any = self.store  # torch's stubs know text only
        store.set(digest_key(self.engine, self.generation, self.worker, version), sums.tobytes())

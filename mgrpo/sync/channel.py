"""Both ends of the weight sync: what a training rank sends and what an engine's worker writes into its live weights.

Both go through the rounds of `mgrpo.sync.plan.rounds`: the sender prepares the next round while one is under way, and the
receiver writes the last one meanwhile. Besides its own weights a worker holds two rounds, and the learners that send to it
hold two together; where they share memory, both ends hold the same two.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, hf_tensors
from mgrpo.sync.digest import digests
from mgrpo.sync.group import connect_store
from mgrpo.sync.meeting import Members, meet
from mgrpo.sync.plan import Incoming, ReshardPlan, messages, plan, rounds
from mgrpo.sync.shared import BUCKET_BYTES
from mgrpo.sync.transport import Round, Transport

Held = Iterable[tuple[Box, torch.Tensor]]
"""Boxes with the live view of each."""


class Cut(Protocol):
    """The messages of one pair; see `mgrpo.sync.plan.messages`."""

    def __call__(self, *, limit: int | None) -> list[list[Box]]: ...


class Sender:
    """A training rank's end of all channels. Every learner rank makes one and calls the same methods in the same order.

    Args:
        boxes: every box this rank holds with the live view of it (`policy.boxes()`).
        holdings: for each training rank the boxes it holds (`policy.holdings(group)`).
        dtype: the engines' weight type; weights are cast to it on the way.
        store: the key-value server of `open_store` / `connect_store`.
        bucket_bytes: of what is sent to a worker at the same time, by all ranks.
        share_gpus: training ranks and workers may be on the same GPUs, all of one machine.
    """

    def __init__(
        self,
        boxes: Held,
        *,
        holdings: Sequence[Sequence[Box]],
        model: ModelShape,
        train_layout: Layout,
        infer_layout: InferLayout,
        rank: int,
        dtype: torch.dtype,
        store: dist.Store,
        host: str,
        port: int,
        bucket_bytes: int,
        timeout_s: float,
        share_gpus: bool = False,
    ) -> None:
        self.live = LiveBoxes(boxes)
        self.model, self.infer_layout = model, infer_layout
        self.rank, self.dtype, self.store, self.host, self.port = rank, dtype, store, host, port
        self.bucket_bytes, self.timeout_s, self.share_gpus = bucket_bytes, timeout_s, share_gpus
        self.plan: ReshardPlan = plan(model, train_layout, infer_layout, itemsize=dtype.itemsize, holdings=holdings)
        self.outgoing = self.plan.sent_by(rank)
        self.channels: dict[int, Channel] = {}
        """By engine."""

    def incoming(self, engine: int) -> tuple[Incoming, ...]:
        """What each worker of an engine receives."""
        workers = self.infer_layout.tensor
        return self.plan.received_by[engine * workers : (engine + 1) * workers]

    def invitation(self, engine: int) -> dict[str, Any]:
        """What engine number `engine` needs to join, as plain values."""
        return {
            "host": self.host,
            "port": self.port,
            "engine": engine,
            "model": asdict(self.model),
            "incoming": [
                {source: [astuple(box) for box in boxes] for source, boxes in incoming.items()}
                for incoming in self.incoming(engine)
            ],
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
            "share_gpus": self.share_gpus,
        }

    def join(self) -> None:
        """Meet the workers of each engine that this rank sends to; those of all engines must be joining."""
        for engine in range(self.infer_layout.engines):
            incoming = self.incoming(engine)
            learners = senders(incoming)
            if self.rank in learners:
                pairs = {
                    len(learners) + worker: self._cut(boxes)
                    for worker, boxes in enumerate(incoming)
                    if self.rank in boxes
                }
                self.channels[engine] = Channel(
                    self.live,
                    pairs,
                    store=dist.PrefixStore(group_name(engine), self.store),
                    names=member_names(learners, len(incoming), engine),
                    rank=learners.index(self.rank),
                    is_worker=False,
                    dtype=self.dtype,
                    host=self.host,
                    timeout_s=self.timeout_s,
                    share_gpus=self.share_gpus,
                )

    def _cut(self, incoming: Incoming) -> Cut:
        return partial(messages, incoming, self.rank, itemsize=self.dtype.itemsize, bucket_bytes=self.bucket_bytes)

    def send(self, version: int) -> int:
        """Send this rank's slices to all workers of all engines; returns the bytes sent.

        An engine that fails is given up, and the others get their weights all the same.

        Raises:
            RuntimeError: naming this rank, the workers and the bucket that were waited for, after `timeout_s`.
        """
        sent = 0
        channels = {engine: channel for engine, channel in self.channels.items() if channel.is_open}
        begun: dict[int, list[Round]] = {engine: [] for engine in channels}
        failures: list[RuntimeError] = []

        @contextlib.contextmanager
        def apart(engine: int) -> Iterator[None]:
            try:
                yield
            except RuntimeError as err:
                failures.append(err)
                channels.pop(engine).close()

        for number in range(max((len(channel.rounds) for channel in channels.values()), default=0)):
            for engine, channel in list(channels.items()):
                if number < len(channel.rounds):
                    with apart(engine):
                        # One round may be under way while this one is prepared.
                        if number > 1:
                            begun[engine][number - 2].settle()
                        begun[engine].append(self._begin(version, number, engine))
                        sent += channel.num_elements(number) * self.dtype.itemsize
        for engine in list(channels):
            with apart(engine):
                for each in begun[engine]:
                    each.finish()
        if failures:
            raise RuntimeError("; ".join(map(str, failures))) from failures[0]
        return sent

    def _begin(self, version: int, number: int, engine: int) -> Round:
        channel = self.channels[engine]
        return channel.transport.send(channel.rounds[number], lost=partial(self._lost, version, number, engine))

    def _lost(self, version: int, number: int, engine: int, peers: Sequence[int], err: Exception) -> RuntimeError:
        names = self.channels[engine].names
        return RuntimeError(
            f"weight sync {version}: training rank {self.rank} could not send bucket {number} to "
            f"{', '.join(names[peer] for peer in peers)} within weight_sync_timeout={self.timeout_s:g} s: {err}"
        )

    def close(self) -> None:
        """Leave all transfers."""
        for channel in self.channels.values():
            channel.close()

    def digests(self) -> torch.Tensor:
        """`[workers, tensors]` int64: digest of what this rank sends each worker; the sum over ranks is what the worker must have."""
        shapes = hf_tensors(self.model)
        table = torch.zeros(self.infer_layout.engines * self.infer_layout.tensor, len(shapes), dtype=torch.int64)
        for worker, boxes in self.outgoing.items():
            table[worker] = digests(((box, self.live.view(box).to(self.dtype)) for box in boxes), shapes)
        return table

    def compare(self, version: int, truth: torch.Tensor) -> None:
        """Rank 0: compare the summed `digests()` with what every worker reported for `version`.

        Raises:
            RuntimeError: naming engine, worker and tensors that differ.
        """
        names = list(hf_tensors(self.model))
        for worker in range(truth.shape[0]):
            engine, worker_rank = divmod(worker, self.infer_layout.tensor)
            reported = json.loads(self.store.get(digest_key(engine, worker_rank, version)))
            wrong = [n for n, a, b in zip(names, truth[worker].tolist(), reported, strict=True) if a != b]
            if wrong:
                raise RuntimeError(
                    f"weight sync {version}: worker {worker_rank} of engine {engine} does not hold the trainer's weights; "
                    f"{len(wrong)} of {len(names)} tensors differ, the first are {wrong[:3]}"
                )


class Receiver:
    """An engine worker's end: every slice is written in place into the live weights.

    Args:
        targets: every box the worker holds with the live view to write to.
        worker: number of the worker in its engine.
    """

    def __init__(self, targets: Held, *, worker: int, invitation: dict[str, Any]) -> None:
        self.live = LiveBoxes(targets)
        self.model = ModelShape.from_dict(invitation["model"])
        self.engine, self.worker = invitation["engine"], worker
        self.place = (invitation["host"], invitation["port"])
        """Of the store, which is there as long as the run is."""
        self.timeout_s = invitation["timeout_s"]
        workers: list[Incoming] = [
            {
                int(source): [Box(name, tuple(start), tuple(shape)) for name, start, shape in boxes]
                for source, boxes in incoming.items()
            }
            for incoming in invitation["incoming"]
        ]
        self._check_targets(workers[worker])
        self.learners = senders(workers)
        itemsize, bucket_bytes = self.live.dtype.itemsize, invitation["bucket_bytes"]
        self.store = connect_store(invitation["host"], invitation["port"], self.timeout_s)
        self.channel = Channel(
            self.live,
            {
                self.learners.index(source): partial(
                    messages, workers[worker], source, itemsize=itemsize, bucket_bytes=bucket_bytes
                )
                for source in sorted(workers[worker])
            },
            store=dist.PrefixStore(group_name(self.engine), self.store),
            names=member_names(self.learners, len(workers), self.engine),
            rank=len(self.learners) + worker,
            is_worker=True,
            dtype=self.live.dtype,
            host=invitation["host"],
            timeout_s=self.timeout_s,
            share_gpus=invitation["share_gpus"],
        )

    def _check_targets(self, incoming: Incoming) -> None:
        """The engine's live weights must be exactly the boxes that the plan sends to it."""
        live = {name: sum(box.size for box, _ in held) for name, held in self.live.by_name.items()}
        planned: dict[str, int] = {}
        for box in (box for boxes in incoming.values() for box in boxes):
            planned[box.name] = planned.get(box.name, 0) + box.size
            if self.live.find(box) is None:
                raise ValueError(f"the engine does not hold {box} in one piece, which the plan sends to it")
        differing = sorted(name for name in live.keys() | planned.keys() if live.get(name) != planned.get(name))
        if differing:
            raise ValueError(f"engine and plan differ in {len(differing)} tensors, the first are {differing[:3]}")

    def receive(self, version: int) -> None:
        """Receive all slices of one sync.

        Raises:
            RuntimeError: naming this worker, the training ranks and the bucket that were waited for, after `timeout_s`. The
                transfer is over then.
        """
        begun: list[Round] = []
        try:
            for number, round_ in enumerate(self.channel.rounds):
                begun.append(self.channel.transport.recv(round_, lost=partial(self._lost, version, number)))
                if number > 0:
                    begun[number - 1].settle()
            for each in begun[-1:]:
                each.settle()
            for each in begun:
                each.finish()
        except RuntimeError:
            self.close()
            raise

    def _lost(self, version: int, number: int, peers: Sequence[int], err: Exception) -> RuntimeError:
        ranks = ", ".join(self.channel.names[peer] for peer in peers)
        return RuntimeError(
            f"weight sync {version}: worker {self.worker} of engine {self.engine} waited for bucket {number} of {ranks} "
            f"for weight_sync_timeout={self.timeout_s:g} s: {err}"
        )

    def close(self) -> None:
        """Leave the transfer."""
        self.channel.close()

    def report_digests(self, version: int) -> None:
        """Tell rank 0 the digest of every tensor's part that this worker holds now."""
        held = (pair for pairs in self.live.by_name.values() for pair in pairs)
        sums = digests(held, hf_tensors(self.model)).tolist()
        self.store.set(digest_key(self.engine, self.worker, version), json.dumps(sums))


class Channel:
    """One member's end of the transfer to an engine: its transport to the others, and what goes over it in each round."""

    def __init__(
        self,
        live: LiveBoxes,
        pairs: Mapping[int, Cut],
        *,
        store: dist.Store,
        names: Sequence[str],
        rank: int,
        is_worker: bool,
        dtype: torch.dtype,
        host: str,
        timeout_s: float,
        share_gpus: bool,
    ) -> None:
        """
        Args:
            pairs: the messages with each member that this one exchanges weights with.
            names: of all members, in their order.
        """
        self.names = names
        self.is_open = True
        peers = {
            peer: max(sum(box.size for box in boxes) for boxes in cut(limit=BUCKET_BYTES)) * dtype.itemsize
            for peer, cut in pairs.items()
        }
        self.transport: Transport = meet(
            store,
            Members(names=names, rank=rank, peers=peers, is_worker=is_worker, share_gpus=share_gpus),
            dtype=dtype,
            device=live.device,
            host=host,
            timeout_s=timeout_s,
        )
        self.rounds: list[dict[int, list[torch.Tensor]]] = rounds(
            {
                peer: [[live.view(box) for box in boxes] for boxes in cut(limit=self.transport.bucket_limit(peer))]
                for peer, cut in pairs.items()
            }
        )

    def num_elements(self, number: int) -> int:
        """Of one round."""
        return sum(view.numel() for views in self.rounds[number].values() for view in views)

    def close(self) -> None:
        """Members that wait for this one learn that it has left."""
        self.is_open = False
        self.transport.close()


class LiveBoxes:
    """Boxes that a process holds, with the live view of each."""

    def __init__(self, boxes: Held) -> None:
        self.by_name: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for box, view in boxes:
            self.by_name.setdefault(box.name, []).append((box, view))
        view = next(iter(self.by_name.values()))[0][1]
        self.dtype, self.device = view.dtype, view.device

    def find(self, box: Box) -> torch.Tensor | None:
        """The live view of `box`; None where no held box contains it."""
        for held, view in self.by_name.get(box.name, ()):
            if held.intersect(box) == box:
                return view[box.within(held)]
        return None

    def view(self, box: Box) -> torch.Tensor:
        """The live view of a box that is held."""
        view = self.find(box)
        assert view is not None, f"{box} is not held"
        return view


def senders(workers: Iterable[Incoming]) -> list[int]:
    """The training ranks that send to an engine, in their order in its transfer group."""
    return sorted({source for incoming in workers for source in incoming})


def member_names(learners: Sequence[int], workers: int, engine: int) -> list[str]:
    """The members of an engine's transfer group, in their order."""
    return [
        *(f"training rank {rank}" for rank in learners),
        *(f"worker {worker} of engine {engine}" for worker in range(workers)),
    ]


def group_name(engine: int) -> str:
    """The transfer group of an engine."""
    return f"transfer/{engine}"


def digest_key(engine: int, worker: int, version: int) -> str:
    """Where a worker leaves its digests."""
    return f"digest/{engine}/{worker}/{version}"

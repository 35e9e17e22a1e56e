"""The training ranks' end of the weight sync, and code of both ends; the engines' end is `mgrpo.sync.vllm_plugin.receiver`.

Both go through the rounds of `mgrpo.sync.sending.rounds.rounds`: the sender prepares the next round while one is under way, and the
receiver writes the last one meanwhile. Besides its own weights a worker holds two rounds, and the learners that send to it
hold two together; with shared memory both ends hold the same two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.adapters import LoraShape, are_apart, sent_tensors
from mgrpo.models.placement.box_table import HeldBoxes, packed
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.shape import ModelShape
from mgrpo.models.table import hf_tensors
from mgrpo.sync.delivery import Delivery, Failed, deliver
from mgrpo.sync.group import another_connection
from mgrpo.sync.joining import SyncMembers, meet, meet_unless_failed
from mgrpo.sync.live import LiveBoxes, View, WeightMessage
from mgrpo.sync.plan import ReshardPlan, Seated, plan
from mgrpo.sync.sending.digest import digests
from mgrpo.sync.sending.float32_units import shapes_in_units
from mgrpo.sync.sending.rounds import messages, rounds
from mgrpo.sync.sending.seating import Link
from mgrpo.sync.shared import BUCKET_BYTES
from mgrpo.sync.transport import Round, Transport

DIGEST = np.dtype("<i8")
"""Type of digests in the store."""


class Cut(Protocol):
    """The messages of one pair; see `mgrpo.sync.sending.rounds`."""

    def __call__(self, *, limit: int | None) -> list[list[Box]]: ...


class Sender:
    """A training rank's end of all channels. Every learner rank makes one and calls the same methods in the same order.

    Args:
        boxes: every box this rank holds with the live view of it (`policy.sync_boxes()`).
        holdings: which training rank holds which boxes (`policy.holdings(group)`).
        lora: the policy's adapters. Where they are not merged, only they are sent: engines load the model itself from their own disk.
        dtype: the engines' weight type; weights are cast to it on the way.
        store: the key-value server of `open_store` / `connect_store`.
        bucket_bytes: bytes in flight to one worker, from all ranks together.
        share_gpus: training ranks and workers may be on the same GPUs, all of one machine.
    """

    def __init__(
        self,
        boxes: Iterable[tuple[Box, View]],
        *,
        holdings: HeldBoxes,
        model: ModelShape,
        lora: LoraShape | None = None,
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
        self.live = LiveBoxes(boxes, dtype)
        self.model, self.lora, self.infer_layout = model, lora, infer_layout
        self.rank, self.dtype, self.store, self.host, self.port = rank, dtype, store, host, port
        self.bucket_bytes, self.timeout_s, self.share_gpus = bucket_bytes, timeout_s, share_gpus
        planned = partial(plan, model, train_layout, infer_layout, itemsize=dtype.itemsize, holdings=holdings)
        self.plan: ReshardPlan = planned(lora=lora)
        self.proven = [self.plan, planned()] if are_apart(lora) else [self.plan]
        """Plans of all tensors that engines must hold, including those that they load themselves."""
        self.outgoing = self.plan.outgoing(rank)
        """Slices that this rank sends, by planned engine and worker."""
        self._sources: dict[Seated, list[str]] = {}
        self.channels: dict[int, Channel] = {}
        """Channels to the engines that this rank sends to, by engine."""
        self.generations: dict[int, int] = {}
        """Generations of all engines that have joined, including those that this rank sends nothing to."""

    @property
    def handed(self) -> LiveBoxes:
        """Boxes that are sent to engines."""
        return self.live

    @cached_property
    def _slices(self) -> list[str]:
        """For each worker of an engine, the packed table of its slices."""
        return [packed(self.plan.slices[own]) for own in self.plan.workers]

    def _to(self, engine: int) -> Mapping[int, np.ndarray]:
        """Slices that this rank sends to each worker of an engine."""
        return self.outgoing.get(engine % self.plan.sources.engines, {})

    def invitation(
        self,
        engine: int,
        generation: int = 0,
        *,
        first: int | None = None,
        upstream: Link | None = None,
        followers: Sequence[Link] = (),
    ) -> dict[str, Any]:
        """The invitation with which engine number `engine` joins, as plain values.

        Args:
            first: root of the engine's broadcast tree, if it is another engine: both ends of each transfer in the tree cut
                messages by the root's sources.
            upstream: the engine that sends to this one in the learners' place, with its own generation.
            followers: the engines that this one sends to.
        """
        return {
            "host": self.host,
            "port": self.port,
            "engine": engine,
            "generation": generation,
            "upstream": upstream and [*upstream],
            "followers": [[*link] for link in followers],
            "model": asdict(self.model),
            "lora": self.lora and asdict(self.lora),
            **self._tables(engine if first is None else first),
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
            "share_gpus": self.share_gpus,
        }

    def _tables(self, engine: int) -> dict[str, Any]:
        """Slices of each worker of an engine, and the place of each slice's source among `learners`."""
        learners, seated = self.plan.seated(engine)
        if seated not in self._sources:
            sources = self.plan.source_places(seated)
            self._sources[seated] = [packed(sources[own]) for own in self.plan.workers]
        return {"learners": learners, "slices": self._slices, "sources": self._sources[seated]}

    def join(self, seats: Mapping[int, int]) -> dict[int, str]:
        """Meet the workers of engines, which must be joining; returns failures as `send` does.

        Args:
            seats: the generation of each engine. A later one takes the place of an earlier one.
        """
        for engine in seats:
            self.leave(engine)
        self.generations.update(seats)
        mine = [engine for engine in seats if self._sends_to(engine)]

        def meet_each(engines: Sequence[int], failed: Failed) -> None:
            for engine in engines:
                try:
                    self.channels[engine] = self._meet(engine, seats[engine])
                except RuntimeError as err:
                    failed(engine, err)
                    announce_failure(self.store, (engine, seats[engine]), str(err))

        return self._apart(mine, meet_each)

    def _sends_to(self, engine: int) -> bool:
        return bool(self._to(engine))

    def _stages(self, engine: int) -> tuple[list[int], list[dict[int, Cut]]]:
        """The ranks that send to an engine, and for each stage (one here) this rank's messages to each of its workers."""
        learners, num_sources = self.plan.learners(engine), self.plan.num_sources(engine)
        pairs = {
            len(learners) + worker: self._cut(self.plan.boxes(places), num_sources[worker])
            for worker, places in self._to(engine).items()
        }
        return learners, [pairs]

    def _meet(self, engine: int, generation: int) -> Channel:
        learners, stages = self._stages(engine)
        return Channel(
            self.handed,
            stages,
            store=dist.PrefixStore(group_name(engine, generation), another_connection(self.store)),
            names=member_names(learners, self.infer_layout.workers, engine),
            rank=learners.index(self.rank),
            is_worker=False,
            dtype=self.dtype,
            host=self.host,
            timeout_s=self.timeout_s,
            share_gpus=self.share_gpus,
            failure=partial(announced_failure, self.store, [(engine, generation)]),
        )

    def _cut(self, boxes: Sequence[Box], num_sources: int) -> Cut:
        return partial(messages, boxes, num_sources, itemsize=self.dtype.itemsize, bucket_bytes=self.bucket_bytes)

    def leave(self, engine: int) -> None:
        """Close the transfer to an engine, if there is one."""
        self.generations.pop(engine, None)
        if (channel := self.channels.pop(engine, None)) is not None:
            channel.close()

    def send(self, version: int, engines: Iterable[int]) -> dict[int, str]:
        """Send this rank's slices to all workers of these engines; returns the reason of each failure, by engine.

        An engine that fails within `timeout_s` is left; the others still get their weights. The reason names the workers and
        the bucket.
        """
        mine = [engine for engine in engines if engine in self.channels]

        def send_to(engines: Sequence[int], failed: Failed) -> None:
            deliver({engine: self._delivery(version, engine, 0) for engine in engines}, failed)

        try:
            return self._apart(mine, send_to)
        finally:
            self.live.forget()

    def _delivery(self, version: int, engine: int, stage: int) -> Delivery:
        channel = self.channels[engine]
        numbers = channel.stages[stage]

        def begin(place: int) -> Round:
            number = numbers[place]
            return channel.transport.send(channel.rounds[number], lost=partial(self._lost, version, number, engine))

        return Delivery(begin, len(numbers))

    def _apart(self, engines: Sequence[int], work: Callable[[Sequence[int], Failed], None]) -> dict[int, str]:
        """Run `work` for engines; returns the reason of each failure, by engine.

        On CPUs and shared GPUs one thread per engine: an engine that hangs does not delay the others, whose workers have the same time limit.
        On GPUs of their own one thread, because NCCL needs the same order on all ranks.
        """
        failures: dict[int, str] = {}

        def failed(engine: int, err: RuntimeError) -> None:
            failures[engine] = str(err)
            self.leave(engine)

        if (self.live.device.type == "cpu" or self.share_gpus) and len(engines) > 1:
            with ThreadPoolExecutor(len(engines)) as threads:
                for done in [threads.submit(work, [engine], failed) for engine in engines]:
                    done.result()
        else:
            work(engines, failed)
        return failures

    def _lost(self, version: int, number: int, engine: int, peers: Sequence[int], err: Exception) -> RuntimeError:
        names = self.channels[engine].names
        return RuntimeError(
            f"weight sync {version}: training rank {self.rank} could not send bucket {number} to "
            f"{', '.join(names[peer] for peer in peers)} within weight_sync_timeout={self.timeout_s:g} s: {err}"
        )

    def close(self) -> None:
        """Leave all transfers."""
        for engine in list(self.generations):
            self.leave(engine)

    def digests(self) -> torch.Tensor:
        """`[workers, tensors]` int64: this rank's part of the digests that the workers of an engine must report; sum it over ranks."""
        shapes = proven_tensors(self.model, self.lora, self.dtype.itemsize)
        table = torch.zeros(self.infer_layout.workers, len(shapes), dtype=torch.int64)
        for what in self.proven:
            for worker, places in what.proof(self.rank).items():
                held = ((box, self.live.values(self.live.view(box)).to(self.dtype)) for box in what.boxes(places))
                table[worker] += digests(held, shapes)
        self.live.forget()
        return table

    def compare(self, version: int, truth: torch.Tensor, seats: Mapping[int, int]) -> None:
        """Rank 0: compare the summed `digests()` with those that the workers of engines reported for `version`.

        Args:
            seats: the generation of each engine, as in its invitation.

        Raises:
            RuntimeError: naming engine, worker and tensors that differ.
        """
        names, sent = (
            list(proven_tensors(self.model, self.lora, self.dtype.itemsize)),
            sent_tensors(self.model, self.lora),
        )
        for engine, generation in seats.items():
            for worker, wanted in enumerate(truth.numpy()):
                key = digest_key(engine, generation, worker, version)
                reported = np.frombuffer(self.store.get(key), dtype=DIGEST)
                self.store.delete_key(key)
                wrong = [names[number] for number in (wanted != reported).nonzero()[0]]
                if wrong:
                    raise RuntimeError(
                        f"weight sync {version}: worker {worker} of engine {engine} does not hold the trainer's weights; "
                        f"{len(wrong)} of {len(names)} tensors differ, the first are {wrong[:3]}{_whose(wrong, sent)}"
                    )


class Channel:
    """One member's end of the transfer to an engine: its transport to the other members, and the messages of each round."""

    def __init__(
        self,
        live: LiveBoxes,
        stages: Sequence[Mapping[int, Cut]],
        *,
        store: dist.Store,
        names: Sequence[str],
        rank: int,
        is_worker: bool,
        dtype: torch.dtype,
        host: str,
        timeout_s: float,
        share_gpus: bool,
        failure: Callable[[], str],
    ) -> None:
        """
        Args:
            stages: the messages with each peer; all of a stage come before those of the next.
            names: all members, in their order.
            store: a connection of this channel alone.
            failure: see `meet_unless_failed`; it must not use that connection.
        """
        self.names = names
        self.is_open = True
        peers: dict[int, int] = {}
        for peer, cut in itertools.chain(*(pairs.items() for pairs in stages)):
            largest = max(sum(box.size for box in boxes) for boxes in cut(limit=BUCKET_BYTES)) * dtype.itemsize
            peers[peer] = max(peers.get(peer, 0), largest)
        members = SyncMembers(names=names, rank=rank, peers=peers, is_worker=is_worker, share_gpus=share_gpus)

        def meeting() -> Transport:
            if live.device.index is not None:
                torch.accelerator.set_device_index(live.device)
            return meet(store, members, dtype=dtype, device=live.device, host=host, timeout_s=timeout_s)

        self.transport = meet_unless_failed(meeting, failure)
        self.rounds: list[dict[int, WeightMessage]] = []
        self.stages: list[range] = []
        """The numbers of each stage's rounds."""
        for pairs in stages:
            first = len(self.rounds)
            self.rounds += rounds(
                {
                    peer: [WeightMessage(live, boxes) for boxes in cut(limit=self.transport.bucket_limit(peer))]
                    for peer, cut in pairs.items()
                }
            )
            self.stages.append(range(first, len(self.rounds)))

    def close(self) -> None:
        """Leave the transfer; members that wait for this one get an error."""
        self.is_open = False
        self.transport.close()


def proven_tensors(model: ModelShape, lora: LoraShape | None, itemsize: int) -> dict[str, Shape]:
    """Name and shape of every tensor that engines must have as learners do, in units of `itemsize` bytes, see `float32_units`."""
    return shapes_in_units(hf_tensors(model) | sent_tensors(model, lora), itemsize)


def invited_lora(invitation: Mapping[str, Any]) -> LoraShape | None:
    """The adapters of an invitation."""
    return LoraShape(**invitation["lora"]) if invitation.get("lora") else None


def _whose(wrong: Sequence[str], sent: Mapping[str, Shape]) -> str:
    """Advice for tensors that differ though they are never sent; "" if one of them is sent."""
    if all(name in sent for name in wrong):
        return ""
    return "; with lora_sync=adapter an engine loads the model itself: give every node that serves the same files in model_name_or_path"


def member_names(learners: Sequence[int], workers: int, engine: int) -> list[str]:
    """The members of an engine's transfer group, in their order."""
    return [
        *(f"training rank {rank}" for rank in learners),
        *(f"worker {worker} of engine {engine}" for worker in range(workers)),
    ]


def group_name(engine: int, generation: int) -> str:
    """Name of an engine's transfer group, unique per seat."""
    return f"transfer/{engine}/{generation}"


def relay_name(above: Link, below: Link, worker: int) -> str:
    """Name of the transfer from a worker of one engine to the same worker of its child."""
    return "relay/" + "/".join(map(str, (*above, *below, worker)))


def unserved_key(engine: int, generation: int, version: int) -> str:
    """Store key of an engine whose upstream failed; its value is the error."""
    return f"unserved/{engine}/{generation}/{version}"


def announce_failure(store: dist.Store, seat: Link, reason: str) -> None:
    """Make every member that waits for this engine fail with this reason; an earlier reason stays."""
    store.compare_set(_failure_key(seat), "", reason)


def announced_failure(store: dist.Store, seats: Sequence[Link]) -> str:
    """The announced reason of failure of one of these engines; "": none."""
    failed = next((seat for seat in seats if store.check([_failure_key(seat)])), None)
    return "" if failed is None else store.get(_failure_key(failed)).decode()


def _failure_key(seat: Link) -> str:
    return "failed/" + "/".join(map(str, seat))


def digest_key(engine: int, generation: int, worker: int, version: int) -> str:
    """The store's key for a worker's digests."""
    return f"digest/{engine}/{generation}/{worker}/{version}"

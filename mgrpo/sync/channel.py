"""The transport: one process group per engine, of all training ranks and that engine's workers, and bounded buckets on it.

Training rank r is rank r of the group, worker w is rank `world_size + w`. gloo on CPU, NCCL on CUDA. Besides its own
weights neither end holds more than one bucket per peer.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import ModelShape
from mgrpo.models.table import Box, hf_tensors
from mgrpo.sync.digest import digest
from mgrpo.sync.plan import ReshardPlan, buckets, plan


def open_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Rank 0's key-value server on a free port of `host` only (torch would listen on every interface)."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The other processes' end of `open_store`."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join_group(
    store: dist.Store, *, name: str, rank: int, size: int, timeout_s: float, device: torch.device, host: str
) -> dist.ProcessGroup:
    """Join the transfer group `name`; returns when all `size` members are there."""
    store = dist.PrefixStore(name, store)
    timeout = timedelta(seconds=timeout_s)
    # Any: torch's type stubs do not declare these classes' options.
    nccl: Any = dist.ProcessGroupNCCL if device.type == "cuda" else None
    if nccl is not None:
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [_gloo_device(host)]
    return gloo(store, rank, size, options)


def _gloo_device(host: str) -> Any:
    """On one machine all members use loopback; on several each listens on GLOO_SOCKET_IFNAME, or where its name resolves."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if host == "127.0.0.1":
        return dist.ProcessGroupGloo.create_device(hostname=host)
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


class Sender:
    """A training rank's end of all channels. Every learner rank makes one and calls the same methods in the same order.

    Args:
        boxes: every box this rank holds with the live view of it (`policy.boxes()`).
        holdings: for each training rank the boxes it holds (`policy.holdings(group)`).
        dtype: the engines' weight type; weights are cast to it on the way.
        store: the key-value server of `open_store` / `connect_store`.
    """

    def __init__(
        self,
        boxes: Iterable[tuple[Box, torch.Tensor]],
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
    ) -> None:
        self.held: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for box, view in boxes:
            self.held.setdefault(box.name, []).append((box, view))
        self.model, self.train_layout, self.infer_layout = model, train_layout, infer_layout
        self.rank, self.dtype, self.store, self.host, self.port = rank, dtype, store, host, port
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self.plan: ReshardPlan = plan(model, train_layout, infer_layout, itemsize=dtype.itemsize, holdings=holdings)
        self.outgoing = self.plan.sent_by(rank)
        self.groups: dict[int, dist.ProcessGroup] = {}
        self.device = next(iter(self.held.values()))[0][1].device

    def invitation(self, engine: int) -> dict[str, Any]:
        """What engine number `engine` needs to join, as plain values."""
        return {
            "host": self.host,
            "port": self.port,
            "engine": engine,
            "model": asdict(self.model),
            "num_learners": self.train_layout.world_size,
            "incoming": [
                {source: [astuple(box) for box in boxes] for source, boxes in self.plan.received_by(worker).items()}
                for worker in range(engine * self.infer_layout.tensor, (engine + 1) * self.infer_layout.tensor)
            ],
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
        }

    def join(self, engine: int) -> None:
        """Form the group with one engine, whose workers must be joining at the same time."""
        self.groups[engine] = join_group(
            self.store,
            name=group_name(engine),
            rank=self.rank,
            size=self.train_layout.world_size + self.infer_layout.tensor,
            timeout_s=self.timeout_s,
            device=self.device,
            host=self.host,
        )

    def send(self, version: int) -> int:
        """Send this rank's slices to all workers of all engines; returns the bytes sent.

        Raises:
            RuntimeError: naming this rank, the worker and the bucket that were waited for, after `timeout_s`.
        """
        queues = {
            worker: buckets(boxes, itemsize=self.dtype.itemsize, bucket_bytes=self.bucket_bytes)
            for worker, boxes in self.outgoing.items()
        }
        sent = 0
        # Round by round, as the receivers read: one bucket per worker is in flight, so there is no deadlock.
        for number in range(max(map(len, queues.values()), default=0)):
            in_flight = []
            for worker, queue in queues.items():
                if number < len(queue):
                    bucket = torch.cat([self._values(box).reshape(-1) for box in queue[number]])
                    engine, worker_rank = divmod(worker, self.infer_layout.tensor)
                    peer = self.train_layout.world_size + worker_rank
                    in_flight.append((worker, bucket, self._attempt(version, worker, number, engine, peer, bucket)))
            for worker, bucket, work in in_flight:
                self._wait(version, worker, number, work)
                sent += bucket.numel() * bucket.element_size()
        return sent

    def _attempt(self, version: int, worker: int, number: int, engine: int, peer: int, bucket: torch.Tensor) -> Any:
        try:
            return self.groups[engine].send([bucket], peer, 0)
        except RuntimeError as err:
            raise self._lost(version, worker, number, err) from err

    def _wait(self, version: int, worker: int, number: int, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as err:
            raise self._lost(version, worker, number, err) from err

    def _lost(self, version: int, worker: int, number: int, err: Exception) -> RuntimeError:
        engine, worker_rank = divmod(worker, self.infer_layout.tensor)
        return RuntimeError(
            f"weight sync {version}: training rank {self.rank} could not send bucket {number} to worker {worker_rank} of "
            f"engine {engine} within weight_sync_timeout={self.timeout_s:g} s: {err}"
        )

    def digests(self) -> torch.Tensor:
        """`[workers, tensors]` int64: digest of what this rank sends each worker; the sum over ranks is what the worker must have."""
        shapes = hf_tensors(self.model)
        table = torch.zeros(self.infer_layout.engines * self.infer_layout.tensor, len(shapes), dtype=torch.int64)
        column = {name: i for i, name in enumerate(shapes)}
        for worker, boxes in self.outgoing.items():
            for box in boxes:
                table[worker, column[box.name]] += digest(box, self._values(box), shapes[box.name])
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

    def _values(self, box: Box) -> torch.Tensor:
        for held, view in self.held[box.name]:
            if held.intersect(box) == box:
                return view[box.within(held)].to(self.dtype)
        raise AssertionError(f"rank {self.rank} does not hold {box}")


class Receiver:
    """An engine worker's end: every slice is written in place into the live weights.

    Args:
        targets: every box the worker holds with the live view to write to.
        worker: number of the worker in its engine.
    """

    def __init__(self, targets: Iterable[tuple[Box, torch.Tensor]], *, worker: int, invitation: dict[str, Any]) -> None:
        self.targets: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for box, view in targets:
            self.targets.setdefault(box.name, []).append((box, view))
        view = next(iter(self.targets.values()))[0][1]
        self.dtype, self.device = view.dtype, view.device
        self.model = ModelShape.from_dict(invitation["model"])
        self.engine, self.worker = invitation["engine"], worker
        self.timeout_s = invitation["timeout_s"]
        num_learners, workers = invitation["num_learners"], invitation["incoming"]
        incoming = {
            int(source): [Box(name, tuple(start), tuple(shape)) for name, start, shape in boxes]
            for source, boxes in workers[worker].items()
        }
        self._check_targets(incoming)
        self.queues = {
            source: buckets(boxes, itemsize=self.dtype.itemsize, bucket_bytes=invitation["bucket_bytes"])
            for source, boxes in incoming.items()
        }
        self.store = connect_store(invitation["host"], invitation["port"], self.timeout_s)
        self.group = join_group(
            self.store,
            name=group_name(self.engine),
            rank=num_learners + worker,
            size=num_learners + len(workers),
            timeout_s=self.timeout_s,
            device=self.device,
            host=invitation["host"],
        )

    def _check_targets(self, incoming: dict[int, list[Box]]) -> None:
        """The engine's live weights must be exactly the boxes that the plan sends to it."""
        live = {name: sum(box.size for box, _ in held) for name, held in self.targets.items()}
        planned: dict[str, int] = {}
        for box in (box for boxes in incoming.values() for box in boxes):
            planned[box.name] = planned.get(box.name, 0) + box.size
            if self._find(box) is None:
                raise ValueError(f"the engine does not hold {box} in one piece, which the plan sends to it")
        differing = sorted(name for name in live.keys() | planned.keys() if live.get(name) != planned.get(name))
        if differing:
            raise ValueError(f"engine and plan differ in {len(differing)} tensors, the first are {differing[:3]}")

    def receive(self, version: int) -> None:
        """Receive all slices of one sync.

        Raises:
            RuntimeError: naming this worker, the training rank and the bucket that were waited for, after `timeout_s`.
        """
        for number in range(max(map(len, self.queues.values()))):
            for source, queue in self.queues.items():
                if number >= len(queue):
                    continue
                bucket = torch.empty(sum(box.size for box in queue[number]), dtype=self.dtype, device=self.device)
                try:
                    self.group.recv([bucket], source, 0).wait(timedelta(seconds=self.timeout_s))
                except RuntimeError as err:
                    raise RuntimeError(
                        f"weight sync {version}: worker {self.worker} of engine {self.engine} waited for bucket {number} of "
                        f"training rank {source} for weight_sync_timeout={self.timeout_s:g} s: {err}"
                    ) from err
                offset = 0
                for box in queue[number]:
                    view = self._find(box)
                    assert view is not None, "checked when the group was joined"
                    view.copy_(bucket[offset : offset + box.size].view(box.shape))
                    offset += box.size

    def report_digests(self, version: int) -> None:
        """Tell rank 0 the digest of every tensor's part that this worker holds now."""
        shapes = hf_tensors(self.model)
        sums = []
        for name, shape in shapes.items():
            total = sum(digest(box, view, shape) for box, view in self.targets[name])
            sums.append((total + (1 << 63)) % (1 << 64) - (1 << 63))
        self.store.set(digest_key(self.engine, self.worker, version), json.dumps(sums))

    def _find(self, box: Box) -> torch.Tensor | None:
        for held, view in self.targets.get(box.name, ()):
            if held.intersect(box) == box:
                return view[box.within(held)]
        return None


def group_name(engine: int) -> str:
    """The transfer group of an engine."""
    return f"transfer/{engine}"


def digest_key(engine: int, worker: int, version: int) -> str:
    """Where a worker leaves its digests."""
    return f"digest/{engine}/{worker}/{version}"

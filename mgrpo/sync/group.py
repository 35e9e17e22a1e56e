"""The store for the rendezvous of a transfer's members, and the transport over a process group: gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgrpo.processes.address import LOOPBACK, own_address
from mgrpo.sync.live import WeightMessage
from mgrpo.sync.transport import Lost, Messages, named

POLL_S = 0.0002
"""Seconds between two polls of the work under way on CUDA."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()
"""Held while the variable is set: engines join groups in threads."""

Backend = Any
"""Torch's type stubs do not declare all of its methods."""
Start = Callable[[list[torch.Tensor], int, int], dist.Work]
"""Begins to send or to receive."""


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
    """Client of the server of `open_store`, for all other processes."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def another_connection(store: Any) -> dist.Store:
    """Another connection to the same server: a wait blocks the connection for all other users."""
    return store.clone()


def join_group(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    host: str,
    timeout_s: float,
) -> ProcessGroup:
    """Join `size` members that are all there (`mgrpo.sync.joining`) as number `rank`; returns when all are connected.

    Args:
        dtype: type of the weights on the wire.
    """
    if device.type == "cuda":
        backend = _nccl(store, rank, size, timedelta(seconds=timeout_s))
        # One communicator for the whole group; otherwise the first message between two members makes one for them.
        backend.eager_connect_single_device(device)
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_gloo_device(host)]
        backend = gloo(store, rank, size, options)
    return ProcessGroup(backend, dtype=dtype, device=device, timeout_s=timeout_s)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """NCCL group without torch's watchdog, which would end this process when an engine dies.

    Torch reads the variable in the constructor, for this group alone; the learners' own groups keep their watchdogs.
    `Transfer.is_due` checks the time limit in its place.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _environment:
        before = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"
        try:
            return nccl(store, rank, size, options)
        finally:
            if before is None:
                del os.environ[BLOCKING_WAIT]
            else:
                os.environ[BLOCKING_WAIT] = before


def _gloo_device(host: str) -> Any:
    """Gloo device on GLOO_SOCKET_IFNAME if there are several machines, otherwise on the route to rank 0 at `host`."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface and host != LOOPBACK:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=own_address(host))


class ProcessGroup:
    """A member's end of a group (a `Transport`)."""

    def __init__(self, backend: Backend, *, dtype: torch.dtype, device: torch.device, timeout_s: float) -> None:
        self.backend, self.dtype, self.device, self.timeout_s = backend, dtype, device, timeout_s

    def send(self, messages: Messages, *, lost: Lost) -> Transfer:
        """See `Transport`."""
        buckets = [self._filled(message) for message in messages.values()]
        return self._begin(self.backend.send, messages, buckets, lost, timeout_s=self.timeout_s)

    def recv(self, messages: Messages, *, lost: Lost) -> Transfer:
        """See `Transport`. Time limit doubled on CUDA: a learner serves its engines in turn, and one that hangs takes `timeout_s`."""
        buckets = [self._empty(message) for message in messages.values()]
        into = [[view for part in message for view in part] for message in messages.values()]
        timeout_s = self.timeout_s * (2 if self.backend.supports_coalescing else 1)
        return self._begin(self.backend.recv, messages, buckets, lost, into=into, timeout_s=timeout_s)

    def exchange(self, messages: Messages, into: Mapping[int, torch.Tensor], *, lost: Lost) -> Transfer:
        """Begin to send these slices and to receive into these tensors, all at once.

        On CUDA two members that each sent first would block each other.
        """
        sent = [(self.backend.send, peer, self._filled(message)) for peer, message in messages.items()]
        received = [(self.backend.recv, peer, bucket) for peer, bucket in into.items()]
        return Transfer(self.backend, [*sent, *received], timeout_s=self.timeout_s, lost=lost)

    def _empty(self, message: WeightMessage) -> torch.Tensor:
        return torch.empty(message.size, dtype=self.dtype, device=self.device)

    def _filled(self, message: WeightMessage) -> torch.Tensor:
        bucket, start = self._empty(message), 0
        for part in message:
            stop = start + sum(view.numel() for view in part)
            torch.cat([view.reshape(-1) for view in part], out=bucket[start:stop])
            start = stop
        return bucket

    def _begin(
        self,
        start: Start,
        messages: Messages,
        buckets: list[torch.Tensor],
        lost: Lost,
        *,
        into: Sequence[Sequence[torch.Tensor]] = (),
        timeout_s: float,
    ) -> Transfer:
        calls = [(start, peer, bucket) for peer, bucket in zip(messages, buckets, strict=True)]
        return Transfer(self.backend, calls, into=into, timeout_s=timeout_s, lost=lost)

    def bucket_limit(self, peer: int) -> None:
        """See `Transport`."""

    def close(self) -> None:
        """See `Transport`. With NCCL it also ends the kernels of an unanswered round, within the group's timeout."""
        if self.backend is not None and self.backend.supports_coalescing:
            # Torch's destructor would abort as well, but end the process if that takes longer than the group's timeout.
            with contextlib.suppress(RuntimeError):
                self.backend.abort()
        self.backend = None


class Transfer:
    """Buckets that are under way in a group at the same time (a `Round`).

    Args:
        calls: for each bucket `backend.send` or `backend.recv`, and the member.
        into: for each bucket that arrives, the views that its values are written to.
    """

    def __init__(
        self,
        backend: Backend,
        calls: Sequence[tuple[Start, int, torch.Tensor]],
        *,
        into: Sequence[Sequence[torch.Tensor]] = (),
        timeout_s: float,
        lost: Lost,
    ) -> None:
        peers, buckets = [peer for _, peer, _ in calls], [bucket for _, _, bucket in calls]
        self._timeout_s, self._lost = timeout_s, lost
        self._buckets, self._into = buckets, into
        self._deadline = time.monotonic() + timeout_s
        self._works: list[tuple[Sequence[int], dist.Work]] = []
        # Only NCCL coalesces messages; it orders them with the device's other work.
        self._is_on_device = backend.supports_coalescing
        if self._is_on_device:
            with named(peers, lost):
                # Together: on their own they would take their turn, and one that waits for its peer would hold up the rest.
                backend._start_coalescing()
                for start, peer, bucket in calls:
                    start([bucket], peer, 0)
                self._works.append((peers, backend._end_coalescing()))
            return
        for start, peer, bucket in calls:
            with named([peer], lost):
                self._works.append(([peer], start([bucket], peer, 0)))

    def is_due(self) -> bool:
        """See `Round`. On CUDA, RuntimeError once `timeout_s` has passed since the messages began."""
        if not self._is_on_device:
            return True
        for peers, work in self._works:
            with named(peers, self._lost):
                if not work.is_completed():
                    if time.monotonic() > self._deadline:
                        raise RuntimeError(f"no answer for {self._timeout_s:g} s")
                    return False
        return True

    def settle(self) -> None:
        """See `Round`. It waits at most `timeout_s` since the messages began on CUDA, for each on the CPU."""
        while not self.is_due():
            time.sleep(POLL_S)
        for peers, work in self._works:
            with named(peers, self._lost):
                work.wait() if self._is_on_device else work.wait(timedelta(seconds=self._timeout_s))
        _write(self._buckets, self._into)
        self._works, self._buckets, self._into = [], [], ()


def _write(buckets: Sequence[torch.Tensor], into: Sequence[Sequence[torch.Tensor]]) -> None:
    """Write the values of each received bucket to its views; sent buckets have none."""
    for bucket, views in zip(buckets, into, strict=False):
        parts = bucket.split([view.numel() for view in views])
        torch._foreach_copy_(list(views), [part.view(view.shape) for part, view in zip(parts, views, strict=True)])

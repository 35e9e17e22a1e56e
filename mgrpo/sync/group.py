"""The transport: a process group for each engine, and rounds of messages on it. gloo on CPU, NCCL on CUDA.

Members are the training ranks that send to the engine, in ascending order, and then its workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgrpo.processes.address import LOOPBACK, own_address

_POLL_S = 0.001

Group = Any
"""A bare backend: torch's type stubs do not declare all of its methods."""

Message = tuple[int, torch.Tensor]
"""The other member, and the values that are sent to it or the room for those that it sends."""


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
    store: dist.Store,
    *,
    name: str,
    members: Sequence[str],
    rank: int,
    timeout_s: float,
    device: torch.device,
    host: str,
) -> Group:
    """Join the transfer group `name`; returns when all members are there.

    Args:
        members: what each member is called, for the error.
        rank: this process's place among the members.
    Raises:
        RuntimeError: naming the members that have not come within `timeout_s`.
    """
    store = dist.PrefixStore(name, store)
    _meet(store, members, rank, timeout_s)
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # NCCL's watchdog ends the process; `Round.finish` gives up first and says what it waited for.
        options._timeout = timedelta(seconds=2 * timeout_s)
        group = nccl(store, rank, len(members), options)
        # One communicator for the whole group; otherwise the first message between two members makes one for them.
        group.eager_connect_single_device(device)
        return group
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [_gloo_device(host)]
    return gloo(store, rank, len(members), options)


def _meet(store: dist.Store, members: Sequence[str], rank: int, timeout_s: float) -> None:
    """Wait for all members, which making a communicator does without a limit of time."""
    keys = [f"here/{member}" for member in range(len(members))]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as err:
        missing = [member for member, key in zip(members, keys, strict=True) if not store.check([key])]
        raise RuntimeError(
            f"{members[rank]} waited for {', '.join(missing)} to join the weight-transfer group for "
            f"weight_sync_timeout={timeout_s:g} s; raise weight_sync_timeout if they are slow"
        ) from err


def _gloo_device(host: str) -> Any:
    """Each member listens on GLOO_SOCKET_IFNAME if there are several machines, otherwise on its way to rank 0, at `host`."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface and host != LOOPBACK:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=own_address(host))


class Round:
    """Messages with several members of a group that are under way at the same time, at most one with each.

    Args:
        start: `group.send` or `group.recv`.
        lost: makes the error from the members that were waited for and its cause.
    """

    def __init__(
        self,
        group: Group,
        start: Callable[[list[torch.Tensor], int, int], dist.Work],
        messages: Sequence[Message],
        *,
        timeout_s: float,
        lost: Callable[[Sequence[int], Exception], Exception],
    ) -> None:
        self._timeout_s, self._lost = timeout_s, lost
        self._buckets = [bucket for _, bucket in messages]
        self._deadline = time.monotonic() + timeout_s
        self._works: list[tuple[list[int], dist.Work]] = []
        # Where messages can be coalesced, which is NCCL, they are ordered with the device's other work.
        self._is_on_device = group.supports_coalescing
        if self._is_on_device:
            peers = [peer for peer, _ in messages]
            with self._named(peers):
                # Together: on their own they would take their turn, and one that waits for its peer would hold up the rest.
                group._start_coalescing()
                for peer, bucket in messages:
                    start([bucket], peer, 0)
                self._works.append((peers, group._end_coalescing()))
            return
        for peer, bucket in messages:
            with self._named([peer]):
                self._works.append(([peer], start([bucket], peer, 0)))

    def settle(self) -> list[torch.Tensor]:
        """The buckets, which from here on may be read, written and freed: on CUDA the device waits, on the CPU the host."""
        if not self._is_on_device:
            self.finish()
        for peers, work in self._works:
            with self._named(peers):
                work.wait()
        buckets, self._buckets = self._buckets, []
        return buckets

    def finish(self) -> None:
        """Wait on the host until all messages have arrived, at most `timeout_s` since they began on CUDA, each on the CPU."""
        for peers, work in self._works:
            with self._named(peers):
                if self._is_on_device:
                    self._poll(work)
                else:
                    work.wait(timedelta(seconds=self._timeout_s))
        self._works = []

    def _poll(self, work: dist.Work) -> None:
        # Unlike a `wait` that times out, this leaves the communicator as it is: torch ends a process that has aborted one.
        while not work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError("no answer")
            time.sleep(_POLL_S)
        work.wait()

    @contextlib.contextmanager
    def _named(self, peers: Sequence[int]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as err:
            raise self._lost(peers, err) from err

"""torch's NCCL group towards its caller, on the CPU: messages travel through the group's store, and works do as they are told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist

from mgrpo.sync import group
from mgrpo.sync.group import ProcessGroup
from mgrpo.sync.joining import SyncMembers

ABORT_S = 0.3
"""NCCL waits for its threads and kernels; meanwhile the workers of other engines wait for the next round."""
State = Callable[["Nccl", int], Literal["goes", "taken", "waits", "fails"]]
"""What a training rank's round does, by its group and its number there; what is taken arrives at no worker."""


class Work:
    """A round that is under way."""

    def __init__(self, backend: Nccl, number: int, messages: list[tuple[str, torch.Tensor, str]]) -> None:
        self.backend, self.number, self.messages = backend, number, messages
        self.is_over = self.has_failed = False

    def is_completed(self) -> bool:
        """As in torch also if it has failed."""
        if not self.is_over:
            state = self.backend.state(self.backend, self.number)
            self.has_failed = state == "fails"
            self.is_over = state in ("taken", "fails") or (state == "goes" and self._has_arrived())
        return self.is_over

    def _has_arrived(self) -> bool:
        store = self.backend.store
        for kind, bucket, key in list(self.messages):
            if not store.check([f"{key}/taken" if kind == "send" else key]):
                return False
            if kind == "recv":
                bucket.copy_(torch.frombuffer(bytearray(store.get(key)), dtype=bucket.dtype))
                store.set(f"{key}/taken", "")
            self.messages.remove((kind, bucket, key))
        return True

    def wait(self) -> None:
        """In a group without a watchdog it blocks the host until the round is over."""
        assert self.is_over, "the host would wait in torch, which looks at no other engine"
        if self.has_failed:
            raise RuntimeError("NCCL error: remote process exited")


class Nccl:
    """ProcessGroupNCCL."""

    Options = SimpleNamespace
    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.store, self.rank, self.options = store, rank, options
        self.environment = dict(os.environ)
        self.name, self.state = "", as_planned  # type: str, State
        self.begun: list[tuple[str, int]] = []
        self.num_rounds = 0
        self.counts: dict[str, int] = {}
        self.is_aborted = False

    def _start_coalescing(self) -> None:
        self.messages: list[tuple[str, torch.Tensor, str]] = []

    def send(self, buckets: list[torch.Tensor], peer: int, tag: int) -> None:
        """To a member, which need not be there yet."""
        key = self._key(f"{self.rank} to {peer}")
        self.store.set(key, buckets[0].view(torch.uint8).numpy().tobytes())
        self.messages.append(("send", buckets[0], key))

    def recv(self, buckets: list[torch.Tensor], peer: int, tag: int) -> None:
        """From a member."""
        self.messages.append(("recv", buckets[0], self._key(f"{peer} to {self.rank}")))

    def _key(self, pair: str) -> str:
        self.counts[pair] = self.counts.get(pair, 0) + 1
        return f"{pair}/{self.counts[pair]}"

    def _end_coalescing(self) -> Work:
        self.begun.append((self.name, self.num_rounds))
        self.num_rounds += 1
        return Work(self, self.num_rounds - 1, self.messages)

    def abort(self) -> None:
        """What is under way never arrives."""
        time.sleep(ABORT_S)
        self.is_aborted = True


def as_planned(group: Nccl, number: int) -> Literal["goes"]:
    """Every round arrives."""
    return "goes"


def meet_over(state: State, groups: list[Nccl], begun: dict[str, list[tuple[str, int]]]) -> Callable[..., ProcessGroup]:
    """In place of `mgrpo.sync.joining.meet`: groups as on GPUs of their own; `state` is that of training ranks' rounds.

    Args:
        groups: to which each one that is made is added.
        begun: by member's name, the rounds that it has begun in all of its groups.
    """

    def meet(
        store: dist.Store, members: SyncMembers, *, dtype: Any, device: Any, host: str, timeout_s: float
    ) -> ProcessGroup:
        own = members.names[members.rank]
        backend = group._nccl(store, members.rank, len(members.names), timedelta(seconds=timeout_s))
        backend.name, backend.begun = members.names[-1], begun.setdefault(own, [])
        if not members.is_worker:
            backend.state = state
            groups.append(backend)
        return ProcessGroup(backend, dtype=dtype, device=torch.device("cpu"), timeout_s=timeout_s)

    return meet

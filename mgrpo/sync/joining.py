"""Rendezvous of the members of an engine's transfer, and the transport of each pair of a training rank and a worker.

On CUDA: NCCL, or shared GPU memory where they share GPUs, since NCCL refuses two members on one. On the CPU: shared memory, or
gloo between machines and where memory cannot be shared.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from mgrpo.processes.background import Background
from mgrpo.sync import shared
from mgrpo.sync.group import join_group
from mgrpo.sync.live import WeightMessage
from mgrpo.sync.transport import Lost, Messages, Round, Transport, named

COMPLETE, GIVEN_UP = "complete", "given up"
"""Outcomes of a rendezvous."""
POLL_S = 0.1
"""Seconds between two checks for a failure of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMembers:
    """The members of the transfer to an engine, as one of them sees it."""

    names: Sequence[str]
    """Names in errors: the training ranks that send to the engine, ascending, then its workers."""
    rank: int
    """This process's number among them."""
    peers: Mapping[int, int]
    """For each peer, bytes of the largest message over shared memory."""
    is_worker: bool
    share_gpus: bool = False
    """A training rank and a worker may be on the same GPU, and all members are on one machine."""


def meet_unless_failed(meeting: Callable[[], Transport], failure: Callable[[], str]) -> Transport:
    """Run `meeting`, which waits for others, in a thread of its own and return its result.

    Args:
        failure: the reason why another member will not come; "": none so far.
    Raises:
        RuntimeError: with that reason, as soon as there is one. The thread ends at its own time limit: waits of stores, gloo and NCCL
            cannot be cancelled.
    """
    thread = Background("meeting")
    met = thread.submit(meeting)
    thread.close()
    while not wait([met], POLL_S).done:
        if reason := failure():
            met.add_done_callback(_close)
            raise RuntimeError(reason)
    return met.result()


def _close(met: Future[Transport]) -> None:
    if met.exception() is None:
        met.result().close()


def meet(
    store: dist.Store, members: SyncMembers, *, dtype: torch.dtype, device: torch.device, host: str, timeout_s: float
) -> Transport:
    """Join the others; returns when all members are connected. Every member must call it.

    Args:
        store: of this transfer alone.
        dtype: of the engine.
        host: of the store.
    Raises:
        RuntimeError: naming the members that did not join within `timeout_s`.
    """

    def group() -> Transport:
        size = len(members.names)
        return join_group(
            store, rank=members.rank, size=size, dtype=dtype, device=device, host=host, timeout_s=timeout_s
        )

    is_cuda = device.type == "cuda"
    if is_cuda and not members.share_gpus:
        _exchange(store, "here", "", members, timeout_s)
        return group()
    links, reasons = _share_memory(store, members, dtype, device, timeout_s)
    if is_cuda and reasons:
        reason = next(filter(None, reasons), "an engine and a learner are on different machines")
        raise RuntimeError(
            f"{reason}; with vllm_mode=colocate an engine and the learners of its node must share GPU memory"
        )
    if members.rank == 0:
        for reason in filter(None, reasons):
            print(f"mgrpo: {reason}; these weights take the slower way over gloo", file=sys.stderr, flush=True)
    if not reasons:
        return shared.SharedMemory(links)
    # All members join the group, also those that do not need it: one rule, at little cost.
    return Mixed({**dict.fromkeys(members.peers, group()), **dict.fromkeys(links, shared.SharedMemory(links))})


def _share_memory(
    store: dist.Store, members: SyncMembers, dtype: torch.dtype, device: torch.device, timeout_s: float
) -> tuple[dict[int, shared.SharedMemoryLink], list[str]]:
    """This member's links, and for each pair of members without one the reason; "": they are on different machines."""
    with contextlib.ExitStack() as stack:
        listener = None
        if not members.is_worker:
            listener = stack.enter_context(contextlib.closing(shared.Listener(len(members.peers))))
        addresses = _exchange(store, "here", listener.address if listener else "", members, timeout_s)
        links: dict[int, shared.SharedMemoryLink] = {}
        missing: dict[int, str] = {}
        for peer, slot_bytes in members.peers.items() if members.is_worker else ():
            try:
                link = shared.connect(
                    addresses[peer],
                    member=members.rank,
                    slot_bytes=slot_bytes,
                    dtype=dtype,
                    device=device,
                    timeout_s=timeout_s,
                )
            except OSError as err:
                missing[peer] = f"{members.names[members.rank]} cannot share memory with {members.names[peer]}: {err}"
                continue
            if link is None:
                missing[peer] = ""
            else:
                links[peer] = link
        # Training ranks accept only the workers that could share memory.
        all_missing = [
            json.loads(found) for found in _exchange(store, "missing", json.dumps(missing), members, timeout_s)
        ]
        if listener:
            expected = {
                peer: size for peer, size in members.peers.items() if str(members.rank) not in all_missing[peer]
            }
            with named(list(expected), lambda peers, err: _refused(members, peers, err)):
                links = listener.accept(expected, dtype=dtype, device=device, timeout_s=timeout_s)
    return links, [reason for found in all_missing for reason in found.values()]


def _refused(members: SyncMembers, peers: Sequence[int], err: Exception) -> RuntimeError:
    names = ", ".join(members.names[peer] for peer in peers)
    return RuntimeError(f"{members.names[members.rank]} could not share memory with {names}: {err}")


def _exchange(store: dist.Store, topic: str, value: str, members: SyncMembers, timeout_s: float) -> list[str]:
    """The values of all members. Without this, creating an NCCL communicator would wait for them without a time limit.

    The first member that has all values, or times out, decides for all: none continues when another has failed.
    """
    keys = [f"{topic}/{member}" for member in range(len(members.names))]
    verdict = partial(store.compare_set, f"{topic}/verdict", "")
    store.set(keys[members.rank], value)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as err:
        missing = [name for name, key in zip(members.names, keys, strict=True) if not store.check([key])]
        if missing and verdict(GIVEN_UP) == GIVEN_UP.encode():
            raise RuntimeError(
                f"{members.names[members.rank]} waited for {', '.join(missing)} to join the weight-transfer group for "
                f"{timeout_s:g} s; raise weight_sync_timeout if they are slow"
            ) from err
    if verdict(COMPLETE) == GIVEN_UP.encode():
        raise RuntimeError(
            f"{members.names[members.rank]} came to the weight-transfer group after another of {', '.join(members.names)} had "
            f"waited for {timeout_s:g} s; raise weight_sync_timeout if it is slow"
        )
    return [store.get(key).decode() for key in keys]


class Mixed:
    """A `Transport` that uses another one for each peer."""

    def __init__(self, by_peer: Mapping[int, Transport]) -> None:
        self.by_peer = by_peer
        self._transports = list(dict.fromkeys(by_peer.values()))

    def send(self, messages: Messages, *, lost: Lost) -> MixedRound:
        """See `Transport`."""
        return MixedRound([each.send(own, lost=lost) for each, own in self._parts(messages)])

    def recv(self, messages: Messages, *, lost: Lost) -> MixedRound:
        """See `Transport`."""
        return MixedRound([each.recv(own, lost=lost) for each, own in self._parts(messages)])

    def _parts(self, messages: Messages) -> list[tuple[Transport, Messages]]:
        found: dict[Transport, dict[int, WeightMessage]] = {}
        for peer, message in messages.items():
            found.setdefault(self.by_peer[peer], {})[peer] = message
        return list(found.items())

    def bucket_limit(self, peer: int) -> int | None:
        """See `Transport`."""
        return self.by_peer[peer].bucket_limit(peer)

    def close(self) -> None:
        """See `Transport`."""
        for each in self._transports:
            each.close()


class MixedRound:
    """The parts of a round."""

    def __init__(self, parts: Sequence[Round]) -> None:
        self._parts = parts

    def is_due(self) -> bool:
        """See `Round`."""
        return all(part.is_due() for part in self._parts)

    def settle(self) -> None:
        """See `Round`."""
        for part in self._parts:
            part.settle()

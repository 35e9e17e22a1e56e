"""Members that come to a meeting at different times."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgrpo.sync.group import BLOCKING_WAIT, join_group
from mgrpo.sync.joining import SyncMembers, meet


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The members that have made their end of an NCCL communicator, which waits for the others without a limit."""
    ranks: list[int] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            assert os.environ[BLOCKING_WAIT] == "1"
            ranks.append(rank)

        def eager_connect_single_device(self, device: torch.device) -> None: ...

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    return ranks


def come(store: dist.Store, rank: int, timeout_s: float = 60) -> None:
    members = SyncMembers(names=["above", "below"], rank=rank, peers={1 - rank: 1}, is_worker=rank == 1)
    device = torch.device("cuda", 0)
    meet(store, members, dtype=torch.bfloat16, device=device, host="127.0.0.1", timeout_s=timeout_s)


def test_nobody_enters_a_group_that_another_has_given_up(made):
    """It would wait in NCCL for ever."""
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"above waited for below to join the weight-transfer group for 0\.01 s"):
        come(store, 0, timeout_s=0.01)
    with pytest.raises(RuntimeError, match="below came to the weight-transfer group after another of above, below had"):
        come(store, 1)
    assert not made


def test_nobody_gives_up_a_group_that_another_enters(made):
    """Its time is over in the moment in which the other one has come, and has seen it there."""
    store = dist.HashStore()

    class Late:
        """The store, as it is for a member whose wait ends without an answer."""

        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise RuntimeError("time is over")

        def check(self, keys: list[str]) -> bool:
            seen = store.check(keys)
            with ThreadPoolExecutor(1) as thread:
                if "here/1" in keys:
                    thread.submit(come, store, 1).result()
            return seen

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    come(Late(), 0)  # type: ignore[arg-type]
    assert made == [1, 0]


def test_groups_that_are_made_in_threads_have_no_watchdog(monkeypatch):
    """One thread took the variable away in which another one's group was about to look."""
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    inside, left = threading.Event(), threading.Event()
    found: list[str | None] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            if rank == 0:
                second.append(thread.submit(join, 1))
                # Where both can be here at once, this one leaves first.
                inside.wait(0.2)
            else:
                inside.set()
                left.wait()
            found.append(os.environ.get(BLOCKING_WAIT))

        def eager_connect_single_device(self, device: torch.device) -> None:
            left.set()

    def join(rank: int) -> None:
        device = torch.device("cuda", 0)
        join_group(dist.HashStore(), rank=rank, size=2, dtype=torch.bfloat16, device=device, host="", timeout_s=1)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    second: list[Any] = []
    with ThreadPoolExecutor(1) as thread:
        join(0)
        second[0].result()
    assert found == ["1", "1"] and BLOCKING_WAIT not in os.environ

"""What a transfer group asks of NCCL, which no test can run."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgrpo.sync.group import Transfer, join_group


def test_nccl_makes_one_communicator_and_gives_up_after_the_host(monkeypatch):
    """A watchdog that is first ends the process without a word; a communicator for each pair takes minutes to make."""
    made: list[Any] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((rank, size, options._timeout))

        def eager_connect_single_device(self, device: torch.device) -> None:
            made.append(device)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    device = torch.device("cuda", 3)
    join_group(dist.HashStore(), rank=0, size=2, dtype=torch.bfloat16, device=device, host="127.0.0.1", timeout_s=30)
    assert made == [(0, 2, timedelta(seconds=60)), device]


def test_a_round_that_is_late_on_the_device_is_named_and_not_aborted():
    """torch ends a process whose communicator was aborted, before its error is out."""

    class Work:
        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: timedelta | None = None) -> None:
            assert timeout is None, "it aborts the communicator"

    group = SimpleNamespace(
        supports_coalescing=True,
        _start_coalescing=lambda: None,
        _end_coalescing=Work,
        send=lambda tensors, peer, tag: None,
    )
    late = Transfer(
        group,
        group.send,
        [4, 6],
        [torch.zeros(1), torch.zeros(1)],
        timeout_s=0.05,
        lost=lambda peers, err: RuntimeError(f"waited for {peers}: {err}"),
    )
    with pytest.raises(RuntimeError, match=r"waited for \[4, 6\]: no answer"):
        late.finish()

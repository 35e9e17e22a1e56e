"""What a transfer group asks of NCCL, and how a round on the device is waited for."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgrpo.sync.group import BLOCKING_WAIT, Transfer, join_group


@pytest.mark.parametrize("own", [None, "0"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_transfer_group_alone_has_no_watchdog(monkeypatch, own: str | None, fails: bool) -> None:
    """A watchdog ends the learner for an engine that died; without one the learners' own groups would never time out."""
    made: list[Any] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((rank, size, options._timeout, os.environ[BLOCKING_WAIT]))
            if fails:
                raise RuntimeError("no device")

        def eager_connect_single_device(self, device: torch.device) -> None:
            made.append((device, os.environ.get(BLOCKING_WAIT)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if own:
        monkeypatch.setenv(BLOCKING_WAIT, own)
    device = torch.device("cuda", 3)

    def join() -> None:
        join_group(
            dist.HashStore(), rank=0, size=2, dtype=torch.bfloat16, device=device, host="127.0.0.1", timeout_s=30
        )

    if fails:
        with pytest.raises(RuntimeError, match="no device"):
            join()
    else:
        join()
    assert made[0] == (0, 2, timedelta(seconds=30), "1")
    # One communicator for the whole group: one for each pair takes minutes to make.
    assert made[1:] == ([] if fails else [(device, own)])
    assert os.environ.get(BLOCKING_WAIT) == own


class Work:
    """A round on the device; `wait` would block the host until it is over."""

    def __init__(self, answers: list[bool], *, failure: str = "") -> None:
        self.answers, self.failure = answers, failure

    def is_completed(self) -> bool:
        return self.answers.pop(0) if self.answers else False

    def wait(self) -> None:
        assert not self.answers, "the host waits in torch"
        if self.failure:
            raise RuntimeError(self.failure)


def transfer(work: Work, *, timeout_s: float, bucket: torch.Tensor, view: torch.Tensor) -> Transfer:
    backend = SimpleNamespace(
        supports_coalescing=True,
        _start_coalescing=lambda: None,
        _end_coalescing=lambda: work,
        recv=lambda tensors, peer, tag: None,
    )

    def lost(peers: Any, err: Exception) -> RuntimeError:
        return RuntimeError(f"waited for {peers}: {err}")

    return Transfer(backend, [(backend.recv, 4, bucket)], into=[[view]], timeout_s=timeout_s, lost=lost)


def test_a_round_on_the_device_is_written_once_it_has_arrived() -> None:
    """A bucket that is read too early holds what was there before it."""
    view = torch.zeros(2)
    round_ = transfer(Work([False, False, True, True]), timeout_s=60, bucket=torch.ones(2), view=view)
    assert not round_.is_due() and not round_.is_due() and round_.is_due()
    assert not view.any()
    round_.settle()
    assert view.all()


def test_a_round_that_is_late_on_the_device_is_named() -> None:
    """The run goes on without the engine whose name it is."""
    late = transfer(Work([]), timeout_s=0.05, bucket=torch.ones(1), view=torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"waited for \[4\]: no answer for 0.05 s"):
        late.settle()


def test_a_round_that_has_failed_is_named_and_written_nowhere() -> None:
    """torch calls a work complete that has failed; its values would be garbage."""
    view = torch.zeros(1)
    failed = transfer(Work([True], failure="remote process exited"), timeout_s=60, bucket=torch.ones(1), view=view)
    with pytest.raises(RuntimeError, match=r"waited for \[4\]: remote process exited"):
        failed.settle()
    assert not view.any()

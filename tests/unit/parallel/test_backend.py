"""What the backend says about this machine."""

from __future__ import annotations

import os

import pytest
import torch

from mgrpo.parallel import backend


@pytest.mark.skipif(backend.has_cuda(), reason="with CUDA every rank has a device of its own")
def test_ranks_of_a_machine_share_its_memory(monkeypatch) -> None:
    """Four ranks that each count on all of it would choose buffers for which there is no room."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = backend.device_bytes()
    assert whole > 1 << 28
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert backend.device_bytes() == whole // 4


@pytest.mark.parametrize("num_local_ranks", [1, 3, 1000])
def test_an_update_on_the_host_takes_this_ranks_share_of_the_cores(monkeypatch, num_local_ranks) -> None:
    """On one thread it takes as long as the rest of a step; on all cores the ranks of a machine get in each other's way."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local_ranks))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="inside"), backend.host_threads():
        assert torch.get_num_threads() == max(6 // num_local_ranks, 1)
        raise RuntimeError("inside")
    assert torch.get_num_threads() == before

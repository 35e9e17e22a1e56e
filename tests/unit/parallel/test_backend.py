"""What the backend says about this machine."""

from __future__ import annotations

import pytest

from mgrpo.parallel import backend


@pytest.mark.parametrize(
    ("cuda", "words"),
    [(None, "built for CPUs alone"), ("13.0", "with CUDA 13.0 needs driver 580"), ("12.8", "a driver for it")],
)
def test_gpus_that_torch_does_not_find_have_a_reason(monkeypatch, cuda, words) -> None:
    """ "No GPU" on a machine full of them sends the user to the hardware; it is the driver."""
    monkeypatch.setattr(backend.torch.version, "cuda", cuda)
    assert words in backend.why_no_cuda()


@pytest.mark.skipif(backend.has_cuda(), reason="with CUDA every rank has a device of its own")
def test_ranks_of_a_machine_share_its_memory(monkeypatch) -> None:
    """Four ranks that each count on all of it would choose buffers for which there is no room."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = backend.device_bytes()
    assert whole > 1 << 28
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert backend.device_bytes() == whole // 4

"""What the backend says about this machine."""

from __future__ import annotations

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


def test_gpus_that_torch_cannot_use_are_an_error(monkeypatch, tmp_path):
    """With too old a driver torch sees no GPU: learners would train on the CPU while engines wait for GPUs."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(backend, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(backend, "has_cuda", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    backend.check_gpus()  # a CPU build
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        RuntimeError, match=r"\(CUDA 13\.0\) cannot use this machine's GPUs: .*; update the NVIDIA driver"
    ):
        backend.check_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    backend.check_gpus()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "nvidia0").unlink()
    backend.check_gpus()

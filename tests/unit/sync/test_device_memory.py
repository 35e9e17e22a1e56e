"""GPU memory that cannot be shared: what is said, on a machine without a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from mgrpo.sync import device_memory


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"PYTORCH_ALLOC_CONF": ""}, None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"}, None),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: true"}, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_expandable_segments_are_known_from_the_environment(environment: dict[str, str], found: str | None) -> None:
    """CUDA refuses to share them with an error that names nothing that a user has set."""
    assert device_memory.expandable_segments(environment) == found


def test_an_engine_with_expandable_segments_is_told_what_to_set(monkeypatch) -> None:
    """Servers of `vllm_mode=server` are started by somebody else. An OSError reaches all members, who would wait otherwise."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(
        OSError, match=r"PYTORCH_ALLOC_CONF=expandable_segments:True, expected no .* PYTORCH_ALLOC_CONF empty"
    ):
        device_memory.offer(torch.zeros(1))


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch) -> None:
    """CUDA says that peer access is not supported, and not between which of eight."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of {device}"))
    offered = json.dumps(
        {"gpu": "of a worker", "fields": [0, {"bytes": "00"}, 4, 0, {"bytes": "00"}, 0, {"bytes": "00"}, True]}
    )
    with pytest.raises(
        RuntimeError, match=r"GPU of cuda:3 cannot map the memory of GPU of a worker: .*vllm_mode=colocate"
    ):
        device_memory.mapped(offered.encode(), dtype=torch.float32, device=torch.device("cuda", 3))

"""Which device the ranks of a pool use."""

from __future__ import annotations

import torch

from tests.ranks import cases
from tests.ranks.rank_pool import start_method


def test_ranks_use_gpus_only_if_each_has_one(run_ranks) -> None:
    """NCCL refuses two ranks on a GPU, and a forked rank cannot use CUDA: on such machines no layout would be tested."""
    assert [start_method(4, num_gpus) for num_gpus in (0, 3, 4, 8)] == ["forkserver", "forkserver", "spawn", "spawn"]
    if torch.cuda.device_count() == 0:
        assert run_ranks(1, cases.visible_gpus) == [""]

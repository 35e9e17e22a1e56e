"""Metrics of how tokens are spread over experts."""

from __future__ import annotations

import torch

from mgrpo.parallel import backend

backend.install()

from mgrpo.parallel.moe.expert_loads import load_metrics  # noqa: E402


def test_loads_are_compared_with_their_layers_mean() -> None:
    """Layers differ, so that one number for all would hide a layer that has collapsed."""
    found = load_metrics(torch.tensor([[4, 0, 0, 0], [2, 2, 2, 2], [6, 1, 1, 0]]))
    assert found == {"moe/idle_experts": 4 / 12, "moe/load_max/0": 4.0, "moe/load_max/1": 1.0, "moe/load_max/2": 3.0}


def test_a_step_without_a_trained_token_has_no_loads() -> None:
    assert load_metrics(torch.zeros(2, 4, dtype=torch.int64)) == {}

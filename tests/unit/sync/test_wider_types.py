"""Weights that vLLM keeps in float32 where the model's are bfloat16: routers of GLM-4.5, decays of gated delta nets."""

from __future__ import annotations

import numpy as np
import torch

from mgrpo.models.placement.boxes import Box
from mgrpo.sync.live import LiveBoxes
from mgrpo.sync.sending.digest import digests
from mgrpo.sync.vllm_plugin import receiver as module


def test_digests_are_of_what_was_sent(monkeypatch):
    """Otherwise every check of such a model says that its weights differ."""
    sent = {name: torch.randn(3, 4).bfloat16() for name in ("a", "b", "c")}
    shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
    boxes = {name: Box(name, (0, 0), shape) for name, shape in shapes.items()}
    kept: dict[str, bytes] = {}
    receiver = object.__new__(module.Receiver)
    vars(receiver).update(
        live=LiveBoxes([(boxes["a"], sent["a"]), (boxes["b"], sent["b"].float())], torch.bfloat16),
        loaded=[(boxes["c"], sent["c"].float())],
        **{"model": None, "lora": None, "engine": 0, "generation": 0, "worker": 0, "store": kept},
    )
    monkeypatch.setattr(module, "proven_tensors", lambda *args: shapes)
    receiver.store = type("Store", (), {"set": lambda self, key, sums: kept.update({"sums": sums})})()
    receiver.report_digests(1)
    expected = digests([(boxes[name], sent[name]) for name in sent], shapes)
    assert np.array_equal(np.frombuffer(kept["sums"], module.DIGEST), expected)

"""The LM head with fp32 logits in a bf16 model, against float64 from what the head is given, on every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ranks import cases
from tests.tiny_models import save_tiny

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2+sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("qwen2", {}),
        ("qwen2", {"logits_chunk": 17}),
        ("llama, tied", {}),
        ("llama, tied", {"logits_chunk": 17}),
        ("gemma2", {}),  # logits with a soft cap
    ],
    ids=str,
)
def test_logprobs_are_those_of_float64(run_ranks, tmp_path, family, head, layout):
    """What trainer and engine may differ by is what their layers round: the head adds nothing to it."""
    name, _, tied = family.partition(", ")
    folder = save_tiny(tmp_path, name, tied=bool(tied))
    world_size, axes = LAYOUTS[layout]
    arguments = {"model_dir": str(folder), "layout": axes, "samples": cases.random_samples(seed=3)}
    wide, narrow = (
        max(_errors(run_ranks(world_size, cases.head_operands, **arguments, **head, fp32_logits=on), name))
        for on in (True, False)
    )
    print(f"{family} {head} {layout}: {wide:.1e} with fp32 logits, {narrow:.1e} without")
    assert wide < 2e-6
    assert narrow > 100 * wide


def _errors(ranks, name):
    """Largest error of a logprob on each context rank."""
    found = [rank for rank in ranks if rank is not None]
    for context in sorted({int(rank["ranks"][1]) for rank in found}):
        shards = sorted((rank for rank in found if rank["ranks"][1] == context), key=lambda rank: rank["ranks"][0])
        hidden, targets = torch.from_numpy(shards[0]["hidden"]).double(), torch.from_numpy(shards[0]["targets"])
        logits = hidden @ torch.from_numpy(np.concatenate([rank["weight"] for rank in shards])).double().t()
        if name == "gemma2":
            logits = 1.5 * torch.tanh(logits / 1.5)
        exact = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        for rank in shards:
            np.testing.assert_array_equal(rank["logprobs"], shards[0]["logprobs"])
            yield float((torch.from_numpy(rank["logprobs"]).double() - exact).abs().max())

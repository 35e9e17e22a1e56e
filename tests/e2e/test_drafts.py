"""An engine that drafts: its answers have the model's log-probabilities, and the counts of drafts come with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mgrpo.rollout.engine import Sampling
from tests.e2e.lone_engine import lone_engine
from tests.sampling import prompt_batch
from tests.tiny_models import load_hf, save_tiny

pytest.importorskip("numba", reason="drafts by n-grams need numba, see requirements/dev.txt")
ENGINE_DIFFERENCE = 5e-5
"""Of a log-probability, between the engine and transformers in float32 at the temperature below."""
TEMPERATURE = 0.3
"""A small random model repeats itself when it is cold."""


def test_drafts_are_accepted_and_change_no_log_probability(tmp_path):
    """vLLM's own kernel for CPUs judges drafts by what memory holds: answers would be of another distribution than the trainer's."""
    folder = save_tiny(tmp_path / "model", "llama", vocab_size=32, head_dim=32)
    values = {
        "model_name_or_path": str(folder),
        "model_dtype": "float32",
        "max_prompt_token_length": 16,
        "response_length": 96,
        "output_dir": str(tmp_path),
        "vllm_speculative_method": "ngram",
    }
    prompts = [np.tile(np.arange(2, 8), 2), np.arange(3, 13)]
    sampling = Sampling(num_samples=8, max_tokens=96, temperature=TEMPERATURE, stop_token_ids=(1,))
    with lone_engine(values) as fleet:
        engine, batch = fleet.engines[0], prompt_batch(prompts, sampling)
        engine.submit(batch)
        engine.resume().result(60)
        answers = [engine.poll(gather_s=5.0).result(120)]
        while sum(len(answer["numbers"]) for answer in answers) < len(prompts):
            answers.append(engine.poll(gather_s=5.0).result(120))
    times, drafted, accepted = sum(answer["drafts"] for answer in answers).tolist()
    assert drafted > times > 0 and drafted / 10 < accepted <= drafted
    oracle = load_hf(folder)
    for answer in answers:
        own = [prompts[number] for number in answer["numbers"] for _ in range(sampling.num_samples)]
        for prompt, first, last in zip(own, answer["cu_seqlens"][:-1], answer["cu_seqlens"][1:], strict=True):
            ids = torch.from_numpy(np.concatenate((prompt, answer["tokens"][first:last]))).long()[None]
            with torch.no_grad():
                scores = torch.log_softmax(oracle(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE, -1)
            expected = scores.gather(1, ids[0, len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(answer["logprobs"][first:last], expected.numpy(), atol=ENGINE_DIFFERENCE)

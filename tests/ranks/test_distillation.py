"""Teachers in every layout, against transformers' own model in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mgrpo.types import TrainSample
from tests.ranks import cases, distillation_cases
from tests.tiny_models import load_hf, save_tiny

SAMPLES = cases.random_samples(seed=0, groups_of_turns=2)
LAYOUTS = {
    "one": (1, {}),
    "tp2+sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "dp2": (2, {}),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("teacher"), "llama", tied=True)


def distribution(model: torch.nn.Module, sample: TrainSample, temperature: float) -> torch.Tensor:
    """Log-probabilities `[predicted tokens, vocab]` in float64, -inf outside of the kept sets; unpacked and unpadded."""
    tokens = torch.from_numpy(np.concatenate((sample.prompt_tokens, sample.tokens))).long()
    logits = model(tokens[None]).logits[0, len(sample.prompt_tokens) - 1 : -1].double() / temperature
    if sample.kept is not None:
        is_kept = torch.zeros_like(logits, dtype=torch.bool)
        for row, token, kept in zip(
            is_kept, sample.tokens, np.split(sample.kept.ids, sample.kept.offsets[1:-1]), strict=True
        ):
            row[[token, *kept]] = True
        logits = logits.masked_fill(~is_kept, -torch.inf)
    return torch.log_softmax(logits, -1)[torch.from_numpy(sample.is_predicted)]


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "kept"])
@pytest.mark.parametrize("logits_chunk", [0, 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teacher_names_the_likeliest_tokens(run_ranks, teacher, layout, logits_chunk, is_cut):
    """Tokens of one shard, of the student's temperature, or beside another row would teach another distribution."""
    world_size, axes = LAYOUTS[layout]
    samples = cases.with_sets(SAMPLES) if is_cut else SAMPLES
    arguments = {"model_dir": str(teacher), "layout": axes, "samples": samples, "logits_chunk": logits_chunk}
    ranks = run_ranks(world_size, distillation_cases.taught, num_likeliest=4, temperature=1.3, **arguments)
    found = {number: scores for rank in ranks for number, scores in rank.items()}
    assert sorted(found) == list(range(len(samples)))
    model = load_hf(teacher)
    for number, sample in enumerate(samples):
        with torch.no_grad():
            every = distribution(model, sample, 1.3).numpy()
        scores, targets = found[number], sample.tokens[sample.is_predicted]
        np.testing.assert_allclose(scores.logprobs, every[np.arange(len(targets)), targets], atol=2e-5)
        best = -np.sort(-every, 1)[:, :4]
        is_token = best > -np.inf
        assert np.array_equal(scores.ids >= 0, is_token) and np.array_equal(np.isfinite(scores.likeliest), is_token)
        np.testing.assert_allclose(scores.likeliest[is_token], best[is_token], atol=2e-5)
        named = np.take_along_axis(every, np.maximum(scores.ids, 0), 1)
        np.testing.assert_allclose(scores.likeliest[is_token], named[is_token], atol=2e-5)

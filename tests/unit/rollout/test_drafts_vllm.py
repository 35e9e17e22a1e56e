"""Drafts without weights in vLLM's own rejection sampler: what it returns has the trainer's log-probabilities. It takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mgrpo.sync.vllm_plugin.rebound import expanded

pytestmark = pytest.mark.slow
VOCAB, REQUESTS, DRAFTED = 8, 2000, 3
TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
        yield pytest.importorskip("vllm.v1.sample.rejection_sampler")


def verified(vllm: Any, logits: Any, drafts: list[list[int]]) -> tuple[list[list[int]], Any]:
    """The tokens that are left of the drafts, with those sampled after them, and what vLLM returns of their log-probabilities.

    Args:
        logits: `[DRAFTED + 1, VOCAB]`, the same for each request.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    current_platform.register_triton_kernel_overrides()
    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    places = torch.arange(len(drafts) * (DRAFTED + 1), dtype=torch.int32).view(len(drafts), -1)
    metadata.target_logits_indices, metadata.bonus_logits_indices = places[:, :-1].flatten(), places[:, -1].contiguous()
    nothing = torch.zeros(len(drafts))
    sampling = SamplingMetadata(
        temperature=torch.full((len(drafts),), TEMPERATURE), all_greedy=False, all_random=True, top_p=None, top_k=None,
        generators={}, max_num_logprobs=0, no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing,
        presence_penalties=nothing, repetition_penalties=nothing, output_token_ids=[[] for _ in drafts],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    sampler = vllm.RejectionSampler(Sampler(logprobs_mode="processed_logprobs"))
    done = sampler(metadata, None, logits.repeat(len(drafts), 1), sampling)
    return sampler.parse_output(done.sampled_token_ids, VOCAB, logprobs_tensors=done.logprobs_tensors)


def test_on_a_cpu_drafts_are_judged_at_no_temperature(vllm):
    """What the plugin replaces: vLLM's CPU kernel writes the temperatures into a copy, and divides by what memory held. Where this fails,
    `expanded` may go."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not the build for CPUs")
    current_platform.register_triton_kernel_overrides()
    temperatures, ends = torch.full((50,), TEMPERATURE), torch.arange(1, 51, dtype=torch.int32) * DRAFTED
    assert bool((expanded(temperatures, ends, 150) == TEMPERATURE).all())
    assert not bool((vllm.expand_batch_to_tokens(temperatures, ends, 150) == TEMPERATURE).all())


def test_drafts_change_neither_the_distribution_nor_its_logprobs(vllm, monkeypatch):
    """Accepted, sampled in place of a refused one, or sampled after all: a token's ratio of trainer to engine must be 1."""
    import torch

    monkeypatch.setattr(vllm, "expand_batch_to_tokens", expanded)
    torch.manual_seed(3)
    logits = 2 * torch.randn(DRAFTED + 1, VOCAB)
    expected = (logits.double() / TEMPERATURE).log_softmax(-1).numpy()
    drafts = [[1, 2, 3] if number % 2 else [4, 4, 4] for number in range(REQUESTS)]
    tokens, returned = verified(vllm, logits, drafts)
    counts, lengths = np.zeros(VOCAB), np.zeros(DRAFTED + 2)
    flat = [(place, token) for own in tokens for place, token in enumerate(own)]
    for (place, token), row in zip(flat, np.asarray(returned.logprobs), strict=True):
        assert abs(row[0] - expected[place, token]) < 1e-5
    for own in tokens:
        counts[own[0]] += 1
        lengths[len(own)] += 1
    assert (lengths[1:] > 0).all(), "no draft was refused at some place, or none was accepted"
    np.testing.assert_allclose(counts / REQUESTS, np.exp(expected[0]), atol=4 * 0.5 / REQUESTS**0.5)

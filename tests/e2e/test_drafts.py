"""An engine that drafts: its answers have the model's log-probabilities, and the counts of drafts come with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from mgrpo.rollout.drafts import PACKAGES
from mgrpo.rollout.engine import Completions, Engine, PromptBatch, Sampling
from tests.e2e.lone_engine import lone_engine
from tests.sampling import prompt_batch
from tests.tiny_models import load_hf, save_tiny

ENGINE_DIFFERENCE = 5e-5
"""Of a log-probability, between the engine and transformers in float32 at the temperature below."""
TEMPERATURE = 0.3
"""A small random model repeats itself when it is cold."""
PROMPTS = [np.tile(np.arange(2, 8), 2), np.arange(3, 13)]


@contextmanager
def drafting_engine(folder: Path, method: str, num_tokens: int) -> Iterator[tuple[Engine, torch.nn.Module]]:
    """An engine of a small Llama, paused, and the same model of transformers."""
    module, command = PACKAGES[method]
    if find_spec(module) is None:
        pytest.skip(f"{method} needs {module}: {command}")
    model = save_tiny(folder / "model", "llama", vocab_size=32, head_dim=32)
    values = {
        "model_name_or_path": str(model),
        "model_dtype": "float32",
        "max_prompt_token_length": 16,
        "response_length": 96,
        "output_dir": str(folder),
        "vllm_speculative_method": method,
        "vllm_num_speculative_tokens": num_tokens,
    }
    with lone_engine(values) as fleet:
        yield fleet.engines[0], load_hf(model)


def answered(engine: Engine, batch: PromptBatch) -> tuple[list[Completions], list[int]]:
    """What the engine answers, and its counts: drafts, their tokens, and those that were accepted."""
    engine.submit(batch)
    engine.resume().result(60)
    answers: list[Completions] = []
    while sum(len(answer["numbers"]) for answer in answers) < len(batch.numbers):
        answers.append(engine.poll(gather_s=5.0).result(120))
    engine.pause("recompute").result(60)
    return answers, np.sum([answer["drafts"] for answer in answers], axis=0).tolist()


def scores_of(oracle: torch.nn.Module, prompt: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """`[tokens, vocab]`: logits that transformers has for each token of an answer."""
    ids = torch.from_numpy(np.concatenate((prompt, tokens))).long()[None]
    with torch.no_grad():
        scores: torch.Tensor = oracle(ids).logits[0, len(prompt) - 1 : -1]
    return scores


@pytest.mark.parametrize(("method", "num_tokens"), [("ngram", 3), ("suffix", 8)])
def test_drafts_are_accepted_and_change_no_log_probability(tmp_path, method, num_tokens):
    """vLLM's own kernel for CPUs judges drafts by what memory holds: answers would be of another distribution than the trainer's."""
    sampling = Sampling(num_samples=8, max_tokens=96, temperature=TEMPERATURE, stop_token_ids=(1,))
    with drafting_engine(tmp_path, method, num_tokens) as (engine, oracle):
        answers, (times, drafted, accepted) = answered(engine, prompt_batch(PROMPTS, sampling))
    assert drafted > times > 0 and drafted / 10 < accepted <= drafted
    for answer in answers:
        own = [PROMPTS[number] for number in answer["numbers"] for _ in range(sampling.num_samples)]
        for prompt, first, last in zip(own, answer["cu_seqlens"][:-1], answer["cu_seqlens"][1:], strict=True):
            tokens = answer["tokens"][first:last]
            expected = torch.log_softmax(scores_of(oracle, prompt, tokens) / TEMPERATURE, -1)
            expected = expected.gather(1, torch.tensor(tokens).long()[:, None])[:, 0]
            np.testing.assert_allclose(answer["logprobs"][first:last], expected.numpy(), atol=ENGINE_DIFFERENCE)


def test_suffix_drafts_are_those_of_earlier_answers(tmp_path):
    """What makes it better than n-grams for a group: the second answer, equal where sampling is greedy, is guessed from the first."""
    sampling = Sampling(num_samples=1, max_tokens=96, temperature=0, stop_token_ids=(1,))
    with drafting_engine(tmp_path, "suffix", 8) as (engine, oracle):
        prompt = PROMPTS[1]
        ((first,), (times, _, accepted)), ((second,), (times_again, _, accepted_again)) = (
            answered(engine, prompt_batch([prompt], sampling, first=number)) for number in range(2)
        )
    assert second["tokens"].tolist() == first["tokens"].tolist()
    scores = scores_of(oracle, prompt, first["tokens"])
    chosen = scores.gather(1, torch.tensor(first["tokens"]).long()[:, None])[:, 0]
    np.testing.assert_allclose(chosen.numpy(), scores.amax(-1).numpy(), atol=ENGINE_DIFFERENCE)
    assert accepted_again > accepted and times_again < times

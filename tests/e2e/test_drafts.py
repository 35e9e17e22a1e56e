"""An engine that drafts: its answers have the model's log-probabilities, and the counts of drafts come with them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from mgrpo.rollout.drafts import PACKAGES
from mgrpo.rollout.engine import Completions, Engine, PromptBatch, Sampling
from tests.e2e.drafting_heads import RIGHT_SCALE, add_head
from tests.e2e.interrupted import Job, metrics
from tests.e2e.launching import ROOT
from tests.e2e.lone_engine import lone_engine
from tests.sampling import prompt_batch
from tests.tiny_models import load_hf, save_tiny

ENGINE_DIFFERENCE = 5e-5
"""Of a log-probability, between the engine and transformers in float32 at the temperature below."""
TEMPERATURE = 0.3
"""A small random model repeats itself when it is cold."""
REWARD = """
def of_ids(completions, completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_heads_are_read_as_vllm_loads_them(family, tmp_path):
    """An engine starts without the model's files. What the heads share with the model is the weight sync's, and must stay."""
    folder = save_tiny(tmp_path, family)
    add_head(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.drafting_heads", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("read ")).removeprefix("read ")
    )
    assert found["wrong"] == [] and 0 < found["num_bytes"] <= found["lost"], found


@pytest.mark.slow
def test_a_run_drafts_with_the_heads_of_its_model(tmp_path):
    """Heads that were not read, or do not see the embedding that is trained, guess one token in 64."""
    model = save_tiny(tmp_path / "model", "glm4_moe", vocab_size=64, eos_token_id=1)
    add_head(model, is_right=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples/quickstart/model" / name, model / name)
    (tmp_path / "rewards.py").write_text(REWARD)
    flags = [
        *("--reward_funcs", f"{tmp_path / 'rewards.py'}:of_ids"),
        *("--sequence_parallel", "true", "--routing_replay", "none"),
        *("--num_unique_prompts_rollout", "4", "--num_samples_per_prompt_rollout", "4", "--total_episodes", "48"),
        *(
            "--learning_rate",
            "1e-3",
            "--warm_up_steps",
            "0",
            "--local_eval_every",
            "-1",
            "--weight_sync_check_every",
            "1",
        ),
        *("--model_name_or_path", str(model), "--vllm_speculative_method", "mtp", "--vllm_num_speculative_tokens", "2"),
    ]
    steps = [line for line in metrics(Job(flags=flags).finish(tmp_path)) if "reward" in line]
    assert len(steps) == 3
    for line in steps:
        assert line["debug/vllm_vs_local_logprob_diff_max"] < RIGHT_SCALE * ENGINE_DIFFERENCE, line["step"]
        assert line["engines/draft_acceptance"] > 0.1, line["step"]

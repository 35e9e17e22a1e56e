"""Cut sampling on a real engine: its sets against the model's own distribution, and a run whose ratios are exact."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from mgrpo.moving import from_values
from mgrpo.rollout.dispatch import Dispatcher
from mgrpo.rollout.engine import RefusedError, Sampling
from mgrpo.rollout.requests import Request, prompt_seeds, to_groups
from mgrpo.types import Completion, Prompt, RolloutGroup
from tests import builders
from tests.e2e.launching import ROOT, Run
from tests.e2e.lone_engine import lone_engine
from tests.sampling import prompt_batch, sampled

MODEL = ROOT / "examples/quickstart/model"
DIGITS = "[0-4]{1,3}"
CUTS = [
    {"top_k": 8},
    {"top_k": 8, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.1, "temperature": 0.7},
    {"top_k": 64, "regex": DIGITS},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "regex": DIGITS},
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """One engine, with the weights that it loads by itself; the expression has it load a tokenizer."""
    values = {
        "model_name_or_path": str(MODEL),
        "model_dtype": "float32",
        "max_prompt_token_length": 16,
        "response_length": 16,
        "vllm_kv_cache_mb": 16,
        "top_k": 64,
        "output_dir": str(tmp_path_factory.mktemp("engine")),
        "vllm_guided_decoding_regex": DIGITS,
    }
    with lone_engine(values) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def tokenizer():
    from mgrpo.data.tokenizer import load_tokenizer

    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    texts = [f"{a}+{b}=" for a in range(3, 19, 3) for b in range(4, 20, 4)]
    return [
        builders.prompt(tokenizer(text, add_special_tokens=False)["input_ids"], id=(0, number))
        for number, text in enumerate(texts)
    ]


def sample(fleet, prompts: list[Prompt], **settings) -> list[tuple[Prompt, Completion]]:
    """Some completions of each."""
    sampling = Sampling(**{"num_samples": 4, "max_tokens": 8, "temperature": 1.0, "stop_token_ids": (1,), **settings})
    fleet.reseed(-1)
    (engine,) = fleet.engines
    batch = prompt_batch([prompt.tokens for prompt in prompts], sampling, seeds=prompt_seeds(1, prompts, 0))
    groups = to_groups(prompts, sampled(engine, batch), lambda tokens: [""] * len(tokens))
    return [(group.prompt, completion) for group in groups for completion in group.completions]


@torch.no_grad()
def model_logprobs(model, prompt: Prompt, completion: Completion, temperature: float) -> np.ndarray:
    """`[len, vocab]` float64, of the whole distribution at each token."""
    ids = torch.from_numpy(np.concatenate([prompt.tokens, completion.tokens]).astype(np.int64))
    logits = model(ids[None]).logits[0, len(prompt.tokens) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).numpy()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_engines_logprobs_are_the_models_over_the_sets(fleet, model, tokenizer, prompts, cut):
    """The whole point: over the sets the ratio is 1 before the first update. Without them it is off by the mass that was left."""
    gaps, masses, sizes = [], [], []
    for prompt, completion in sample(fleet, prompts, **cut):
        whole = model_logprobs(model, prompt, completion, cut.get("temperature", 1.0))
        sets = builders.sets_of(completion.kept)
        assert len(sets) == len(completion.tokens)
        for token, own, logprob, row in zip(completion.tokens, sets, completion.logprobs, whole, strict=True):
            assert token in own and len(own) == len(set(own)) <= cut["top_k"]
            if "regex" not in cut:
                likeliest = np.sort(row)[::-1][: len(own)]
                np.testing.assert_allclose(np.sort(row[own])[::-1], likeliest, atol=1e-5)
            mass = np.logaddexp.reduce(row[own])
            gaps.append(row[token] - mass - logprob)
            masses.append(mass)
            sizes.append(len(own))
        if "regex" in cut and completion.finish_reason == "stop":
            assert re.fullmatch(DIGITS, tokenizer.decode(completion.tokens, skip_special_tokens=True))
    assert np.abs(gaps).max() < 1e-5
    assert np.abs(masses).max() > 0.01, "nothing was cut: the test would pass without sets"
    if cut == {"top_k": 8}:
        assert set(sizes) == {8}


def test_what_is_not_cut_has_the_models_logprobs_and_no_sets(fleet, model, prompts):
    """As an evaluation on the engine of a run that cuts."""
    for prompt, completion in sample(fleet, prompts[:4]):
        assert completion.kept is None
        whole = model_logprobs(model, prompt, completion, 1.0)
        np.testing.assert_allclose(completion.logprobs, np.take_along_axis(whole, completion.tokens[:, None].astype(int), 1)[:, 0], atol=1e-5)  # fmt: skip


def test_a_cut_repeats(fleet, prompts):
    """A grammar is ready at some moment, which must not choose the samples."""
    first, second = (sample(fleet, prompts, **CUTS[-1]) for _ in range(2))
    for (_, ours), (_, theirs) in itertools.zip_longest(first, second):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert builders.sets_of(ours.kept) == builders.sets_of(theirs.kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"num_mini_batches": 2}, {"context_parallel_size": 2, "tensor_model_parallel_size": 1}],
    ids=["tp", "cp"],
)
def test_trainer_and_engine_agree_in_every_step_of_a_run(tmp_path, layout):
    """Two ranks, each of which has half of the vocabulary, or of the tokens; old logprobs and those of the reference."""
    flags = ["--top_k", "8", "--top_p", "0.9", "--min_p", "0.02", "--total_episodes", "768", "--warm_up_steps", "0"]
    flags += ["--beta", "0.01"]
    flags += [word for name, value in layout.items() for word in (f"--{name}", str(value))]
    run = Run(tmp_path, flags)
    assert run.wait(300) == 0, run.text()[-3000:]
    steps = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "rollout/kept_tokens_avg" in step]
    assert len(trained) == 3
    for step in trained:
        assert step["debug/vllm_vs_local_logprob_diff_max"] < 1e-5
        assert step["rollout/kept_unknown_share"] == 0 and 1 < step["rollout/kept_tokens_avg"] < 8
    if "num_mini_batches" not in layout:
        assert trained[0]["objective/kl0_avg"] == pytest.approx(0, abs=1e-6), "the policy is still the reference"


GOOD = Sampling(num_samples=2, max_tokens=4, temperature=1.0, stop_token_ids=(1,))


@pytest.mark.parametrize(
    ("tokens", "change", "words"),
    [
        ([3, 4], {"temperature": 0.0}, "n must be 1 when using greedy sampling, got 2"),
        ([3, 4], {"temperature": 2.5}, "temperature must be in"),
        ([3, 4], {"temperature": float("nan")}, "temperature must be a finite number"),
        ([3, 4], {"num_samples": 0}, "n must be at least 1"),
        ([3, 4], {"num_samples": 1.5}, "n must be an int"),
        ([3, 4], {"top_p": 0.0}, "top_p must be in"),
        ([3, 4], {"top_k": -7}, "top_k must be"),
        ([3, 4], {"min_p": 2.0}, "min_p must be in"),
        ([3, 4], {"max_tokens": 0}, "max_tokens must be at least 1"),
        ([3, 4], {"prompt_logprobs": 10**6}, "greater than max allowed"),
        ([3, 4], {"stop_token_ids": (10**6,)}, "out-of-vocab"),
        ([3, 4], {"stop_token_ids": ("a",)}, "must contain only integers"),
        ([3, 4], {"stop_strings": ("",)}, "stop cannot contain an empty string"),
        ([3, 4], {"regex": "[0-9"}, ""),
        ([3, 4], {"regex": "a\0"}, "NUL"),
        ([3, 4], {"temperature": "hot"}, ""),
        ([], {}, "prompt cannot be empty"),
        ([3] * 32, {}, "longer than the maximum model length of 32"),
        ([3] * 100, {}, "longer than the maximum model length of 32"),
        ([3, 10**6], {}, "out of vocabulary"),
        ([3, -1], {}, "out of vocabulary"),
    ],
    ids=str,
)
def test_a_request_that_vllm_refuses_fails_alone_with_its_words(fleet, tokens, change, words):
    """It ended the engine, with all that this had begun, and then the next one."""
    (engine,) = fleet.engines
    bad = replace(GOOD, **change)
    # In one batch where it may share one.
    shares = bad == GOOD
    batches = [prompt_batch([np.array([5, 6]), *[np.array(tokens, np.int32)] * shares, np.array([7, 8])], GOOD)]
    if not shares:
        batches.append(prompt_batch([np.array(tokens, np.int32)] * 2, bad, first=10))
    batches.append(prompt_batch([np.array([9, 10])], GOOD, first=20))
    for batch in batches:
        engine.submit(batch)
    engine.resume().result(60)
    answered, refused = set(), {}
    while len(answered) + len(refused) < sum(len(batch.numbers) for batch in batches):
        answer = engine.poll().result(60)
        answered |= set(answer["numbers"].tolist())
        if "refused" in answer:
            refused |= dict(zip(answer["refused"].tolist(), answer["refusals"].tolist(), strict=True))
    # A pause that drains waits for no request that was refused.
    engine.pause("drain").result(60)
    assert answered == ({0, 2, 20} if shares else {0, 1, 20})
    assert [*refused] == ([1] if shares else [10, 11])
    assert all(reason and words in reason for reason in refused.values())


def test_requests_that_an_engine_refuses_are_asked_of_it_once_and_the_others_are_answered(fleet, prompts):
    """The dispatcher here knows no bounds: what it cannot check is left to vLLM."""
    rollout = from_values({"response_length": 16}).rollout
    own = Dispatcher(fleet, rollout, run_seed=1, decode=lambda tokens: [""] * len(tokens), stop_token_ids=(1,))
    found: dict[int, object] = {}
    requests = [
        Request(
            prompt=prompt if row % 2 else replace(prompt, tokens=np.full(40, 3, np.int32)),
            sampling=GOOD,
            stream=0,
            done=partial(found.__setitem__, row),
            failed=partial(found.__setitem__, row),
        )
        for row, prompt in enumerate(prompts)
    ]
    own.post(partial(own.send, requests))
    own.thread.submit(own.resume).result()
    deadline = time.monotonic() + 120
    while len(found) < len(requests):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    own.wait(own.thread.submit(own.pause).result())
    for row, result in found.items():
        if row % 2:
            assert isinstance(result, RolloutGroup) and len(result.completions) == 2
        else:
            assert isinstance(result, RefusedError) and "longer than the maximum model length of 32" in str(result)
    assert fleet.roster.num_deaths == 0 and len(fleet.members.open) == 1

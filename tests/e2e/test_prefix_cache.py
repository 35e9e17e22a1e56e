"""The samples of a group read their prompt once: how many tokens a real engine computes, and that they stay the same."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.engine import Sampling
from mgrpo.rollout.vllm.actor import EngineActor
from mgrpo.rollout.vllm.engine_arguments import engine_args, engine_environment
from tests.sampling import prompt_batch
from tests.tiny_models import save_tiny

BLOCK = 32
LENGTHS = (140, 140, 70, 9)
SAMPLING = Sampling(num_samples=4, max_tokens=3, temperature=1.0, stop_token_ids=())


def sampled(model: Path, settings: dict[str, Any]) -> tuple[list[int], dict[str, np.ndarray]]:
    """The tokens that an engine computes in each of its steps, and what it answers. In a process of its own."""
    lengths = {"max_prompt_token_length": max(LENGTHS), "response_length": SAMPLING.max_tokens}
    config = from_values({"model_name_or_path": str(model), "model_dtype": "float32", **lengths, **settings})
    os.environ.update(engine_environment(config, on_gpu=False, is_local=True))
    # The first two groups have the same prompt.
    prompts = [np.arange(3, 3 + length) % 120 for length in LENGTHS]

    async def sample() -> tuple[list[int], dict[str, np.ndarray]]:
        actor = EngineActor()
        await actor.start(engine_args(config, on_gpu=False), has_local_core=True)
        scheduler, computed = actor.engine.engine_core.core.scheduler, []
        schedule = scheduler.schedule

        def counted(*args: Any) -> Any:
            output = schedule(*args)
            computed.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = counted
        await actor.seed(1)
        await actor.submit(prompt_batch(prompts, SAMPLING))
        await actor.resume()
        await actor.is_idle.wait()
        return [count for count in computed if count], await actor.poll()

    return asyncio.run(sample())


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """What an engine with the defaults, and one without a cache of prefixes, compute and answer."""
    model = save_tiny(tmp_path_factory.mktemp("model"), "llama", heads=2, vocab_size=160)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as children:
        settings = ({}, {"vllm_enable_prefix_caching": False})
        return [child.result(120) for child in [children.submit(sampled, model, each) for each in settings]]


def test_a_prompt_is_computed_once_a_group(engines) -> None:
    """Whole blocks are shared, also among samples that begin in the same step; not with other groups, see `EngineActor._add`."""
    (cached, _), (plain, _) = engines
    count = SAMPLING.num_samples
    assert plain == [count * sum(LENGTHS)] + [count * len(LENGTHS)] * (SAMPLING.max_tokens - 1)
    rests = [length - (length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert cached == [sum(LENGTHS) + (count - 1) * sum(rests), *plain[1:]]


def test_shared_prompts_change_nothing(engines) -> None:
    """To rounding: a wrong block would give the log-probabilities of another prompt."""
    (_, cached), (_, plain) = engines
    assert cached["tokens"].tolist() == plain["tokens"].tolist() and len(set(plain["tokens"].tolist())) > 10
    np.testing.assert_allclose(cached["logprobs"], plain["logprobs"], atol=1e-5)

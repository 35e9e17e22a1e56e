"""The halves of a run for a loop of one's own: what is wrong with a configuration, and how engines are asked."""

from __future__ import annotations

import numpy as np
import pytest

import mgrpo
from mgrpo.config import ConfigError
from mgrpo.rollout.engine import RefusedError
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.run.start import parts
from tests.scripted_engine import ScriptedEngine

MODEL = {"model_name_or_path": "examples/quickstart/model", "model_dtype": "float32"}


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(parts, "started_fleet", lambda *arguments, **others: pytest.fail("started"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": -1}, "learning_rate=-1.0 must be"),
        ({"vllm_mode": "colocate"}, "vllm_mode=colocate takes turns with learners, which mgrpo.train arranges"),
        ({"teacher_model_name_or_path": "examples/quickstart/model"}, "teachers take part in mgrpo.train alone"),
        ({"tools": ["python"]}, "tools and agents take part in mgrpo.train alone"),
        ({"model_name_or_path": "nowhere/here/at-all"}, "model_name_or_path=nowhere/here/at-all"),
    ],
)
@pytest.mark.parametrize("door", [lambda config: parts.start_engines(config).__enter__(), parts.make_learner])
def test_what_is_wrong_is_found_before_anything_starts(started, door, values, words):
    """An error of Megatron's or vLLM's would say less, and later."""
    with pytest.raises(ConfigError, match=words):
        door(mgrpo.GRPOConfig(MODEL | values))


def test_torchrun_is_refused(started, monkeypatch):
    """Every rank would train alone, with engines of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2: a loop of one's own has one learner"):
        mgrpo.make_learner(mgrpo.GRPOConfig(MODEL))


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def engines(engine):
    config = mgrpo.GRPOConfig(MODEL, num_samples_per_prompt_rollout=2, response_length=4, temperature=0.5)
    return parts.SamplingEngines(config, Fleet(Roster([engine], config.engine), seed=1, seeds_prompts=True))


def test_completions_come_in_the_order_of_their_prompts_as_often_as_asked(engines, engine):
    """The scripted engine answers with the prompt. Afterwards it stands still, as a weight sync needs it."""
    prompts = [[3, 4, 5], [6], [7, 8]]
    found = engines.sample(prompts)
    assert [[completion.tokens.tolist() for completion in own] for own in found] == [[ids] * 2 for ids in prompts]
    assert all(isinstance(completion.text, str) for own in found for completion in own)
    assert engine.is_paused and engine.calls[-1][0] == "pause"
    (own,) = engines.sample([np.array([3, 4])], num_samples=1, temperature=0.0)
    assert len(own) == 1
    first, second = (batch.sampling for batch in engine.batches)
    assert (first.num_samples, first.temperature, first.max_tokens) == (2, 0.5, 4)
    assert (second.num_samples, second.temperature) == (1, 0.0)


def test_each_call_has_random_numbers_of_its_own(engines, engine):
    """With those of the call before, every step would draw the same completions of a prompt."""
    for _ in range(2):
        engines.sample([[3], [4]])
    seeds = [seed for batch in engine.batches for seed in batch.seeds.tolist()]
    assert len(set(seeds)) == 4


def test_a_prompt_that_is_too_long_is_refused_and_the_engines_stand_still(engines, engine):
    """They would sample on while they receive weights."""
    with pytest.raises(RefusedError, match="its prompt has 5000 tokens"):
        engines.sample([[3] * 5000])
    assert engine.is_paused
    assert len(engines.sample([[3]])) == 1

"""The comparison of learner and engines before the first update."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mgrpo.moving import from_values
from mgrpo.parallel import backend

backend.install()

from mgrpo.run.train.mismatch import SCORE, Mismatch, differences, fatal_of, limit_of, mismatch_of  # noqa: E402


def microbatch(gaps, *, untrained=(), unknown=(), old=()):
    """A micro-batch whose learner and engine differ by these numbers; tokens are 100, 101, ..."""
    places = np.arange(len(gaps))
    rollout = np.full(len(gaps), -2.0, np.float32)
    logprobs = torch.tensor(rollout + np.asarray(gaps, np.float32))
    rollout[list(unknown)] = np.nan
    pack = SimpleNamespace(
        rollout_logprobs=rollout,
        loss_mask=~np.isin(places, untrained),
        ages=np.isin(places, old).astype(np.uint8),
        targets=100 + places,
    )
    return SimpleNamespace(pack=pack, logprobs={SCORE: logprobs})


def test_trained_tokens_of_the_present_weights_are_compared():
    """Prompts of tools, tokens of older weights and those without an engine's number differ for other reasons."""
    first = microbatch([0.5, -1.0, 9.0, 9.0, 9.0], untrained=[2], unknown=[3], old=[4])
    second = microbatch([0.25, -2.0])
    found = mismatch_of([*differences([first, microbatch([9.0], untrained=[0])]), *differences([second])])
    assert found == Mismatch(mean=3.75 / 4, largest=2.0, token=101, num_tokens=4)
    assert mismatch_of(differences([microbatch([9.0], untrained=[0])])) is None


def test_a_number_that_is_none_exceeds_every_limit():
    """A learner whose weights are broken would pass a comparison that NaN never fails."""
    found = mismatch_of(differences([microbatch([0.0, math.nan, 0.1])]))
    assert math.isnan(found.mean) and math.isnan(found.largest) and found.token == 101 and found.exceeds(1e9)
    assert not Mismatch(0.1, 0.1, 0, 1).exceeds(0.1)


@pytest.mark.parametrize(
    ("settings", "has_experts", "limit"),
    [
        ({"model_dtype": "float32"}, False, 1e-4),
        ({"model_dtype": "float32"}, True, 1e-4),
        ({"model_dtype": "float16"}, False, 0.02),
        ({"model_dtype": "bfloat16"}, False, 0.1),
        ({"model_dtype": "bfloat16", "routing_replay": "none"}, True, 0.2),
        ({"model_dtype": "bfloat16", "routing_replay": "rollout"}, True, 0.1),
        ({"model_dtype": "float32", "vllm_kv_cache_dtype": "fp8"}, False, 0.15),
        ({"model_dtype": "bfloat16", "vllm_kv_cache_dtype": "fp8", "routing_replay": "none"}, True, 0.2),
    ],
)
def test_limits_are_what_rounding_explains(settings, has_experts, limit):
    """A limit below what a healthy run shows would warn in each of them, one above it in none."""
    config = from_values(settings)
    assert limit_of(config, has_experts=has_experts) == pytest.approx(limit)
    assert fatal_of(config, limit) == pytest.approx(10 * limit)


def test_the_end_of_a_run_can_be_chosen():
    assert fatal_of(from_values({"max_initial_mismatch": 0.3}), 0.1) == 0.3
    assert fatal_of(from_values({"max_initial_mismatch": None}), 0.1) == math.inf

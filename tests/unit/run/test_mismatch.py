"""The comparison of learner and engines before the first update."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mgrpo.data.pieces import TokenPieces
from mgrpo.data.tokenizer import load_tokenizer
from mgrpo.moving import from_values
from mgrpo.parallel import backend

backend.install()

from mgrpo.run.train.mismatch import SCORE, Mismatch, differences, fatal_of, limit_of, mismatch_of, sentence  # noqa: E402

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart/model"


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
        # A prompt of three tokens, whose last row predicts the first response.
        positions=np.arange(2 + len(gaps)),
        rows=2 + places,
    )
    return SimpleNamespace(pack=pack, logprobs={SCORE: logprobs})


def test_trained_tokens_of_the_present_weights_are_compared():
    """Prompts of tools, tokens of older weights and those without an engine's number differ for other reasons."""
    first = microbatch([0.5, -1.0, 9.0, 9.0, 9.0], untrained=[2], unknown=[3], old=[4])
    second = microbatch([0.25, -2.0])
    found = mismatch_of([*differences([first, microbatch([9.0], untrained=[0])]), *differences([second])])
    assert found == Mismatch(mean=3.75 / 4, largest=2.0, token=101, position=4, learner=-4.0, engine=-2.0, num_tokens=4)
    assert mismatch_of(differences([microbatch([9.0], untrained=[0])])) is None


def test_a_number_that_is_none_exceeds_every_limit():
    """A learner whose weights are broken would pass a comparison that NaN never fails."""
    found = mismatch_of(differences([microbatch([0.0, math.nan, 0.1])]))
    assert math.isnan(found.mean) and math.isnan(found.largest) and found.token == 101 and found.exceeds(1e9)
    assert math.isnan(found.learner) and found.engine == -2.0
    assert not found._replace(mean=0.1).exceeds(0.1)


def test_the_message_shows_the_largest_token_with_both_numbers_and_the_causes():
    """An id alone sends its reader to the tokenizer; text of the model must not reach the terminal as it is."""
    found = Mismatch(mean=0.19, largest=1.25, token=38, position=7, learner=-3.5, engine=-2.25, num_tokens=640)
    pieces = TokenPieces(load_tokenizer(QUICKSTART))
    message = sentence(found, 1e-4, pieces)
    assert (
        f"of token 38, {load_tokenizer(QUICKSTART).decode([38])!r}, at position 7 of prompt and completion" in message
    )
    assert "log-probability is -3.5 in the learner and -2.25 in the engine" in message
    assert "config.json" in message and "vllm_extra_args" in message and "weight_sync_check_every" in message
    assert "of token 38 at position 7" in sentence(found, 1e-4)
    hostile = sentence(found, 1e-4, lambda tokens: ["\x1b[2J\u202e\n" + "a" * 90])
    assert hostile.isprintable() and "'\\x1b[2J\\u202e\\naaaaaaaaaaaaaaaaaa'," in hostile


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

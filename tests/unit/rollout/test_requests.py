"""Prompts out, completions back: nobody's tokens may end up in somebody else's group."""

from __future__ import annotations

import itertools

import numpy as np

from mgrpo.rollout.requests import sampler_seed, to_arrays, to_groups
from tests.builders import prompt

PROMPTS = [prompt(range(i + 1), id=(0, i)) for i in range(5)]


def test_every_run_version_and_engine_has_its_own_seed():
    """Equal seeds make every step, or every engine, explore the same randomness again."""
    seeds = {sampler_seed(run, version, engine) for run in (1, 2) for version in range(500) for engine in range(8)}
    assert len(seeds) == 2 * 500 * 8
    assert min(seeds) >= 0 and max(seeds) < 2**62


def test_groups_come_back_to_their_prompts():
    """Worked by hand: two prompts, two samples each, lengths 1, 2, 3 and 1."""
    answer = {
        "numbers": np.array([4, 9]),
        "sizes": np.array([2, 2]),
        "tokens": np.array([10, 20, 21, 30, 31, 32, 40], dtype=np.int32),
        "logprobs": -np.arange(7, dtype=np.float32),
        "policy_versions": np.full(7, 3, dtype=np.int32),
        "cu_seqlens": np.array([0, 1, 3, 6, 7]),
        "finish_reasons": np.array([0, 1, 0, 0], dtype=np.int8),
    }
    groups = to_groups(PROMPTS[:2], answer, lambda tokens: [str(t.tolist()) for t in tokens])
    assert [g.prompt.id for g in groups] == [(0, 0), (0, 1)]
    assert [[c.text for c in g.completions] for g in groups] == [["[10]", "[20, 21]"], ["[30, 31, 32]", "[40]"]]
    assert [c.finish_reason for g in groups for c in g.completions] == ["stop", "length", "stop", "stop"]
    assert groups[1].completions[0].logprobs.tolist() == [-3.0, -4.0, -5.0]


def test_arrays_hold_the_prompts_end_to_end():
    """The engine cuts them at cu_seqlens."""
    tokens, cuts = to_arrays([prompt.tokens for prompt in PROMPTS])
    assert [tokens[a:b].tolist() for a, b in itertools.pairwise(cuts)] == [p.tokens.tolist() for p in PROMPTS]
    empty = to_arrays([])
    assert len(empty[0]) == 0 and empty[1].tolist() == [0]

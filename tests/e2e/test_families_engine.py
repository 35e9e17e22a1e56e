"""Engines with the models of 2026 beside transformers, with the plugin that a run gives them: as they start, and after a sync."""

from __future__ import annotations

import pytest

from tools.bench_cases.engine_families import CASES, row

ROUNDING = {"mean": 1e-6, "max": 2e-5}
"""Of log-probabilities around -5 in float32. Transformers' own distance from float64 is 7e-7 and 4e-6."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_engine_computes_what_transformers_does(case):
    """A kernel that turns by other angles, packs what is written, or knows another norm is noise in every ratio of policies."""
    for when, kinds in row(case, "float32").items():
        for kind, far in kinds.items():
            assert all(far[name] < most for name, most in ROUNDING.items()), (when, kind, far)

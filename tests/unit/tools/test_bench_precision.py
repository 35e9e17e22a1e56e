"""What the comparison of trainer and engine makes of two completions, by hand, and the figures of its page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tools.bench_precision import CASES, before, compared

ROOT = Path(__file__).resolve().parents[3]


def test_differences_of_two_completions():
    """A mean over the wrong tokens would make one precision look like another."""
    prompt, tokens = np.array([1]), np.array([2, 3])
    rows = [(prompt, tokens, np.array([-1.0, -2.0])), (prompt, tokens[:1], np.array([-0.5]))]
    found = compared(rows, [np.array([-1.1, -2.0]), np.array([-0.5 + math.log(1.5)])])
    assert found["tokens"] == 3
    assert found["diff_mean"] == pytest.approx((0.1 + math.log(1.5)) / 3)
    assert found["diff_max"] == pytest.approx(math.log(1.5))
    kl = (math.exp(-0.1) - 1 + 0.1, 0.5 - math.log(1.5))
    assert found["sequence_kl"] == pytest.approx(sum(kl) / 2)
    assert found["sequence_kl_error"] == pytest.approx(abs(kl[0] - kl[1]) / 2)
    assert found["ratio_outside"] == pytest.approx(1 / 3)


def test_rows_that_are_not_measured_again_stay_if_they_were_measured_alike(tmp_path):
    """`--only` would leave a table of one row, or one whose rows cannot be compared."""
    path, text = tmp_path / "precision.json", {"protocol": "16 completions", "versions": {"torch": "2.13"}}
    assert before(path, text) == {}
    path.write_text(json.dumps(text | {"cases": {"float16": {"tokens": 3}}}))
    assert before(path, text) == {"float16": {"tokens": 3}}
    assert before(path, text | {"protocol": "32 completions"}) == {}


def test_the_page_holds_the_figures_of_the_file():
    """Figures that nobody measured must not stand there."""
    cases = json.loads((ROOT / "benchmarks" / "precision.json").read_text())["cases"]
    page = (ROOT / "docs" / "precision.md").read_text()
    assert cases.keys() <= CASES.keys()
    for name, found in cases.items():
        row = f"| {name} | {found['diff_mean']:.1e} | {found['diff_max']:.1e} | {found['sequence_kl']:.1e} |"
        assert row in page

"""The exchange of tokens between an engine's workers on a CPU, which vLLM's communicator lacks."""

from __future__ import annotations

import pytest

from tests.ranks import exchange_cases
from tests.ranks.conftest import run_ranks  # noqa: F401  (a fixture)


@pytest.mark.parametrize(("sizes", "rows"), [([3, 1], [3, 1]), ([0, 2], [0, 2]), (None, [2, 2])], ids=str)
def test_tokens_reach_all_workers_and_their_sums_come_back(run_ranks, sizes, rows):  # noqa: F811
    """Worked by hand: worker r multiplies every token by r + 1, so that each comes back three times as large."""
    first, second = run_ranks(2, exchange_cases.exchanged, sizes=sizes, rows=rows)
    own = [[10.0 * rank + row for row in range(rows[rank])] for rank in (0, 1)]
    for found in (first, second):
        assert found["gathered"] == own[0] + own[1]
        assert found["chosen"] == [0] * rows[0] + [1] * rows[1]
    for found, tokens in zip((first, second), own, strict=True):
        assert found["back"] == [[3 * token, 3 * token] for token in tokens]

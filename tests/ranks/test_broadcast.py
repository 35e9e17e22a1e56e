"""What rank 0 sends reaches every learner unchanged."""

from __future__ import annotations

from mgrpo.parallel.broadcast import Action
from tests.ranks import cases


def test_headers_arrays_and_errors_reach_every_rank(run_ranks):
    """A learner that misreads a header trains on garbage or hangs; an error must end all with the same words."""
    rank_0, other = run_ranks(2, cases.broadcast_messages, message="engine 3 died: no memory")
    assert rank_0[:3] == other[:3]
    assert rank_0[:2] == [Action.HEARTBEAT, Action.RUN]
    assert other[2] == {"a": [[0, 1, 2], [3, 4, 5]], "b": [], "c": [True]}
    # Whether the rank waits for an action or for arrays.
    assert other[3:] == ["engine 3 died: no memory"] * 2

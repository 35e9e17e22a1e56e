"""What rank 0 sends reaches every learner that it is for, unchanged."""

from __future__ import annotations

import pytest

from mgrpo.layout import Layout
from mgrpo.parallel.broadcast import Action
from tests.ranks import channel_cases


def test_headers_arrays_and_errors_reach_every_rank(run_ranks):
    """A learner that misreads a header trains on garbage or hangs; an error must end all with the same words."""
    rank_0, other = run_ranks(2, channel_cases.broadcast_messages, message="engine 3 died: no memory")
    assert rank_0[:3] == other[:3]
    assert rank_0[:2] == [Action.HEARTBEAT, Action.RUN]
    assert other[2] == {"a": [[0, 1, 2], [3, 4, 5]], "b": [], "c": [True]}
    # Whether the rank waits for an action or for arrays.
    assert other[3:] == ["engine 3 died: no memory"] * 2


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (2, {}),
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        (4, {}),
        (4, {"tensor": 2}),
        (4, {"pipeline": 2}),
        (4, {"context": 2}),
        (4, {"tensor": 2, "pipeline": 2}),
        (4, {"tensor": 4}),
    ],
)
def test_every_holder_of_a_part_receives_it(ranks, layout, run_ranks):
    """Tensor ranks with different packs compute a mixture of both; parts differ in length, and so in chunks."""
    sizes = [13, 7, 25, 1][: Layout(world_size=ranks, **layout).data]
    found = run_ranks(ranks, channel_cases.scatter_parts, layout=layout, sizes=sizes, message="engine 3 died")
    for rank, (received, error) in enumerate(found):
        number = Layout(world_size=ranks, **layout).coordinate(rank).data
        first = range(10 * number, 10 * number + sizes[number])
        assert received == [bytes(first), bytes(100 + value for value in first)]
        assert error == ("engine 3 died" if rank else "")


def test_a_rank_does_not_wait_long_for_its_slice(run_ranks):
    """Rank 0 may die between the header and a slice; the others would wait for the hours that a collective may take."""
    rank_0, other = run_ranks(2, channel_cases.wait_for_a_rank_0_that_died)
    assert rank_0 == "died" and "imed out" in other

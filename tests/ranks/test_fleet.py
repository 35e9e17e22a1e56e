"""Weight syncs with engines that fail: all learners agree who takes part, and the others get their weights."""

from __future__ import annotations

import pytest

from tests.ranks import fleet_cases
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "llama", "llama")


HANGS, FAILS, HANGS_JOINING = {"hangs": "receive_weights"}, {"fails": "receive_weights"}, {"hangs": "join"}
TENSOR = {"tensor": 2}
"""All learners send to each engine; without it one of them does."""


@pytest.mark.parametrize(
    ("how", "transport", "layout"),
    [
        *((how, transport, TENSOR) for how in (HANGS, FAILS, HANGS_JOINING) for transport in ("shared memory", "gloo")),
        (HANGS, "shared memory", {}),
    ],
    ids=str,
)
def test_an_engine_that_fails_in_a_sync_keeps_no_other_from_its_weights(
    model, run_ranks, how, transport, layout
) -> None:
    """A learner that waits for an engine which others have given up stands in another collective than they do."""
    rank_0, other = run_ranks(
        2, fleet_cases.sync_with_engines_that_fail, model_dir=str(model), how=how, transport=transport, layout=layout
    )
    seats = [seats for seats, _ in rank_0["found"]]
    assert seats == [seats for seats, _ in other["found"]]
    last = 2 if how == {"hangs": "join"} else 1
    assert seats[:3] == [{0: 0, 1: 0}, {1: 0}, {0: last, 1: 0}]
    versions = [versions for _, versions in rank_0["found"]]
    assert versions[0] == [1, 1] and versions[1][1] == 2 and versions[2] == [3, 3]
    # Between two syncs only those that are back get weights: the learners' own, by their own version.
    assert versions[3] == [4, 3]
    # And so they do while the learners wait.
    assert 4 in versions[4] and set(versions[4]) <= {0, 4}
    assert len(set(rank_0["weights"])) == 1 and rank_0["weights"][0] != 0


@pytest.mark.parametrize("layout", [TENSOR, {}], ids=str)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_engine_that_fails_while_it_joins_ends_the_wait_with_its_own_error(model, run_ranks, moment, layout) -> None:
    """The learners would wait for `weight_sync_timeout` seconds, here ten minutes, and then name another cause."""
    case = fleet_cases.sync_with_an_engine_that_fails_while_it_joins
    (error, _), (other, _) = run_ranks(2, case, model_dir=str(model), moment=moment, engines=1, layout=layout)
    own = "could not join the weight-transfer group: engine and plan differ in 3 tensors"
    assert error == own and other.endswith(own)


def test_engines_beside_one_that_fails_while_it_joins_get_their_weights(model, run_ranks) -> None:
    """They have joined, and the learners go on with them."""
    case = fleet_cases.sync_with_an_engine_that_fails_while_it_joins
    (error, versions), (other, _) = run_ranks(2, case, model_dir=str(model), moment="after", engines=2, layout=TENSOR)
    assert error == other == "" and versions[1] == 1


def synced_through_engines(run_ranks, model, how: str, transport: str, layout: dict[str, int]):
    """What rank 0 has found, of which the other one agrees."""
    rank_0, other = run_ranks(
        2, fleet_cases.sync_through_engines, model_dir=str(model), how=how, transport=transport, layout=layout
    )
    assert [heads for heads, *_ in rank_0["found"]] == [heads for heads, *_ in other["found"]]
    assert len(set(rank_0["weights"])) == 1 and rank_0["weights"][0] != 0
    assert rank_0["bytes"] == rank_0["plan"]
    # One for engines that are served apart from the others.
    assert how == "parts" or max(held for each in (rank_0, other) for *_, held in each["found"]) <= (2 if layout else 3)
    return rank_0["found"]


@pytest.mark.parametrize(
    ("how", "transport", "layout"),
    [
        ("fails", "shared memory", TENSOR),
        ("0", "gloo", TENSOR),
        ("3", "gloo", {}),
        ("5", "shared memory", {}),
        ("hangs", "gloo", TENSOR),
    ],
    ids=str,
)
def test_engines_below_one_that_fails_get_their_weights_in_the_same_sync(
    model, run_ranks, how, transport, layout
) -> None:
    """They are well: to start them again costs minutes, and to leave them out a step's samples of old weights."""
    found = synced_through_engines(run_ranks, model, how, transport, layout)
    assert [versions for _, versions, *_ in found] == [
        [1, 1, 1, 1, 1],
        [1, 2, 2, 2, 2],
        [3, 3, 3, 3, 3],
        [4, 3, 4, 4, 4],
        [5, 5, 5, 5, 5],
    ]
    # No other engine is taken for one that has failed.
    assert [generations for _, _, generations, _ in found][2:] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]


def test_engines_that_do_not_reach_each_other_get_their_weights_from_the_learners(model, run_ranks) -> None:
    """A network that connects engines with learners alone was enough before there were many engines."""
    found = synced_through_engines(run_ranks, model, "parts", "gloo", TENSOR)
    assert [versions for _, versions, *_ in found] == [[version] * 5 for version in range(1, 6)]
    assert found[-1][2] == [0] * 5


@pytest.mark.parametrize(
    ("seed", "transport", "layout"),
    [(1, "gloo", TENSOR), (2, "shared memory", {}), (3, "shared memory", TENSOR), (4, "gloo", {})],
    ids=str,
)
def test_engines_that_are_killed_while_they_send_on_keep_no_other_from_its_weights(
    model, run_ranks, seed, transport, layout
) -> None:
    """The kernel closes what they had open, in the middle of a message as well."""
    rank_0, _ = run_ranks(
        2,
        fleet_cases.sync_with_engines_that_are_killed,
        model_dir=str(model),
        seed=seed,
        transport=transport,
        layout=layout,
    )
    assert len(rank_0["found"]) == 4
    for version, (doomed, versions, held) in enumerate(rank_0["found"], start=1):
        assert [engine for engine in range(6) if versions[engine] != version] == sorted(doomed)
        assert len(held) == 1 and held != {0.0}

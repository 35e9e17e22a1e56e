"""Rank 0 works and the others wait: results, failures and the end of a run reach every rank."""

from __future__ import annotations

import pytest

from tests.ranks import run_cases
from tests.tiny_models import save_tiny


def test_results_failures_and_the_end_reach_every_rank(run_ranks):
    """A rank that misses one waits for a minute, and the run ends with a time-out instead of its reason."""
    rank_0, other = run_ranks(2, run_cases.follow_the_lead)
    assert rank_0 == [
        7,
        8,
        [0, "a", None, {"b": 1.5}],
        "ZeroDivisionError: integer division or modulo by zero",
        "stopped",
    ]
    assert other == [
        None,
        None,
        [0, "a", None, {"b": 1.5}],
        "RuntimeError: rank 0: integer division or modulo by zero",
        "stopped",
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "llama", "llama")


def test_an_engines_own_error_comes_before_the_learners_time_out(model, run_ranks):
    """ "Nobody joined within 2 s" hides that the engine ran out of memory."""
    ((message, _),) = run_ranks(1, run_cases.connect_to_an_engine_that_fails, model_dir=str(model))
    assert message == "could not join the weight-transfer group: join has failed"


def test_a_rank_that_sends_nothing_waits_for_rank_0s_part_of_a_sync(run_ranks):
    """Rank 0 sends no heartbeat while it sends weights: an idle rank would end a sync that is only slow."""
    assert run_ranks(2, run_cases.send_nothing_while_rank_0_sends, patience_s=3) == [[7], [7]]


def test_learners_meet_the_engines_where_these_can_reach_rank_0(model, run_ranks):
    """Engines on another node would connect to a loopback address of their own, and time out."""
    found = run_ranks(2, run_cases.connect_to_an_engine_that_fails, model_dir=str(model), meeting_host="127.0.0.2")
    assert [host for _, host in found] == ["127.0.0.2", "127.0.0.2"]

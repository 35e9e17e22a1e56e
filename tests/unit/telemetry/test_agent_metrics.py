"""Metrics of completions that agents have played, worked out by hand."""

from __future__ import annotations

import pytest

from mgrpo.telemetry.metrics.agents import agent_metrics
from mgrpo.types import AgentRecord
from tests import builders


def completion(mask: str, agent: AgentRecord | None, *branches):
    record = builders.trajectory(mask, branches=branches, agent=agent)
    return builders.completion(len(mask), trajectory=record)


def agent(ended: str, seconds: float, **counts: float) -> AgentRecord:
    return AgentRecord(ended=ended, status=None, output="", seconds=seconds, counts=counts)


def test_ends_branches_and_counts_are_those_of_all_that_agents_have_played() -> None:
    forked = completion(
        "1101",
        agent("ended", 3.0, **{"retries": 2.0, "overridden/top_p": 4.0, "context_repeated": 6.0}),
        builders.branch(0, 2),
        builders.branch(3, 4, [5, 6, 7]),
    )
    late = completion("10", agent("late", 9.0, **{"undelivered": 1.0}))
    group = builders.scored_group([1.0, float("nan")], completions=[forked, late])
    found = agent_metrics([group])
    ends = {name: value for name, value in found.items() if name.startswith("agents/ended/")}
    assert ends == {
        "agents/ended/ended": 0.5,
        "agents/ended/late": 0.5,
        "agents/ended/crashed": 0,
        "agents/ended/silent": 0,
        "agents/ended/lost": 0,
    }
    assert (found["agents/retries"], found["agents/undelivered"], found["agents/overridden/top_p"]) == (1.0, 0.5, 2.0)
    # Six tokens of contexts for four that were sampled.
    assert found["agents/context_repeated"] == pytest.approx(6 / 4)
    assert found["time/agent"] == 6.0 and found["agents/first_prompts_differ"] == 0.0


def test_without_agents_there_are_none() -> None:
    group = builders.scored_group([1.0], completions=[completion("10", None)])
    assert agent_metrics([group]) == {}

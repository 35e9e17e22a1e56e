"""Metrics of agents' completions: endings, branches, and requests that were not handled as sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from mgrpo.types import AgentRecord, Completion, ScoredGroup, TrajectoryRecord

AGENT_ENDINGS = ("ended", "crashed", "late", "silent", "lost")
"""Endings of an agent."""
COUNTS = ("retries", "undelivered", "abandoned", "rendered_again", "other_model", "workers_gone")
"""Counts of an endpoint that are always logged; counts by kind only if there are any."""


def agent_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Metrics of all completions of agents, counts per completion; empty without any."""
    whole = list(groups)
    completions = [completion for group in whole for completion in group.group.completions]
    pairs = [(c, c.trajectory.agent, c.trajectory) for c in completions if c.trajectory and c.trajectory.agent]
    if not pairs:
        return {}
    agents = [agent for _, agent, _ in pairs]
    return {
        **{f"agents/ended/{how}": _share([agent.ended == how for agent in agents]) for how in AGENT_ENDINGS},
        "agents/branches": float(np.mean([_num_branches(record) for _, _, record in pairs])),
        **_counts(agents),
        "agents/context_repeated": _repeated(agents, [completion for completion, _, _ in pairs]),
        "agents/first_prompts_differ": _share([_differs(group) for group in whole]),
        "time/agent": float(np.mean([agent.seconds for agent in agents])),
    }


def _counts(agents: Sequence[AgentRecord]) -> dict[str, float]:
    total = Counter[str]()
    for agent in agents:
        total.update(agent.counts)
    named = dict.fromkeys((*COUNTS, *sorted(name for name in total if "/" in name)))
    return {f"agents/{name}": total[name] / len(agents) for name in named}


def _repeated(agents: Sequence[AgentRecord], completions: Sequence[Completion]) -> float:
    sampled = sum(completion.num_sampled for completion in completions)
    repeated = sum(agent.counts.get("context_repeated", 0.0) for agent in agents)
    return repeated / sampled if sampled else float("nan")


def _num_branches(record: TrajectoryRecord) -> int:
    return len(record.branches) or bool(record.turns)


def _differs(group: ScoredGroup) -> bool:
    """True if a sample's first turn has another context than the group's prompt."""
    records = [completion.trajectory for completion in group.group.completions]
    firsts = [record.branches[0].prompt_tokens for record in records if record and record.branches]
    return any(not np.array_equal(first, group.group.prompt.tokens) for first in firsts)


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)

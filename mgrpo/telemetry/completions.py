"""Completions of a training step as a table, for the terminal and for trackers; and headings of their branches and agents.

Completions are untrusted input: control characters are printed visibly, and markup is not interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgrpo.telemetry.trackers.sinks import Cell, Table, utf8
from mgrpo.telemetry.untrusted import finite, printable
from mgrpo.types import ScoredGroup

if TYPE_CHECKING:
    from rich.console import RenderableType

TEXTS = ("prompt", "completion")
NARROW = 100
"""Columns of a terminal below which a row is printed line by line."""
NOT_PARTS = {"correct"}


def completions_table(
    groups: Sequence[ScoredGroup],
    dropped: Sequence[ScoredGroup],
    advantages: Sequence[float],
    *,
    unique_prompts: bool = False,
) -> Table:
    """Prompt, completion, parts of the reward, reward and advantage of each completion of a step.

    Args:
        dropped: groups that were sampled but not trained on; they have no advantage.
        advantages: one per completion of `groups`, in order.
        unique_prompts: include only the first completion of each prompt.
    """
    of_samples = iter(advantages)
    parts = list(dict.fromkeys(part for group in (*groups, *dropped) for score in group.scores for part in score.parts))
    parts = [part for part in parts if part not in NOT_PARTS]
    rows: list[tuple[Cell, ...]] = []
    seen: set[str] = set()
    for number, scored in enumerate([*groups, *dropped]):
        prompt = scored.group.prompt.text
        for completion, score in zip(scored.group.completions, scored.scores, strict=True):
            advantage = finite(next(of_samples)) if number < len(groups) else None
            if unique_prompts and prompt in seen:
                continue
            seen.add(prompt)
            scores = [finite(score.parts[part]) if part in score.parts else None for part in parts]
            rows.append((utf8(prompt), utf8(completion.text), *scores, finite(score.reward), advantage))
    return Table(name="completions", columns=(*TEXTS, *parts, "reward", "advantage"), rows=tuple(rows))


def some_of(table: Table, count: int | None) -> Table:
    """The table with `count` of its rows, spread evenly; None: all of them."""
    total = len(table.rows)
    if count is None or count >= total:
        return table
    rows = tuple(table.rows[number * total // count] for number in range(count))
    return Table(name=table.name, columns=table.columns, rows=rows)


def printed(table: Table, *, title: str, width: int) -> RenderableType:
    """The table for a terminal of `width` columns; row by row on a narrow one."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    texts = len(TEXTS)
    if width < NARROW:
        blocks = [Text(f"-- {title}", style="bold")]
        for row in table.rows:
            for name, cell in zip(table.columns[:texts], row, strict=False):
                blocks.append(Text.assemble((f"{name}: ", "dim"), printable(str(cell))))
            facts = zip(table.columns[texts:], row[texts:], strict=True)
            blocks.append(Text("  ".join(f"{printable(name)} {_number(cell)}" for name, cell in facts), style="bold"))
        return Group(*blocks)
    grid = Grid(title=Text(title), box=box.ASCII2, show_lines=True, title_justify="left")
    for number, name in enumerate(table.columns):
        is_text = number < texts
        grid.add_column(
            Text(printable(name)),
            ratio=(1, 2)[number] if is_text else None,
            overflow="fold",
            justify="left" if is_text else "right",
        )
    for row in table.rows:
        cells = [printable(str(cell)) for cell in row[:texts]] + [_number(cell) for cell in row[texts:]]
        grid.add_row(*map(Text, cells))
    return grid


def beginning(number: int, branch: Mapping[str, Any]) -> str:
    """The heading of a branch, from its record (`samples.branch_records`)."""
    parent, after = branch.get("parent"), branch.get("after")
    context = f"{branch.get('context_tokens', 0)} tokens before it"
    if parent is None:
        return f"branch {number + 1} begins by itself, {context}"
    turn = "" if after is None else f" after turn {after + 1}"
    again = ", its context written again" if branch.get("rewritten") else ""
    return f"branch {number + 1} goes on from branch {parent + 1}{turn}{again}, {context}"


def agent_facts(agent: Mapping[str, Any]) -> list[str]:
    """Ending of an agent and the counts of its endpoint, from its record; empty without one."""
    if not agent:
        return []
    status, seconds = agent.get("status"), agent.get("seconds")
    how = f"agent {agent.get('ended')}"
    how += f" with status {status:g}" if status else ""
    how += f" after {seconds:.4g} s" if seconds is not None else ""
    counts = agent.get("counts") or {}
    return [how, *(f"{name.replace('_', ' ')} {value:.4g}" for name, value in counts.items() if value)]


def _number(cell: Cell) -> str:
    return "-" if cell is None else f"{cell:.3g}" if isinstance(cell, (int, float)) else printable(cell)

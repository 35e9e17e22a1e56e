"""Prints every public figure beside the plan of the same run: `python -m tests.unit.planner.figures`."""

from __future__ import annotations

from tests.unit.planner.figures.published import Compared, compare_training, mean_error, median_error, of


def lines(compared: list[Compared]) -> list[str]:
    """A table of Markdown, as in docs/figures.md."""
    head = ["| row | source | reported | planned | error | |", "|---|---|---|---|---|---|"]
    return head + [
        f"| {row.row} | {row.source} | {row.reported:,.4g} | {row.planned:,.4g} | {row.error:+.0%} | {row.note} |"
        for row in compared
    ]


if __name__ == "__main__":
    found = compare_training()
    for figure in ("tok_s_gpu", "mem_gib"):
        own = of(figure, found)
        print(
            f"\n{figure}: {len(own)} rows, mean of absolute errors {mean_error(own):.1%}, median {median_error(own):+.1%}\n"
        )
        print("\n".join(lines(own)))

"""Writes the coding agent's data, train.jsonl (512 rows) and heldout.jsonl (100 rows): files to repair and the judge's cases.

    python examples/coding_agent/make_data.py [--out FOLDER]

The output does not depend on the machine; the committed files are this output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from task import NUM_SHOWN, Problem, split_problems


def write_rows(path: Path, problems: list[Problem]) -> None:
    """One JSON object per line: what is asked, the files of the working folder, and what the judge alone knows."""
    rows = (
        {
            "messages": [{"role": "user", "content": problem.question}],
            "files": {problem.path: problem.source, "test.py": problem.test},
            "ground_truth": {"function": problem.name, "cases": problem.cases[NUM_SHOWN:]},
            "dataset": "passthrough",
        }
        for problem in problems
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(problems)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the two files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, held_out = split_problems()
    write_rows(args.out / "train.jsonl", train)
    write_rows(args.out / "heldout.jsonl", held_out)


if __name__ == "__main__":
    main()

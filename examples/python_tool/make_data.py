"""Writes the data of the tool `python`, train.jsonl (2000 rows) and heldout.jsonl (100 rows), scored by the verifier `integer`.

    python examples/python_tool/make_data.py [--out FOLDER]

The output does not depend on the machine; the committed files are this output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from task import Problem, split_problems


def write_rows(path: Path, problems: list[Problem]) -> None:
    """One JSON object per line: the question as a chat, the right answer, the verifier that compares them."""
    rows = (
        {
            "messages": [{"role": "user", "content": problem.question}],
            "ground_truth": str(problem.answer),
            "dataset": "integer",
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

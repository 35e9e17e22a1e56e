"""The quickstart's model learns from a Python function and from rows made in Python.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/own_reward/train.py --output_dir output/own_reward

It takes the flags of every run, which override the quickstart's YAML file.
"""

import json
import sys
from pathlib import Path

from reward import closeness

import mgrpo
from mgrpo.moving import parse

EXAMPLES = Path("examples")


def sums() -> list[dict[str, str]]:
    """All sums of two numbers below 30, without the held-out ones that evaluations use."""
    lines = (EXAMPLES / "quickstart/heldout.jsonl").read_text().splitlines()
    held_out = {json.loads(line)["prompt"] for line in lines}
    rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(30) for b in range(30)]
    return [row for row in rows if row["prompt"] not in held_out]


if __name__ == "__main__":
    config = parse(["--config", str(EXAMPLES / "configs/quickstart.yaml"), *sys.argv[1:]])
    mgrpo.train(config, reward_funcs=[closeness], dataset=sums())

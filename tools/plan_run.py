"""The needs of a run, on paper: memory by part, floating-point operations, traffic, seconds and layouts that fit. No GPU.

    python tools/plan_run.py --config examples/configs/32b_16x8.yaml [--gpu H200] [--name value ...]

The same as `mgrpo plan`; docs/planning.md says what is assumed and how far the numbers were checked.
"""

from __future__ import annotations

import sys

from mgrpo.planner.plan_command import plan_command

if __name__ == "__main__":
    raise SystemExit(plan_command(sys.argv[1:], prog="plan_run.py"))

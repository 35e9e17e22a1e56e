"""The reward curve of a run as an SVG file.

python -m tools.docs.reward_curve output/quickstart > docs/reward_curve.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.figure import reward_svg

if __name__ == "__main__":
    print(reward_svg(list(read_records([Path(sys.argv[1]) / "metrics.jsonl"]))))

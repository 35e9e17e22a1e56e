"""Writes down what the GPU packages are and how they take our engines, for tests on machines without them.

    python -m tests.gpu_config.record > tests/gpu_config/recorded.json

It needs requirements/gpu.txt and gcc, but no GPU; `make test-gpu-config` has them. Run it again when what is pinned there
changes, or what engines on GPUs are given.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu_config.faked_h100 import ROOT, environment
from tests.gpu_config.uses import described, uses

PACKAGES = ("torch", "vllm")


def recorded_engines() -> dict[str, Any]:
    """What becomes of each of `cases`, by its name."""
    with tempfile.TemporaryDirectory(prefix="mgrpo-h100-") as folder:
        command = [sys.executable, "-m", "tests.gpu_config.resolve", folder]
        subprocess.run(command, env=environment(Path(folder)), cwd=ROOT, stdout=sys.stderr, check=True)
        return json.loads((Path(folder) / "engines.json").read_text())


def installed_versions() -> dict[str, str]:
    """Without what says for which device."""
    return {name: importlib.import_module(name).__version__.partition("+")[0] for name in PACKAGES}


def main() -> None:
    """One line for each owner and each engine."""
    found = {"versions": installed_versions(), "interfaces": described(uses()), "engines": recorded_engines()}
    parts = []
    for name, part in found.items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in part.items())
        parts.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    print("{" + ",\n".join(parts) + "}")


if __name__ == "__main__":
    main()

"""The comparison of logits that conversions are verified with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_tiny

COMPARE = """
import json, sys
from pathlib import Path
from mgrpo.model_io.logit_agreement import compare_logits

*models, hf = map(Path, sys.argv[1:])
found = [compare_logits(model, hf) for model in models]
print(json.dumps([[one.rows, one.largest, one.difference, one.within(1e-5)] for one in found]))
"""
"""In a process of its own: it hides the GPUs and makes process groups."""


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_model_agrees_with_itself_and_not_with_another(tmp_path: Path, family: str) -> None:
    """A tolerance in which one wrong number is lost would pass a wrong conversion; Gemma 2 also caps its logits."""
    model = save_tiny(tmp_path, family, layers=2, tied=family == "gemma2")
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    ran = subprocess.run(
        [sys.executable, "-c", COMPARE, str(model), str(other), str(model)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    (rows, largest, difference, agrees), (*_, other_difference, other_agrees) = json.loads(ran.stdout.splitlines()[-1])
    assert rows == 4 * 47 and largest > 0.1
    assert agrees and difference <= 1e-5 * max(largest, 1.0)
    assert not other_agrees and other_difference > 1e-5 * max(largest, 1.0)

"""The comparison of logits that conversions are verified with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.tiny_models import save_tiny

COMPARE = """
import json, sys
from pathlib import Path
from mgrpo.model_io.logit_agreement import compare_logits

pairs = zip(*[iter(map(Path, sys.argv[1:]))] * 2, strict=True)
found = [compare_logits(model, own) for own, other in pairs for model in (own, other)]
print(json.dumps([[one.rows, one.largest, one.difference, one.within(1e-5)] for one in found]))
"""
"""Each model with itself and with the one after it. In a process of its own: it hides the GPUs and makes process groups."""


def test_a_model_agrees_with_itself_and_not_with_another(tmp_path: Path) -> None:
    """A tolerance in which one wrong number is lost would pass a wrong conversion; Gemma 2 also caps its logits."""
    families, words = ("qwen2", "gemma2"), []
    for family in families:
        model = save_tiny(tmp_path / family, family, layers=2, tied=family == "gemma2")
        other = Path(shutil.copytree(model, tmp_path / family / "other"))
        tensors = load_file(other / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 0.1
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        words += [str(model), str(other)]
    ran = subprocess.run([sys.executable, "-c", COMPARE, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    for family, own, other in zip(families, found[::2], found[1::2], strict=True):
        (rows, largest, difference, agrees), (*_, other_difference, other_agrees) = own, other
        assert rows == 4 * 47 and largest > 0.1, family
        assert agrees and difference <= 1e-5 * max(largest, 1.0), family
        assert not other_agrees and other_difference > 1e-5 * max(largest, 1.0), family

"""docs/algorithms.md names tests and settings that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from mgrpo.algo import LossConfig
from tests.unit.algo.test_loss_peers import PEERS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def test_every_test_that_the_page_names_exists():
    """A formula would be called proven by a test that was renamed or never written."""
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    files = [
        *(ROOT / "tests/unit/algo").glob("*.py"),
        *(
            ROOT / "tests/unit" / name
            for name in ("rewards/test_overlong.py", "rollout/test_kept.py", "rollout/test_masks_vllm.py")
        ),
        ROOT / "tests/e2e/test_kept_sets.py",
        *(
            ROOT / "tests/ranks" / f"{name}.py"
            for name in ("test_loss_invariance", "test_own_loss", "test_own_advantages", "test_distillation")
        ),
        ROOT / "tests/unit/ops/test_candidates.py",
    ]
    existing = {name for path in files for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)}
    assert len(named) > 30 and named <= existing, sorted(named - existing)


def test_the_table_of_names_has_the_settings_that_were_compared():
    """The page would promise an expansion that no test has seen."""
    rows = dict(re.findall(r"^\| `((?:oi|trl) [^`]+)` \| ?(.*?) ?\|$", PAGE, re.MULTILINE))
    assert rows.keys() == PEERS.keys()
    for name, (_, axes) in PEERS.items():
        settings = {setting.split("=")[0] for setting in rows[name].split()}
        assert settings == axes.keys(), name
        assert settings <= {field.name for field in fields(LossConfig)}

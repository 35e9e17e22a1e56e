"""Which tests `make test-changed` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo.changed import affected_tests, importers

UNIT = Path(__file__).parents[1] / "unit"
IMPORTERS = {"packing": {"model_io", "run.train"}, "run.ranks": {"run.start"}}


@pytest.mark.parametrize(
    ("paths", "folders"),
    [
        ([], []),
        (["README.md", "docs/agents.md"], []),
        (["mgrpo/packing/cost.py"], ["tests/unit/model_io", "tests/unit/packing", "tests/unit/run"]),
        (["mgrpo/run/nodes/gone.py"], ["tests/unit/run/nodes"]),
        (["mgrpo/layout.py"], ["tests/unit/test_layout.py"]),
        (["csrc/core/policy_loss.h"], ["tests/unit/ops"]),
        (["tools/parity.py", "mgrpo/packing/cost.py", "tests/unit/tools/test_parity.py"], None),
        (["tests/unit/algo/test_losses.py", "tests/unit/packing/ranks.py"], None),
        (["tests/unit/algo/test_gone.py"], ["tests/unit/algo"]),
        (["tests/e2e/test_resume.py"], ["tests/e2e/test_resume.py"]),
    ],
)
def test_changed_rooms_and_those_that_import_them_are_tested(paths: list[str], folders: list[str] | None) -> None:
    """What is left out may be broken by the change."""
    found = affected_tests(paths, IMPORTERS, UNIT)
    assert "tests/repo" in found
    if folders is not None:
        assert [name for name in found if name != "tests/repo"] == folders
    assert all((UNIT.parents[1] / name).exists() for name in found)
    assert not any(a != b and b.startswith(f"{a}/") for a in found for b in found), "run twice"


def test_the_import_table_is_read_upwards() -> None:
    found = importers()
    assert {"algo", "data", "moving", "run.start"} <= found["config"]
    assert "config" not in found["algo"]
    assert {"run.start", "run.train"} <= found["run.ranks"]

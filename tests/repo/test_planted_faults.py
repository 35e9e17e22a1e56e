"""Functions that end-to-end tests replace, by their names in strings: most of those tests are slow, and would go stale unseen."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from mgrpo.parallel import backend

E2E = Path(__file__).parents[1] / "e2e"
PLACES = sorted(
    {place for file in E2E.glob("*.py") for place in re.findall(r'"(mgrpo(?:\.\w+)+:[\w.]+)"', file.read_text())}
)


def test_places_are_found():
    """Or the test below would have nothing to look at."""
    assert "mgrpo.rollout.dispatch:Dispatcher.wait" in PLACES


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_is_planted_in_a_function_that_exists(place):
    """After a function got another name, the test that plants a fault in it fails before the fault."""
    backend.install()
    assert callable(pkgutil.resolve_name(place))

"""Where the workers of the environments look for modules of the user's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mgrpo
from mgrpo.run.inputs import toolset


def test_the_folder_of_the_script_is_searched_and_not_that_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m mgrpo` is a script there, and its types.py would be taken for the standard library's."""
    monkeypatch.chdir(tmp_path)
    for script, expected in (
        (tmp_path / "own" / "train.py", "own"),
        (Path(mgrpo.__file__).with_name("__main__.py"), ""),
    ):
        monkeypatch.setattr(sys, "argv", [str(script)])
        assert toolset._folders() == [str(tmp_path), *([str(tmp_path / expected)] if expected else [])]

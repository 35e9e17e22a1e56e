"""What the workers of the environments see of the user's: folders of modules, arguments, variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mgrpo
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.environments.workers.pool import describe
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


SCRIPT = """
import os, sys

def tool(n: int) -> int:
    \"\"\"Double a number.

    Args:
        n: It.
    \"\"\"
    return 2 * n

size, key = int(sys.argv[1]), os.environ["{variable}"]
if __name__ == "__main__":
    raise SystemExit("the script's work")
"""


def test_a_tool_of_a_script_is_imported_with_the_scripts_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard keeps a script from its work in another process, and not from reading what it was started with."""
    script = tmp_path / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script), "12"])
    for name in ("MGRPO_TOOL_SIZE", "SIZE"):
        monkeypatch.setenv(name, "3")
    script.write_text(SCRIPT.format(variable="MGRPO_TOOL_SIZE"))
    assert [tool.name for tool in describe([Spec(entry=f"{script}:tool")]).tools] == ["tool"]
    script.write_text(SCRIPT.format(variable="SIZE"))
    with pytest.raises(ValueError, match=r"cannot be imported: KeyError: 'SIZE'. Tools .* MGRPO_TOOL_.* in a module"):
        describe([Spec(entry=f"{script}:tool")])

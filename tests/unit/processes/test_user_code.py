"""The one loader of the user's modules: tools, reward functions and verifiers have the same errors for the same mistakes."""

from __future__ import annotations

import pytest

from mgrpo.processes.user_code import user_module

MISSING = "there is no module {name}; look again"


def test_a_file_runs_once_however_many_names_are_taken_from_it(tmp_path, monkeypatch):
    """A tool and a reward function in one file share what the file holds, by whatever path they name it."""
    (tmp_path / "own.py").write_text("made = object()\n")
    monkeypatch.chdir(tmp_path)
    first = user_module("tools: own.py:a", "own.py", missing=MISSING)
    assert user_module("reward_funcs: own.py:b", str(tmp_path / "own.py"), missing=MISSING) is first


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "a: there is no file {file}"),
        ("import absent_module", "a cannot be imported: there is no module absent_module; look again"),
        ("raise KeyError('k')", "a cannot be imported: KeyError: 'k'"),
        ("import sys; sys.exit(3)", "a cannot be imported: SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, source, problem):
    """Whatever the user's code raises, the setting is named; and a file that was mended is read anew."""
    file = tmp_path / "own.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ValueError) as failure:
        user_module("a", str(file), missing=MISSING)
    assert str(failure.value) == problem.format(file=file)
    file.write_text("x = 1\n")
    assert user_module("a", str(file), missing=MISSING).x == 1


def test_a_path_is_no_name_where_files_are_not_taken():
    """Verifiers are found by import in every worker, so a path would work in one process alone."""
    with pytest.raises(ValueError, match=r"^v: absent\.py cannot be imported: No module named 'absent'; look again$"):
        user_module("v: absent.py", "absent.py", missing="{err}; look again", takes_files=False)

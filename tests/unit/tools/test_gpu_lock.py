"""tools/gpu_lock.py: what pip's reports become; that the committed file is right, tests/repo/test_install.py says."""

from __future__ import annotations

from packaging.requirements import Requirement

from tools.gpu_lock import lock_lines

RESOLVED = {
    "3.11": {"ray": "2.60.0", "numpy": "2.3.5", "tomli": "2.4"},
    "3.12": {"ray": "2.60.0", "numpy": "2.4.0"},
    "3.13": {"ray": "2.60.0", "numpy": "2.4.0"},
}


def test_a_marker_stands_only_where_versions_of_python_differ():
    assert list(lock_lines(RESOLVED)) == [
        'numpy==2.3.5 ; python_version == "3.11"',
        'numpy==2.4.0 ; python_version == "3.12" or python_version == "3.13"',
        "ray==2.60.0",
        "tomli==2.4",
    ]


def test_each_python_gets_what_was_resolved_for_it():
    """pip reads the lines in the same way, and refuses two versions of one package."""
    lines = [Requirement(line) for line in lock_lines(RESOLVED)]
    for python, versions in RESOLVED.items():
        meant = [line for line in lines if line.marker is None or line.marker.evaluate({"python_version": python})]
        found = {line.name: str(line.specifier) for line in meant}
        assert found.items() >= {name: f"=={version}" for name, version in versions.items()}.items()
        assert len(found) == len(meant)

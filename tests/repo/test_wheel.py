"""A wheel must hold every file that the package reads: in a clone they are there in any case."""

from __future__ import annotations

import fnmatch
import subprocess
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]


def test_every_data_file_is_in_the_wheel():
    """`mgrpo plan` of an installed package knows no model without its JSON files."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package, own in data.items() for pattern in own]
    listed = subprocess.run(["git", "ls-files", "mgrpo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.splitlines() if not name.endswith(".py")]
    assert files
    missing = [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    assert not missing, "name them in package-data of pyproject.toml"

"""The environment variables that a program which meets untrusted text may see. Standard library only."""

from __future__ import annotations

import os
import re

# A list of forbidden names would miss the next service's key.
_VISIBLE = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|CONDA_PREFIX|PYTHON[A-Z]*"
    r"|(?:OMP|MKL|OPENBLAS)_\w+|NLTK_DATA|HF_HOME|HF_HUB_OFFLINE|XDG_CACHE_HOME"
)

TOOL_VARIABLES = "MGRPO_TOOL_"
"""Prefix of the variables that a user gives to tools."""


def without_secrets(prefix: str) -> dict[str, str]:
    """This process's environment variables that hold no secrets, and those whose names begin with `prefix`."""
    return {name: value for name, value in os.environ.items() if _VISIBLE.fullmatch(name) or name.startswith(prefix)}

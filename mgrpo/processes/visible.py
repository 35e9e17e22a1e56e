"""The environment variables that other programs may see: few for programs with untrusted text, no keys for others. Standard library only."""

from __future__ import annotations

import os
import re

# A list of forbidden names would miss the next service's key.
_VISIBLE = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|CONDA_PREFIX|PYTHON[A-Z]*"
    r"|(?:OMP|MKL|OPENBLAS)_\w+|NLTK_DATA|HF_HOME|HF_HUB_OFFLINE|XDG_CACHE_HOME"
)
_KEY = re.compile(
    r"(?!RAY_|HF_TOKEN$|HUGGING_FACE_HUB_TOKEN$)(?:\w*_)?(?:(?:API|ACCESS|SECRET|PRIVATE)_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)",
    re.IGNORECASE,
)


def is_key(name: str) -> bool:
    """True if a variable's name is that of a key of another service than Ray and the Hub.

    For programs that run no untrusted text and need all other variables: drivers, compilers and networks read too many.
    Engines download models, which may be private.
    """
    return _KEY.fullmatch(name) is not None


TOOL_VARIABLES = "MGRPO_TOOL_"
"""Prefix of the variables that a user gives to tools."""


def without_secrets(prefix: str) -> dict[str, str]:
    """This process's environment variables that hold no secrets, and those whose names begin with `prefix`."""
    return {name: value for name, value in os.environ.items() if _VISIBLE.fullmatch(name) or name.startswith(prefix)}

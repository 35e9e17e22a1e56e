"""Prepares docstrings for the API page: sections may follow each other without an empty line, griffe's parser wants one."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<!\n)\n(?=(?:Args|Returns|Raises):\n)")


class Sections(griffe.Extension):
    """Puts an empty line before each section of a docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)

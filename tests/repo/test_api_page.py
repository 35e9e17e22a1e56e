"""docs/api.md: every name is there, and its docstring says what each argument is."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from mgrpo.parallel import backend

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE)
PUBLIC = re.findall(r"heading: (mgrpo\.[\w.]+)", PAGE)


def found(name: str) -> object:
    # Before Megatron is imported, which the learner does.
    backend.install()
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_explained(name):
    """An argument without a line sends its reader to the source code."""
    subject = found(name)
    text = inspect.getdoc(subject)
    assert text
    if inspect.isfunction(subject):
        assert "Returns:" in text
        missing = [argument for argument in inspect.signature(subject).parameters if f"\n    {argument}: " not in text]
        assert missing == []


@pytest.mark.parametrize("name", PUBLIC)
def test_names_can_be_imported_from_where_the_page_says(name):
    """A heading is what a reader copies into an import."""
    assert found(name)

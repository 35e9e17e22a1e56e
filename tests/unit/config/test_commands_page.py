"""docs/cli.md, and the help of every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgrpo.run.commands.sample import DEFAULT_NUM
from tools.docs.cli import commands, help_of, to_markdown

ROOT = Path(__file__).parents[3]


def test_the_page_of_commands_is_current():
    """A page that lags behind shows flags that are gone. `python -m tools.docs.cli > docs/cli.md`"""
    assert (ROOT / "docs/cli.md").read_text(encoding="utf-8") == to_markdown()


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_explains_itself(words):
    """--help is where a user looks first: it names the command, says what it does, and ends well."""
    text = help_of(*words)
    assert text.startswith(f"usage: mgrpo {' '.join(words)}")
    assert len(text.split()) > len(words) + 6, text


def test_help_names_the_flags_of_the_command_alone():
    """--dry_run under eval would be refused, and --nproc-per-node is how most runs start."""
    assert "--nproc-per-node N" in help_of("train") and "--dry_run" in help_of("train")
    assert f"--num N\n        How many prompts. (default: {DEFAULT_NUM})" in help_of("rollout")
    assert "--dry_run" not in help_of("eval")

"""The types of `mgrpo.GRPOConfig`'s arguments, which editors complete and type checkers check."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo.config.fields import settings
from mgrpo.moving.grpo_config import GRPOConfig
from tools.docs.keywords import to_stub

STUB = Path(__file__).parents[3] / "mgrpo/moving/keywords.pyi"
CALLS = """
from typing import Unpack
from keywords import Keywords

def door(**fields: Unpack[Keywords]) -> None: ...

door(learning_rate=1e-6, seed=2, reward_funcs=["a.py:f"], vllm_mode="colocate", num_train_epochs=None, preset="trl_main")
door(chat_template_kwargs={"enable_thinking": False}, profile_steps=(1, 2), sequence_parallel="auto", tools=[print])
door(learning_rate="fast")
door(learning_rat=1e-6)
door(vllm_mode="elsewhere")
door(seed=None)
"""


def test_the_stub_is_current_and_documents_every_setting():
    """A setting that it lacks is an error to a type checker. `python -m tools.docs.keywords > mgrpo/moving/keywords.pyi`"""
    text = STUB.read_text()
    assert text == to_stub()
    (keywords,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    fields = [node.target.id for node in keywords.body if isinstance(node, ast.AnnAssign)]
    assert fields == ["preset", *settings()]
    documents = [node for node in keywords.body if isinstance(node, ast.Expr)]
    assert len(documents) == len(fields) + 1
    assert type(GRPOConfig).__call__.__annotations__["fields"] == "Unpack[Keywords]"


def test_a_type_checker_finds_wrong_types_and_unknown_names(tmp_path):
    """That is what the stub is for, and a mistake in it would make everything Any."""
    pytest.importorskip("mypy")
    shutil.copy(STUB, tmp_path / "keywords.pyi")
    (tmp_path / "calls.py").write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--config-file", os.devnull, "--python-version", "3.11", "calls.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    errors = [line.split(": error: ") for line in done.stdout.splitlines() if ": error: " in line]
    assert [(place.split(":")[1], text.rpartition("[")[2]) for place, text in errors] == [
        ("9", "arg-type]"), ("10", "call-arg]"), ("11", "arg-type]"), ("12", "arg-type]"),
    ], done.stdout + done.stderr  # fmt: skip

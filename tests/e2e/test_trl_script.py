"""A script of TRL's with real engines: what `mgrpo.trl` promises beside the training itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from tests.e2e.launching import ROOT


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What the script has found and printed."""
    folder = tmp_path_factory.mktemp("script")
    command = [sys.executable, str(ROOT / "tests/e2e/trl_script.py"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text()) | {"said": done.stderr}


def test_a_run_without_any_reward_ends_with_a_warning(finished):
    """As TRL's: a script goes on, and has been told."""
    found = finished["unrewarded"]
    assert (found["steps"], found["loss"]) == (2, 0.0)
    assert finished["said"].count("All reward functions returned None for the following kwargs") == 1
    assert "nothing was trained: none of 2 steps changed the weights" in finished["said"]


def test_other_rows_are_evaluated_before_training(finished):
    """Each set by its name."""
    sets = finished["unrewarded"]["sets"]
    assert {"eval_even_loss", "eval_odd_loss", "eval_odd_completions/mean_length"} <= sets.keys()
    assert sets["eval_even_loss"] == 0.0, "no completion has an advantage"


def test_an_adapter_of_a_loaded_model_is_trained_in_place(finished):
    """All of it, and nothing else."""
    found = finished["adapted"]
    assert found["changed"] == found["adapters"] != []


def test_a_callback_ends_a_run_which_is_evaluated_and_exported(finished):
    """The log has every step, the evaluations before and after, and the summary."""
    found = finished["adapted"]
    assert (found["steps"], found["max_steps"]) == (2, 4)
    log = found["log"]
    assert [line["step"] for line in log] == [0, 1, 2, 2, 2]
    assert [name for line in log for name in line if name in ("loss", "eval_loss", "train_loss")] == [
        "eval_loss", "loss", "loss", "eval_loss", "train_loss"
    ]  # fmt: skip
    assert log[1]["calls"] == 1.0 and math.isfinite(log[1]["kl"]) and log[1]["kl"] < 1e-9 < log[2]["kl"]
    assert found["evaluation"]["eval_reward"] == log[3]["eval_reward"]

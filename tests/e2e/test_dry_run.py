"""`--dry_run`, and a run that runs out of prompts: the real program from start to end."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.e2e.launching import Run, survivors


@pytest.fixture
def start(tmp_path):
    """Start one run with these flags."""
    runs = []

    def go(*flags: str) -> Run:
        runs.append(Run(tmp_path, flags))
        return runs[-1]

    yield go
    for run in runs:
        run.end()


def dry_run_folders() -> list[str]:
    return [path.name for path in Path(tempfile.gettempdir()).glob("mgrpo-dry-run-*")]


def test_a_dry_run_trains_one_step_and_keeps_nothing(start, tmp_path):
    """Rows that the model never gets right: a step that the zero-spread filter emptied would prove nothing."""
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "1+1=", "ground_truth": 99_999, "dataset": "integer"}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(40)))
    others = dry_run_folders()
    run = start("--dry_run", "--dataset_mixer_list", str(rows), "1.0")
    run.wait_for("step 1/1", 120)
    family = run.family()
    assert run.wait(60) == 0, run.text()[-3000:]
    assert "one step; no files were kept" in run.text()
    assert "evaluation before training" not in run.text()
    assert not run.output_dir.exists() and dry_run_folders() == others
    assert survivors(family, 20) == []


@pytest.mark.slow
def test_a_run_ends_when_every_prompt_is_solved(start, tmp_path):
    """With nothing left to sample it would go on for ever, or for all of its steps, doing nothing."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{n}+1=", "ground_truth": n + 1, "dataset": "integer"}) + "\n" for n in range(2, 28)
        )
        + "".join(
            json.dumps({"prompt": f"{n}+2=", "ground_truth": n + 2, "dataset": "integer"}) + "\n" for n in range(2, 28)
        )
    )
    run = start(
        "--dataset_mixer_list", str(rows), "1.0", "--no_resampling_pass_rate", "0.01", "--total_episodes", "25600",
        "--active_sampling", "true", "--dataset_mixer_eval_list", "",
    )  # fmt: skip
    assert run.wait(240) == 0, run.text()[-3000:]
    assert "every prompt is solved, nothing is left to sample; training ends" in run.text()
    (exported,) = (run.output_dir / "hf").iterdir()
    assert (exported / "model.safetensors").exists()

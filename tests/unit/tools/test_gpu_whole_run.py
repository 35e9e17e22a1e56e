"""What tools/gpu_whole_run.py makes of a run's figures; the stages themselves run in tests/e2e/test_gpu_whole_run.py."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture
def whole_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_whole_run_training")


@pytest.fixture
def made_run(tmp_path: Path) -> Path:
    """A run's folder of 20 steps, whose reward rises from 0.3 to 0.68."""
    steps = [
        {
            "step": n,
            "policy_version": n,
            "optim/skipped_steps": 0,
            "reward": 0.28 + 0.02 * n,
            "debug/vllm_vs_local_logprob_diff_mean": 0.002,
            "time/actor_tokens_per_second": 1000 * n,
            "time/learner_tokens_per_second_per_gpu": 500 * n,
            "learner_mfu": 0.01 * n,
            "perf/max_memory_allocated_gb": 40 - n,
            "completions/min_length": 40 - n,
            **{f"time/{part}": 0.1 for part in ("generate", "train", "sync", "total")},
        }
        for n in range(1, 21)
    ]
    lines = [{"step": 0, "eval/scores": 0.3}, *steps, {"step": 20, "eval/scores": 0.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("model_dtype: bfloat16\n")
    (tmp_path / "engines.jsonl").write_text(json.dumps({"engines": [{"engine": 0, "starts": 1}]}) + "\n")
    lines = [
        f"INFO 11-29 12:00:00 [abstract.py:390] It took {second}.250000 seconds to fall asleep.\n"
        f"INFO 11-29 12:00:01 [abstract.py:408] It took {second}.500000 seconds to wake up tags ['weights'].\n"
        f"INFO 11-29 12:00:02 [abstract.py:408] It took 0.{second}00000 seconds to wake up tags ['kv_cache'].\n"
        for second in (3, 1, 2)
    ]
    (tmp_path / "engine_logs").mkdir()
    (tmp_path / "engine_logs" / "engine_0.txt").write_text("".join(lines))
    return tmp_path


def test_a_run_that_learns_has_its_figures(whole_run: ModuleType, made_run: Path) -> None:
    """Worked by hand: means of five steps, a median over the 18 steps after the first two."""
    figures = whole_run.run_figures(made_run)
    assert figures["first_reward"] == pytest.approx(0.34) and figures["last_reward"] == pytest.approx(0.64)
    assert figures["tokens_per_s"] == 12000 and figures["heldout"] == [0.3, 0.7]
    assert figures["learner_tokens_per_s"] == 6000 and figures["mfu"] == pytest.approx(0.12)
    assert figures["allocated_gib"] == 39 and figures["shortest"] == 20
    # Of 3.25, 1.25 and 2.25 s; a wake is that of the weights and that of the cache.
    assert figures["sleep_s"] == 2.25 and figures["wake_s"] == pytest.approx(2.5 + 0.2)
    assert whole_run.run_problems(figures) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"last_reward": 0.35}, "the reward has not risen: 0.340 to 0.350"),
        ({"logprob_difference": 0.03}, "engine and learner are 0.03 apart, 0.02 is allowed"),
        ({"dtype": "float32"}, "engine and learner are 0.002 apart, 0.001 is allowed"),
        ({"policy_version": 19}, "only 19 of 20 steps have changed the weights"),
        ({"policy_version": 19, "skipped": 1}, "only 19 of 20 steps have changed the weights"),
        ({"policy_version": 15, "skipped": 5, "dtype": "float16"}, "only 15 of 20 steps have changed the weights"),
        ({"engine_starts": 2}, "the engine was started 2 times"),
    ],
)
def test_what_a_run_must_not_be(whole_run: ModuleType, made_run: Path, changed: dict, problem: str) -> None:
    """A run that ends with 0 may still have trained on a broken engine."""
    assert whole_run.run_problems(whole_run.run_figures(made_run) | changed) == [problem]


def test_a_real_model_in_bfloat16_may_be_further_apart(whole_run: ModuleType, made_run: Path) -> None:
    """Rounding adds up over its layers: on an H200 SmolLM2-135M was 0.0205 apart in a run without a fault."""
    figures = whole_run.run_figures(made_run) | {"logprob_difference": 0.0205}
    assert whole_run.run_problems(figures, whole_run.MODEL_APART) == []
    assert whole_run.run_problems(figures | {"logprob_difference": 0.07}, whole_run.MODEL_APART)


def test_a_loss_scale_may_be_too_large_at_first(whole_run: ModuleType, made_run: Path) -> None:
    """float16's gradient overflows now and then: on a CPU one step in 15 was skipped."""
    figures = whole_run.run_figures(made_run) | {"dtype": "float16", "policy_version": 18, "skipped": 2}
    assert whole_run.run_problems(figures) == []


def test_a_short_run_need_not_learn(whole_run: ModuleType, made_run: Path) -> None:
    """`--total_episodes` for a first look."""
    figures = whole_run.run_figures(made_run) | {"steps": 6, "policy_version": 6, "last_reward": 0.0}
    assert whole_run.run_problems(figures) == []


def test_answers_differ_from_their_first_other_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows another token has another context: its log-probabilities say nothing."""
    monkeypatch.syspath_prepend(str(TOOLS))
    engine = importlib.import_module("gpu_whole_run_engine")

    def answer(tokens: list[int], logprobs: list[float]) -> dict[str, np.ndarray]:
        return {"tokens": np.array(tokens), "logprobs": np.array(logprobs)}

    first = [answer([1, 2, 3], [-1.0, -1.0, -1.0]), answer([4], [-2.0])]
    second = [answer([1, 9, 3], [-1.5, -7.0, -7.0]), answer([4], [-2.25])]
    assert engine.difference(first, second) == {"tokens": 2 / 4, "logprobs": 0.5}


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        (["quickstrat"], "unknown stage 'quickstrat'; choose from join, imports"),
        (["lora+quickstart+"], "unknown stage ''; choose from join, imports"),
        (["lora+kept", "lora"], "stage 'lora' is named twice"),
    ],
)
def test_stages_that_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stages: list[str], problem: str
) -> None:
    """Before anything has run."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setattr(sys, "argv", ["gpu_whole_run.py", *stages])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("gpu_whole_run").main()
    assert problem in capsys.readouterr().err


def test_stages_at_the_same_time_each_have_an_outcome(tmp_path: Path) -> None:
    """One that fails must not hide the other, nor what a call before has found."""
    kept, out = tmp_path / "kept", tmp_path / "out"
    (kept / "pieces").mkdir(parents=True)
    (kept / "pieces" / "pieces.json").write_text(json.dumps({"a": [{"name": "a.00", "bytes": 1, "sha256": ""}]}))

    def run(*stages: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, TOOLS / "gpu_whole_run.py", "--device", "cpu", "--folder", kept, "--out", out]
        return subprocess.run([*command, *stages], capture_output=True, text=True)

    assert run("masks").returncode == 0
    both = run("join+ops_tests")
    assert both.returncode == 1 and "join failed after 0 s: a is not complete yet: a.00 is not here" in both.stdout
    parts = json.loads((out / "whole-run.json").read_text())["parts"]
    outcomes = {name: (part["status"], part["figures"]) for name, part in parts.items()}
    assert outcomes == {
        "masks": ("skipped", {}),
        "join": ("failed", {"beside": ["ops_tests"]}),
        "ops_tests": ("skipped", {"beside": ["join"]}),
    }


def test_a_run_without_a_gpu_has_no_figures_of_one(whole_run: ModuleType, made_run: Path) -> None:
    """MFU and memory are measured on GPUs alone, and an engine that never slept has no times."""
    lines = [json.loads(line) for line in (made_run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("learner_mfu", None), line.pop("perf/max_memory_allocated_gb", None)
    (made_run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made_run / "engine_logs" / "engine_0.txt").unlink()
    figures = whole_run.run_figures(made_run)
    assert [figures[name] for name in ("mfu", "allocated_gib", "sleep_s", "wake_s")] == [None] * 4
    assert whole_run.big_note(figures) == (
        "a step 0.1 s (generate 0.1, train 0.1, sync 0.1), 12,000 tokens/s sampled, 6,000 tokens/s trained"
    )


def fake_trl(folder: Path, shortest: int) -> Path:
    """A program in the place of tools/gpu_book_trl.py, which fails where it is to use vLLM."""
    file = folder / "trl_program.py"
    found = {"trainer": "trl 1", "sampled_by": "transformers", "step_s": [9, 9, 3, 1, 2], "generate_s": [5, 5, 1, 1, 1]}
    file.write_text(
        "import sys\n"
        f"print({json.dumps(json.dumps(found | {'shortest': shortest}))})\n"
        "sys.exit('--transformers' not in sys.argv)\n"
    )
    return file


@pytest.mark.parametrize(
    ("shortest", "status", "note"),
    [
        (512, "passed", "trl 1, sampled by transformers: a step 2 s, of which sampling and sync 1"),
        (511, "failed", "a completion has 511 tokens, expected 512"),
    ],
)
def test_trl_samples_by_itself_where_vllm_fails(
    whole_run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shortest: int, status: str, note: str
) -> None:
    """TRL names the versions of vLLM that it knows; a quarter hour must not end without its figure."""
    site_module = importlib.import_module("gpu_whole_run_site")
    place = importlib.import_module("gpu_check").Place("cuda", True, tmp_path, time.monotonic() + 60)
    site = site_module.Site(tmp_path, (), "trl")
    assert whole_run.trl(place, site).note == "it needs the stage big, whose configuration it reads"
    (tmp_path / "runs" / "big").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "config.yaml").write_text("response_length: 512\n")
    monkeypatch.setattr(whole_run, "TRL", fake_trl(tmp_path, shortest))
    outcome = whole_run.trl(place, site)
    assert (outcome.status, outcome.note) == (status, note)

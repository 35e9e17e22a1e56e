"""tools/gpu_book.py: its budget, its limits and its report; the whole book runs small in tests/e2e/test_gpu_whole_run.py."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
CHILD = "import pathlib, time\nwhile True: pathlib.Path({!r}).touch(); time.sleep(0.1)"
"""A program that shows in a file that it is alive."""


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_book")


@pytest.fixture
def site(book: ModuleType, tmp_path: Path) -> Any:
    return book.Site(tmp_path, ())


def parts_of(site: Any) -> dict[str, tuple[str, str]]:
    """Status and note of the stages that have ended."""
    found = {file.stem: json.loads(file.read_text()) for file in site.parts.glob("*.json")}
    return {name: (part["status"], part["note"]) for name, part in found.items()}


def test_the_limits_of_all_stages_fit_into_the_budget(book: ModuleType) -> None:
    """The pieces travel and are unpacked beside the learner's half; the machine's start, the first unpacking and both halves do not."""
    shares = [stage.share_s for half in (book.LEARNER, book.ENGINE) for stage in half.values()]
    assert book.MACHINE_START_S + book.UNPACK_S + sum(shares) <= book.BUDGET_S == 780
    assert not book.LEARNER.keys() & book.ENGINE.keys()


def test_the_engines_half_keeps_its_time(book: ModuleType, site: Any) -> None:
    """However slow the learner's half is."""
    book.begin_file(site).touch()
    begun = book.begin_file(site).stat().st_mtime
    learner_end, end = book.deadlines(site, "cuda")
    assert end - begun == pytest.approx(690)
    assert end - learner_end == pytest.approx(sum(stage.share_s for stage in book.ENGINE.values()))


def test_a_stage_that_fails_or_hangs_stops_no_other(
    book: ModuleType, site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its children are ended with it: they would keep the GPU's memory."""
    monkeypatch.setattr(book, "CPU_SLACK", 1.0)
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD.format(str(tmp_path / 'alive'))!r}])"

    def command(program: str) -> Any:
        return lambda place, site: book.outcome_of(*site.run([sys.executable, "-c", program], place))

    def broken(place: Any, site: Any) -> Any:
        raise RuntimeError("no such kernel")

    stages = {
        "broken": book.Stage(broken, 1),
        "hangs": book.Stage(command(child), 1),
        "dies": book.Stage(command("import os; os.abort()"), 1),
        "needy": book.Stage(command(""), 1, needs="dies"),
        "works": book.Stage(command(""), 5),
        "large": book.Stage(command(""), 1000),
    }
    book.run_half(stages, "cpu", site, time.time() + 12 + 1000)
    time.sleep(0.5)
    last_sign = (tmp_path / "alive").stat().st_mtime
    parts = parts_of(site)
    assert parts.pop("hangs")[1].startswith("its time was over")
    assert parts == {
        "broken": ("failed", "RuntimeError: no such kernel"),
        "dies": ("failed", "exit code -6"),
        "needy": ("skipped", "dies has not passed"),
        "works": ("passed", ""),
        "large": ("passed", ""),
    }
    time.sleep(0.5)
    assert (tmp_path / "alive").stat().st_mtime == last_sign
    book.run_half({"large": stages["large"]}, "cpu", site, time.time() + 30)
    assert parts_of(site)["large"] == ("skipped", "it may take 1000 s, 30 s of the budget are left")


def test_a_book_begins_once(tmp_path: Path) -> None:
    """Two learners at once on the GPU would spoil each other's figures, and without the first call there is nothing to go on with."""

    def call(name: str) -> str:
        command = [sys.executable, TOOLS / "gpu_book.py", name, "--device", "cpu", "--folder", tmp_path / "kept"]
        done = subprocess.run([*command, "--out", tmp_path / "out"], capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr.strip()

    assert call("more") == f"--folder {tmp_path / 'kept'} holds no book; call start first"
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "begun").touch()
    assert (
        call("start") == f"--folder {tmp_path / 'kept'} holds a book that has begun; call more or finish, or remove it"
    )


def test_the_report_has_predictions_beside_results(book: ModuleType) -> None:
    """Worked by hand: 60,000 tokens/s are 1.5 times 40,000, and a step of 4 s is 1.25 times as fast as one of 5 s."""
    mode = {
        "mode": "bf16 (2)",
        "status": "passed",
        "losses": [-0.25],
        "grad_norms": [0.65],
        "seconds": 0.3,
        "tokens_per_s": 60_000.0,
        "mfu": 0.39,
        "peak_gib": 25.5,
        "planned_gib": 28.3,
        "allowed_gib": 29.4,
    }
    parts = {
        "modes": {"figures": {"modes": [mode]}, "note": "1 of 1 modes ran"},
        "transformers": {"figures": {"tokens_per_s": 40_000.0}, "note": ""},
        "big": {"figures": {"total_s": 4.0}, "note": "a | b"},
        "trl": {"figures": {"step_s": 5.0}, "note": ""},
    }
    parts = {name: {"status": "passed", "seconds": 1.0, "output": "", **part} for name, part in parts.items()}
    predictions = {"big": "a step 4 to 5 s", "families": "one of four fails"}
    report = {"machine": {"gpu": "H200"}, "versions": {}, "protocol": "", "parts": parts, "predictions": predictions}
    page = book.page(report)
    assert "| big | a step 4 to 5 s | passed: a \\| b |" in page
    assert "| families | one of four fails | not run:  |" in page
    assert "| learner, tokens/s: mgrpo, transformers | 60,000 | 40,000 | 1.50 |" in page
    assert "| whole step, s: mgrpo, TRL | 4 | 5 | 1.25 |" in page
    assert "Liger |" not in page.split("## Beside")[1]
    assert "| bf16 (2) | -0.25000 | 0.6500 | 60000 | 39.0 % | 25.50 | 28.30 | 29.40 |" in page


def test_counters_are_read_from_what_ncu_prints(book: ModuleType) -> None:
    """A page of Nsight Compute, with its units."""
    page = """
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    DRAM Frequency                  Ghz         2.62
    Duration                         ms         3.71
    Memory Throughput                 %        86.92
    Memory Throughput        Tbyte/s         2.68
    Achieved Occupancy                %        71.30
    """
    assert book.COUNTERS.findall(page) == [
        ("Duration", "ms", "3.71"),
        ("Memory Throughput", "%", "86.92"),
        ("Memory Throughput", "Tbyte/s", "2.68"),
        ("Achieved Occupancy", "%", "71.30"),
    ]


def test_the_model_of_the_whole_runs_never_ends(tmp_path: Path) -> None:
    """Completions of other lengths would be other work, and TRL's would not be those of mgrpo."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, TOOLS / "gpu_book_model.py", tmp_path, "--shape", "tiny", "--rows", "60"]
    subprocess.run([*command, "--prompt_tokens", "12"], check=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    prompts = [tokenizer(row)["input_ids"] for row in rows]
    assert tokenizer.eos_token_id == 2 and tokenizer.decode(prompts[0]) == rows[0]
    assert len(rows) == 60 and {len(ids) for ids in prompts} == set(range(6, 13)) and min(map(min, prompts)) >= 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.randint(3, 2000, (4, 300))).logits.log_softmax(-1)
    assert logprobs[..., 2].max() < -50
    # The others are sampled as of a random model: nearly all alike.
    assert -(logprobs.exp() * logprobs).sum(-1).min() > 7


def test_transformers_trains_what_the_mode_bf16_trains(tmp_path: Path) -> None:
    """Two speeds of different work are no comparison: same model, samples, loss and count of tokens."""
    device = ["--device", "cpu", "--folder", tmp_path / "models"]
    out = tmp_path / "modes.jsonl"
    subprocess.run([sys.executable, TOOLS / "gpu_check_training.py", *device, "--out", out, "bf16"], check=True)
    (mode,) = [record for line in out.read_text().splitlines() if "losses" in (record := json.loads(line))]
    learner = [sys.executable, TOOLS / "gpu_book_learner.py", *device]
    done = subprocess.run([*learner, "--steps", "2"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["losses"][0] == pytest.approx(mode["losses"][0], rel=0.01)
    assert found["tokens"] == mode["tokens"] and found["losses"][1] < found["losses"][0]
    done = subprocess.run([*learner, "--liger"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"skipped": "Liger's kernels and the compiled model need a GPU"}

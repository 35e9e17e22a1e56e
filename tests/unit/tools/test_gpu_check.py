"""tools/gpu_check.py on a CPU: whoever gets a GPU for half an hour must not spend it on mending the check."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
import torch

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_check")


@pytest.fixture
def place(check: ModuleType, tmp_path: Path):
    return check.Place("cpu", True, tmp_path, time.monotonic() + 30)


def test_every_mode_trains_and_agrees_with_float32(tmp_path: Path) -> None:
    """The whole command, without Ray and vLLM, which a lent machine does not have."""
    for name in ("ray", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not needed here')\n")
    done = subprocess.run(
        [
            sys.executable,
            TOOLS / "gpu_check.py",
            "--device",
            "cpu",
            "--out",
            tmp_path,
            "--parts",
            "extension",
            "training",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-check-cpu.json").read_text())
    modes = {mode["mode"]: mode for mode in report["parts"]["training"]["figures"]["modes"]}
    assert {"bf16", "fp32", "recompute full", "reference", "experts", "softcap", "zero_stage 3"} <= modes.keys()
    assert {mode["status"] for mode in modes.values()} == {"passed"}
    assert modes["bf16"]["losses"] != modes["fp32"]["losses"]  # or nothing was in bf16
    assert modes["bf16"]["losses"][-1] < modes["bf16"]["losses"][0]
    assert modes["shared prompts"]["tokens"] < modes["bf16"]["tokens"]
    page = (tmp_path / "gpu-check-cpu.md").read_text()
    assert "| training | passed |" in page and "| recompute full |" in page


def steps_on(device: str, models: Path, out: Path) -> dict[str, dict]:
    """Float32 training of every small model, by its mode."""
    command: list[str | Path] = [sys.executable, TOOLS / "gpu_check_training.py", "--device", device, "--size", "tiny"]
    subprocess.run(
        [*command, "--folder", models, "--out", out, "fp32", "experts fp32", "softcap fp32"],
        env=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        check=True,
    )
    records = map(json.loads, out.read_text().splitlines())
    return {record["mode"]: record for record in records if "status" in record}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_on_cuda_equal_those_on_the_cpu(tmp_path: Path) -> None:
    """Every kernel on the way, and the update: the second step's loss depends on the first one's weights."""
    expected, got = (steps_on(device, tmp_path / "models", tmp_path / device) for device in ("cpu", "cuda"))
    for name, figures in expected.items():
        assert got[name]["losses"] == pytest.approx(figures["losses"], rel=1e-4), name
        assert got[name]["grad_norms"] == pytest.approx(figures["grad_norms"], rel=1e-3), name


WORKER = """
import json, os, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
for mode in sys.argv[sys.argv.index("--out") + 2:]:
    with open(out, "a") as file:
        print(json.dumps({"mode": mode}), file=file)
    if mode == "dies":
        print("a last word", flush=True)
        os.kill(os.getpid(), 9)
    if mode == "hangs":
        time.sleep(60)
    if mode == "fails":
        with open(out, "a") as file:
            print(json.dumps({"mode": mode, "status": "failed", "error": "wrong"}), file=file)
        os._exit(1)
    with open(out, "a") as file:
        print(json.dumps({"mode": mode, "status": "passed"}), file=file)
"""


def test_a_mode_that_dies_hangs_or_fails_hides_no_other(check: ModuleType, place, tmp_path: Path) -> None:
    """An illegal access ends the process, and a deadlock would take all ten minutes."""
    names = ["a", "dies", "b", "hangs", "c", "fails", "d"]
    records = check.train_modes([sys.executable, "-c", WORKER], names, place, mode_limit_s=1.5)
    assert [record["mode"] for record in records] == names
    assert [record["status"] for record in records] == ["passed", "failed"] * 3 + ["passed"]
    assert [record["error"] for record in records if "error" in record] == [
        "its process ended with -9",
        "its time was over",
        "wrong",
    ]
    assert records[1]["output"] == "a last word\n"


def test_when_the_time_is_over_the_rest_is_reported(check: ModuleType, tmp_path: Path) -> None:
    """A check that goes on after ten minutes is ended with the lease, without a report."""
    place = check.Place("cpu", True, tmp_path, time.monotonic() + 1)
    records = check.train_modes([sys.executable, "-c", WORKER], ["hangs", "a"], place)
    assert [record["error"] for record in records] == ["its time was over", "there was no time left"]
    assert check.check(check.extension, place).note == "there was no time left"


@pytest.mark.parametrize("left_out", [None, "native", "sanitizer"])
def test_every_part_has_its_share_of_ten_minutes(check: ModuleType, left_out: str | None) -> None:
    """A part that hangs, or that compiles all kernels for the first time, would leave nothing to those behind it."""
    parts = [name for name in check.PARTS if name != left_out]
    limits = check.limits(parts)
    assert list(limits) == parts and limits[parts[-1]] == check.LIMIT_S
    begun = 0.0
    for name in parts:  # each takes all that it may
        assert limits[name] - begun >= check.SHARES_S[name]
        begun = limits[name]
    assert check.limits(["training"]) == {"training": check.LIMIT_S}


def test_only_files_with_gpu_tests_are_collected(check: ModuleType, tmp_path: Path, monkeypatch) -> None:
    """The others import packages that a machine for a run does not have, and one error of collection ends pytest."""
    commands: list[list[str | Path]] = []

    def run(command: list[str | Path], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 0, "1 passed"

    monkeypatch.setattr(check, "run", run)
    assert check.gpu_tests(check.Place("cuda", True, tmp_path, time.monotonic() + 30)).status == "passed"
    places = [Path(part) for part in commands[0] if "tests" in Path(part).parts]
    names = {place.name for place in places}
    assert {"test_ops_cuda.py", "test_attention_kernels.py", "test_rotary.py", Path(__file__).name} <= names
    assert all(place.is_file() and "pytest.mark.gpu" in place.read_text() for place in places)


def test_types_of_gpu_tests_are_checked(check: ModuleType) -> None:
    """CI cannot run them: mypy alone notices a call that the code no longer takes."""
    files = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert files == ["mgrpo", *(str(path.relative_to(check.ROOT)) for path in check.files_with_gpu_tests())]


def test_gpu_tests_without_pytest_say_what_to_install(check: ModuleType, tmp_path: Path, monkeypatch) -> None:
    """It is not among the packages of a run; "No module named pytest" does not say where it comes from."""
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    outcome = check.gpu_tests(check.Place("cuda", True, tmp_path, time.monotonic() + 30))
    assert (outcome.status, outcome.note) == ("failed", "pytest is not installed; `make dev` installs it")


def test_an_error_in_the_check_is_a_failed_part(check: ModuleType, place) -> None:
    """The report is written all the same."""

    def broken(place):
        raise KeyError("cuda_archs")

    outcome = check.check(broken, place)
    assert (outcome.status, outcome.note) == ("failed", "KeyError: 'cuda_archs'")


def mode(name: str, **figures: object) -> dict[str, object]:
    plain = {"status": "passed", "equals": "fp32", "losses": [-0.5], "grad_norms": [2.0], "peak_gib": 9.0}
    return {"mode": name, **plain, "planned_gib": 9.5, "allowed_gib": 10.0, "is_planned": True, **figures}


def test_a_mode_that_computes_something_else_is_a_problem(check: ModuleType) -> None:
    """Beyond what bf16 rounds, and beyond the memory that the plan promises."""
    modes = [
        mode("fp32", equals=None),
        mode("rounds", losses=[-0.505], grad_norms=[2.05]),
        mode("loss", losses=[-0.52]),
        mode("norm", grad_norms=[1.8]),
        mode("memory", peak_gib=10.5),
        mode("float32", peak_gib=10.5, is_planned=False),
        mode("other", equals=None, losses=[3.0]),
        {"mode": "dead", "status": "failed", "error": "wrong"},
    ]
    assert check.mode_problems(modes) == [
        "loss: the first of losses is -0.52, -0.5 in fp32",
        "norm: the first of grad_norms is 1.8, 2 in fp32",
        "memory: 10.50 GiB, but the plan allows 10.00",
        "dead: wrong",
    ]

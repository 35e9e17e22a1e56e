"""`tools/bench.py ops` on tiny shapes: a method called wrongly would be a figure for other work. Times are not checked."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.bench_cases import ops, readme_figures
from tools.bench_cases.ops_methods import GROUPS, LOGITS, Shape

ROOT = Path(__file__).resolve().parents[3]
OURS = {
    "experts": {"one by one", "mgrpo, grouped"},
    "loss": {"PyTorch formulas", "mgrpo policy_loss"},
    "logits": {"mgrpo, new buffer", "mgrpo, in place"},
    "head": {"mgrpo, matmul + in place", "mgrpo linear_logprobs"},
    "kept": {"mgrpo, matmul + in place", "mgrpo linear_logprobs"},
}
PACKAGES = {"TRL": "trl", "Liger": "liger_kernel", "Megatron": "megatron"}


def bench_ops(file: Path, *options: str) -> tuple[dict, str]:
    """Report and output of a tiny run. Uncompiled: Megatron's fused cross entropy compiles for half a minute."""
    shape = ["--tokens", "8", "--vocab", "64", "--hidden", "16", "--repeats", "1"]
    result = subprocess.run(
        [sys.executable, "tools/bench.py", "ops", *shape, *options, "--output", str(file)],
        cwd=ROOT,
        env=os.environ | {"TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(file.read_text()), result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    return bench_ops(tmp_path_factory.mktemp("bench") / "ops.json")


def limits(row: dict) -> tuple[float, float]:
    """Largest errors of a logprob, entropy or result and of a gradient that rounding explains."""
    logprob, gradient = 1e-5, 1e-5
    if row["dtype"] == "bfloat16":
        gradient = 2**-8
        if row["group"] == "experts":  # every product and activation is rounded to bfloat16
            logprob = gradient = 2**-6
        elif row["group"] in ("head", "kept"):  # logits of up to 12 are rounded to bfloat16
            logprob, gradient = 0.1, 2**-5
        elif row["method"].startswith(("TRL", "Liger")):  # compute in bfloat16 or return it
            logprob, gradient = 0.1, 2**-6
    elif row["method"] == "Megatron fused cross entropy":  # rounds every gradient to bfloat16
        gradient = 2**-8
    return logprob, gradient


def test_every_method_computes_what_the_oracle_computes(run: tuple[dict, str]) -> None:
    """A swapped sign or operand would make a peer look wrong or its time meaningless."""
    report, _ = run
    for row in report["rows"]:
        logprob, gradient = limits(row)
        assert row["result_error" if row["group"] == "experts" else "logprob_error"] <= logprob, row
        assert row["gradient_error"] <= gradient, row
        if row["entropy"]:
            assert row["entropy_error"] <= logprob, row


def test_every_method_has_rows_or_a_reason(run: tuple[dict, str]) -> None:
    """A comparison that silently lost a peer would look complete."""
    report, printed = run
    for name, group in GROUPS.items():
        cases = {(row["method"], row["dtype"], row["entropy"]) for row in report["rows"] if row["group"] == name}
        absent = report["groups"][name]["absent"]
        for method in group.methods:
            if method.name in absent:
                assert method.is_peer, absent
                assert f"absent: {method.name} ({absent[method.name]})" in printed
                continue
            has_entropy = method.has_entropy and name not in ("loss", "experts")
            for dtype in ("float32",) if name == "loss" else ("float32", "bfloat16"):
                assert (method.name, dtype, False) in cases
                assert ((method.name, dtype, True) in cases) == has_entropy
        assert not OURS[name] & set(absent)
        for prefix, package in PACKAGES.items():
            if importlib.util.find_spec(package) is None:
                missing = [method.name for method in group.methods if method.name.startswith(prefix)]
                assert all(f"No module named '{package}" in absent[method] for method in missing), absent
        compiled = [method.name for method in group.methods if method.name.endswith("compiled")]
        assert all("TORCH_COMPILE_DISABLE" in absent[method] for method in compiled), absent
    assert "Megatron cross entropy" not in report["groups"]["logits"]["absent"]


def test_a_dtype_can_be_left_out(tmp_path: Path) -> None:
    """float32 takes most of the time of a run on a GPU; the goals and the page must do with the other rows."""
    report, printed = bench_ops(tmp_path / "ops.json", "--dtypes", "bfloat16")
    found = {name: {row["dtype"] for row in report["rows"] if row["group"] == name} for name in GROUPS}
    assert found == {name: {"bfloat16"} for name in GROUPS} | {"loss": {"float32"}}
    assert [goal["goal"] in printed for goal in report["goals"]] == [True] * 5
    assert "bfloat16, with entropy" in "\n".join(readme_figures.ops(report))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++")
def test_compiled_baseline_is_compiled_before_the_clock_starts() -> None:
    """An eager or recompiling baseline would be too easy to beat."""
    device, shape = torch.device("cpu"), Shape(tokens=8, vocab=64, hidden=0, rounds=1)
    names = ("log_softmax + gather", "log_softmax + gather, compiled")
    calls = {method.name: method.load(device) for method in LOGITS.methods if method.name in names}
    _, with_entropy = LOGITS.cases(shape, device, [torch.float32])
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    ops.run_case(LOGITS, calls, with_entropy, 1, device, {})
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.compiler.set_stance("fail_on_recompile"):
        rows = ops.run_case(LOGITS, calls, with_entropy, 2, device, {})

    assert graphs == 1 and [row["method"] for row in rows] == list(names)
    for row in rows:
        assert max(row["logprob_error"], row["entropy_error"], row["gradient_error"]) < 1e-5, row


def test_report_says_where_and_how(run: tuple[dict, str]) -> None:
    """A speed claim without machine, versions and protocol is none."""
    report, printed = run
    assert report["machine"]["device"] and report["machine"]["threads"] >= 1 and report["machine"]["copy_gb_per_s"] > 0
    assert {"compiled", "cuda_archs", "built_with_torch", "load_before", "cores"} <= set(report["machine"])
    assert report["versions"]["torch"] == torch.__version__ and "trl" in report["versions"]
    assert "CPU seconds" in report["protocol"] and report["unit"] == "CPU ms"
    assert [goal["goal"] in printed for goal in report["goals"]] == [True] * 5
    for row in report["rows"]:
        assert row["forward_ms"] >= 0 and row["backward_ms"] >= 0 and row["speedup"] > 0
        assert row["peak_share"] * row["logits_bytes"] == pytest.approx(row["peak_mib"] * 2**20, rel=1e-4)


def test_peak_is_what_lives_at_once() -> None:
    """Freed buffers, or those that existed before, would make a method look larger than it is."""
    mib = 2**20
    before = torch.empty(64 * mib, dtype=torch.uint8)

    def call() -> None:
        torch.empty(7 * mib, dtype=torch.uint8)  # freed at once
        first = torch.empty(4 * mib, dtype=torch.uint8)
        second = first.clone()
        before.zero_()
        del first, second
        torch.empty(6 * mib, dtype=torch.uint8)

    assert ops.peak_bytes(torch.device("cpu"), call) == 8 * mib


def test_a_goal_is_judged_by_its_worst_row() -> None:
    """One dtype must not hide behind the other."""
    row = {"group": "logits", "peak_share": 0.001}
    rows = [
        row | {"method": method, "entropy": entropy, "speedup": speedup}
        for method in ("mgrpo, in place", "mgrpo, new buffer")
        for entropy in (False, True)
        for speedup in (100.0, 7.0)
    ]
    rows[0]["peak_share"] = 0.02
    judged = {goal["goal"]: (goal["found"], goal["met"]) for goal in ops.goals(rows, torch.device("cpu"))}
    assert judged == {
        "in place: times faster": (7.0, True),
        "in place, with entropy: times faster": (7.0, False),
        "new buffer: times faster": (7.0, True),
        "new buffer, with entropy: times faster": (7.0, True),
        "in place: extra memory over the logits' bytes": (0.02, False),
    }

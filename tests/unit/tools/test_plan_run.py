"""tools/plan_run.py as a user meets it: the verdict first, numbers as JSON, and one clear error for what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo import cli
from mgrpo.planner.plan_command import plan_command, shipped_config, shipped_name

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "examples" / "configs"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(name: str, *flags: str) -> int:
    return plan_command(["--config", str(CONFIGS / f"{name}.yaml"), "--suggest", "0", *flags])


def test_the_tool_plans_32b_without_torch_in_seconds(tmp_path) -> None:
    """It is for a laptop, before any GPU is rented: no heavy package, and under 10 s of computing with suggestions."""
    code = (
        "import sys, runpy; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: status = end.code\n"
        "heavy = {'torch', 'megatron', 'ray', 'vllm', 'transformers'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy; sys.exit(status)"
    )
    before = os.times()
    done = subprocess.run(
        [
            *(sys.executable, "-c", code, str(ROOT / "tools" / "plan_run.py")),
            *("--config", str(CONFIGS / "32b_16x8.yaml"), "--json", str(tmp_path / "plan.json")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert after.children_user - before.children_user < 10
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("fits: ") and "of 80 GiB on the worst learner (stage 0)" in first
    assert " s per step; bottleneck: " in second
    for text in ("parameters", "gradients", "optimizer", "passes, recompute full", "KV cache", "weight sync"):
        assert text in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] and plan["gpus"] == {"learners": 64, "engines": 64, "teachers": 0, "idle": 0}
    worst = max(stage["total"] for stage in plan["learners"])
    assert f"{worst / 2**30:.1f}" in first
    assert plan["seconds"]["step"] == pytest.approx(sum(plan["seconds"]["phases"].values()))
    assert len(plan["layouts"]) == 5 and all(layout["bytes"] <= 80 * 2**30 for layout in plan["layouts"])


def test_flags_override_the_file_as_in_training(capsys) -> None:
    """What is planned must be what would run; a smaller GPU changes the verdict and the exit status."""
    assert run("7b_8gpu", "--pack_length", "16384", "--recompute_granularity=full", "--gpu=H200") == 0
    text = capsys.readouterr().out
    assert "of 141 GiB" in text and "packs of 16384 tokens" in text and "recompute full" in text
    assert run("7b_8gpu", "--gpu", "l40s") == 1
    assert capsys.readouterr().out.startswith("does not fit: learners: ")
    assert run("7b_8gpu", "--gpu", "l40s", "--gpu_memory_gib", "96", "--gpu_tflops", "500", "--suggest", "0") == 0
    assert "of 96 GiB" in capsys.readouterr().out
    assert run("7b_8gpu", "--gpu", "rtx4090", "--suggest", "1") == 1
    assert "No layout and no division of these GPUs fits" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen2.5-7b", "/on/the/cluster/Qwen2.5-7B"])
def test_a_model_known_by_name_needs_no_folder(name: str, capsys) -> None:
    """The plan is made on a laptop; the folder may be on the cluster, or nowhere yet."""
    assert run("7b_8gpu") == 0
    planned = capsys.readouterr().out
    assert run("7b_8gpu", "--model_name_or_path", name) == 0
    assert capsys.readouterr().out == planned.replace("models/Qwen2.5-7B-Instruct", name)


def test_nodes_and_learners_follow_from_each_other(tmp_path, capsys) -> None:
    """Without num_learners_per_node engines take their GPUs and learners the rest, in whole copies of the model."""
    file = tmp_path / "free.yaml"
    file.write_text((CONFIGS / "7b_8gpu.yaml").read_text().replace("num_learners_per_node: [4]\n", ""))
    flags = ["--suggest", "0", "--nodes", "2", "--vllm_num_engines", "5"]
    assert plan_command(["--config", str(file), *flags]) == 0
    assert "2 x 8 H100: 10 learners, 5 for 5 engines of 1, 1 idle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tensor_model_parallel_size", "3"), "tensor_model_parallel_size=3 does not divide num_attention_heads=28"),
        (("--tensor_model_parallel_size", "0"), "tensor_model_parallel_size=0 must be"),
        (("--pack_length", "100"), "pack_length=100 cannot hold"),
        (("--pack_lenght", "100"), "did you mean --pack_length"),
        (("--model_name_or_path", "models/unheard-of"), "--hf_config FILE"),
        (("--hf_config", "/nowhere.json"), "hf_config=/nowhere.json cannot be read"),
        (("--pipeline_model_parallel_size", "3"), "pipeline_model_parallel_size"),
    ],
)
def test_a_mistake_is_one_clear_error_that_names_the_field(flags, said, capsys) -> None:
    """No plan for a run that would not start."""
    assert run("7b_8gpu", *flags) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "flags", [("--gpu", "V100"), ("--nodes", "0"), ("--network_gbps", "-1"), ("--hbm_efficiency", "1.5")]
)
def test_a_cluster_that_cannot_be_is_refused(flags, capsys) -> None:
    """As with every command line: the usage, the flag and what it may be."""
    with pytest.raises(SystemExit) as end:
        run("7b_8gpu", *flags)
    assert end.value.code == 2 and f"argument {flags[0]}: " in capsys.readouterr().err


def test_a_model_may_be_a_file_or_a_known_name(tmp_path, capsys) -> None:
    """A plan needs sizes, not weights."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shipped_config("qwen2.5-7b") | {"num_hidden_layers": 14}))
    assert run("7b_8gpu", "--hf_config", str(file), "--model_name_or_path", "mine/half") == 0
    assert "mine/half: 4.35 billion weights" in capsys.readouterr().out
    assert shipped_name("Qwen/Qwen2.5-7B-Instruct") == "qwen2.5-7b"
    assert shipped_name("Qwen/Qwen3-30B-A3B") == "qwen3-30b-a3b"
    assert shipped_name("meta-llama/Meta-Llama-3.1-8B-Instruct") == "llama-3.1-8b"
    assert shipped_name("Qwen/Qwen2.5-73B") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "32b_16x8",
            "500 steps, about HOURS without evaluations; 10 exports of 66 GB; a training state 393 GB, 3 on disk at most",
        ),
        (
            "7b_8gpu",
            "500 steps, about HOURS without evaluations; 5 exports of 15 GB; a training state 91 GB, written only when "
            "the run is stopped (checkpoint_state_freq, save_every_minutes)",
        ),
        ("quickstart", "120 steps, under a minute without evaluations; 1 export of 1.8 MB; a training state 5.5 MB"),
    ],
)
def test_the_whole_run_is_planned_in_time_and_bytes(name: str, said: str, capsys) -> None:
    """Who asks for a reservation and a quota needs the sums, not a step's."""
    run(name, "--suggest", "0")
    printed = " ".join(capsys.readouterr().out.split())
    seconds = float(re.findall(r"about ([\d.]+) s per step", printed)[0])
    assert said.replace("HOURS", f"{500 * seconds / 3600:.0f} hours") in printed


def test_one_of_a_kind_is_said_as_one_and_large_numbers_have_separators(capsys) -> None:
    assert run("quickstart", "--suggest", "0") == 0
    printed = capsys.readouterr().out
    assert "1 for 1 engine of 1, 0 idle" in printed and "1 micro-batch per rank" in printed
    assert "an engine caches 3,395,303 sequences of 14 tokens" in printed


def test_mgrpo_plan_is_the_same_command(capsys) -> None:
    """Users who installed the package have no tools folder."""
    assert cli.main(["plan", "--config", str(CONFIGS / "7b_8gpu.yaml"), "--suggest", "0"]) == 0
    assert capsys.readouterr().out.startswith("fits: ")

"""The two conversion programs as a user runs them, with `--verify` against transformers for every family."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgrpo import cli
from mgrpo.model_io.convert import hf_to_megatron_command, megatron_to_hf_command
from tests.tiny_models import FAMILIES, save_tiny

ROOT = Path(__file__).resolve().parents[3]
LOOP = """
import sys
from mgrpo.model_io.convert import hf_to_megatron_command, megatron_to_hf_command
for family in sys.argv[1:]:
    cut = ["--tensor_model_parallel_size", "2", "--pipeline_model_parallel_size", "2"]
    print(family, hf_to_megatron_command(["--hf", family, "--out", family + ".m", "--verify", *cut], prog=""), flush=True)
    print(family, megatron_to_hf_command(["--checkpoint", family + ".m", "--out", family + ".h", "--verify"], prog=""))
rounded = ["--checkpoint", family + ".m", "--out", "rounded", "--dtype", "bfloat16", "--verify"]
print("rounded", megatron_to_hf_command(rounded, prog=""))
"""


def run(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=200
    )


@pytest.fixture
def hf(tmp_path) -> Path:
    return save_tiny(tmp_path, "llama").rename(tmp_path / "hf")


def test_logits_of_every_family_equal_transformers(tmp_path):
    """A tensor in the wrong place has the right bits; only a forward pass tells. One process: the imports take longest."""
    for family in FAMILIES:
        save_tiny(tmp_path, family, tied="gemma" in family).rename(tmp_path / family)
    done = subprocess.run(
        [sys.executable, "-c", LOOP, *FAMILIES], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    for family in FAMILIES:
        assert done.stdout.count(f"{family} 0\n") == 2, (family, done.stdout[-2000:], done.stderr[-3000:])
        assert (tmp_path / f"{family}.h" / "model.safetensors").is_file()
    assert "rounded 0\n" in done.stdout
    assert done.stdout.count("equal in every bit") == 2 * len(FAMILIES) + 1


def test_logits_that_differ_leave_nothing(hf, tmp_path):
    """The check must be able to fail: here rounding alone is more than is allowed."""
    arguments = ["--hf", "hf", "--out", "out", "--verify", "--tolerance", "1e-12"]
    done = run("convert_hf_to_megatron.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "differ from transformers' by at most" in done.stderr and "--tolerance 1e-12" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_programs_convert_there_and_back(hf, tmp_path):
    """Without `--verify` neither Megatron nor transformers is needed, nor loaded."""
    for script, arguments in (
        ("convert_hf_to_megatron.py", ["--hf", "hf", "--out", "megatron", "--tensor_model_parallel_size", "4"]),
        ("convert_megatron_to_hf.py", ["--checkpoint", "megatron", "--out", "back", "--dtype", "bfloat16"]),
    ):
        done = run(script, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "peak memory" in done.stdout
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    modules = "import sys, mgrpo.model_io.convert; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", modules], capture_output=True, text=True, check=True).stdout.split()
    assert not {"megatron", "transformers", "ray", "vllm"} & set(loaded)


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (hf_to_megatron_command, ["--hf", "nowhere", "--out", "out"], "nowhere is not a folder"),
        (hf_to_megatron_command, ["--hf", "hf", "--out", "hf"], "exists already"),
        (
            hf_to_megatron_command,
            ["--hf", "cut", "--out", "out"],
            "cut: model.safetensors is not a complete safetensors file",
        ),
        (
            hf_to_megatron_command,
            ["--hf", "hf", "--out", "out", "--expert_model_parallel_size", "0"],
            "must be at least 1",
        ),
        (megatron_to_hf_command, ["--checkpoint", "hf", "--out", "out"], "neither a Megatron folder"),
        (megatron_to_hf_command, ["--checkpoint", "step_7", "--out", "out"], "neither a Megatron folder"),
    ],
)
def test_mistakes_end_in_one_sentence(hf, tmp_path, monkeypatch, capsys, command, arguments, words):
    """Not in a traceback, and not in half a folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree("hf", "cut")
    os.truncate("cut/model.safetensors", 100_000)
    assert command(arguments, prog="convert") == 2
    error = capsys.readouterr().err
    assert error.startswith("convert: ") and words in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "hf"]


def test_package_has_the_same_commands(hf, tmp_path, capsys):
    """For those who installed it without the repository."""
    assert cli.main(["convert", "hf-to-megatron", "--hf", str(hf), "--out", str(tmp_path / "m")]) == 0
    assert (
        cli.main(["convert", "megatron-to-hf", "--checkpoint", str(tmp_path / "m"), "--out", str(tmp_path / "h")]) == 0
    )
    heads = [load_file(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in ("hf", "h")]
    assert torch.equal(*heads)
    assert cli.main(["convert", "gguf"]) == 2
    assert "{hf-to-megatron|megatron-to-hf}" in capsys.readouterr().err

"""What a user gets for a mistake: exit code 2 and one message, before Ray or an engine is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from mgrpo import cli
from tests.e2e.launching import ROOT, TENSOR_PARALLEL, Run

QUICKSTART = ["--config", "examples/configs/quickstart.yaml"]


@pytest.fixture
def message(monkeypatch, capsys):
    """The error text of a start that must fail, as rank 0 of so many."""

    def start(*flags: str, world_size: int = 2) -> str:
        for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(ROOT)
        assert cli.train_command([*QUICKSTART, TENSOR_PARALLEL, "2", *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err and "ray" not in captured.err.lower()
        return captured.err

    return start


def test_missing_model_folder():
    """The message names the flag and the folder; nothing heavy is imported, and no traceback is shown."""
    command = [sys.executable, "examples/train_grpo.py", *QUICKSTART, "--model_name_or_path", "no/such/model"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "model_name_or_path=no/such/model" in result.stderr and "Traceback" not in result.stderr


def test_malformed_row_is_named_by_file_and_line(tmp_path, message):
    """Line 3 of a million."""
    rows = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "1+1=", "ground_truth": 2, "dataset": "integer"})
    rows.write_text(f"{good}\n{good}\n{{oops\n")
    assert f"{rows}:3" in message("--dataset_mixer_list", str(rows), "1.0")


def test_unknown_verifier_in_a_row(tmp_path, message):
    """A typing error in the data must not become 100,000 rewards of 0."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "ground_truth": 2, "dataset": "intger"}) + "\n")
    text = message("--dataset_mixer_list", str(rows), "1.0")
    assert "intger" in text
    assert "integer" in text


def test_layout_that_does_not_divide(message):
    """3 ranks cannot be cut into tensor-parallel pairs."""
    assert "tensor" in message(world_size=3)


def test_smollm2_refuses_tensor_parallelism(tmp_path, message):
    """9 heads over 2 ranks."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/quickstart/model", model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (model / "config.json").write_text(json.dumps(config))
    assert "tensor_model_parallel_size=2 does not divide num_attention_heads=9" in message(
        "--model_name_or_path", str(model)
    )


def test_unknown_flag_names_the_nearest(message):
    """A letter that is missing."""
    assert "--learning_rate" in message("--learning_rat", "1")


def test_all_problems_come_at_once(message):
    """One mistake a start wastes a start each."""
    text = message("--temperature", "0", "--async_steps", "-2", "--model_name_or_path", "nope", "--pack_length", "3")
    for field in ("temperature", "async_steps", "nope", "pack_length"):
        assert field in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--expert_model_parallel_size", "3"), "choose from {1, 2}"),
        (("--expert_model_parallel_size", "2"), "expert_model_parallel_size=2 needs a mixture-of-experts model"),
        (("--zero_stage", "1", "--fsdp_shard_degree", "2"), "fsdp_shard_degree=2 needs zero_stage=3"),
        (("--virtual_pipeline_model_parallel_size", "2"), "needs pipeline_model_parallel_size > 1"),
    ],
)
def test_an_impossible_layout_is_refused_with_what_is_possible(flags, words, message):
    """Process groups that cannot be formed end in an assertion deep inside Megatron, after the engines have started."""
    assert words in message(*flags)


def test_the_message_is_not_lost_when_other_ranks_are_faster(tmp_path):
    """torchrun ends rank 0, which still reads data, when rank 1 has noticed and ended; nobody would say what was wrong."""
    rows = tmp_path / "rows.jsonl"
    chat = {"messages": [{"role": "user", "content": "1+1="}], "ground_truth": 2, "dataset": "integer"}
    rows.write_text((json.dumps(chat) + "\n") * 32)
    run = Run(tmp_path, ["--learning_rate", "-1", "--dataset_mixer_list", str(rows), "1.0"])
    try:
        assert run.wait(200) != 0
        assert run.text().count("mgrpo: ") == 1 and "mgrpo: 2 problems" in run.text(), run.text()
        for words in ("learning_rate=-1", "has no chat template"):
            assert run.text().count(words) == 1, run.text()
    finally:
        run.end()

"""The whole program, in miniature: two Megatron ranks, Ray, one vLLM engine, 30 steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.launching import Run, survivors
from tests.tiny_models import load_hf

STEPS = 30
KEYS = {"WANDB_API_KEY": "planted-key", "OPENAI_API_KEY": "planted-key"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    flags = ["--total_episodes", str(STEPS * 256), "--weight_sync_check_every", "10"]
    run = Run(tmp_path_factory.mktemp("run"), flags, variables=KEYS | {"HF_TOKEN": "hub-token"})
    try:
        run.wait_for("\nstep ", 150)
        family = run.family()
        run.environments = {
            kind: Path(f"/proc/{run.find(kind).pid}/environ").read_text(errors="replace")
            for kind in ("rank 0", "raylet", "gcs", "verifier")
        }
        assert run.wait(200) == 0, run.text()[-3000:]
    finally:
        run.end()
    run.left = survivors(family, 5)
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    run.steps = [line for line in lines if "reward" in line]
    run.evaluations = [line for line in lines if "eval/pass_at_1" in line]
    return run


def test_reward_and_held_out_accuracy_rise(finished):
    """The one thing a trainer is for."""
    rewards = [step["reward"] for step in finished.steps]
    assert len(rewards) == STEPS
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-5:]) / 5 > 0.65
    before, after = (line["eval/pass_at_1"] for line in finished.evaluations)
    assert before < 0.45
    assert after > before + 0.2


def test_trainer_and_engine_agree_on_logprobs(finished):
    """On policy the ratio is 1: a larger difference means another model, temperature or stale weights in the engine."""
    for step in finished.steps:
        assert step["debug/vllm_vs_local_logprob_diff_mean"] < 1e-4
        assert step["debug/vllm_vs_local_logprob_diff_max"] < 1e-2


def test_a_run_that_ends_well_reports_no_failure_of_ray(finished):
    """Ray's daemons end with the run: taken for their failure, it would end a slow shutdown with exit code 1."""
    assert [file.name for file in (finished.output_dir / "engine_logs").iterdir()] == ["engine_0.txt"]


def test_what_the_engine_has_chosen_is_in_the_runs_folder_and_not_in_the_terminal(finished):
    """Whoever is called at night reads it there; between the steps of a run nobody could."""
    log = (finished.output_dir / "engine_logs" / "engine_0.txt").read_text()
    assert "KV cache size: " in log and "KV cache size: " not in finished.text()


def test_weights_are_synchronised_after_every_step(finished):
    """Each step's tokens come from the weights of the step before."""
    assert [step["policy_version"] for step in finished.steps] == list(range(1, STEPS + 1))
    assert "(lower bound 1.84 MB)" in finished.text()
    assert len({step["sync/bytes"] for step in finished.steps}) == 1


def test_everything_a_run_promises_is_written(finished):
    """config.yaml that loads back, metrics, TensorBoard events, and a model that transformers loads."""
    from mgrpo.moving import load_file

    out = finished.output_dir
    assert load_file(out / "config.yaml").num_training_steps == STEPS
    assert list((out / "tensorboard").glob("events*"))
    trained, start = load_hf(out / "hf" / f"step_{STEPS}"), load_hf("examples/quickstart/model")
    moved = [(a - b).abs().max().item() for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert all(torch.isfinite(p).all() for p in trained.parameters())
    assert min(moved) > 0


def test_exported_model_is_the_one_that_was_measured(finished):
    """Greedy accuracy of the export, by transformers, is in line with the engine's sampled accuracy after training."""
    from mgrpo.data.tokenizer import load_tokenizer

    folder = finished.output_dir / "hf" / f"step_{STEPS}"
    model, tokenizer = load_hf(folder), load_tokenizer(folder)
    rows = [json.loads(line) for line in Path("examples/quickstart/heldout.jsonl").read_text().splitlines()]
    right = 0
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
        answer = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == str(row["ground_truth"])
    assert right / len(rows) > finished.evaluations[-1]["eval/pass_at_1"] - 0.05


def test_keys_of_trackers_and_judges_stay_in_the_ranks(finished):
    """What the engines start inherits Ray's environment, and programs of others run beside them."""
    assert finished.environments["rank 0"].count("planted-key") == len(KEYS)
    others = [text for kind, text in finished.environments.items() if kind != "rank 0"]
    assert all("PATH=" in text and "planted-key" not in text for text in others)
    # Engines of other nodes download models; what reads untrusted text does not.
    assert "hub-token" in finished.environments["raylet"] and "hub-token" not in finished.environments["verifier"]


def test_no_process_is_left(finished):
    """An engine that survives holds its memory until someone notices."""
    assert finished.left == []

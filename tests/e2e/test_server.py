"""Runs whose engine is a vLLM server that was there before them, and is there after them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.engine import FINISH_REASONS, Sampling
from mgrpo.rollout.vllm.server.http_engine import HttpEngine
from mgrpo.rollout.vllm.server.server_calls import ServerError
from tests.e2e.launching import ROOT, Run
from tests.e2e.vllm_server import MISSING, REASON, TOKEN, Server
from tests.sampling import collected, prompt_batch, sampled
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)
MODEL = ROOT / "examples/quickstart/model"
STEPS = 3
FLAGS = (
    *("--num_unique_prompts_rollout", "16", "--warm_up_steps", "1", "--eval_pass_at_k", "1"),
    *("--dataset_mixer_eval_list", "examples/quickstart/heldout.jsonl", "8"),
    *("--weight_sync_check_every", "1", "--vllm_mode", "server", "--vllm_server_base_url"),
)
PROMPTS = [np.arange(3, 9), np.arange(20, 25)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a token, which only some of its endpoints ask for."""
    server = Server(MODEL, tmp_path_factory.mktemp("server"), max_model_len=256)
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.fixture(autouse=True)
def token(monkeypatch) -> None:
    """Runs inherit it."""
    monkeypatch.setenv("MGRPO_VLLM_SERVER_TOKEN", TOKEN)


def config_of(server: Server, **values):
    """Of a run that the server suits."""
    own = {
        "model_name_or_path": str(MODEL),
        "model_dtype": "float32",
        "max_prompt_token_length": 8,
        "response_length": 200,
        "vllm_mode": "server",
        "vllm_server_base_url": [server.url],
    }
    return from_values({**own, **values})


def start(server: Server, folder: Path, *flags: str, steps: int = STEPS) -> Run:
    folder.mkdir(exist_ok=True)
    return Run(folder, [*FLAGS, server.url, "--total_episodes", str(steps * 128), *flags], program=None)


def metrics(run: Run) -> list[dict]:
    whole = [line for line in (run.output_dir / "metrics.jsonl").open() if line.endswith("\n")]
    lines = [json.loads(line) for line in whole]
    return [line for line in lines if "reward" in line]


def wait_for_step(run: Run, step: int, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not (run.output_dir / "metrics.jsonl").exists() or len(metrics(run)) < step:
        assert run.process.poll() is None and time.monotonic() < deadline, run.text()[-3000:]
        time.sleep(0.1)


def test_a_run_trains_with_a_server(server, tmp_path):
    """With every sync the digests of all weights are compared."""
    run = start(server, tmp_path / "run")
    assert run.wait(120) == 0, run.text()[-3000:]
    assert "starting Ray" not in run.text()
    lines = metrics(run)
    assert [line["policy_version"] for line in lines] == list(range(1, STEPS + 1))
    assert all(0 < line["debug/vllm_vs_local_logprob_diff_max"] < 1e-4 for line in lines)
    assert server.says("/weight_info") == {"weight_version": str(STEPS)}
    assert server.says("/is_paused") == {"is_paused": False}


def test_a_servers_sets_are_whole(server, tmp_path):
    """It allows 20 log-probabilities, enough for 4 and ties; it gives them as JSON, where minus infinity has a number."""
    run = start(server, tmp_path / "cut", "--top_k", "4", "--top_p", "0.9")
    assert run.wait(120) == 0, run.text()[-3000:]
    for line in metrics(run):
        assert line["debug/vllm_vs_local_logprob_diff_max"] < 1e-5
        assert line["rollout/kept_unknown_share"] == 0 and 1 < line["rollout/kept_tokens_avg"] < 4
    engine = HttpEngine(server.url, config_of(server, top_k=5))
    with pytest.raises(ServerError, match="max_logprobs is 20, expected at least 21 for top_k=5"):
        engine.ready.result(60)
    engine.close()


def test_a_run_that_lives_keeps_its_server_and_one_that_is_killed_does_not(server, tmp_path):
    """Two runs would take turns to overwrite the weights; one that has died cannot say that it has gone."""
    run = start(server, tmp_path / "lives", steps=10_000)
    try:
        wait_for_step(run, 2)
        engine = HttpEngine(server.url, config_of(server))
        with pytest.raises(
            ServerError, match=r"takes part in another run, whose rank 0 is at 127.0.0.1:.*end that run"
        ):
            engine.ready.result(60)
        engine.close()
        wait_for_step(run, len(metrics(run)) + 3)
    finally:
        run.end()
    run.process.wait()
    flags = ("--async_steps", "1", "--inflight_updates", "true")
    next_run = start(server, tmp_path / "next", *flags)
    assert next_run.wait(120) == 0, next_run.text()[-3000:]
    assert [line["async/age_max"] for line in metrics(next_run)] == [0, 1, 1]


def test_samples_depend_on_their_seeds_alone(server):
    """A server queues prompts in the order in which they arrive, which nobody knows."""
    engine = HttpEngine(server.url, config_of(server))
    try:
        engine.ready.result(60)
        sampling = Sampling(num_samples=3, max_tokens=20, temperature=1.0, stop_token_ids=())
        first = sampled(engine, prompt_batch(PROMPTS, sampling, seeds=np.array([5, 6])))
        again = sampled(engine, prompt_batch(PROMPTS[::-1], sampling, first=2, seeds=np.array([6, 5])))
    finally:
        engine.close()
    cut = int(again["cu_seqlens"][3])
    assert first["tokens"].tolist() == np.roll(again["tokens"], -cut).tolist()
    assert np.allclose(first["logprobs"], np.roll(again["logprobs"], -cut), atol=1e-5)
    assert first["sizes"].tolist() == [3, 3] and {FINISH_REASONS[reason] for reason in first["finish_reasons"]} == {
        "length"
    }
    assert (first["logprobs"] < 0).all() and len(np.unique(first["tokens"])) > 3


def test_what_is_aborted_comes_back_with_its_tokens(server):
    """Those that have begun with the tokens so far, and those that have not with none."""
    engine = HttpEngine(server.url, config_of(server))
    long, short = (Sampling(num_samples=2, max_tokens=n, temperature=1.0, stop_token_ids=()) for n in (200, 2))
    seeds = np.array([5, 6])
    try:
        engine.ready.result(60)
        engine.submit(prompt_batch(PROMPTS, long, seeds=seeds))
        engine.submit(prompt_batch(PROMPTS[:1], short, first=2, seeds=seeds[:1]))
        engine.resume().result(60)
        assert collected(engine, 1)["numbers"].tolist() == [2]
        engine.pause("recompute").result(60)
        engine.submit(prompt_batch(PROMPTS, long, first=3, seeds=seeds)).result(60)
        engine.abort().result(60)
        answer = collected(engine, 4)
    finally:
        engine.close()
    assert {FINISH_REASONS[reason] for reason in answer["finish_reasons"]} == {"abort"}
    lengths = np.diff(answer["cu_seqlens"]).reshape(4, 2)
    assert answer["numbers"].tolist() == [0, 1, 3, 4]
    assert (lengths[:2] > 0).any() and (lengths < 200).all() and not lengths[2:].any()
    assert len(answer["logprobs"]) == len(answer["tokens"]) == lengths.sum()


def test_what_the_server_is_not_is_said_at_the_start(server, tmp_path, monkeypatch):
    """Each of these would be found steps later, as a dead engine or as numbers that are a little wrong."""
    other = save_tiny(tmp_path / "other", "llama", heads=2, vocab_size=96)
    wrong = {
        "it has num_layers|family=qwen2 instead of llama, .*start the engine with the folder": {
            "model_name_or_path": str(other)
        },
        r"computes in float32, expected model_dtype=bfloat16; start it with --dtype bfloat16": {
            "model_dtype": "bfloat16"
        },
        r"tensor_parallel_size is 1, expected vllm_tensor_parallel_size=2; .*--tensor-parallel-size 2": {
            "vllm_tensor_parallel_size": 2
        },
        r"max_model_len is 256, expected at least .*= 308; start it with --max-model-len 308": {"response_length": 300},
        "no tokenizer, needed for stop_strings; start it without --skip-tokenizer-init": {"stop_strings": ["x"]},
    }
    for words, values in wrong.items():
        engine = HttpEngine(server.url, config_of(server, **values))
        with pytest.raises(ServerError, match=words) as failure:
            engine.ready.result(60)
        assert len(failure.value.problems) == 1 and str(failure.value).startswith(
            f"vllm_server_base_url={server.url}: "
        )
        engine.close()
    monkeypatch.setenv("MGRPO_VLLM_SERVER_TOKEN", "another")
    engine = HttpEngine(server.url, config_of(server))
    with pytest.raises(ServerError, match=r"refuses the request .*set MGRPO_VLLM_SERVER_TOKEN in the environment"):
        engine.ready.result(60)
    engine.close()
    assert server.says("/is_paused") == {"is_paused": False}, "a server that was refused has been left alone"


@pytest.mark.slow
def test_a_run_waits_for_a_server_that_comes_back(server, tmp_path):
    """A server has no weights of the run then: it samples no more until a weight sync has given it some."""
    run = start(server, tmp_path / "run", "--checkpoint_state_freq", "0", steps=2000)
    try:
        wait_for_step(run, 3)
        server.end()
        run.wait_for(f"engine 0 is dead and is started again: could not generate: server {server.url}", 120)
        before = metrics(run)[-1]["step"]
        server.start()
        server.wait()
        run.wait_for("engine 0 has loaded its model and waits for a weight sync", 120)
        run.wait_for("engine 0 has joined and serves the weights of version", 120)
        wait_for_step(run, before + 3)
        assert all(line["debug/vllm_vs_local_logprob_diff_max"] < 1e-4 for line in metrics(run))
    finally:
        run.end()

"""Turns that nobody waits for any more, at real engines: these go on with what is wanted alone."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from mgrpo.moving import parse
from mgrpo.rollout.engine import FINISH_REASONS, Sampling
from mgrpo.rollout.vllm import actor
from mgrpo.rollout.vllm.server.http_engine import HttpEngine
from mgrpo.run.commands.evaluate import ready
from mgrpo.run.commands.sample import first_prompts
from mgrpo.run.commands.serve_agent import served
from tests.e2e.counting_actor import CountingActor
from tests.e2e.launching import ROOT
from tests.e2e.test_server import config_of
from tests.e2e.vllm_server import MISSING, REASON, TOKEN, Server
from tests.sampling import collected, prompt_batch
from tests.tiny_models import load_hf

END, LONGEST = 2, 30_000
ASK = {"model": "policy", "messages": [{"role": "user", "content": "12*34+567"}]}


def endless_model(folder: Path) -> Path:
    """That of the calculator, which never ends a turn: its first dimension is 8 after every layer, and says so of no token."""
    shutil.copytree(ROOT / "examples/calculator/model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST + 64}))
    model = load_hf(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 8.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.norm.weight[0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END, 0] = -1e3
    model.save_pretrained(folder)
    return folder


def wait_until(is_true: Callable[[], Any], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.05)


class Agent:
    """One trajectory of `mgrpo serve-agent`."""

    def __init__(self, offer: Path) -> None:
        self.offer = offer
        said = json.loads(offer.read_text())
        self.url = urlsplit(f"{said['base_url']}/v1/chat/completions")
        self.headers = {"Authorization": f"Bearer {said['api_key']}", "Content-Type": "application/json"}
        self.connections: list[HTTPConnection] = []

    def ask(self, **settings: Any) -> HTTPConnection:
        """Ask for a turn, which never ends unless `max_tokens` says so, without reading the answer."""
        connection = HTTPConnection(self.url.netloc, timeout=60)
        connection.request("POST", self.url.path, json.dumps(ASK | settings), self.headers)
        self.connections.append(connection)
        return connection

    def hang_up(self) -> None:
        """Close its connections, as the end of its process would."""
        for connection in self.connections:
            connection.close()

    def end(self) -> None:
        self.offer.with_suffix(".done").touch()


def test_an_engine_ends_the_turns_of_agents_that_hang_up_or_have_ended(tmp_path: Path, monkeypatch) -> None:
    """It would sample tens of thousands of tokens that nobody reads."""
    monkeypatch.setattr(actor, "EngineActor", CountingActor)
    monkeypatch.chdir(ROOT)
    values = {
        "model_name_or_path": str(endless_model(tmp_path / "model")),
        "output_dir": str(tmp_path / "out"),
        "response_length": str(LONGEST),
        "vllm_kv_cache_mb": "256",
        "local_eval_every": "1",
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", value)]
    config = first_prompts(parse(["--config", "examples/configs/agent.yaml", *flags], defer=True), 2)
    folder = tmp_path / "offers"
    folder.mkdir()
    with ready(served(config, str(folder)), []) as (_, production):
        found: list[Any] = []
        evaluating = threading.Thread(target=lambda: found.append(production.evaluator.evaluate(done=0)), daemon=True)
        evaluating.start()
        wait_until(lambda: len(list(folder.glob("*.served"))) == 2)
        first, second = map(Agent, sorted(folder.glob("*.served")))
        (engine,) = production.evaluator.dispatcher.fleet.engines

        def count() -> tuple[int, int]:
            return engine._call("count").result(60)

        first.ask()
        second.ask()
        second.ask()
        wait_until(lambda: count() == (3, 0))
        first.hang_up()
        wait_until(lambda: count() == (2, 1))
        answer = json.load(first.ask(max_tokens=5).getresponse())
        assert answer["usage"]["completion_tokens"] == 5
        second.end()
        wait_until(lambda: count() == (0, 3))
        first.end()
        evaluating.join(60)
        assert not production.evaluator.dispatcher.loads.is_busy(0)
    completions = [group.group.completions[0] for group in found[0].groups]
    assert sorted(int(completion.loss_mask.sum()) for completion in completions) == [0, 5]
    assert sorted(completion.trajectory.agent.counts["abandoned"] for completion in completions) == [0.0, 1.0]


@pytest.mark.skipif(bool(MISSING), reason=REASON)
def test_a_server_ends_the_requests_that_are_withdrawn(tmp_path: Path, monkeypatch) -> None:
    """And goes on with the others, to their own tokens."""
    monkeypatch.setenv("MGRPO_VLLM_SERVER_TOKEN", TOKEN)
    model = endless_model(tmp_path / "model")
    server = Server(model, tmp_path, max_model_len=4096)

    def running() -> float:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    try:
        server.wait()
        engine = HttpEngine(server.url, config_of(server, model_name_or_path=str(model), response_length=2000))
        try:
            engine.ready.result(60)
            sampling = Sampling(num_samples=1, max_tokens=2000, temperature=1.0, stop_token_ids=(END,))
            prompts = [np.arange(3, 9 + number) for number in range(4)]
            engine.submit(prompt_batch(prompts, sampling, seeds=np.arange(4)))
            engine.resume().result(60)
            wait_until(lambda: running() == 4)
            engine.withdraw([0, 2, 3, 99]).result(60)
            answer = collected(engine, 3)
            wait_until(lambda: running() == 1)
            last = collected(engine, 1, 120)
            engine.withdraw([1]).result(60)
        finally:
            engine.close()
    finally:
        server.end()
    assert answer["numbers"].tolist() == [0, 2, 3] and last["numbers"].tolist() == [1]
    assert {FINISH_REASONS[reason] for reason in answer["finish_reasons"]} == {"abort"}
    assert (np.diff(answer["cu_seqlens"]) < 2000).all() and len(last["tokens"]) == 2000

"""An engine whose workers hold whole experts, against transformers: as it is loaded, and after a sync from parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from mgrpo.moving import from_values
from mgrpo.rollout.engine import EngineError, Sampling
from mgrpo.rollout.vllm.server.http_engine import HttpEngine
from mgrpo.sync.channel import Sender
from mgrpo.sync.group import open_store
from mgrpo.sync.sending.layout_tables import training_holdings
from tests.e2e.lone_engine import lone_engine
from tests.e2e.vllm_server import MISSING, REASON, TOKEN, Server
from tests.ranks import cases
from tests.ranks.conftest import run_ranks  # noqa: F401  (a fixture)
from tests.sampling import collected, prompt_batch, sampled
from tests.tiny_models import YARN, load_hf, save_tiny

pytestmark = pytest.mark.slow
SAMPLING = Sampling(num_samples=2, max_tokens=16, temperature=0.7, stop_token_ids=(2,))
LONG = replace(SAMPLING, num_samples=1, max_tokens=32)
PROMPTS = [np.arange(3, 3 + n) for n in (1, 9, 30)]
CUT = InferLayout(tensor=2, expert_parallel=True)
COPIES = InferLayout(data=2, expert_parallel=True)
CASES = [
    *((family, engine, "ray") for engine in (CUT, COPIES) for family in ("qwen3_moe", "glm4_moe", "gpt_oss")),
    ("qwen3_moe", InferLayout(tensor=2, data=2, expert_parallel=True), "ray"),
    ("qwen3_moe", COPIES, "server"),
]
LAYOUTS = [{"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}]
HOST = "127.0.0.1"


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].tensor}x{case[1].data}-{case[2]}")
def models(tmp_path_factory, request):
    """The weights that an engine starts with, and those that it is sent. Of 5 experts the first worker has 3; one layer has none."""
    folder, (family, engine, mode) = tmp_path_factory.mktemp("models"), request.param
    rope = YARN | {"factor": 16.0, "truncate": False, "beta_fast": 0.9, "beta_slow": 0.1}
    settings = {"qwen3_moe": {"num_experts": 5}, "gpt_oss": {"intermediate_size": 64, "rope_parameters": rope}}
    sent = save_tiny(folder / "sent", family, **settings.get(family, {}))
    torch.manual_seed(123)
    model = load_hf(sent)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "start")
    return {"start": folder / "start", "sent": sent, "engine": engine, "mode": mode}


@pytest.fixture(scope="module")
def engine(models):
    values = {
        "model_name_or_path": str(models["start"]),
        "model_dtype": "float32",
        "max_prompt_token_length": 32,
        "response_length": 32,
        "vllm_kv_cache_mb": 16,
        "vllm_tensor_parallel_size": models["engine"].tensor,
        "vllm_data_parallel_size": models["engine"].data,
        "vllm_enable_expert_parallel": True,
        "output_dir": str(models["start"].parent / "out"),
    }
    if models["mode"] == "ray":
        with lone_engine(values) as fleet:
            yield fleet.engines[0]
        return
    if MISSING:
        pytest.skip(REASON)
    flags = ("--enable-expert-parallel", "--data-parallel-size", str(models["engine"].data))
    server = Server(models["start"], models["start"].parent, max_model_len=64, flags=flags)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("MGRPO_VLLM_SERVER_TOKEN", TOKEN)
    try:
        server.wait()
        config = from_values({**values, "vllm_mode": "server", "vllm_server_base_url": [server.url]})
        engine = HttpEngine(server.url, config)
        engine.ready.result(60)
        yield engine
        engine.close()
    finally:
        monkeypatch.undo()
        server.end()


def test_a_pause_stops_every_copy_in_the_middle_of_a_group(engine, models):
    """A copy that computes on while another takes weights over waits for it in its experts' exchange, for ever."""
    for pause in ("recompute", "keep"):
        engine.submit(prompt_batch(PROMPTS, LONG)).result(60)
        engine.resume().result(60)
        engine.pause(pause).result(60)
        engine.ping().result(60)
        engine.resume().result(60)
        got = collected(engine, len(PROMPTS))
        assert len(got["tokens"]) > len(PROMPTS)
        engine.pause("recompute").result(60)
        assert of_transformers(got, PROMPTS, LONG, models["start"]) < 1e-5


def test_one_copy_samples_while_the_other_has_nothing_to_do(engine, models):
    """Its experts are needed all the same."""
    assert difference(engine, models["start"], PROMPTS[:1]) < 1e-5


def test_engine_logprobs_equal_transformers_before_and_after_a_sync(engine, models, run_ranks):  # noqa: F811
    """A worker that took another's expert for its own would sample from another model, and no digest would show it."""
    assert difference(engine, models["start"]) < 1e-5
    assert difference(engine, models["sent"]) > 1e-2
    for version, layout in enumerate(LAYOUTS, start=1):
        holdings = run_ranks(2, cases.holdings, model_dir=str(models["sent"]), layout=layout)[0]
        for model in ("start", "sent"):
            store = open_store(HOST, 60)
            sender = make_sender(models[model], layout, models["engine"], store, holdings)
            arguments = {"layout": layout, "port": store[1], "version": version, "engine": models["engine"]}
            pool = run_ranks.start(2, cases.send_weights, model_dir=str(models[model]), **arguments)
            engine.join(sender.invitation(0)).result(60)
            engine.receive_weights(version, check=True, seed=0).result(60)
            reports = pool.results()
            assert sum(report["sent"] for report in reports) == reports[0]["lower_bound"] == reports[0]["bytes_moved"]
            sender.compare(version, torch.tensor(reports[0]["digests"]), {0: 0})
            assert difference(engine, models[model]) < 1e-5


def test_weights_that_are_cut_for_other_workers_are_refused(engine, models):
    """A plan for workers that share every expert has boxes of the same tensors."""
    layout = Layout(world_size=2)
    holdings = training_holdings(shape_of(read_hf_config(models["sent"])), layout)
    sender = make_sender(models["sent"], {}, InferLayout(tensor=2), open_store(HOST, 60), holdings)
    # Of an engine with more workers than the plan, another one may be the first that refuses.
    reasons = r"engine does not hold .*experts.*, which the plan sends to it|the plan sends to 2 workers .* number [23]"
    with pytest.raises(EngineError, match=reasons):
        engine.join(sender.invitation(0) | {"timeout_s": 5}).result(60)


def make_sender(model_dir, layout, engine, store, holdings) -> Sender:
    """Rank 0's end without weights: for invitations and comparisons."""
    return Sender(
        [(Box("x", (0,), (1,)), torch.zeros(1))],
        holdings=holdings,
        model=shape_of(read_hf_config(model_dir)),
        train_layout=Layout(world_size=2, **layout),
        infer_layout=engine,
        rank=0,
        dtype=torch.float32,
        store=store[0],
        host=HOST,
        port=store[1],
        bucket_bytes=1 << 14,
        timeout_s=30,
    )


def difference(engine, folder, prompts=PROMPTS) -> float:
    """The largest between log-probabilities of the engine's tokens in the engine, and in transformers' model of this folder."""
    return of_transformers(sampled(engine, prompt_batch(prompts, SAMPLING)), prompts, SAMPLING, folder)


def of_transformers(got, prompts, sampling, folder) -> float:
    """See `difference`."""
    model, most = load_hf(folder), 0.0
    prompts = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
    for prompt, a, b in zip(prompts, got["cu_seqlens"][:-1], got["cu_seqlens"][1:], strict=True):
        ids = torch.from_numpy(np.concatenate((prompt, got["tokens"][a:b]))).long()[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / sampling.temperature
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        most = np.maximum(most, np.abs(got["logprobs"][a:b] - expected.numpy()).max())  # also NaN
    return most

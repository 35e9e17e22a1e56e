"""A sync from parallel ranks into a live engine, against an engine that loaded the same weights from disk.

Both engines live in one Ray cluster; the ranks come from the pool of the distributed tests.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from mgrpo.moving import from_values
from mgrpo.rollout.engine import FINISH_REASONS, EngineError, Sampling
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.engine_arguments import policy_kind
from mgrpo.sync.channel import Sender
from mgrpo.sync.group import open_store
from mgrpo.sync.sending.layout_tables import training_holdings
from tests.ranks import cases
from tests.ranks.conftest import run_ranks  # noqa: F401  (a fixture)
from tests.sampling import prompt_batch, sampled
from tests.tiny_models import load_hf, save_tiny

SAMPLING = Sampling(num_samples=4, max_tokens=16, temperature=0.7, stop_token_ids=(2,))
GREEDY = Sampling(num_samples=1, max_tokens=24, temperature=0.0, stop_token_ids=(2,))
LAYOUTS = {
    "llama": [{"tensor": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"zero_stage": 3}, {"context": 2}],
    "qwen3_moe": [{"expert": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}],
}
PROMPTS = [np.arange(3, 3 + n) for n in (1, 5, 9, 30)]
HOST = "127.0.0.1"


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory, family):
    """Two sets of weights that engines are sent, and a folder without weights. Tied: the LM head is the embedding."""
    folder = tmp_path_factory.mktemp("models")
    # vLLM on CPU has no heads of size 16
    sent = save_tiny(folder / "sent", family, **({"heads": 2, "tied": True} if family == "llama" else {}))
    torch.manual_seed(123)
    model = load_hf(sent)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "start")
    shutil.copytree(sent, folder / "bare", ignore=shutil.ignore_patterns("*.safetensors*"))
    return {"start": folder / "start", "sent": sent, "bare": folder / "bare"}


@pytest.fixture(scope="module")
def fleet(models):
    """Engine 0 is one of a run, whose folder has no weights that it could load; engine 1 has loaded the true ones."""

    def config(model: str):
        settings = {"model_dtype": "float32", "max_prompt_token_length": 32, "response_length": 32}
        settings |= {"output_dir": str(models["start"].parent / "out")}
        return from_values(settings | {"model_name_or_path": str(models[model])})

    cluster = Cluster(config("start"), num_local_learners=0)
    try:
        kinds = [
            policy_kind(config(model), on_gpu=cluster.on_gpu, num_local_learners=learners)
            for model, learners in (("bare", 1), ("sent", 0))
        ]
        engines = [engine for kind in kinds for engine in cluster.start_engines(kind).engines]
        fleet = Fleet(Roster(engines, config("start").engine, keep_logs=cluster.keep_logs), seed=1)
        fleet.wait_ready()
        yield fleet
    finally:
        cluster.close()


def sample(fleet, engine: int, sampling: Sampling = GREEDY) -> dict[str, np.ndarray]:
    return sampled(fleet.engines[engine], prompt_batch(PROMPTS, sampling))


def test_engine_after_sync_equals_a_freshly_loaded_one(fleet, models, family, run_ranks):  # noqa: F811
    """Tokens and logprobs to the bit, from every training layout; a stale tied LM head or a misplaced row shows here."""
    truth = sample(fleet, 1)
    assert not np.array_equal(sample(fleet, 0)["logprobs"], truth["logprobs"])
    for version, layout in enumerate(LAYOUTS[family], start=1):
        holdings = run_ranks(2, cases.holdings, model_dir=str(models["sent"]), layout=layout)[0]
        for model in ("start", "sent"):  # away from the truth and back, so that no layout profits from the one before
            # Keys of a store are spent once a group has formed.
            store = open_store(HOST, 60)
            sender = make_sender(models["sent"], layout, store, holdings)
            pool = run_ranks.start(
                2,
                cases.send_weights,
                model_dir=str(models[model]),
                layout=layout,
                port=store[1],
                version=version,
            )
            fleet.engines[0].join(sender.invitation(0)).result(60)
            fleet.engines[0].receive_weights(version, check=True, seed=0).result(60)
            reports = pool.results()
            got = sample(fleet, 0)
            assert (got["policy_versions"] == version).all()
            # Every byte moved once, and the engine's digests are the ranks' digests.
            assert sum(report["sent"] for report in reports) == reports[0]["lower_bound"] == reports[0]["bytes_moved"]
            sender.compare(version, torch.tensor(reports[0]["digests"]), {0: 0})
        np.testing.assert_array_equal(got["tokens"], truth["tokens"])
        np.testing.assert_array_equal(got["logprobs"], truth["logprobs"])


def make_sender(model_dir, layout, store, holdings) -> Sender:
    """Rank 0's end without weights: for invitations and comparisons."""
    shape = shape_of(read_hf_config(model_dir))
    return Sender(
        [(Box("x", (0,), (1,)), torch.zeros(1))],
        holdings=holdings,
        model=shape,
        train_layout=Layout(world_size=2, **layout),
        infer_layout=InferLayout(engines=1, tensor=1),
        rank=0,
        dtype=torch.float32,
        store=store[0],
        host=HOST,
        port=store[1],
        bucket_bytes=1 << 14,
        timeout_s=30,
    )


def test_engine_logprobs_equal_transformers(fleet, models):
    """The engine's definition of a logprob is the trainer's: log-softmax of logits / temperature."""
    got = sample(fleet, 1, SAMPLING)
    model = load_hf(models["sent"])
    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLING.num_samples)]
    for prompt, a, b in zip(prompts, got["cu_seqlens"][:-1], got["cu_seqlens"][1:], strict=True):
        ids = torch.from_numpy(np.concatenate((prompt, got["tokens"][a:b]))).long()[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(got["logprobs"][a:b], expected.numpy(), atol=2e-5)


def test_a_sender_that_never_comes_is_named(fleet, models):
    """A sync that cannot finish must end within its time and say whom it waited for."""
    layout = Layout(world_size=2)
    holdings = training_holdings(shape_of(read_hf_config(models["sent"])), layout)
    sender = make_sender(models["sent"], {}, open_store(HOST, 60), holdings)
    invitation = sender.invitation(0) | {"timeout_s": 5}
    with pytest.raises(EngineError, match="worker 0 of engine 0 waited for training rank 0"):
        fleet.engines[0].join(invitation).result(60)


def test_what_an_abort_ends_comes_back_with_the_tokens_so_far(fleet):
    """A run that is to end must not wait for its longest answer; what was sampled has its log-probabilities."""
    long = Sampling(num_samples=4, max_tokens=24, temperature=1.0, stop_token_ids=())
    fleet.engines[1].submit(prompt_batch(PROMPTS, long))
    fleet.engines[1].resume()
    answered = fleet.engines[1].poll()
    while not answered.done():
        fleet.engines[1].abort().result(60)
    answer = answered.result(60)
    while len(answer["numbers"]) < 4:
        more = fleet.engines[1].poll().result(60)
        answer = {name: np.concatenate((answer[name], more[name])) for name in answer}
    fleet.engines[1].pause("drain").result(60)
    assert len(answer["finish_reasons"]) == 16 and len(answer["tokens"]) == len(answer["logprobs"])
    assert {FINISH_REASONS[reason] for reason in answer["finish_reasons"]} <= {"abort", "length"}
    assert "abort" in {FINISH_REASONS[reason] for reason in answer["finish_reasons"]}
    np.testing.assert_array_equal(sample(fleet, 1)["tokens"], sample(fleet, 1)["tokens"])

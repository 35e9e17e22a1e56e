"""Weights that change in the middle of completions: which weights each token came from, against the models themselves."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from mgrpo.moving import from_values
from mgrpo.rollout.engine import Completions, EngineError, Sampling
from mgrpo.rollout.engines.fleet import Fleet
from mgrpo.rollout.engines.roster import Roster
from mgrpo.rollout.vllm.cluster import Cluster
from mgrpo.rollout.vllm.engine_arguments import policy_kind
from mgrpo.sync.group import open_store
from tests.e2e.test_weight_sync import HOST, make_sender
from tests.ranks import cases
from tests.ranks.conftest import run_ranks  # noqa: F401  (a fixture)
from tests.sampling import collected, prompt_batch, sampled
from tests.tiny_models import load_hf, save_tiny

# Longer than blocks of the cache.
PROMPTS = [np.arange(3, 3 + 140), np.arange(20, 20 + 135)]
SAMPLING = Sampling(num_samples=4, max_tokens=100, temperature=1.0, stop_token_ids=())
LAYOUT = {"tensor": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two policies, the second a step away from the first."""
    folder = tmp_path_factory.mktemp("models")
    old = save_tiny(folder / "old", "llama", heads=2, vocab_size=160)
    torch.manual_seed(5)
    model = load_hf(old)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder / "new")
    return {1: old, 2: folder / "new"}


@pytest.fixture(scope="module")
def engine(models):
    """With room for two groups at a time."""
    config = from_values(
        {
            "model_dtype": "float32",
            "model_name_or_path": str(models[1]),
            "max_prompt_token_length": 150,
            "response_length": 100,
            "vllm_enable_prefix_caching": True,
            "vllm_max_num_seqs": 2 * SAMPLING.num_samples,
            "output_dir": str(models[1].parent / "out"),
        }
    )
    cluster = Cluster(config, num_local_learners=0)
    try:
        engines = cluster.start_engines(policy_kind(config, on_gpu=cluster.on_gpu, num_local_learners=0)).engines
        fleet = Fleet(Roster(engines, config.engine, keep_logs=cluster.keep_logs), seed=1)
        fleet.wait_ready()
        yield fleet.engines[0]
    finally:
        cluster.close()


@pytest.fixture
def send(engine, models, run_ranks):  # noqa: F811
    """Has the engine, which must be paused, take over the weights of a version."""
    holdings = run_ranks(2, cases.holdings, model_dir=str(models[1]), layout=LAYOUT)[0]

    def send(version: int) -> None:
        store = open_store(HOST, 60)
        invitation = make_sender(models[1], LAYOUT, store, holdings).invitation(0)
        pool = run_ranks.start(
            2, cases.send_weights, model_dir=str(models[version]), layout=LAYOUT, port=store[1], version=version
        )
        joined = engine.join(invitation)
        received = engine.receive_weights(version, check=True, seed=version)
        joined.result(60), received.result(60), pool.results()

    return send


def differences(models, answer: Completions, prompts=PROMPTS) -> dict[int, np.ndarray]:
    """By version, how far the log-probability of each token of a group lies from that of the model with its version."""
    found: dict[int, list[np.ndarray]] = {1: [], 2: []}
    cuts = answer["cu_seqlens"]
    for number, (a, b) in enumerate(itertools.pairwise(cuts)):
        prompt = prompts[number // SAMPLING.num_samples]
        ids = torch.from_numpy(np.concatenate((prompt, answer["tokens"][a:b]))).long()[None]
        for version, folder in models.items():
            with torch.no_grad():
                logits = load_hf(folder)(ids).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
            is_own = answer["policy_versions"][a:b] == version
            found[version].append(np.abs(answer["logprobs"][a:b] - expected)[is_own])
    return {version: np.concatenate(parts) for version, parts in found.items()}


def updated_in_the_middle(engine, send, how: str, prompts=PROMPTS) -> Completions:
    """Groups of which the first two begin with version 1 and end with version 2, and others begin after the update."""
    engine.pause("recompute").result(60)
    send(1)
    for wait_s in (0.1, 0.05, 0.2, 0.02, 0.4, 0.07, 0.03):
        engine.submit(prompt_batch(prompts, SAMPLING))
        engine.resume().result(60)
        time.sleep(wait_s)
        (engine.sleep() if how == "sleep" else engine.pause(how)).result(60)
        send(2)
        engine.resume().result(60)
        answer = collected(engine, len(prompts))
        begun, queued = np.split(answer["policy_versions"], [answer["cu_seqlens"][2 * SAMPLING.num_samples]])
        if {1, 2} <= set(begun.tolist()) and 1 not in queued:
            return answer
        engine.pause("recompute").result(60)
        send(1)
    raise AssertionError("the update never came in the middle")


@pytest.mark.parametrize("how", ["recompute", "sleep"])
def test_recomputed_every_token_comes_from_the_version_that_it_is_marked_with(engine, send, models, how) -> None:
    """Importance weights of a completion of two policies are exact only then. Nothing that had begun is lost by sleep."""
    answer = updated_in_the_middle(engine, send, how)
    own = differences(models, answer)
    assert all(len(found) > 8 and found.mean() < 1e-5 and found.max() < 1e-4 for found in own.values())
    swapped = answer | {"policy_versions": 3 - answer["policy_versions"]}
    assert all(found.mean() > 1e-2 for found in differences(models, swapped).values()), "the models do not differ"
    cuts = answer["cu_seqlens"]
    assert all((np.diff(answer["policy_versions"][a:b]) >= 0).all() for a, b in itertools.pairwise(cuts))


def test_kept_caches_serve_what_has_begun_and_no_new_prompt(engine, send, models) -> None:
    """The price of keeping keys and values is known; a cached prefix of old weights would spread it to all later prompts."""
    answer = updated_in_the_middle(engine, send, "keep", [*PROMPTS, PROMPTS[0]])
    cuts = answer["cu_seqlens"]
    begun, queued = (differences(models, answer | {"cu_seqlens": cuts[part]}) for part in (slice(0, 9), slice(8, None)))
    assert begun[1].mean() < 1e-5 and begun[2].mean() > 1e-4
    assert len(queued[1]) == 0 and queued[2].max() < 1e-4
    engine.pause("keep").result(60)
    fresh = differences(models, sampled(engine, prompt_batch(PROMPTS, SAMPLING, first=10)))
    assert len(fresh[1]) == 0 and fresh[2].max() < 1e-4


def test_an_engine_that_has_slept_samples_only_with_weights(engine, send, models) -> None:
    """Its own are gone: it would sample from whatever lies there now."""
    engine.sleep().result(60)
    with pytest.raises(EngineError, match="must receive all weights before it samples"):
        engine.resume().result(60)
    send(2)
    answer = sampled(engine, prompt_batch(PROMPTS, SAMPLING, first=20))
    assert set(answer["policy_versions"].tolist()) == {2} and differences(models, answer)[2].max() < 1e-4

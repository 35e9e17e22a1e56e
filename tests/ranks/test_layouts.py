"""Every parallel layout against transformers' own model: logprobs, loss and the gradient of every parameter.

Adam and clipping hide a gradient that is wrong by a factor, so gradients themselves are compared, never trained weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from mgrpo import algo
from mgrpo.config.loss import LossConfig
from tests.ranks import cases
from tests.ranks.outcomes import Outcome, collect, compare, global_norm
from tests.routed import fixed_experts
from tests.tiny_models import load_hf, save_tiny, saved_gradients

TEMPERATURE = 0.8
LOSS = {"beta": 0.05, "kl_estimator": 2, "clip_lower": 0.2, "clip_higher": 0.28}
UNCLIPPED = LOSS | {"clip_lower": 1.0, "clip_higher": 100.0}
"""For 16 bits, whose rounding takes a ratio beside a bound to its other side, and with it the token's whole gradient."""
SAMPLES = cases.random_samples(seed=0, groups_of_turns=2)


def oracle(model_dir, samples, loss):
    """The outcome of an HF forward of each sample alone in float64, unpacked and unpadded."""
    model = load_hf(model_dir, torch.float64)
    settings = LossConfig(**loss)
    total, by_sample, entropies = 0.0, {}, {}
    num_trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    for number, sample in enumerate(samples):
        ids = torch.from_numpy(np.concatenate((sample.prompt_tokens, sample.tokens))).long()[None]
        first = len(sample.prompt_tokens) - 1
        with nullcontext() if sample.routes is None else fixed_experts(model, sample.routes):
            logits = model(ids).logits[0, first:-1] / TEMPERATURE
        if sample.kept is not None:
            is_kept = torch.zeros_like(logits, dtype=torch.bool)
            sets = np.split(sample.kept.ids, sample.kept.offsets[1:-1])
            for row, token, kept in zip(is_kept, sample.tokens, sets, strict=True):
                row[[token, *kept]] = True
            logits = logits.masked_fill(~is_kept, -torch.inf)
        every = torch.log_softmax(logits, -1)
        logprobs = every.gather(1, ids[0, first + 1 :, None])[:, 0]
        old = torch.from_numpy(sample.rollout_logprobs).double()
        total = (
            total
            + algo.policy_loss(
                logprobs,
                old,
                torch.full_like(old, sample.advantage)
                if sample.token_advantages is None
                else torch.from_numpy(sample.token_advantages).double(),
                torch.from_numpy(sample.loss_mask),
                torch.tensor([0, len(old)], dtype=torch.int32),
                config=settings,
                ref_logprobs=old - 0.1,
                denominator=algo.loss_denominator(num_trained, settings),
            ).loss
        )
        sampled = range(len(old)) if sample.is_sampled is None else np.flatnonzero(sample.is_sampled)
        own = list(sampled) or [0]
        by_sample[number] = logprobs.detach()[own].numpy()
        entropies[number] = -(every.exp() * every.clamp(min=-1e9)).sum(-1).detach()[own].numpy()
    total.backward()
    gradients = {name: gradient.numpy() for name, gradient in saved_gradients(model).items()}
    return Outcome(float(total.detach()), by_sample, entropies, gradients, [global_norm(gradients)])


def check(ranks, truth):
    difference = compare(collect(ranks, {name: grad.shape for name, grad in truth.gradients.items()}), truth)
    assert difference.is_equal, difference


LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2+sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": 2},
    "dp2": {},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen2": save_tiny(folder, "qwen2"),
        "qwen3": save_tiny(folder, "qwen3"),
        "llama-tied": save_tiny(folder, "llama", tied=True),
        "qwen2-1kv": save_tiny(folder, "qwen2", kv_heads=1),
    }


@pytest.fixture(scope="module")
def truth(models):
    return {name: oracle(folder, SAMPLES, LOSS) for name, folder in models.items()}


def run(run_ranks, models, name, world_size, layout, **options):
    arguments = {"model_dir": str(models[name]), "layout": layout, "samples": SAMPLES, "loss": LOSS}
    return run_ranks(world_size, cases.gradients, **arguments, **options)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-tied"])
def test_one_rank_equals_transformers(run_ranks, models, truth, name):
    """A wrong weight mapping, RoPE, norm or LM head trains another model than the one that was loaded."""
    check(run(run_ranks, models, name, 1, {}), truth[name])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("pack_length", [32, 512])
def test_gradient_does_not_depend_on_packing(run_ranks, models, truth, share_prompts, pack_length):
    """Documents that see each other, or a loss that depends on the number of packs, biases every long batch."""
    options = {"share_prompts": share_prompts, "pack_length": pack_length}
    check(run(run_ranks, models, "qwen2", 1, {}, **options), truth["qwen2"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-tied"])
def test_two_ranks_equal_transformers(run_ranks, models, truth, name, layout):
    """A missing or doubled reduction over an axis changes what is learned without an error."""
    check(run(run_ranks, models, name, 2, LAYOUTS[layout]), truth[name])


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}])
def test_the_head_computes_sampled_tokens_only(run_ranks, models, layout):
    """Tool output is often most of a trajectory; a row of logits for each of its tokens is the largest tensor of a step."""
    found = run(run_ranks, models, "qwen2", 2, layout)
    copies = layout.get("tensor", 1)
    num_sampled = sum(len(s.tokens) if s.is_sampled is None else max(int(s.is_sampled.sum()), 1) for s in SAMPLES)
    assert num_sampled < sum(len(sample.tokens) for sample in SAMPLES) - 10
    assert sum(rank["rows_of_head"] for rank in found) == copies * num_sampled


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"context": 2}])
def test_tokens_may_have_advantages_of_their_own(run_ranks, models, layout):
    """An advantage beside the wrong token rewards another turn than the one that earned it."""
    random = np.random.default_rng(7)
    samples = [
        replace(sample, token_advantages=random.normal(size=len(sample.tokens)).astype(np.float32))
        for sample in SAMPLES
    ]
    arguments = {"model_dir": str(models["qwen2"]), "layout": layout, "samples": samples, "loss": LOSS}
    check(run_ranks(2, cases.gradients, **arguments), oracle(models["qwen2"], samples, LOSS))


@pytest.mark.parametrize("logits_chunk", [0, 17])
@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor": 2, "sequence_parallel": True}, {"context": 2}, {"pipeline": 2}],
    ids=["dp2", "tp2+sp", "cp2", "pp2"],
)
def test_kept_sets_go_with_their_tokens(run_ranks, models, layout, logits_chunk):
    """A set beside another token, or a shard's part counted as the whole, is another policy's probability."""
    samples = cases.with_sets(SAMPLES)
    arguments = {"model_dir": str(models["llama-tied"]), "layout": layout, "samples": samples, "loss": LOSS}
    ranks = run_ranks(2, cases.gradients, logits_chunk=logits_chunk, **arguments)
    check(ranks, oracle(models["llama-tied"], samples, LOSS))
    assert any(rank["has_logits"] for rank in ranks) == (logits_chunk == 0)


def test_fewer_key_value_heads_than_tensor_ranks(run_ranks, models, truth):
    """One key-value head over two ranks: the rows of a group are cut in two."""
    check(run(run_ranks, models, "qwen2-1kv", 2, {"tensor": 2}), truth["qwen2-1kv"])


@pytest.mark.parametrize(
    "layout", [{"tensor": 2, "pipeline": 2, "sequence_parallel": True}, {"tensor": 2}, {"pipeline": 2}]
)
@pytest.mark.parametrize("name", ["qwen2", "llama-tied"])
def test_four_ranks_equal_transformers(run_ranks, models, truth, name, layout):
    """Axes combined: TP x PP with sequence parallelism, TP x DP, PP x DP, the last two with the distributed optimizer."""
    check(run(run_ranks, models, name, 4, layout), truth[name])


@pytest.mark.parametrize("name", ["qwen2", "llama-tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_does_not_depend_on_the_chunked_head(run_ranks, models, truth, name, layout):
    """Whole logits or chunks: a reduction that only one of the heads does changes what is learned once logits are large."""
    chunked = run(run_ranks, models, name, 2, LAYOUTS[layout], logits_chunk=17)
    check(chunked, truth[name])
    for a, b in zip(chunked, run(run_ranks, models, name, 2, LAYOUTS[layout]), strict=True):
        assert not a["has_logits"] and b["has_logits"] == b["is_last_stage"]
        assert a["loss"] == pytest.approx(b["loss"], abs=2.5e-7)
        for (box, grad), (_, whole) in zip(a["gradients"], b["gradients"], strict=True):
            np.testing.assert_allclose(grad, whole, atol=7e-6 * np.abs(whole).max(), err_msg=box.name)


@pytest.mark.parametrize("name", ["qwen2", "llama-tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_does_not_depend_on_the_head_with_fp32_logits(run_ranks, models, truth, name, layout):
    """It is not Megatron's layer, and has a reduction of its own: with fp32 weights the two must be equal."""
    check(run(run_ranks, models, name, 2, LAYOUTS[layout], fp32_logits=True), truth[name])


def test_gradient_does_not_depend_on_an_empty_rank(run_ranks, models):
    """With less data than ranks, a rank that holds nothing must neither hang nor change the gradient."""
    samples = cases.long_samples(seed=0)[:1]
    arguments = {"layout": {}, "samples": samples, "loss": LOSS, "pack_length": 192}
    ranks = run_ranks(2, cases.gradients, model_dir=str(models["qwen2"]), **arguments)
    check(ranks, oracle(models["qwen2"], samples, LOSS))


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "pipeline": 2}])
def test_export_is_what_was_trained(run_ranks, models, tmp_path, layout):
    """An export that misplaces rows or keeps padding loads without an error and answers nonsense."""
    world_size = 4 if layout else 1
    for name in ("qwen2", "llama-tied"):
        arguments = {"model_dir": str(models[name]), "samples": SAMPLES, "steps": 2}
        run_ranks(1, cases.trained_export, layout={}, folder=str(tmp_path / name / "one"), **arguments)
        run_ranks(world_size, cases.trained_export, layout=layout, folder=str(tmp_path / name / "many"), **arguments)
        one, many = load_hf(tmp_path / name / "one"), load_hf(tmp_path / name / "many")
        start = dict(load_hf(models[name]).named_parameters())
        for (key, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
            assert (a - start[key]).abs().max() > 1e-4, f"{key} was not trained"
            torch.testing.assert_close(a, b, atol=5e-7, rtol=0)

"""The algorithm over several mini-batches, epochs and a reference model, in every layout."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mgrpo.types import ScoredGroup
from tests import builders
from tests.ranks import cases, run_cases
from tests.tiny_models import VOCAB, load_hf, save_tiny

SETTINGS = {
    "num_mini_batches": 2,
    "num_epochs": 2,
    "beta": 0.1,
    "temperature": 0.8,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-2,  # keeps Adam from blowing up the rounding of gradients near 0
    "lr_scheduler_type": "constant",
    "num_unique_prompts_rollout": 4,
    "num_samples_per_prompt_rollout": 3,
    "total_episodes": 240,
    "pack_length": 64,
    "sequence_parallel": False,
}


def scored_groups(rewards: float | None = None) -> list[ScoredGroup]:
    """Four prompts, three completions each, of different lengths; random rewards unless one is given."""
    rng = np.random.default_rng(5)
    groups = []
    for number in range(4):
        of = builders.prompt(rng.integers(3, VOCAB, rng.integers(1, 7)), id=(0, number), verifiers=("integer",))
        completions, drawn = [], []
        for _ in range(3):
            length = int(rng.integers(1, 8))
            tokens = rng.integers(3, VOCAB, length)
            completions.append(builders.completion(tokens, logprobs=rng.normal(-4.8, 0.3, length)))
            drawn.append(float(rng.normal()) if rewards is None else rewards)
        groups.append(builders.scored_group(drawn, completions=completions, of=of))
    return groups


def aged_groups() -> list[ScoredGroup]:
    """The same, sampled by versions 0, -1 and -2; each version back, the engine's logprobs are 10 higher."""
    rng = np.random.default_rng(6)
    groups = []
    for scored in scored_groups():
        completions = []
        for sampled in scored.group.completions:
            versions = np.sort(rng.integers(-2, 1, len(sampled.tokens)))
            completions.append(
                builders.completion(sampled.tokens, logprobs=sampled.logprobs - 10 * versions, version=versions)
            )
        of = scored.group.prompt
        groups.append(builders.scored_group(scored.rewards.tolist(), completions=completions, of=of))
    return groups


AS_ONE_RANK = {"rel": 2e-5, "abs": 2e-6}
"""Four times the largest differences between layouts, of metrics; weights after a few updates differ by less than 2.5e-7."""


def measured(result: dict) -> dict[str, float]:
    """What `run_cases.learn` gives without the state, which every layout keeps in its own way."""
    return {name: value for name, value in result.items() if name != "state"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models"), "qwen2")


@pytest.fixture(scope="module")
def truth(run_ranks, model, tmp_path_factory):
    """Metrics and model of one rank, by number of mini-batches."""
    found = {}
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("one") / "hf"
        settings = SETTINGS | {"num_mini_batches": number}
        arguments = {"model_dir": str(model), "groups": scored_groups(), "folder": str(folder)}
        (metrics,) = run_ranks(1, run_cases.learn, settings=settings, **arguments)
        found[number] = metrics, load_hf(folder)
    return found


def test_mini_batches_and_epochs_are_optimizer_steps(truth, model):
    """2 mini-batches x 2 epochs are 4 steps; off-policy ones have ratios, the reference a distance."""
    metrics, trained = truth[2]
    assert metrics["steps"] == 4
    assert metrics["val/ratio_var"] > 0
    assert metrics["objective/kl2_avg"] > 0
    assert metrics["loss/kl_avg"] == pytest.approx(0.1 * metrics["objective/kl2_avg"])
    start = dict(load_hf(model).named_parameters())
    assert all((p - start[name]).abs().max() > 1e-4 for name, p in trained.named_parameters())


@pytest.mark.parametrize(
    ("world_size", "layout", "num_mini_batches"),
    [
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "logits_chunk": 24}, 2),
        (2, {"pipeline_model_parallel_size": 2}, 2),
        (2, {"context_parallel_size": 2}, 2),
        (2, {}, 2),
        (4, {"tensor_model_parallel_size": 2}, 2),
        (4, {"pipeline_model_parallel_size": 2}, 1),
    ],
    ids=["tp2+sp", "tp2+sp+chunked", "pp2", "cp2", "dp2", "tp2xdp2", "pp2xdp2"],
)
def test_the_trained_model_does_not_depend_on_the_layout(
    run_ranks, truth, model, tmp_path, world_size, layout, num_mini_batches
):
    """Reference, old logprobs, denominators and metrics meet the axes here: the whole algorithm, not one gradient."""
    ranks = run_ranks(
        world_size,
        run_cases.learn,
        model_dir=str(model),
        settings=SETTINGS | layout | {"num_mini_batches": num_mini_batches},
        groups=scored_groups(),
        folder=str(tmp_path / "hf"),
    )
    metrics, expected = truth[num_mini_batches]
    for rank in ranks:
        assert measured(rank) == pytest.approx(measured(metrics), **AS_ONE_RANK)
    trained = load_hf(tmp_path / "hf")
    for (name, a), b in zip(expected.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0, msg=name)


VARIANTS = {
    "gspo, seq_mean, tis": {
        "ratio_level": "sequence",
        "aggregation": "seq_mean",
        "use_rho_correction": True,
        "rho_clamp_upper_bound": 1.05,
        "rho_mask_level": "sequence_mean",
        "rho_mask_upper_bound": 1.5,
    },
    "cispo, entropy": {
        "policy_loss": "cispo",
        "entropy_coef": 0.05,
        "use_adaptive_entropy": True,
        "entropy_target": 10.0,
        "top_entropy_quantile": 0.5,
    },
    "bnpo": {"aggregation": "local_token", "local_batch_size": 2},
    "sapo, engine's logprobs": {"policy_loss": "sapo", "use_vllm_logprobs": True, "log_ref_kl": True, "beta": 0.0},
}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2}),
        (2, {"context_parallel_size": 2}),
        (2, {}),
    ],
    ids=["one", "tp2", "pp2", "cp2", "dp2"],
)
def test_the_first_comparison_with_engines_is_of_the_same_numbers(run_ranks, model, world_size, layout):
    """A comparison that misses tokens, or counts some twice, lets another model pass or ends a healthy run."""
    settings = SETTINGS | layout | {"num_mini_batches": 1, "num_epochs": 1}
    for rank in run_ranks(
        world_size, run_cases.mismatch, model_dir=str(model), settings=settings, groups=scored_groups()
    ):
        assert rank["mean"] == pytest.approx(rank["debug/vllm_vs_local_logprob_diff_mean"], rel=1e-5)
        assert rank["largest"] == pytest.approx(rank["debug/vllm_vs_local_logprob_diff_max"], rel=1e-5)
        assert rank["mean"] > 1e-3


@pytest.mark.parametrize(("zero_stage", "is_refused"), [(0, True), (1, True), (2, False), (3, False)])
def test_gradients_are_summed_over_ranks_once(run_ranks, model, zero_stage, is_refused):
    """A second backward pass would count the first one's gradients once for each rank: a wrong update without an error."""
    settings = SETTINGS | {"num_mini_batches": 1, "num_epochs": 1, "zero_stage": zero_stage}
    for error in run_ranks(2, run_cases.accumulate, model_dir=str(model), settings=settings, groups=scored_groups()):
        assert error.startswith("two backward passes before an update") == is_refused


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_loss_is_the_same_in_every_layout(run_ranks, model, tmp_path, variant):
    """Denominators, thresholds and controllers that look at one rank's tokens only would show here."""
    results = []
    for number, (world_size, layout) in enumerate(
        [(1, {}), (2, {}), (2, {"pipeline_model_parallel_size": 2}), (2, {"tensor_model_parallel_size": 2})]
    ):
        folder = tmp_path / str(number)
        metrics = run_ranks(
            world_size,
            run_cases.learn,
            model_dir=str(model),
            settings=SETTINGS | VARIANTS[variant] | layout,
            groups=scored_groups(),
            folder=str(folder),
        )
        results.append((metrics, dict(load_hf(folder).named_parameters())))
    (expected,), truth = results[0]
    # Also where the old logprobs are the engine's, which agree with themselves.
    assert expected["debug/vllm_vs_local_logprob_diff_mean"] > 0.1
    if "entropy_coef" in VARIANTS[variant]:
        # The bonus counts half of the tokens, the most uncertain ones.
        assert 0.05 < expected["policy/entropy_coef"] <= 0.1
        whole = expected["policy/entropy_coef"] * expected["policy/entropy_avg"]
        assert 0.3 * whole < expected["loss/entropy_avg"] < whole
    start = dict(load_hf(model).named_parameters())
    assert all((parameter - start[name]).abs().max() > 1e-4 for name, parameter in truth.items())
    for metrics, parameters in results[1:]:
        for rank in metrics:
            assert measured(rank) == pytest.approx(measured(expected), **AS_ONE_RANK)
        for name, parameter in truth.items():
            torch.testing.assert_close(parameters[name], parameter, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, {}), (2, {"pipeline_model_parallel_size": 2}), (2, {"context_parallel_size": 2})]
)
def test_agreement_by_age_is_that_of_one_rank(run_ranks, model, tmp_path, world_size, layout):
    """A rank whose packs have no token of some age reports fewer names; none may be lost or counted twice."""
    settings = SETTINGS | {"async_steps": 2, "use_rho_correction": True, "num_epochs": 1}
    arguments = {"model_dir": str(model), "groups": aged_groups(), "steps": 1}
    (expected,) = run_ranks(1, run_cases.learn, settings=settings, folder=str(tmp_path / "one"), **arguments)
    assert expected["debug/vllm_vs_local_logprob_diff_max"] < 8
    assert expected["async/logprob_diff_age_1"] == pytest.approx(10, abs=3)
    assert expected["async/logprob_diff_age_2"] == pytest.approx(20, abs=3)
    folder = str(tmp_path / "many")
    for rank in run_ranks(world_size, run_cases.learn, settings=settings | layout, folder=folder, **arguments):
        assert measured(rank) == pytest.approx(measured(expected), **AS_ONE_RANK)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_follows_the_policy_in_fp32(run_ranks, model, dtype):
    """Added up in bf16, a small alpha would move nothing at all.

    The sum in float32 is rounded once: by at most 2^-8 below 2 in bfloat16, where a step moves a parameter by 1e-3.
    """
    ranks = run_ranks(2, cases.blended, model_dir=str(model), dtype=dtype, alpha=1e-3, times=200)
    for rank in ranks:
        assert rank["error"] < (1e-6 if dtype == "float32" else 2**-8 + 1e-6)
        assert rank["moved"] == pytest.approx(1 - (1 - 1e-3) ** 200, rel=0.02)


def test_a_step_without_any_score_changes_nothing(run_ranks, model, tmp_path):
    """All verifiers failed: no optimizer step, no hang, and the metrics line is still written."""
    ranks = run_ranks(
        2,
        run_cases.learn,
        model_dir=str(model),
        settings=SETTINGS,
        groups=scored_groups(float("nan")),
        folder=str(tmp_path / "hf"),
    )
    assert ranks[0]["steps"] == 0
    start = dict(load_hf(model).named_parameters())
    assert all(torch.equal(p, start[name]) for name, p in load_hf(tmp_path / "hf").named_parameters())


def test_weights_that_are_not_finite_end_the_run_on_every_rank(run_ranks, model, tmp_path):
    """A broken or diverged model answers every prompt alike: all groups are filtered, and it is exported as if it were good."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][-1, 0] = 3e38  # finite; only rank 1 of the two that share the matrix has it
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    settings = SETTINGS | {"tensor_model_parallel_size": 2, "output_dir": str(tmp_path / "out")}
    ranks = run_ranks(
        2, run_cases.broken_weights, model_dir=str(model), broken=str(broken), settings=settings, groups=scored_groups()
    )
    assert len(ranks) == 2
    for loading, diverging in ranks:
        assert f"model_name_or_path={broken}: {name} is not finite" in loading
        assert "diverged" in diverging and "not finite after step 1; lower learning_rate=1e+30" in diverging
        assert "there is no checkpoint" in diverging


def test_weight_decay_spares_norms_and_biases(run_ranks, model):
    """Decaying a norm towards 0 slowly switches its layer off."""
    (change,) = run_ranks(1, cases.decayed, model_dir=str(model), weight_decay=0.5)
    assert change["matrices"] > 0.01
    assert change["vectors"] == 0.0
    (change,) = run_ranks(1, cases.decayed, model_dir=str(model), weight_decay=0.5, on_vectors=True)
    assert change["vectors"] > 0.01


def test_the_learning_rate_goes_on_where_a_step_has_nothing_to_train(run_ranks, model, tmp_path):
    """Half the steps empty, a linear schedule would end at half the rate it started with."""
    empty = run_ranks(
        1,
        run_cases.rates,
        model_dir=str(model),
        settings=SETTINGS | {"lr_scheduler_type": "linear"},
        is_empty=[0, 1, 0, 1],
    )[0]
    full = run_ranks(
        1,
        run_cases.rates,
        model_dir=str(model),
        settings=SETTINGS | {"lr_scheduler_type": "linear"},
        is_empty=[0, 0, 0, 0],
    )[0]
    assert empty == [full[0], full[2]]


def test_the_rank_with_the_largest_figure_counts(run_ranks):
    """The fullest GPU decides whether a run fits; a rank may have none."""
    figures = [{"memory": 3.0, "other": 1.0}, {"memory": 5.0}]
    assert run_ranks(2, run_cases.largest_figures, figures=figures) == [{"memory": 5.0, "other": 1.0}] * 2


def test_adapters_learn_against_the_model_without_them(run_ranks, model, tmp_path):
    """A reference that has the adapters too never pulls back; one rank's size of the update is not the model's."""
    settings = SETTINGS | {"use_peft": True, "lora_r": 3, "lora_alpha": 6, "num_mini_batches": 2}
    arguments = {"model_dir": str(model), "groups": scored_groups()}
    (expected,) = run_ranks(1, run_cases.learn, settings=settings, folder=str(tmp_path / "one"), **arguments)
    assert expected["objective/kl2_avg"] > 0 and expected["lora/update_ratio"] > 0
    assert expected["loss/kl_avg"] == pytest.approx(0.1 * expected["objective/kl2_avg"])
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for rank in run_ranks(2, run_cases.learn, settings=settings | layout, folder=str(tmp_path / "two"), **arguments):
        assert measured(rank) == pytest.approx(measured(expected), **AS_ONE_RANK)
    one, two = load_hf(tmp_path / "one"), load_hf(tmp_path / "two")
    start = dict(load_hf(model).named_parameters())
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
        assert ("_proj.weight" in name) == (not torch.equal(a, start[name])), name

"""Teachers on the learners' layout, of another size, with other prompts, several of them, the policy among them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks import cases, teacher_cases
from tests.ranks.test_learning import SETTINGS
from tests.tiny_models import VOCAB, load_hf, save_tiny

TEMPERATURE = 1.3
TOPK = 3
BIG, SMALL, ITSELF, NONE = 0, 1, 2, -1
LAYOUTS = {
    "one": (1, {}),
    "tp2+sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2+chunked": (2, {"tensor_model_parallel_size": 2, "logits_chunk": 24}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2+zero3": (2, {"zero_stage": 3}),
}


def with_teachers(samples):
    """By group another teacher: some read what the policy reads, some a prompt of the group's or of each sample's own."""
    rng = np.random.default_rng(3)
    whose = [BIG, SMALL, ITSELF, NONE, BIG, SMALL, ITSELF]
    shared = {group: rng.integers(3, VOCAB, 9).astype(np.int32) for group in (1, 5)}

    def prompt(group):
        return shared.get(group) if group in shared else rng.integers(3, VOCAB, rng.integers(2, 12)).astype(np.int32)

    return [
        replace(
            sample,
            teacher=whose[sample.group],
            teacher_prompt=prompt(sample.group) if sample.group in (1, 4, 5, 6) else None,
        )
        for sample in samples
    ]


SAMPLES = with_teachers(cases.random_samples(seed=0, groups_of_turns=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models"), "qwen2")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A wider and deeper one of another family, with a larger vocabulary that is padded otherwise; and a smaller one."""
    folder = tmp_path_factory.mktemp("teachers")
    big = save_tiny(
        folder, "qwen3", layers=6, heads=8, kv_heads=4, hidden_size=96, intermediate_size=128, vocab_size=140
    )
    return big, save_tiny(folder, "llama", layers=2, tied=True)


@pytest.fixture(scope="module")
def settings(teachers):
    names = [f"math:{teachers[BIG]}", f"code:{teachers[SMALL]}", "self"]
    return SETTINGS | {
        "num_epochs": 1,
        "beta": 0.0,
        "teacher_model_name_or_path": names,
        "teacher_temperature": TEMPERATURE,
        "distillation_loss": "reverse_kl",
        "distillation_topk": TOPK,
    }


def oracle(folder, sample):
    """Log-probabilities of the sampled tokens, and of the likeliest with their ids, by a forward pass of the sample alone."""
    prompt = sample.prompt_tokens if sample.teacher_prompt is None else sample.teacher_prompt
    ids = torch.from_numpy(np.concatenate((prompt, sample.tokens))).long()[None]
    with torch.no_grad():
        # Beyond the policy's vocabulary there is only padding.
        logits = load_hf(folder)(ids).logits[0, len(prompt) - 1 : -1, :VOCAB].double() / TEMPERATURE
    if sample.kept is not None:
        is_kept = torch.zeros_like(logits, dtype=torch.bool)
        sets = np.split(sample.kept.ids, sample.kept.offsets[1:-1])
        for row, token, kept in zip(is_kept, sample.tokens, sets, strict=True):
            row[[token, *kept]] = True
        logits = logits.masked_fill(~is_kept, -torch.inf)
    every = torch.log_softmax(logits, -1)[torch.from_numpy(np.flatnonzero(sample.is_predicted))]
    tokens = torch.from_numpy(sample.tokens[sample.is_predicted]).long()
    likeliest, best = every.topk(TOPK)
    return every.gather(1, tokens[:, None])[:, 0].numpy(), best.numpy(), likeliest.numpy()


def check(ranks, samples, folders):
    found = {}
    for rank in ranks:
        found |= rank["samples"]
    assert sorted(found) == list(range(len(samples)))
    for number, sample in enumerate(samples):
        logprobs, ids, likeliest = found[number]
        if sample.teacher == NONE:
            assert np.isnan(logprobs).all() and np.isnan(likeliest).all() and (ids == -1).all()
            continue
        expected, best, values = oracle(folders[sample.teacher], sample)
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)
        is_there = np.isfinite(values)  # a set may have fewer
        np.testing.assert_allclose(likeliest[is_there], values[is_there], atol=2e-5)
        np.testing.assert_array_equal(ids[is_there], best[is_there])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_is_taught_by_its_own_teacher(run_ranks, model, teachers, settings, tmp_path, layout):
    """A model cut by another's shape, a prompt of a neighbour or weights after the first update would be other numbers."""
    world_size, own = LAYOUTS[layout]
    ranks = run_ranks(world_size, teacher_cases.taught, model_dir=str(model), settings=settings | own, samples=SAMPLES)
    check(ranks, SAMPLES, {BIG: teachers[BIG], SMALL: teachers[SMALL], ITSELF: model})
    assert ranks[0]["beats"] >= 3  # while teachers score, the others must not think that this rank hangs


@pytest.mark.parametrize("layout", ["one", "tp2+sp"])
def test_a_teacher_is_asked_about_the_tokens_that_were_left_to_sample(run_ranks, model, teachers, settings, layout):
    """Over its whole vocabulary it would blame the policy for what it was not allowed to sample."""
    world_size, own = LAYOUTS[layout]
    samples = cases.with_sets(SAMPLES)
    ranks = run_ranks(world_size, teacher_cases.taught, model_dir=str(model), settings=settings | own, samples=samples)
    check(ranks, samples, {BIG: teachers[BIG], SMALL: teachers[SMALL], ITSELF: model})


def test_a_policy_with_adapters_teaches_with_them(run_ranks, model, teachers, settings, tmp_path):
    """Without them it would teach what it was at the start; a model beside it has none."""
    adapters = {"use_peft": True, "lora_r": 3, "lora_alpha": 6}
    arguments = {"settings": settings | adapters, "samples": SAMPLES, "folder": str(tmp_path / "hf"), "steps_before": 2}
    ranks = run_ranks(1, teacher_cases.taught, model_dir=str(model), **arguments)
    check(ranks, SAMPLES, {BIG: teachers[BIG], SMALL: teachers[SMALL], ITSELF: tmp_path / "hf"})


@pytest.mark.parametrize("layout", ["one", "dp2+zero3"])
def test_the_average_follows_the_policy_after_every_step(run_ranks, model, settings, layout):
    """One that moved at the start of a step, or with every mini-batch, is another average."""
    world_size, own = LAYOUTS[layout]
    itself = {"teacher_model_name_or_path": ["self"], "teacher_update_rate": 0.3}
    samples = [replace(sample, teacher=min(sample.teacher, 0)) for sample in SAMPLES]
    arguments = {"settings": settings | itself | own, "samples": samples, "steps": 3}
    for rank in run_ranks(world_size, teacher_cases.averaged, model_dir=str(model), **arguments):
        assert rank["error"] < 1e-6
        assert rank["distance"] > 1e-4


def test_a_teacher_whose_weights_are_not_finite_is_refused(run_ranks, model, teachers, settings, tmp_path):
    """Every one of its tokens would be left out, which only a metric would tell."""
    broken = shutil.copytree(teachers[SMALL], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, 0] = float("nan")  # only the second stage has it
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    own = settings | {"teacher_model_name_or_path": [str(broken)], "pipeline_model_parallel_size": 2}
    errors = run_ranks(2, teacher_cases.refused, model_dir=str(model), settings=own)
    assert len(errors) == 2
    assert all(f"teacher_model_name_or_path={broken}: {name} is not finite" in error for error in errors)
